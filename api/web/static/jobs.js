/* Jobs: a list that keeps itself fresh, the progress of those that run, and a way to end them. */
"use strict";

service.run(async () => {
  const {find, json, every, ask, events, run, table, text, link} = service;
  const {row, make, size} = parts;
  const STREAMS = 3;  // a browser opens six connections to a service
  const FRESH_MS = 3000;
  const models = new Map();  // by profile digest
  async function learn() {
    const [profiles] = await Promise.all([every("/v1/profiles"), service.learnModels()]);
    for (const profile of profiles.items) models.set(profile.digest, profile);
  }
  await learn();

  const progress = new Map();  // by job id: the words
  const streams = new Map();  // by job id: what ends it
  let shown = [], pages = 1;
  let now = 0;  // by the service's clock
  const final = job => ["succeeded", "failed", "cancelled"].includes(job.state);

  function about(job) {
    const {options} = job;
    return [options.budget_bytes ? size(options.budget_bytes) : "", options.points ? `${options.points} points` : ""].filter(Boolean).join(", ");
  }
  function result(job) {
    if (job.state === "succeeded" && job.policy_id) return link("the policy", `/policies/${job.policy_id}`);
    if (job.state === "succeeded" && job.kind === "frontier" && models.has(job.profile_digest)) return link("the frontier", `/models/${models.get(job.profile_digest).fingerprint}`);
    if (job.state === "failed" && job.problem) return problem(job);
    return "";
  }
  const opened = new Set();  // ids of jobs whose problem is open
  function problem(job) {
    const {title, detail} = job.problem;
    if (!detail || detail === title) return title;
    const details = make("details"), summary = make("summary", title);
    details.open = opened.has(job.id);
    details.ontoggle = () => { if (details.open) opened.add(job.id); else opened.delete(job.id); };
    details.append(summary, make("p", detail));
    return details;
  }
  const between = (from, to) => from ? service.duration(Math.max(0, (to ? Date.parse(to) : now) - Date.parse(from)) / 1000) : "";
  const waited = job => between(job.created_at, job.started_at || job.finished_at);
  const took = job => between(job.started_at, job.finished_at);
  function cancelButton(job) {
    const button = make("button", "Cancel");
    button.type = "button";
    button.setAttribute("aria-label", `Cancel the ${job.kind} job ${job.id.slice(0, 8)}`);
    button.dataset.job = job.id;
    button.onclick = () => run(async () => {
      service.fine();
      button.disabled = true;
      try {
        await ask(`/v1/jobs/${job.id}`, {method: "DELETE"});
        service.say(`Job ${job.id.slice(0, 8)} is cancelled.`);
      } finally {
        button.disabled = false;
        await refresh();
      }
    });
    return button;
  }
  function render() {
    const focused = document.activeElement && document.activeElement.dataset.job;
    table(find("jobs"), ["job", "model", "asked for", "state", "waited", "took", "result", "asked", ""], shown.map(job => {
      const profile = models.get(job.profile_digest), how = make("span", final(job) ? "" : progress.get(job.id) || "", "soft how"), state = text(make("span", job.state));
      how.dataset.how = job.id;
      state.firstChild.append(how);
      const name = make("span", `${job.kind} `);
      name.append(make("span", job.id.slice(0, 8), "soft"));
      const clocks = [waited(job), took(job)].map((words, i) => { const td = make("td", words); td.dataset.clock = `${"wt"[i]}${job.id}`; return td; });
      const tr = row("", name, text(profile ? service.toModelCell(profile) : job.profile_digest.slice(0, 12)), text(about(job)),
        state, ...clocks, text(result(job)), service.made(job.created_at, job.owner), final(job) ? "" : cancelButton(job));
      tr.dataset.state = job.state;
      return tr;
    }), find("state").value ? `No job is ${find("state").value}.` : "No job was asked for. Plan a model, or compute a frontier on a model's page.");
    if (focused) { const button = find("jobs").querySelector(`button[data-job="${CSS.escape(focused)}"]`); if (button) button.focus(); }
  }
  function follow() {
    for (const job of shown.filter(job => job.state === "running")) {
      if (streams.size >= STREAMS || streams.has(job.id)) continue;
      const end = new AbortController();
      streams.set(job.id, end);
      run(async () => {
        try {
          await events(job.events_url, (kind, data) => {
            if (kind !== "progress") return;
            progress.set(job.id, service.progressWords(job.kind, data, job.options.time_limit_s));
            const cell = find("jobs").querySelector(`[data-how="${CSS.escape(job.id)}"]`);
            if (cell && cell.closest("tr").dataset.state === "running") cell.textContent = progress.get(job.id);  // not what comes after its end
          }, end.signal);
        } finally {
          streams.delete(job.id);
          await refresh();
        }
      });
    }
  }
  async function refresh() {
    const state = find("state").value, found = [];
    let next = "";
    for (let page = 0; page < pages && next !== null; page++) {
      const answer = await ask(`/v1/jobs?limit=50${state && `&state=${state}`}${next && `&cursor=${encodeURIComponent(next)}`}`), got = await answer.json();
      now = Date.parse(answer.headers.get("date")) || Date.now();
      found.push(...got.items);
      next = got.next;
    }
    if (found.some(job => !models.has(job.profile_digest))) await learn();
    for (const job of found) {
      const old = shown.find(one => one.id === job.id);
      if (old && old.state !== job.state) service.say(`Job ${job.id.slice(0, 8)}: ${job.state}`);
    }
    const changed = JSON.stringify(found) !== JSON.stringify(shown);
    shown = found;
    find("more").hidden = next === null;
    if (changed || !found.length) render();
    for (const job of shown.filter(job => !final(job)))
      for (const [kind, words] of [["w", waited(job)], ["t", took(job)]]) find("jobs").querySelector(`[data-clock="${kind}${CSS.escape(job.id)}"]`).textContent = words;
    follow();
  }
  find("state").onchange = () => run(refresh);
  find("more").onclick = () => { pages++; run(refresh); };
  await refresh();
  find("main").dataset.ready = "true";
  const again = () => setTimeout(async () => {
    if (!document.hidden) {
      try { await refresh(); service.fine(); } catch (error) { service.trouble(error); }
    }
    again();
  }, FRESH_MS);
  again();
});
