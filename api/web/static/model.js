/* A model: its frontier, a budget to choose on it, and its policies. */
"use strict";

service.run(async () => {
  const {find, json, every, events, run, table, text, toPolicy, when, share, oneLiner, lastOfPath} = service;
  const {row, size, time, make, color, GIB} = parts;
  const fingerprint = lastOfPath();
  const [profiles, stored] = await Promise.all([every(`/v1/profiles?fingerprint=${fingerprint}`), every(`/v1/policies?fingerprint=${fingerprint}`)]);
  const profile = profiles.items[0], any = profile || stored.items[0];
  if (!any) throw new Error(`There is no model of the fingerprint ${fingerprint.slice(0, 12)}… here.`);
  document.title = `${any.model} · autoac`;
  find("name").textContent = any.model;
  find("about").textContent = [any.device, profile ? `${profile.ops} ops` : "its profile was deleted", `fingerprint ${fingerprint.slice(0, 12)}`].join(" · ");

  let policies = stored.items, frontier = null;
  const unit = GIB;

  /* ---- points ---- */
  const fromPolicy = policy => ({budget: policy.budget_bytes, peak: policy.peak_bytes, us: policy.recompute_us, step: policy.step_us, policy, from: "policy"});
  const fromPlan = plan => ({budget: plan.budget_bytes, peak: plan.peak_bytes, us: plan.recompute_us, step: plan.step_us, kink: plan.kink, from: "frontier"});
  let points = [];  // none beats another: peaks rise, times fall
  function collect() {
    const every = [...(frontier ? frontier.plans.map(fromPlan) : []), ...policies.map(fromPolicy)].sort((a, b) => a.peak - b.peak || a.us - b.us || (a.policy ? -1 : 1));
    points = [];
    for (const point of every) if (!points.length || point.us < points[points.length - 1].us) points.push(point);
  }
  const overhead = point => point.step ? 100 * point.us / point.step : 0;
  const within = budget => points.reduce((best, point) => point.peak <= budget ? point : best, null);

  /* ---- the choice ---- */
  const slider = find("budget"), number = find("budget-number");
  let budget = 0, plot = null;
  function choose(bytes, from) {
    const low = points[0].peak;
    budget = Math.max(low, bytes);
    const point = within(budget), asked = Math.ceil(budget / GIB * 1000) / 1000;
    if (from !== slider) slider.value = String(Math.min(Math.max(asked, Number(slider.min)), Number(slider.max)));
    if (from !== number) number.value = String(asked);
    const said = `${size(budget)}: peak ${size(point.peak)}, ${overhead(point).toFixed(1)} % of recompute`;
    slider.setAttribute("aria-valuetext", said);
    const facts = [["Budget", size(budget), ""], ["Predicted peak", size(point.peak), point.from === "policy" ? "of a stored policy" : "of a plan on the frontier"],
      ["Recompute", `${overhead(point).toFixed(1)} %`, `${time(point.us)} of ${time(point.step)}`],
      ["Against nothing recomputed", points[points.length - 1].us === 0 ? `−${size(points[points.length - 1].peak - point.peak)}` : "not known", "of peak"]];
    find("facts").replaceChildren(...facts.map(([name, value, more]) => {
      const div = make("div"), dd = make("dd", value);
      if (more) dd.append(make("small", more));
      div.append(make("dt", name), dd);
      return div;
    }));
    find("one-liner").textContent = oneLiner(budget);
    const fit = policies.find(policy => policy.budget_bytes === Math.floor(asked * GIB));
    find("there").replaceChildren(...(fit ? ["A policy for this budget is stored: ", toPolicy(fit)] : []));
    find("plan").hidden = Boolean(fit) || !profile;
    if (plot) plot.redraw(false);
  }
  slider.oninput = () => choose(Number(slider.value) * GIB, slider);
  number.onchange = () => { if (Number(number.value) > 0) choose(Number(number.value) * GIB, number); };
  service.copies(find("copy"), find("one-liner"));

  /* ---- the plot ---- */
  function draw() {
    if (plot) plot.destroy();
    plot = null;
    if (points.length < 2) return;
    const box = find("plot"), axis = {stroke: color("soft"), font: "12px system-ui, sans-serif", labelFont: "12.5px system-ui, sans-serif", grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), size: 5}};
    const low = points[0].peak / unit, high = points[points.length - 1].peak / unit, room = (high - low) * .04;
    plot = new uPlot({
      width: box.clientWidth, height: 320, legend: {show: false}, cursor: {y: false, points: {show: false}, drag: {x: false, y: false}},
      scales: {x: {time: false, range: () => [low - room, high + room]}, y: {range: (u, a, b) => [0, Math.max(b, 1) * 1.08]}},
      axes: [{...axis, label: "GiB of peak", labelSize: 20, size: 32}, {...axis, label: "recompute, % of the step", labelSize: 20, size: 54}],
      series: [{}, {stroke: color("plan"), width: 2, fill: color("plan") + "1c", paths: uPlot.paths.stepped({align: 1}), points: {show: true, size: 6, fill: color("plan"), stroke: color("plan")}}],
      hooks: {draw: [mark]},
    }, [points.map(point => point.peak / unit), points.map(overhead)], box);
    plot.over.addEventListener("click", () => { if (plot.cursor.left >= 0) choose(plot.posToVal(plot.cursor.left, "x") * unit); });
  }
  function mark(u) {
    const {ctx, bbox} = u, r = devicePixelRatio, point = within(budget);
    if (!point) return;
    const x = Math.min(u.valToPos(budget / unit, "x", true), bbox.left + bbox.width);
    ctx.save();
    ctx.strokeStyle = color("budget");
    ctx.setLineDash([6 * r, 4 * r]);
    ctx.lineWidth = 1.5 * r;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillStyle = color("budget");
    ctx.beginPath();
    ctx.arc(u.valToPos(point.peak / unit, "x", true), u.valToPos(overhead(point), "y", true), 5 * r, 0, 7);
    ctx.fill();
    ctx.restore();
  }
  parts.onTheme(draw);
  new ResizeObserver(() => { if (plot && plot.width !== find("plot").clientWidth) draw(); }).observe(find("plot"));

  /* ---- tables ---- */
  function show() {
    collect();
    find("choice").hidden = !points.length;
    const known = points.length && (frontier || points.length > 1);
    if (!known && !find("progress").textContent) find("progress").textContent = profile ? "The frontier of this model is not computed yet; it tells what each budget costs." : "";
    table(find("points"), ["peak", "planned for", "recompute", "of the step", "note"], points.map(point => row("", size(point.peak), size(point.budget), time(point.us),
      `${overhead(point).toFixed(1)} %`, text(point.policy ? toPolicy(point.policy, "a stored policy") : point.kink ? "less memory costs much more from here" : ""))), "No point is known.");
    table(find("policies"), ["policy", "peak", "recompute", "of the step", "proven gap", "made", "by"], policies.map(policy => row("", toPolicy(policy), size(policy.peak_bytes),
      time(policy.recompute_us), share(policy.recompute_us, policy.step_us), `${(100 * policy.gap).toFixed(1)} %`, when(policy.created_at), text(policy.created_by))), "No policy is stored.");
    find("compute").hidden = !profile;
    find("compute").textContent = frontier ? "Compute it again" : "Compute the frontier";
    if (!points.length) return;
    const low = points[0].peak / GIB, high = points[points.length - 1].peak / GIB;
    slider.min = String(Math.floor(low * 1000) / 1000);
    slider.max = String(Math.max(Math.ceil(high * 1000), Math.floor(low * 1000) + 1) / 1000);
    number.step = slider.step = String(Math.max(.001, Number(((Number(slider.max) - Number(slider.min)) / 400).toFixed(3))));
    number.step = "any";
    number.min = slider.min;
    choose(budget || (points.find(point => point.kink) || points[points.length >> 1]).peak);
    draw();
  }

  /* ---- jobs ---- */
  let watching = null;
  async function watch(job, done) {
    watching = new AbortController();
    find("cancel").hidden = false;
    find("compute").disabled = find("plan").disabled = true;
    find("cancel").onclick = () => run(async () => { await service.ask(`/v1/jobs/${job.id}`, {method: "DELETE"}); });
    const said = `${job.kind === "frontier" ? "The frontier" : "The plan"} is being computed`;
    find("progress").textContent = `${said}.`;
    let state = job.state;
    try {
      await events(job.events_url, (kind, data) => {
        if (kind === "state") state = data.state;
        find("progress").textContent = kind === "progress" ? `${said}: ${service.progressWords(job.kind, data)}.` : `${said}: ${state}.`;
      }, watching.signal);
      find("progress").textContent = state === "cancelled" ? "Cancelled." : "";
      if (state !== "cancelled") await done(await json(job.result_url));
    } catch (error) {
      find("progress").textContent = "";
      throw error;
    } finally {
      find("cancel").hidden = true;
      find("compute").disabled = find("plan").disabled = false;
    }
  }
  const gotFrontier = result => {
    frontier = result;
    show();
    service.say(`The frontier has ${frontier.plans.length} points.`);
  };
  async function submit(path, body, done, headers = {}) {
    service.fine();
    const answer = await service.ask(path, {method: "POST", body: {profile_digest: profile.digest, ...body}, headers: {Prefer: "wait=0", ...headers}});
    const result = await answer.json();
    if (answer.status === 202) await watch(result, done); else await done(result);
  }
  find("compute").onclick = () => run(() => submit("/v1/frontiers", {}, gotFrontier, frontier ? {"Cache-Control": "no-cache"} : {}));
  find("plan").onclick = () => run(() => submit("/v1/policies", {budget_gb: Number(find("budget-number").value)}, async () => {
    policies = (await every(`/v1/policies?fingerprint=${fingerprint}`)).items;
    show();
    service.say("The policy is stored.");
  }));

  if (profile) {
    const jobs = `/v1/jobs?kind=frontier&profile=${profile.digest}&limit=1`;
    const [done, running, queued] = await Promise.all(["succeeded", "running", "queued"].map(state => json(`${jobs}&state=${state}`)));
    if (done.items.length) frontier = await json(done.items[0].result_url);
    show();
    find("main").dataset.ready = "true";
    const live = running.items[0] || queued.items[0];
    if (live) await watch(live, gotFrontier);
  } else {
    show();
    find("main").dataset.ready = "true";
  }
});
