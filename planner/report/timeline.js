/* Draw autoac.planner.report.timeline.Picture: timeline(root, picture). `root` holds the elements of
   timeline.parts.html. Names come from models and files, so strings are only ever textContent, never markup. */
"use strict";

function timeline(root, picture) {
  const {make, color, size, unitOf, time, at, percent, layerOf: layerIn, layerName, moduleName, row, cellOf, wrapped, headed} = parts;
  const wide = text => cellOf(wrapped(text), "wide");
  const part = name => root.querySelector(`[data-part="${name}"]`);

  /* ---- names ---- */
  const [FORWARD, RECOMPUTE, FETCH, BACKWARD] = [0, 1, 2, 3];
  const layerOf = picture.modules.map(layerIn);
  const {ops, steps, copies} = picture;

  /* ---- timelines ---- */
  const tracks = picture.tracks.map(track => {
    const n = track.kind.length;
    const begin = Float64Array.from(track.begin_us);
    const nudge = track.end_us * 1e-7;  // events that take no time stay apart, so that no peak is lost
    for (let e = 1; e < n; e++) begin[e] = Math.max(begin[e], begin[e - 1] + nudge);
    const ofOp = new Int32Array(ops.module.length).fill(-1), ofStep = new Int32Array(steps.module.length).fill(-1);
    for (let e = 0; e < n; e++) {
      if (track.kind[e] === FORWARD) ofOp[track.at[e]] = e;
      if (track.kind[e] === BACKWARD) ofStep[track.at[e]] = e;
    }
    return {...track, n, begin, ofOp, ofStep};
  });
  const plan = tracks[0], measured = picture.measured_peak_bytes;  // null: not measured
  const tail = plan.end_us * .03;
  const lines = tracks.map(track => ({
    key: track.id, name: track.name, track, us: track.begin, bytes: track.live_bytes, end: track.end_us + tail,
    peak: track.live_bytes[track.peak], peakAt: track.begin[track.peak],
  }));
  lines[0].name = measured ? "predicted" : plan.name;

  /* ---- what an event is ---- */
  const stepOf = (track, e) => { while (track.kind[e] < BACKWARD) e++; return track.kind[e] === BACKWARD ? track.at[e] : -1; };
  function moment(track, e) {
    const kind = track.kind[e];
    if (kind < BACKWARD) {
      const op = track.at[e], module = ops.module[op];
      const name = picture.labels[ops.label[op]];
      if (kind === FORWARD) return {phase: "forward", name, module};
      const step = stepOf(track, e);
      return {phase: kind === FETCH ? "fetch" : "recompute", name, module, of: step < 0 ? "" : picture.labels[steps.label[step]]};
    }
    if (kind === BACKWARD) return {phase: "backward", name: picture.labels[steps.label[track.at[e]]], module: steps.module[track.at[e]]};
    return {phase: "optimizer", name: "optimizer.step()", module: -1};
  }
  function words(track, e) {
    const {phase, name, module, of} = moment(track, e);
    const where = module < 0 ? "" : moduleName(picture.modules[module]);
    if (phase === "forward") return `forward, ${name} in ${where}`;
    if (phase === "fetch") return `backward, the fetch of ${name} in ${where} from the host begins`;
    if (phase === "recompute") return `backward, ${name} in ${where} runs again${of ? ` for ${of}` : ""}`;
    if (phase === "backward" && name === "backward") return where ? `backward of ${where}` : name;
    if (phase === "backward") return `backward, ${name}${where ? ` of ${where}` : ""}`;
    return "optimizer step";
  }
  /* The event of `other` that does the same as event `e` of `track`. */
  function same(track, e, other) {
    if (other === track) return e;
    if (track.kind[e] === FORWARD) return other.ofOp[track.at[e]];
    const step = stepOf(track, e);
    return step < 0 ? other.n - 1 : other.ofStep[step];
  }
  function eventAt(track, us) {
    let low = 0, high = track.n - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (track.begin[middle] <= us) low = middle; else high = middle - 1; }
    return low;
  }
  const layerAt = (track, e) => { const {module} = moment(track, e); return module < 0 ? "" : layerOf[module]; };
  /* Stretches of one phase in one layer. */
  function runsOf(track) {
    const runs = [];
    for (let e = 0; e < track.n; e++) {
      const kind = track.kind[e], phase = kind === FORWARD ? "forward" : kind > BACKWARD ? "optimizer step" : "backward";
      const layer = (kind === RECOMPUTE || kind === FETCH) && runs.length && runs[runs.length - 1].phase === phase ? runs[runs.length - 1].layer : layerAt(track, e);
      const last = runs[runs.length - 1];
      if (last && last.phase === phase && last.layer === layer) last.end = e + 1;
      else runs.push({phase, layer, begin: e, end: e + 1});
    }
    return runs;
  }

  /* ---- state ---- */
  let watched = plan;                // the track whose events are looked at
  let chosen = plan.peak;            // the event that stays
  let shown = chosen;                // the event under the cursor, else the chosen one
  let runs = runsOf(watched);
  let fromZero = false, all = false, plot = null, speaking = 0;
  const hidden = new Set();
  const visible = () => lines.filter(line => !hidden.has(line.key));

  /* ---- the plot ---- */
  const unit = unitOf(Math.max(...lines.map(line => line.peak)));
  const box = part("plot"), HEIGHT = 430, GUTTER = 244, BAND = 50, LINK = copies.length ? 78 : 0;
  const overlay = [];

  function aligned(drawn) {
    const stops = drawn.flatMap(line => [line.us, [line.end]]);
    const times = new Float64Array(stops.reduce((sum, us) => sum + us.length, 0));
    let filled = 0;
    for (const us of stops) { times.set(us, filled); filled += us.length; }
    times.sort();
    const x = times.filter((us, i) => i === 0 || us !== times[i - 1]);
    return [Array.from(x, us => us / 1e3), ...drawn.map(line => {
      const y = new Array(x.length);
      let i = -1;
      for (let k = 0; k < x.length; k++) {
        while (i + 1 < line.us.length && line.us[i + 1] <= x[k]) i++;
        y[k] = i < 0 || x[k] > line.end ? null : line.bytes[i] / unit[1];
      }
      return y;
    })];
  }

  function range() {
    const drawn = visible();
    const low = Math.min(...drawn.map(line => line.bytes.reduce((a, b) => Math.min(a, b), Infinity)));
    const peak = Math.max(...drawn.map(line => line.peak), measured ?? 0);
    const high = picture.budget_bytes < 2 * peak ? Math.max(picture.budget_bytes, peak) : peak;  // one far above is not drawn
    const floor = fromZero || low < high * .35 ? 0 : low - (high - low) * .06;
    return [floor / unit[1], (high + (high - floor) * .05) / unit[1]];
  }

  function bands(u) {
    const {ctx, bbox} = u, r = devicePixelRatio;
    const x = us => u.valToPos(us / 1e3, "x", true);
    const left = bbox.left, right = bbox.left + bbox.width;
    const clip = (a, b) => [Math.max(left, a), Math.min(right, b)];
    ctx.save();
    ctx.textBaseline = "middle";
    ctx.textAlign = "center";
    const end = e => e < watched.n ? watched.begin[e] : watched.end_us + tail;
    const rows = {phase: bbox.top - BAND * r, layer: bbox.top - 30 * r, again: bbox.top - 11 * r};
    let previous = null, flip = false;
    const phases = [];
    ctx.font = `${11 * r}px system-ui, sans-serif`;
    const forms = [layer => layer, layer => layer.split(".").slice(-2).join("."), layer => layer.split(".").pop()];
    const form = {};  // by phase, the longest way to name layers that fits nearly all of them
    for (const phase of ["forward", "backward"]) {
      const stretches = runs.filter(run => run.phase === phase && run.layer !== "");
      form[phase] = forms.find(name => stretches.filter(run =>
        ctx.measureText(name(run.layer)).width < x(end(run.end)) - x(watched.begin[run.begin]) - 4 * r).length > .8 * stretches.length);
    }
    for (const run of runs) {
      const [a, b] = clip(x(watched.begin[run.begin]), x(end(run.end)));
      const last = phases[phases.length - 1];
      if (last && last[0] === run.phase) last[2] = Math.max(last[2], b); else phases.push([run.phase, a, b]);
      if (b <= a || run.layer === "") continue;
      if (previous !== run.layer) flip = !flip;
      previous = run.layer;
      ctx.fillStyle = color(flip ? "band" : "band-2");
      ctx.fillRect(a, rows.layer, b - a, 16 * r);
      ctx.fillStyle = color("soft");
      ctx.font = `${11 * r}px system-ui, sans-serif`;
      const text = form[run.phase] ? form[run.phase](run.layer) : "";
      if (ctx.measureText(text).width < b - a - 2 * r) ctx.fillText(text, (a + b) / 2, rows.layer + 8.5 * r);
    }
    for (const [name, a, b] of phases) {
      if (b <= a) continue;
      ctx.fillStyle = color("line");
      ctx.fillRect(a, rows.phase, r, bbox.top + bbox.height - rows.phase);
      ctx.fillStyle = color("soft");
      ctx.font = `${12.5 * r}px system-ui, sans-serif`;
      if (ctx.measureText(name).width < b - a - 8 * r) ctx.fillText(name, (a + b) / 2, rows.phase + 8 * r);
    }
    ctx.fillStyle = color("again");
    for (let e = 0; e < watched.n; e++) {
      if (watched.kind[e] !== RECOMPUTE) continue;
      const first = e;
      while (e + 1 < watched.n && watched.kind[e + 1] === RECOMPUTE) e++;
      const [a, b] = clip(x(watched.begin[first]), x(end(e + 1)));
      if (b > a || (a >= left && a < right)) ctx.fillRect(a, rows.again, Math.max(b - a, r), 6 * r);
    }
    ctx.restore();
  }

  /* Label each line's peak at its height, next to the plot; the budget too. */
  function labels(u) {
    const {ctx, bbox} = u, r = devicePixelRatio;
    const right = bbox.left + bbox.width;
    const wanted = visible().map(line => ({
      y: u.valToPos(line.peak / unit[1], "y", true), from: u.valToPos(line.peakAt / 1e3, "x", true),
      ink: color(line.key), name: line.name, bytes: line.peak,
    }));
    wanted.push({y: u.valToPos(picture.budget_bytes / unit[1], "y", true), from: bbox.left, ink: color("budget"), name: "budget", bytes: picture.budget_bytes});
    if (measured) wanted.push({y: u.valToPos(measured / unit[1], "y", true), from: bbox.left, ink: color("measured"), name: "measured peak", bytes: measured});
    wanted.sort((a, b) => a.y - b.y);
    const rows = wanted.filter(one => one.y >= bbox.top - 1 && one.y <= bbox.top + bbox.height + 1);
    const step = 17 * r, lowest = bbox.top + bbox.height - 8 * r;
    rows.forEach((one, i) => { one.at = Math.max(one.y, i ? rows[i - 1].at + step : bbox.top); });
    for (let i = rows.length - 1; i >= 0; i--) rows[i].at = Math.min(rows[i].at, i + 1 < rows.length ? rows[i + 1].at - step : lowest);
    ctx.save();
    ctx.font = `${12.5 * r}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    for (const one of rows) {
      ctx.strokeStyle = ctx.fillStyle = one.ink;
      ctx.lineWidth = (one.name === "budget" ? 1.5 : 1) * r;
      ctx.setLineDash(one.name === "budget" ? [6 * r, 4 * r] : [1 * r, 3 * r]);
      ctx.beginPath();
      ctx.moveTo(Math.min(Math.max(one.from, bbox.left), right), one.y);
      ctx.lineTo(right, one.y);
      ctx.lineTo(right + 10 * r, one.at);
      ctx.stroke();
      ctx.setLineDash([]);
      if (one.from > bbox.left && one.from <= right) {
        ctx.beginPath();
        ctx.arc(one.from, one.y, 3 * r, 0, 7);
        ctx.fill();
      }
      ctx.textAlign = "left";
      ctx.fillText(one.name, right + 14 * r, one.at);
      ctx.textAlign = "right";
      ctx.fillText(`${(one.bytes / unit[1]).toFixed(2)} ${unit[0]}`, right + (GUTTER - 4) * r, one.at);
    }
    ctx.restore();
  }

  /* ---- moves: below the axis, what the host holds, and when the link copies; times are the plan's ---- */
  let held = 0;
  const onHost = copies.flatMap(one => [[one.host_us[0], one.nbytes], [one.host_us[1], -one.nbytes]])
    .sort((a, b) => a[0] - b[0]).map(([us, bytes]) => [us, held += bytes]);
  const mostOnHost = onHost.reduce((most, [, bytes]) => Math.max(most, bytes), 0);
  function link(u) {
    const {ctx, bbox} = u, r = devicePixelRatio, left = bbox.left, right = left + bbox.width, top = bbox.top + bbox.height + 56 * r;
    const x = us => Math.max(left, Math.min(right, u.valToPos(us / 1e3, "x", true)));
    const rect = ([from, to], y, height) => {
      const a = Math.floor(x(from)), b = Math.ceil(x(to));
      if (x(to) >= left && x(from) < right) ctx.fillRect(a, top + y * r, Math.max(b - a, r), height * r);
    };
    ctx.save();
    ctx.fillStyle = color("moved");
    onHost.slice(0, -1).forEach(([us, bytes], i) => { const height = 38 * bytes / mostOnHost; rect([us, onHost[i + 1][0]], 38 - height, height); });
    for (const one of copies) {
      ctx.fillStyle = color(one.stall_us ? "budget" : "moved");
      rect(one.out_us, 45, 9);
      rect(one.in_us, 60, 9);
    }
    ctx.fillStyle = color("soft");
    ctx.font = `${12 * r}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    [["on the host", 29], ["to the host", 49], ["and back", 64]].forEach(([name, y]) => ctx.fillText(name, left - 7 * r, top + y * r));
    if (bbox.width + left + 99 * r < ctx.canvas.width) ctx.fillText(`at most ${size(mostOnHost)}`, right + (GUTTER - 4) * r, top + 29 * r);
    ctx.restore();
  }
  /* For each direction of the link, the copy at `us`, or another one of event `e`, in words. */
  function copying(e, us) {
    if (watched !== plan || !copies.length) return [];
    const begin = plan.begin_us[e], end = e + 1 < plan.n ? plan.begin_us[e + 1] : plan.end_us;
    return [["To the host", "out_us"], ["From the host", "in_us"]].map(([where, way]) => {
      const found = copies.filter(one => one[way][0] < end && one[way][1] > begin), one = found.find(one => one[way][0] <= us && us < one[way][1]) || found[0];
      return !one ? "\u00a0" : `${where}: ${groupName(one.op, "op")}, ${size(one.nbytes)}, freed at ${at(one.free_us)}, fetched at ${at(one.in_us[0])}${one.stall_us ? `, compute waits ${time(one.stall_us)}` : ""}${found.length > 1 ? `; and ${found.length - 1} more` : ""}`;
    });
  }

  function draw() {
    const view = plot ? {min: plot.scales.x.min, max: plot.scales.x.max} : null;
    if (plot) plot.destroy();
    overlay.length = 0;
    const drawn = visible(), narrow = box.clientWidth < 640;
    const axis = {stroke: color("soft"), font: "12px system-ui, sans-serif", labelFont: "12.5px system-ui, sans-serif", grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), size: 5}};
    const stepped = uPlot.paths.stepped({align: 1});
    plot = new uPlot({
      width: box.clientWidth, height: HEIGHT + LINK, padding: [BAND + 4, narrow ? 12 : GUTTER, LINK, 0], legend: {show: false},
      cursor: {y: false, x: false, points: {show: false}, drag: {x: true, y: false, dist: 5}},
      scales: {x: {time: false, ...(view || {})}, y: {range}},
      axes: [
        {...axis, label: "ms since the step began", labelSize: 20, size: 32},
        {...axis, label: `${unit[0]} live`, labelSize: 20, size: 58},
      ],
      series: [{}, ...drawn.map(line => ({
        label: line.name, stroke: color(line.key), paths: stepped, points: {show: false},
        width: line.key === "plan" ? 2 : 1.4,
        fill: line.key === "plan" ? color("plan") + "1c" : undefined,
        dash: line.key === "blocks" ? [5, 3] : undefined,
      }))],
      hooks: {draw: [bands, ...(narrow ? [] : [labels]), ...(LINK ? [link] : [])], setCursor: [follow], setScale: [() => requestAnimationFrame(place)]},
    }, aligned(drawn), box);
    const add = (kind, ink) => {
      const element = make("div", undefined, kind);
      if (ink) element.style.background = color(ink);
      plot.over.append(element);
      overlay.push(element);
    };
    add("moment");
    for (const line of lines) add("dot", line.key);
    plot.over.addEventListener("mousedown", event => { plot.downAt = event.clientX; });
    plot.over.addEventListener("click", event => { if (Math.abs(event.clientX - plot.downAt) < 4) { settle(); chosen = shown; } });
    plot.over.addEventListener("mouseleave", () => { wanted = null; show(chosen); });
    place();
  }

  /* Follow the cursor once a frame. A click takes effect at once, and leaving the plot cancels the frame. */
  let wanted = null;
  function settle() {
    if (wanted === null) return;
    const us = plot.posToVal(wanted, "x") * 1e3;
    wanted = null;
    show(eventAt(watched, us), us);
  }
  function follow(u) {
    const {left} = u.cursor;
    if (left == null || left < 0) return;
    if (wanted === null) requestAnimationFrame(settle);
    wanted = left;
  }

  /* The values of every line at the moment that is shown. */
  function values(e) {
    const found = new Map();
    for (const line of lines) {
      const other = same(watched, e, line.track);
      if (other >= 0) found.set(line.key, {us: line.track.begin[other], bytes: line.track.live_bytes[other]});
    }
    return found;
  }

  /* The line at the moment, and dots where the other timelines do the same. */
  function place() {
    if (!plot || !overlay.length) return;
    const {min, max} = plot.scales.x, inside = us => us / 1e3 >= min && us / 1e3 <= max;
    const now = watched.begin[shown], found = values(shown);
    overlay[0].hidden = !inside(now);
    overlay[0].style.left = `${plot.valToPos(now / 1e3, "x")}px`;
    lines.forEach((line, i) => {
      const value = found.get(line.key), dot = overlay[i + 1];
      dot.hidden = hidden.has(line.key) || !value || !inside(value.us);
      if (dot.hidden) return;
      dot.style.left = `${plot.valToPos(value.us / 1e3, "x")}px`;
      dot.style.top = `${plot.valToPos(value.bytes / unit[1], "y")}px`;
    });
  }

  /* ---- a moment ---- */
  function show(e, us = watched.begin_us[e]) {
    shown = e;
    place();
    const found = values(e), readout = part("readout");
    const what = make("span", undefined, "what");
    what.append(make("b", at(watched.begin_us[e])), `  ${words(watched, e)}`);
    readout.replaceChildren(what, ...lines.filter(line => found.has(line.key)).map(line => {
      const span = make("span", `${line.name} `);
      span.style.color = `var(--${line.key})`;
      span.append(make("b", size(found.get(line.key).bytes)));
      return span;
    }), ...copying(e, us).map(text => make("span", text, "what")));
    listLive();
  }
  function speak() {
    clearTimeout(speaking);
    speaking = setTimeout(() => {
      const found = values(shown);
      part("spoken").textContent = `${at(watched.begin_us[shown])}, ${words(watched, shown)}: `
        + lines.filter(line => found.has(line.key)).map(line => `${line.name} ${size(found.get(line.key).bytes)}`).join(", ") + copying(shown, watched.begin_us[shown]).map(text => `. ${text}`).join("");
    }, 120);
  }
  function go(e) {
    chosen = Math.max(0, Math.min(watched.n - 1, e));
    const {min, max} = plot.scales.x, x = watched.begin[chosen] / 1e3;
    if (x < min || x > max) { const half = (max - min) / 2; zoomTo(x - half, x + half); }
    show(chosen);
    speak();
  }
  function zoomTo(min, max) {
    const end = plot.data[0][plot.data[0].length - 1];
    const width = Math.min(max - min, end);
    const low = Math.max(0, Math.min(min, end - width));
    plot.setScale("x", {min: low, max: low + width});
  }
  function zoom(factor) {
    const {min, max} = plot.scales.x, x = watched.begin[chosen] / 1e3;
    const centre = x >= min && x <= max ? x : (min + max) / 2;
    zoomTo(centre - (centre - min) * factor, centre + (max - centre) * factor);
  }

  /* ---- what is live ---- */
  const reasonKind = picture.reasons.map(reason => reason === "recomputed" ? "again" : reason.endsWith("the host") ? "moved" : reason.startsWith("held") ? "held" : "saved");
  const KINDS = [["saved", "saved"], ["again", "recomputed"], ["held", "held by forward or Python"], ...(copies.length ? [["moved", "moved to the host"]] : [])];
  function liveAt(track, e, by) {
    const {op, nbytes, begin, end, why} = track.lives, groups = new Map();
    for (let i = 0; i < op.length && begin[i] <= e; i++) {  // in the order of their beginning
      if (end[i] <= e) continue;
      const module = ops.module[op[i]];
      const key = by === "layer" ? layerOf[module] : by === "module" ? module : op[i];
      let group = groups.get(key);
      if (!group) groups.set(key, group = {key, saved: 0, again: 0, held: 0, moved: 0, sum: 0, why: why[i]});
      group[reasonKind[why[i]]] += nbytes[i];
      group.sum += nbytes[i];
    }
    return [...groups.values()].sort((a, b) => b.sum - a.sum);
  }
  const groupName = (key, by) => by === "layer" ? layerName(key) : by === "module" ? moduleName(picture.modules[key])
    : `${moduleName(picture.modules[ops.module[key]])}/${picture.labels[ops.label[key]]}`;
  function stack(parts, most) {
    const cell = make("td"), bar = make("span", undefined, "stack");
    for (const [kind, bytes] of parts) {
      const piece = make("i", undefined, kind);
      piece.style.width = `${most ? 100 * bytes / most : 0}%`;
      bar.append(piece);
    }
    bar.setAttribute("aria-hidden", "true");
    cell.append(bar);
    return cell;
  }
  function listLive() {
    const by = part("live-by").value, e = shown;
    const atPeak = e === watched.peak;
    part("live-title").textContent = atPeak ? "Live at the peak" : `Live at ${at(watched.begin_us[e])}`;
    part("live-where").textContent = `${watched === plan ? "" : `${watched.name}: `}${words(watched, e)}: ${size(watched.live_bytes[e])}`;
    const groups = liveAt(watched, e, by), most = groups.length ? groups[0].sum : 0;
    const standing = [...picture.static.map(([name, bytes]) => [name, bytes]),
      ["other microbatches in flight", watched.waiting_bytes.length ? watched.waiting_bytes[e] : 0],
      ["gradients, temporaries and workspace", watched.beside_bytes[e]]].filter(([, bytes]) => bytes);
    const few = all ? groups : groups.slice(0, 10), rest = groups.slice(few.length);
    const rows = few.map(group => row("", groupName(group.key, by),
      by === "op" ? wide(picture.reasons[group.why]) : stack(KINDS.map(([kind]) => [kind, group[kind]]), most), size(group.sum)));
    if (rest.length || all && groups.length > 10) {
      const more = make("button", all ? "fewer" : `${rest.length} more`);
      more.type = "button";
      more.setAttribute("aria-expanded", String(all));
      more.onclick = () => { all = !all; listLive(); part("live").querySelector("button").focus(); };
      rows.push(row("", more, "", all ? "" : size(rest.reduce((sum, group) => sum + group.sum, 0))));
    }
    rows.push(row("group", "not planned", "", ""), ...standing.map(([name, bytes]) => row("", name, "", size(bytes))));
    rows.push(row("sum", "all", "", size(watched.live_bytes[e])));
    headed(part("live"), ["made by", by === "op" ? "why it is live" : "", "bytes"], rows);
  }

  /* ---- tables that stay ---- */
  function keys(element, kinds) {
    element.replaceChildren(...kinds.map(([kind, name]) => { const span = make("span"); span.append(make("i", undefined, kind), name); return span; }));
  }
  function listLayers() {
    const most = Math.max(...picture.layers.map(layer => (layer.kept_bytes + layer.recomputed_bytes + layer.moved_bytes) / layer.layers), 1);
    const moved = bytes => copies.length ? [size(Math.round(bytes))] : [];
    const rows = [];
    for (const layer of picture.layers) {
      const n = layer.layers, name = make("button", `${layerName(layer.name)}${n > 1 ? ` (${n} layers)` : ""}`);
      name.type = "button";
      name.setAttribute("aria-expanded", "false");
      const inner = layer.modules.map(one => {
        const decisions = [one.keeps.length ? `keeps ${one.keeps.join(", ")}` : "", one.moves.length ? `moves ${one.moves.join(", ")}` : "", one.recomputes.length ? `recomputes ${one.recomputes.join(", ")}` : ""].filter(Boolean).join("; ");
        const named = make("span", moduleName(one.name));
        named.append(make("small", decisions));
        const tr = row("inner", named, "", size(Math.round(one.kept_bytes / n)), ...moved(one.moved_bytes / n), size(Math.round(one.recomputed_bytes / n)), time(one.recompute_us / n));
        tr.hidden = true;
        return tr;
      });
      name.onclick = () => {
        const open = name.getAttribute("aria-expanded") === "false";
        name.setAttribute("aria-expanded", String(open));
        for (const tr of inner) tr.hidden = !open;
      };
      rows.push(row("", name, stack([["saved", layer.kept_bytes / n], ["moved", layer.moved_bytes / n], ["again", layer.recomputed_bytes / n]], most),
        size(Math.round(layer.kept_bytes / n)), ...moved(layer.moved_bytes / n), size(Math.round(layer.recomputed_bytes / n)), time(layer.recompute_us / n)), ...inner);
    }
    const sum = key => picture.layers.reduce((total, layer) => total + layer[key], 0);
    rows.push(row("sum", "all", "", size(sum("kept_bytes")), ...moved(sum("moved_bytes")), size(sum("recomputed_bytes")), time(sum("recompute_us"))));
    headed(part("layers"), ["layer", "", "kept", ...(copies.length ? ["moved"] : []), "recomputed", "in"], rows);
    keys(part("layers-keys"), [["saved", "kept until backward"], ...(copies.length ? [["moved", "moved to the host"]] : []), ["again", "recomputed in backward"]]);
  }
  const phaseOf = kind => kind === FORWARD ? 0 : kind <= BACKWARD ? 1 : 2;
  function byPhase(track) {
    const most = [0, 0, 0];
    for (let e = 0; e < track.n; e++) most[phaseOf(track.kind[e])] = Math.max(most[phaseOf(track.kind[e])], track.live_bytes[e]);
    return most;
  }
  function listPeaks() {
    const rows = [];
    for (const line of lines) {
      const {track} = line;
      const tr = row("", line.name, size(line.peak), ...byPhase(track).map(size),
        time(track.recompute_us), time(track.end_us), wide(words(track, track.peak)));
      tr.firstChild.style.color = `var(--${line.key})`;
      rows.push(tr);
    }
    headed(part("peaks"), ["", "peak", "in forward", "in backward", "optimizer step", "recompute", "forward and backward", "the peak is at"], rows);
  }
  part("numbers").addEventListener("toggle", () => {
    if (part("runs").firstChild) return;
    const rows = runsOf(plan).map(run => {
      let most = 0;
      for (let e = run.begin; e < run.end; e++) most = Math.max(most, plan.live_bytes[e]);
      return row("", `${run.phase}${run.layer ? `, ${run.layer}` : ""}`, at(plan.begin_us[run.begin]), size(most));
    });
    headed(part("runs"), ["stretch", "from", lines[0].name], rows, "The most that is live in each stretch of the step.");
  });

  function describe() {
    part("model").textContent = picture.model;
    part("setting").textContent = [picture.device, ...picture.inputs].filter(Boolean).join(" · ");
    const plain = tracks.find(track => track.id === "plain");
    const facts = [["Budget", size(picture.budget_bytes), picture.headroom_bytes ? `${size(picture.headroom_bytes)} of it left free` : ""],
      ["Predicted peak", size(lines[0].peak), `${(100 * lines[0].peak / picture.budget_bytes).toFixed(1)} % of the budget`]];
    if (measured) facts.push(["Measured peak", size(measured), `${percent(measured / lines[0].peak - 1)} compared with predicted`]);
    if (plain) facts.push(["Nothing recomputed", size(plain.live_bytes[plain.peak]), `${size(plain.live_bytes[plain.peak] - lines[0].peak)} more`]);
    facts.push(["Recompute", time(plan.recompute_us), picture.step_us ? `${(100 * plan.recompute_us / picture.step_us).toFixed(1)} % of ${time(picture.step_us)}` : ""]);
    if (copies.length) facts.push(["Moved to the host", size(mostOnHost), `compute waits for copies: ${time(copies.reduce((sum, one) => sum + one.stall_us, 0))}`]);
    const spent = copies.length ? "recompute and waiting time" : "recompute time";
    facts.push(["Proven gap", `${(100 * picture.gap).toFixed(1)} %`, picture.gap <= .1 ? `of the ${spent} to the best` : picture.stopped === "optimal" ? `of the ${spent}: too little of the step to search on` : `of the ${spent}: a longer time limit may find a better plan`]);
    part("facts").replaceChildren(...facts.map(([name, value, more]) => {
      const div = make("div"), dd = make("dd", value);
      if (more) dd.append(make("small", more));
      div.append(make("dt", name), dd);
      return div;
    }));
    const about = ["Predicted times come from the profile, which has no time for the optimizer step."];
    if (copies.length) about.push(`Below the axis are the bytes on the host, and when the link copies to it and back${copies.some(one => one.stall_us) ? "; compute waits for red copies, and times include that" : ""}.`);
    if (copies.length && copies.every(one => one.in_us[0] === one.in_us[1])) about.push("The profile has no link, so copies take no time here.");
    if (picture.corrected_by_bytes) about.push(`The plan was made for ${size(Math.abs(picture.corrected_by_bytes))} ${picture.corrected_by_bytes > 0 ? "less" : "more"} than the budget, because an earlier step was measured; the predicted line is simulated without this correction.`);
    part("about").textContent = about.join(" ");
  }

  function listLegend() {
    part("legend").replaceChildren(...lines.map(line => {
      const button = make("button"), swatch = make("span", undefined, "line");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!hidden.has(line.key)));
      swatch.style.borderTopColor = `var(--${line.key})`;
      if (line.key === "blocks") swatch.style.borderTopStyle = "dashed";
      button.append(swatch, line.name);
      button.onclick = () => {
        if (hidden.has(line.key)) hidden.delete(line.key); else if (visible().length > 1) hidden.add(line.key);
        button.setAttribute("aria-pressed", String(!hidden.has(line.key)));
        draw();
      };
      return button;
    }));
    if (tracks.length < 2) return;
    const label = make("label", "look at ", "soft"), select = make("select");
    tracks.forEach((track, i) => select.add(new Option(i ? track.name : lines[0].name, String(i))));
    select.onchange = () => {
      watched = tracks[Number(select.value)];
      runs = runsOf(watched);
      chosen = watched.peak;
      draw();
      show(chosen);
    };
    label.append(select);
    part("legend").append(label);
  }

  /* ---- keys and buttons ---- */
  box.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = Math.max(1, Math.round(watched.n / 50)), by = event.shiftKey ? far : 1;
    const here = runs.findIndex(run => chosen < run.end);
    const keys = {
      ArrowRight: () => go(chosen + by), ArrowLeft: () => go(chosen - by),
      Home: () => go(0), End: () => go(watched.n - 1),
      PageDown: () => go(here + 1 < runs.length ? runs[here + 1].begin : watched.n - 1),
      PageUp: () => go(chosen > runs[here].begin ? runs[here].begin : here ? runs[here - 1].begin : 0),
      p: () => go(watched.peak), P: () => go(watched.peak),
      "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), "0": () => whole(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  const whole = () => zoomTo(0, plot.data[0][plot.data[0].length - 1]);
  part("to-peak").onclick = () => go(watched.peak);
  part("zoom-in").onclick = () => zoom(.5);
  part("zoom-out").onclick = () => zoom(2);
  part("whole").onclick = whole;
  part("from-zero").onclick = event => { fromZero = !fromZero; event.currentTarget.setAttribute("aria-pressed", String(fromZero)); draw(); };
  part("live-by").onchange = listLive;
  box.onmousemove = event => {  // the moves are below the part of the plot that follows the cursor
    const {left, right, bottom} = plot.over.getBoundingClientRect();
    if (LINK && event.clientY > bottom && event.clientX < right) follow({cursor: {left: event.clientX - left}});
  };
  box.onmouseleave = () => { wanted = null; show(chosen); };
  parts.onTheme(draw);
  new ResizeObserver(() => { if (plot && plot.width !== box.clientWidth) draw(); }).observe(box);

  describe();
  listLegend();
  listLayers();
  listPeaks();
  keys(part("live-keys"), KINDS);
  draw();
  show(chosen);
  root.dataset.ready = "true";
}
