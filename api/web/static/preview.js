/* A step in outline, under whichever budget is chosen: stepPreview() gives what draws a point of the model's
   page. Points of a frontier are all there at once (drawing.outline); a policy's come when one is chosen. */
"use strict";

function stepPreview() {
  const {find, json} = service;
  const {color, size, unitOf} = parts;
  const SECTION = find("preview");
  let outlined = null;               // of the frontier
  const ofPolicies = new Map();      // by id: a promise of what is drawn
  let show = null;                   // of the map
  let base = null, drawn = null, plot = null, budget = 0, wanted = null;

  const fatesOf = point => ({fate: Array.from(point.fates, Number), nbytes: outlined.ops.nbytes, runtime_us: outlined.ops.runtime_us});
  function ofPolicy(id) {
    if (!ofPolicies.has(id)) ofPolicies.set(id, json(`/v1/policies/${id}/drawing`).then(picture => {
      const [track] = picture.tracks, plain = picture.tracks.find(one => one.id === "plain");
      const line = one => ({begin_us: one.begin_us, live_bytes: one.live_bytes, end_us: one.end_us});
      return {...line(track), fates: picture.fates, names: picture, plain: plain ? line(plain) : null};
    }));
    return ofPolicies.get(id);
  }
  function ofPlan(point) {
    const found = outlined && outlined.points.find(one => one.peak_bytes === point.peak);
    if (!found) return null;
    const last = outlined.points[outlined.points.length - 1];
    return {...found, fates: fatesOf(found), names: {...outlined, fates: fatesOf(found)}, plain: /[23]/.test(last.fates) ? null : last};
  }

  /* The map keeps its rows while a budget is dragged: an op has one if any point of the frontier needs something of it. */
  function needed(point) {
    const found = point.fates.fate.map(Boolean);
    if (outlined) for (const one of outlined.points) for (let op = 0; op < found.length; op++) found[op] ||= one.fates[op] !== "0";
    return found;
  }
  function draw() {
    if (plot) plot.destroy();
    plot = null;
    if (!drawn) return;
    const box = find("step"), lines = outlined ? outlined.points : [drawn, drawn.plain].filter(Boolean);
    const most = lines.concat(drawn).reduce((most, line) => line.live_bytes.reduce((a, b) => Math.max(a, b), most), 0);
    const end = lines.concat(drawn).reduce((most, line) => Math.max(most, line.end_us), 0) / 1e3 * 1.03;
    const unit = unitOf(most), axis = {stroke: color("soft"), font: "12px system-ui, sans-serif", labelFont: "12.5px system-ui, sans-serif", grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), size: 5}};
    const stepped = {paths: uPlot.paths.stepped({align: 1}), points: {show: false}, spanGaps: true};
    plot = new uPlot({
      width: box.clientWidth, height: 260, legend: {show: false}, cursor: {show: false},
      scales: {x: {time: false, range: () => [0, end]}, y: {range: () => [0, most / unit[1] * 1.06]}},
      axes: [{...axis, label: "ms since the step began", labelSize: 20, size: 32}, {...axis, label: `${unit[0]} live`, labelSize: 20, size: 54}],
      series: [{}, {...stepped, stroke: color("plain"), width: 1.2}, {...stepped, stroke: color("plan"), width: 2, fill: color("plan") + "1c"}],
      hooks: {draw: [u => {
        const {ctx, bbox} = u, r = devicePixelRatio, y = u.valToPos(budget / unit[1], "y", true);
        if (y < bbox.top) return;
        ctx.save();
        ctx.strokeStyle = color("budget");
        ctx.setLineDash([6 * r, 4 * r]);
        ctx.lineWidth = 1.5 * r;
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
        ctx.restore();
      }]},
    }, data(unit), box);
    plot.unit = unit;
  }
  function data(unit) {
    const columns = line => {  // the optimizer's step has no time of its own: it is drawn as a short stretch at the end
      if (!line) return [[], []];
      const x = [...line.begin_us, line.end_us * 1.02].map(us => us / 1e3), y = line.live_bytes.map(bytes => bytes / unit[1]);
      return [x, [...y, y[y.length - 1]]];
    };
    return uPlot.join([drawn.plain, drawn].map(line => {
      const [x, y] = columns(line);
      const last = new Map(x.map((at, i) => [at, y[i]]));  // of events at one time the last, as uPlot's axis has each once
      return [[...last.keys()], [...last.values()]];
    }));
  }
  parts.onTheme(draw);
  new ResizeObserver(() => { if (plot && plot.width !== find("step").clientWidth) draw(); }).observe(find("step"));

  function put(found, words) {
    const whole = !plot || !show;
    drawn = found;
    find("preview-drawn").hidden = SECTION.hidden = false;  // the map is as wide as it has room
    if (!show || base !== found.names.ops.module.length) {
      base = found.names.ops.module.length;
      show = layerMap(find("map"), find("map-says"), {...found.names, needed: needed(found)});
    } else show(found.fates);
    find("preview-about").textContent = words;
    if (whole) draw(); else plot.setData(data(plot.unit));
    SECTION.dataset.shows = String(found.peak_bytes || found.live_bytes.reduce((a, b) => Math.max(a, b), 0));
  }
  async function choose(point, bytes) {
    budget = bytes;
    wanted = point;
    if (!point) { SECTION.hidden = true; return; }
    const words = `Memory over the step, and what becomes of each op: ${point.policy ? "the stored policy" : "the frontier's plan"} that peaks at ${size(point.peak)}.`;
    const plan = ofPlan(point);
    if (plan) return put(plan, words);
    if (!point.policy) {
      SECTION.hidden = false;
      find("preview-drawn").hidden = true;
      find("preview-about").textContent = "This frontier was computed without its drawings; compute it again to see the step.";
      return;
    }
    try {
      const found = await ofPolicy(point.policy.id);
      if (wanted === point) put(found, words);
    } catch (error) {
      if (error.status !== 404) throw error;  // its profile was deleted
      if (wanted === point) SECTION.hidden = true;
    }
  }
  /* Bytes that are live when the step ends, whatever the plan; 0 if unknown. */
  const rest = () => outlined ? Math.min(...outlined.points.map(point => point.live_bytes[point.live_bytes.length - 1])) : 0;
  /* The outlines of a frontier, from the job of this id, which computed it. */
  async function learn(job) {
    outlined = null;
    try {
      const found = await json(`/v1/jobs/${job}/drawing`);
      if (found.version === 1) outlined = found;
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    show = null;
    if (plot) plot.destroy();
    plot = null;
  }
  return {choose, learn, rest};
}
