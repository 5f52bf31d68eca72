/* Jobs, ten to a page: a list that keeps itself fresh, the progress of those that run, and a way to end them. */
"use strict";

service.run(async () => {
  const {find, json, ask, run, table, text, pages, link} = service;
  const {row, make, size} = parts;
  const FRESH_MS = 3000;
  const profiles = new Map();  // by digest; null: it was deleted
  const states = new Map();  // by job
  const opened = new Set();  // ids of jobs whose problem is open
  const final = job => ["succeeded", "failed", "cancelled"].includes(job.state);

  function result(job) {
    if (job.state === "failed" && job.problem) return problem(job);
    if (job.state !== "succeeded") return "";
    return job.policy_id ? link("the policy", `/policies/${job.policy_id}`) : job.kind === "frontier" ? link("the frontier", `/profiles/${job.profile_digest}`) : "";
  }
  function problem(job) {
    const {title, detail} = job.problem, details = make("details");
    details.open = opened.has(job.id);
    details.ontoggle = () => { if (details.open) opened.add(job.id); else opened.delete(job.id); };
    details.append(make("summary", title), ...detail.split("\n").map(line => make("p", line)));
    return details;
  }
  function cancelButton(job) {
    const button = make("button", "Cancel");
    button.type = "button";
    button.setAttribute("aria-label", `Cancel the ${job.kind} job ${job.id.slice(0, 8)}`);
    button.dataset.job = job.id;
    button.onclick = () => run(async () => {
      service.fine();
      button.disabled = true;
      await ask(`/v1/jobs/${job.id}`, {method: "DELETE"});
      await refresh();
    });
    return button;
  }
  async function show(jobs, now) {
    for (const digest of new Set(jobs.map(job => job.profile_digest))) {
      if (!profiles.has(digest)) profiles.set(digest, await json(`/v1/profiles/${digest}/about`).catch(() => null));
    }
    const running = new Map();
    for (const job of jobs.filter(job => job.state === "running")) running.set(job.id, service.progressWords(await json(`/v1/jobs/${job.id}`)));
    for (const job of jobs) {
      if (states.has(job.id) && states.get(job.id) !== job.state) service.say(`Job ${job.id.slice(0, 8)}: ${job.state}`);
      states.set(job.id, job.state);
    }
    const between = (from, to) => from ? service.duration(Math.max(0, (to ? Date.parse(to) : now) - Date.parse(from)) / 1000) : "";
    const focused = document.activeElement && document.activeElement.dataset.job;
    table(find("jobs"), ["job", "profile", "asked for", "state", "waited", "took", "result", "requested"], jobs.map(job => {
      const profile = profiles.get(job.profile_digest), state = text(job.state), name = make("span", `${job.kind} `);
      name.append(make("span", job.id.slice(0, 8), "soft"));
      if (running.has(job.id)) state.firstChild.append(make("span", running.get(job.id), "soft how"));
      const {budget_bytes, points} = job.options;
      const tr = row("", name, text(profile ? service.toProfile(profile) : job.profile_digest.slice(0, 12)), text(budget_bytes ? size(budget_bytes) : points ? `${points} points` : ""),
        state, between(job.created_at, job.started_at || job.finished_at), between(job.started_at, job.finished_at), text(final(job) ? result(job) : cancelButton(job)), service.made(job.created_at, job.owner));
      tr.dataset.state = job.state;
      return tr;
    }), find("state").value ? `No job is ${find("state").value}.` : "No job was asked for. Plan a budget, or compute a frontier, on the page of a profile.");
    const button = focused && find("jobs").querySelector(`button[data-job="${CSS.escape(focused)}"]`);
    if (button) button.focus();
  }
  const refresh = pages(find("jobs"), () => `/v1/jobs${find("state").value && `?state=${find("state").value}`}`, show);
  find("state").onchange = () => run(() => refresh(true));
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
