/* A profile: its frontier, a budget to choose on it, and its policies. */
"use strict";

service.run(async () => {
  const {find, json, run, table, text, pages, toPolicy, made, share, oneLiner, lastOfPath} = service;
  const {row, size, unitOf, time, make, color} = parts;
  const digest = lastOfPath();
  let profile;
  try {
    profile = await json(`/v1/profiles/${digest}/about`);
  } catch (error) {
    if (error.status !== 404 && error.status !== 422) throw error;
    return service.missing(`There is no profile ${digest.slice(0, 12)}… here.`);
  }
  document.title = `${profile.model} · autoac`;
  find("name").textContent = profile.model;
  find("about").textContent = `${profile.device} · ${service.stepOf(profile)}`;
  find("made").replaceChildren("Stored ", service.when(profile.created_at), ` by ${profile.created_by} · digest ${digest.slice(0, 12)}`);
  find("content").hidden = false;

  /* ---- the frontier ---- */
  let frontier = null, points = [], budget = 0, unit = null, plot = null;
  async function learn() {
    const {items: [job]} = await json(`/v1/jobs?kind=frontier&state=succeeded&profile=${digest}&limit=1`);
    if (job) frontier = await json(`/v1/jobs/${job.id}/result`);
    points = frontier ? frontier.plans : [];
    find("choice").hidden = !points.length;
    find("compute").textContent = frontier ? "Compute it again" : "Compute the frontier";
    find("progress").textContent = frontier ? "" : "The frontier is not computed yet; it tells what each budget costs.";
    if (!points.length) return;
    find("hollow").hidden = points.every(proven);
    table(find("points"), ["peak", "budget", "recompute", "of the step", "proven gap", "note"], points.map(point => row("", size(point.peak_bytes), size(point.budget_bytes), time(point.recompute_us),
      share(point.recompute_us, point.step_us), gap(point), text(point.kink ? "less memory costs much more from here" : ""))), "");
    unit = unitOf(points[points.length - 1].peak_bytes);
    find("unit").textContent = unit[0];
    slider.max = String(points.length - 1);
    slider.disabled = points.length < 2;
    choose(budget || (points.find(point => point.kink) || points[points.length >> 1]).budget_bytes);
    draw();
  }
  const proven = point => point.stopped === "optimal";
  const gap = plan => `${(100 * plan.gap).toFixed(1)} %${proven(plan) ? "" : `, ${plan.stopped}`}`;
  const overhead = point => point.step_us ? 100 * point.recompute_us / point.step_us : 0;
  const within = bytes => points.reduce((best, point) => point.peak_bytes <= bytes ? point : best, null);

  /* ---- the choice ---- */
  const slider = find("budget"), number = find("budget-number");  // the slider stops at each point
  const shown = bytes => String(Number((bytes / unit[1]).toFixed(2)));
  function choose(bytes) {
    budget = bytes;
    const point = within(budget) || points[0], most = points[points.length - 1];
    slider.value = String(points.indexOf(point));
    slider.setAttribute("aria-valuetext", `${size(budget)}: peak ${size(point.peak_bytes)}, ${overhead(point).toFixed(1)} % slower`);
    number.value = shown(budget);
    find("plan").disabled = point.peak_bytes > budget;
    find("least").hidden = !find("plan").disabled;
    find("least").textContent = `The least is ${size(points[0].peak_bytes)}: the frontier has no plan with a smaller peak.`;
    const spent = point.recompute_us ? `${overhead(point).toFixed(1)} %` : "none";
    const facts = [["Budget", size(budget), ""], ["Predicted peak", size(point.peak_bytes), most.peak_bytes > point.peak_bytes ? `${size(most.peak_bytes - point.peak_bytes)} less than with nothing recomputed` : "nothing is recomputed"],
      ["Recompute", spent, `${time(point.recompute_us)} in addition to a step of ${time(point.step_us)}`]];
    if (!proven(point)) facts.push(["Not proven", `${(100 * point.gap).toFixed(1)} %`, `gap at the ${point.stopped}: a plan may exist that recomputes less`]);
    find("facts").replaceChildren(...facts.map(([name, value, more]) => {
      const div = make("div"), dd = make("dd", value);
      if (more) dd.append(make("small", more));
      div.append(make("dt", name), dd);
      return div;
    }));
    find("one-liner").textContent = oneLiner(budget);
    if (plot) plot.redraw(false);
  }
  slider.oninput = () => choose(points[Number(slider.value)].budget_bytes);
  number.onchange = () => {
    const near = points.find(point => Number(shown(point.budget_bytes)) === Number(number.value));  // as it is shown: the rest was rounded away
    choose(near ? near.budget_bytes : Math.max(1, Math.floor(Number(number.value) * unit[1])));
  };
  service.copies(find("copy"), find("one-liner"));

  /* ---- the plot ---- */
  function draw() {
    if (plot) plot.destroy();
    plot = null;
    if (points.length < 2) return;
    const box = find("plot"), axis = {stroke: color("soft"), font: "12px system-ui, sans-serif", labelFont: "12.5px system-ui, sans-serif", grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), size: 5}};
    const low = points[0].peak_bytes / unit[1], high = points[points.length - 1].peak_bytes / unit[1], room = (high - low) * .04;
    plot = new uPlot({
      width: box.clientWidth, height: 320, legend: {show: false}, cursor: {y: false, points: {show: false}, drag: {x: false, y: false}},
      scales: {x: {time: false, range: () => [low - room, high + room]}, y: {range: (u, a, b) => [0, Math.max(b, 1) * 1.08]}},
      axes: [{...axis, label: `${unit[0]} of peak`, labelSize: 20, size: 32, space: 60}, {...axis, label: "recompute, % of the step", labelSize: 20, size: 54}],
      series: [{}, {stroke: color("plan"), width: 2, fill: color("plan") + "1c", paths: uPlot.paths.stepped({align: 1}), points: {show: true, size: 6, fill: color("plan"), stroke: color("plan")}}],
      hooks: {draw: [mark]},
    }, [points.map(point => point.peak_bytes / unit[1]), points.map(overhead)], box);
    plot.over.onpointerdown = event => choose((within(plot.posToVal(event.offsetX, "x") * unit[1]) || points[0]).budget_bytes);
  }
  function mark(u) {
    const {ctx, bbox} = u, r = devicePixelRatio, point = within(budget);
    const dot = (point, radius) => {
      ctx.beginPath();
      ctx.arc(u.valToPos(point.peak_bytes / unit[1], "x", true), u.valToPos(overhead(point), "y", true), radius * r, 0, 7);
    };
    ctx.save();
    ctx.lineWidth = 1.5 * r;
    ctx.strokeStyle = color("plan");
    ctx.fillStyle = color("card");
    for (const open of points.filter(one => !proven(one))) { dot(open, 4); ctx.fill(); ctx.stroke(); }
    ctx.strokeStyle = ctx.fillStyle = color("budget");
    const x = Math.max(bbox.left, Math.min(u.valToPos(budget / unit[1], "x", true), bbox.left + bbox.width));
    if (point) { dot(point, 5); if (proven(point)) ctx.fill(); else ctx.stroke(); }
    ctx.setLineDash([6 * r, 4 * r]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }
  parts.onTheme(draw);
  new ResizeObserver(() => { if (plot && plot.width !== find("plot").clientWidth) draw(); }).observe(find("plot"));

  /* ---- jobs ---- */
  async function watch(job, done) {
    for (const id of ["compute", "plan"]) find(id).disabled = true;
    find("cancel").hidden = false;
    find("cancel").onclick = () => run(() => service.ask(`/v1/jobs/${job.id}`, {method: "DELETE"}));
    try {
      const end = await service.ended(job, now => { find("progress").textContent = `${job.kind === "frontier" ? "The frontier" : "The plan"} is being computed: ${service.progressWords(now)}.`; });
      find("progress").textContent = end.state === "cancelled" ? "Cancelled." : "";
      if (end.state !== "cancelled") await done(await json(job.result_url));
    } catch (error) {
      find("progress").textContent = "";
      throw error;
    } finally {
      find("cancel").hidden = true;
      find("compute").disabled = false;
      if (points.length) choose(budget);
    }
  }
  async function submit(path, body, done, headers = {}) {
    service.fine();
    const answer = await service.ask(path, {method: "POST", body, headers: {Prefer: "wait=0", ...headers}}), result = await answer.json();
    if (answer.status === 202) await watch(result, done); else await done(result);
  }
  find("compute").onclick = () => run(() => submit("/v1/frontiers", {profile_digest: digest}, async () => {
    await learn();
    service.say(`The frontier has ${points.length} points.`);
  }, frontier ? {"Cache-Control": "no-cache"} : {}));
  find("plan").onclick = () => {
    const planned = budget;
    find("progress").textContent = "";
    run(() => submit("/v1/policies", {profile_digest: digest, budget_bytes: planned}, async () => {
      await policies(true);
      find("progress").textContent = `Planned for ${size(planned)}: the policy is in the list below.`;
    }));
  };

  const policies = pages(find("policies"), () => `/v1/policies?profile=${digest}`, items => table(find("policies"), ["budget", "peak", "recompute", "of the step", "proven gap", "planned"], items.map(policy => row("", toPolicy(policy), size(policy.peak_bytes),
    time(policy.recompute_us), share(policy.recompute_us, policy.step_us), gap(policy), made(policy.created_at, policy.created_by))), "No policy is planned from this profile."));
  await Promise.all([learn(), policies()]);
  find("main").dataset.ready = "true";
  const [live] = (await Promise.all(["running", "queued"].map(state => json(`/v1/jobs?kind=frontier&profile=${digest}&limit=1&state=${state}`)))).flatMap(page => page.items);
  if (live) await watch(live, learn);
});
