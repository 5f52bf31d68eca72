/* A model: its frontier, a budget to choose on it, and its policies. */
"use strict";

service.run(async () => {
  const {find, json, every, events, run, table, text, toPolicy, made, share, oneLiner, lastOfPath} = service;
  const {row, size, unitOf, time, make, color} = parts;
  const fingerprint = lastOfPath();
  const nobody = () => service.missing(`There is no model of the fingerprint ${fingerprint.slice(0, 12)}… here.`);
  if (!/^[0-9a-f]{64}$/.test(fingerprint)) return nobody();
  const preview = stepPreview();
  let profiles, policies, answers;  // newest first; answers: policies that a request of the line's kind gets
  let frontier = null, job = null;  // the newest frontier, of whichever profile
  let digest, profile, any;  // of the one profile that everything but the list of policies is of
  async function learn() {
    const of = `fingerprint=${fingerprint}`;
    [profiles, policies, answers] = (await Promise.all([every(`/v1/profiles?${of}`), every(`/v1/policies?${of}`), every(`/v1/policies?${of}&headroom_bytes=0`), service.learnModel(fingerprint)])).slice(0, 3).map(page => page.items);
    const model = service.models.get(fingerprint), newest = model && model.frontier_job;
    if (newest && newest !== job) {
      job = newest;
      [frontier] = await Promise.all([json(`/v1/jobs/${job}/result`), preview.learn(job)]);
    }
    digest = frontier ? frontier.profile_digest : policies.length ? policies[0].profile_digest : profiles.length ? profiles[0].digest : "";
    profile = profiles.find(one => one.digest === digest);
    any = profile || policies.find(one => one.profile_digest === digest);
  }
  await learn();
  if (!any) return nobody();
  function describe() {
    const name = service.nameOf(any), [newest] = profiles;
    document.title = `${name} · autoac`;
    find("name").textContent = name;
    find("class").textContent = name === any.model ? "" : any.model;
    find("about").textContent = [any.device, profile ? service.stepOf(profile) : "its profile was deleted", `fingerprint ${fingerprint.slice(0, 12)}`].join(" · ");
    find("rename").hidden = !newest;
    find("newer").hidden = !newest || newest.digest === digest;
    if (!find("newer").hidden) find("newer").textContent = `What follows is not of the newest profile of this model; “${computeWords()}” is for the newest.`;
  }
  const computeWords = () => frontier ? "Compute it again" : "Compute the frontier";
  describe();
  find("content").hidden = false;

  find("rename").onclick = () => {
    const closed = find("name-form").hidden;
    find("name-form").hidden = !closed;
    find("rename").setAttribute("aria-expanded", String(closed));
    find("new-name").value = service.models.has(fingerprint) ? service.models.get(fingerprint).name || "" : "";
    find("new-name").placeholder = any.model;
    if (closed) find("new-name").focus();
  };
  find("name-form").onsubmit = event => {
    event.preventDefault();
    run(async () => {
      service.fine();
      const name = find("new-name").value.trim(), path = `/v1/models/${fingerprint}/name`;
      service.models.set(fingerprint, await json(path, name ? {method: "PUT", body: {name}} : {method: "DELETE"}));
      describe();
      find("rename").click();
      find("rename").focus();
      service.say(name ? `Called ${name}` : "Goes by its class again");
    });
  };

  function budgetOfAddress() {
    const bytes = Math.floor(Number(new URLSearchParams(location.search).get("budget_gb")) * parts.GIB);
    return bytes > 0 && Number.isSafeInteger(bytes) ? bytes : 0;
  }

  /* ---- points ---- */
  const fromPolicy = policy => ({budget: policy.budget_bytes, peak: policy.peak_bytes, us: policy.recompute_us, step: policy.step_us, gap: policy.gap, stopped: policy.stopped, policy});
  const fromPlan = plan => ({budget: plan.budget_bytes, peak: plan.peak_bytes, us: plan.recompute_us, step: plan.step_us, gap: plan.gap, stopped: plan.stopped, kink: plan.kink, policy: null});
  let known = [];  // by peak
  let points = [];  // those of them that no other beats: peaks rise, times fall
  function collect() {
    known = [...(frontier ? frontier.plans.map(fromPlan) : []), ...policies.filter(isOurs).map(fromPolicy)].sort((a, b) => a.peak - b.peak || a.us - b.us || (a.policy ? -1 : 1));
    points = [];
    for (const point of known) if (!points.length || point.us < points[points.length - 1].us) points.push(point);
    for (const point of points) if (at(point.budget) !== point) point.budget = point.peak;  // a limit stopped it far below its budget
  }
  const isOurs = policy => policy.profile_digest === digest;
  const overhead = point => point.step ? 100 * point.us / point.step : 0;
  const within = bytes => points.reduce((best, point) => point.peak <= bytes ? point : best, null);
  const answer = bytes => answers.find(policy => policy.budget_bytes === bytes);
  /* What the line gets under a budget: the stored policy for it, or else the best that is known. */
  function at(bytes) {
    const fit = answer(bytes);
    return fit && known.find(point => point.policy && point.policy.id === fit.id) || within(bytes);
  }
  const isOpen = point => point.stopped !== "optimal";
  const gapWords = point => `${(100 * point.gap).toFixed(1)} %${isOpen(point) ? `, ${point.stopped}` : ""}`;
  /* No plan takes less than this, as far as is known; 0 where no frontier says so. */
  const least = () => frontier ? Math.min(frontier.floor.found_bytes, points[0].peak) : 0;

  /* GiB that PyTorch reports as a device's memory, rounded down. The CUDA context and fragmentation take some more. */
  const DEVICES = [["T4", 14.5], ["L4 or A10", 22], ["RTX 4090", 23.6], ["RTX 5090", 31.3], ["A100 40 GB", 39.3], ["L40S", 44.3], ["H100 80 GB", 79.1], ["H200", 139.7], ["B200", 178], ["MI300X", 191.5]];

  /* ---- the choice ---- */
  const slider = find("budget"), number = find("budget-number");  // the slider stops at each point
  let unit = ["GiB", parts.GIB], budget = budgetOfAddress(), plot = null;
  const shown = bytes => String(Number((bytes / unit[1]).toFixed(2)));
  /* Exactly this budget; with a point, one that selects it. */
  function choose(bytes) {
    budget = bytes;
    const point = at(budget), most = points[points.length - 1];
    slider.value = String(Math.max(0, points.indexOf(points.includes(point) ? point : within(budget))));
    number.value = shown(budget);
    find("least").hidden = true;
    slider.setAttribute("aria-valuetext", point ? `${size(budget)}: peak ${size(point.peak)}, ${overhead(point).toFixed(1)} % slower` : `${size(budget)}: no plan is known`);
    const facts = [["Budget", size(budget), ""]];
    const device = point && DEVICES.find(([, gib]) => point.peak <= gib * parts.GIB);
    if (point) facts.push(["Predicted peak", size(point.peak), point.policy ? "of a stored policy" : "of a plan on the frontier"],
      ["Recompute", `${overhead(point).toFixed(1)} %`, `${time(point.us)} of ${time(point.step)}`],
      ["Against nothing recomputed", most.us ? "not known" : most.peak > point.peak ? `−${size(most.peak - point.peak)}` : "the same", "peak"]);
    if (point && isOpen(point)) facts.push(["Not proven", `${(100 * point.gap).toFixed(1)} %`, `gap at the ${point.stopped}: a plan may exist that recomputes less`]);
    if (point && point.peak >= parts.GIB) facts.push(["Fits", device ? device[0] : "none listed", device ? `${device[1]} GiB, and larger devices` : `${DEVICES[DEVICES.length - 1][0]} has ${DEVICES[DEVICES.length - 1][1]} GiB`]);
    find("facts").replaceChildren(...facts.map(([name, value, more]) => {
      const div = make("div"), dd = make("dd", value);
      if (more) dd.append(make("small", more));
      div.append(make("dt", name), dd);
      return div;
    }));
    find("slower").textContent = slower(point);
    find("one-liner").textContent = oneLiner(budget);
    const fit = answer(budget), other = fit && !isOurs(fit) ? `. It is of another profile, by which it recomputes ${time(fit.recompute_us)} (${share(fit.recompute_us, fit.step_us)}).` : "";
    find("there").replaceChildren(...(fit ? ["A policy for this budget is stored: ", toPolicy(fit), other] : ["No policy that is stored answers a request for exactly this budget; the line has one planned."]));
    find("plan").hidden = Boolean(fit && isOurs(fit)) || !profiles.length;
    run(() => preview.choose(point, budget));
    if (plot) plot.redraw(false);
  }
  function slower(point) {
    if (!point) return "No plan within this budget is known yet.";
    if (!point.us) return "As fast as with nothing recomputed.";
    const share = overhead(point) / 100;
    return `${(100 * share).toFixed(1)} % slower than with nothing recomputed: forward and backward take ${time(point.step + point.us)} instead of ${time(point.step)}, ${service.duration(86_400 * share)} more for each day.`;
  }
  function keepInAddress() {
    history.replaceState(null, "", `?budget_gb=${service.gb(budget)}`);
  }
  slider.oninput = () => choose(points[Number(slider.value)].budget);
  slider.onchange = keepInAddress;
  number.onchange = () => {
    const asked = Math.floor(Number(number.value) * unit[1]);
    const near = points.find(point => Number(shown(point.budget)) === Number(number.value));  // as it is shown: the rest was rounded away
    const enough = asked > 0 && asked >= least();
    choose(near ? near.budget : enough ? asked : points[0].budget);
    if (!near && !enough) {
      find("least").textContent = asked > 0 ? `The least is ${size(least())}: the frontier has no plan with a smaller peak.` : "A budget is a positive number.";
      find("least").hidden = false;
    }
    keepInAddress();
  };
  service.copies(find("copy"), find("one-liner"));

  /* ---- the plot ---- */
  const EVEN = Array.from({length: 24}, (_, i) => [1, 2, 5].map(n => Number((n * 10 ** (i - 9)).toPrecision(1)))).flat();
  const evenly = (u, splits, axis, space, step) => splits.map(value => value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))));
  function draw() {
    if (plot) plot.destroy();
    plot = null;
    if (points.length < 2) return;
    const box = find("plot"), axis = {stroke: color("soft"), font: "12px system-ui, sans-serif", labelFont: "12.5px system-ui, sans-serif", grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), size: 5}, incrs: EVEN, values: evenly};
    const low = points[0].peak / unit[1], high = points[points.length - 1].peak / unit[1], room = (high - low) * .04;
    const beyond = DEVICES.map(([, gib]) => gib * parts.GIB / unit[1]).find(memory => memory >= high && memory < high + (high - low) / 3);  // the next device is seen too
    plot = new uPlot({
      width: box.clientWidth, height: 320, legend: {show: false}, cursor: {y: false, points: {show: false}, drag: {x: false, y: false}},
      scales: {x: {time: false, range: () => [low - room, (beyond || high) + room]}, y: {range: (u, a, b) => [0, Math.max(b, 1) * 1.08]}},
      axes: [{...axis, label: `${unit[0]} of peak`, labelSize: 20, size: 32, space: 60}, {...axis, label: "recompute, % of the step", labelSize: 20, size: 54}],
      series: [{}, {stroke: color("plan"), width: 2, fill: color("plan") + "1c", paths: uPlot.paths.stepped({align: 1}), points: {show: true, size: 6, fill: color("plan"), stroke: color("plan")}}],
      hooks: {ready: [standDevices], draw: [mark]},
    }, [points.map(point => point.peak / unit[1]), points.map(overhead)], box);
    const {over} = plot, under = event => choose((within(plot.posToVal(event.clientX - over.getBoundingClientRect().left, "x") * unit[1]) || points[0]).budget);
    over.onpointerdown = event => { over.setPointerCapture(event.pointerId); under(event); };
    over.onpointermove = event => { if (over.hasPointerCapture(event.pointerId)) under(event); };
    over.onpointerup = keepInAddress;
  }
  /* The memory of devices, where it is within the plot. */
  function standDevices(u) {
    let named = Infinity;
    for (const [name, gib] of [...DEVICES].reverse()) {  // where two stand close together, the larger is named
      const value = gib * parts.GIB / unit[1], {min, max} = u.scales.x;
      if (value < min || value > max) continue;
      const x = u.valToPos(value, "x"), line = make("div", named - x < 17 ? "" : `fits ${name}`, "device");
      if (line.textContent) named = x;
      line.style.left = `${x}px`;
      u.over.append(line);
    }
  }
  function mark(u) {
    const {ctx, bbox} = u, r = devicePixelRatio, point = at(budget);
    const dot = (point, radius) => {
      ctx.beginPath();
      ctx.arc(u.valToPos(point.peak / unit[1], "x", true), u.valToPos(overhead(point), "y", true), radius * r, 0, 7);
    };
    ctx.save();
    ctx.strokeStyle = color("plan");
    ctx.fillStyle = color("card");
    ctx.lineWidth = 1.5 * r;
    for (const open of points.filter(isOpen)) { dot(open, 4); ctx.fill(); ctx.stroke(); }
    ctx.restore();
    const x = Math.max(bbox.left, Math.min(u.valToPos(budget / unit[1], "x", true), bbox.left + bbox.width));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("budget");
    ctx.setLineDash([6 * r, 4 * r]);
    ctx.lineWidth = 1.5 * r;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (point) { dot(point, 5); if (isOpen(point)) { ctx.setLineDash([]); ctx.stroke(); } else ctx.fill(); }
    ctx.restore();
  }
  parts.onTheme(draw);
  new ResizeObserver(() => { if (plot && plot.width !== find("plot").clientWidth) draw(); }).observe(find("plot"));

  /* ---- tables ---- */
  function show() {
    collect();
    find("choice").hidden = !points.length;
    const uncomputed = !frontier && points.length < 2;
    if (uncomputed && !find("progress").textContent) find("progress").textContent = profiles.length ? "The frontier of this model is not computed yet; it tells what each budget costs." : "";
    table(find("points"), ["peak", "budget", "recompute", "of the step", "proven gap", "note"], points.map(point => row("", size(point.peak), size(point.budget), time(point.us),
      `${overhead(point).toFixed(1)} %`, gapWords(point), text(point.policy ? toPolicy(point.policy, "a stored policy") : point.kink ? "less memory costs much more from here" : ""))), "No point is known.");
    table(find("policies"), ["policy", "profile", "peak", "recompute", "of the step", "proven gap", "made"], policies.map(policy => row("", toPolicy(policy), text(isOurs(policy) ? "the one above" : "another"), size(policy.peak_bytes),
      time(policy.recompute_us), share(policy.recompute_us, policy.step_us), gapWords(fromPolicy(policy)), made(policy.created_at, policy.created_by))), "No policy is stored.");
    find("compute").hidden = !profiles.length;
    find("compute").textContent = computeWords();
    find("hollow").hidden = !points.some(isOpen);
    find("single").hidden = !frontier || points.length !== 1;
    if (!points.length) return;
    if (points.length === 1) {
      const rest = preview.rest();
      find("single").textContent = `No plan needs less than ${size(points[0].peak)}, so there is nothing to choose${rest ? `: when the step ends, parameters, gradients and the optimizer alone take ${size(rest)}` : ""}.`;
    }
    unit = unitOf(points[points.length - 1].peak);
    find("unit").textContent = unit[0];
    slider.max = String(points.length - 1);
    slider.disabled = points.length < 2;
    choose(budget || (points.find(point => point.kink) || points[points.length >> 1]).budget);
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
        find("progress").textContent = kind === "progress" ? `${said}: ${service.progressWords(job.kind, data, job.options.time_limit_s)}.` : `${said}: ${state}.`;
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
  const gotFrontier = async () => {
    await learn();
    describe();
    show();
    service.say(`The frontier has ${frontier.plans.length} points.`);
  };
  async function submit(path, body, done, headers = {}) {
    service.fine();
    const answer = await service.ask(path, {method: "POST", body, headers: {Prefer: "wait=0", ...headers}});
    const result = await answer.json();
    if (answer.status === 202) await watch(result, done); else await done(result);
  }
  find("compute").onclick = () => run(() => submit("/v1/frontiers", {profile_digest: profiles[0].digest}, gotFrontier, frontier ? {"Cache-Control": "no-cache"} : {}));
  find("plan").onclick = () => run(() => submit("/v1/policies", {profile_digest: (profile || profiles[0]).digest, budget_bytes: budget}, async () => {
    await learn();
    describe();
    show();
    service.say("The policy is stored.");
  }));

  const live = profiles.length ? await Promise.all(["running", "queued"].map(state => json(`/v1/jobs?kind=frontier&profile=${profiles[0].digest}&limit=1&state=${state}`))) : [];
  show();
  find("main").dataset.ready = "true";
  const [one] = live.flatMap(page => page.items);
  if (one) await watch(one, gotFrontier);
});
