/* Jobs: a list that keeps itself fresh, the progress of those that run, and a way to end them. */
"use strict";

service.run(async () => {
  const {find, json, every, ask, events, run, table, text, when, link} = service;
  const {row, make, size} = parts;
  const STREAMS = 3;  // a browser opens six connections to a service
  const FRESH_MS = 3000;
  const models = new Map();  // by profile digest
  async function learn() {
    for (const profile of (await every("/v1/profiles")).items) models.set(profile.digest, profile);
  }
  await learn();

  const progress = new Map();  // by job id: the words
  const streams = new Map();  // by job id: what ends it
  let shown = [], pages = 1;
  const final = job => ["succeeded", "failed", "cancelled"].includes(job.state);

  function about(job) {
    const {options} = job;
    return [options.budget_bytes ? size(options.budget_bytes) : "", options.points ? `${options.points} points` : ""].filter(Boolean).join(", ");
  }
  function outcome(job) {
    if (job.state === "succeeded" && job.policy_id) return link("the policy", `/policies/${job.policy_id}`);
    if (job.state === "succeeded" && job.kind === "frontier" && models.has(job.profile_digest)) return link("the frontier", service.toModel(models.get(job.profile_digest)).href);
    if (job.state === "failed" && job.problem) return job.problem.detail || job.problem.title;
    return final(job) ? "" : progress.get(job.id) || "";
  }
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
    table(find("jobs"), ["job", "kind", "model", "asked for", "state", "how far", "asked", "by", ""], shown.map(job => {
      const profile = models.get(job.profile_digest), how = text(outcome(job)), state = make("td", job.state, "text");
      how.dataset.how = job.id;
      const tr = row("", job.id.slice(0, 8), text(job.kind), text(profile ? service.toModel(profile) : job.profile_digest.slice(0, 12)), text(about(job)),
        state, how, when(job.created_at), text(job.owner), final(job) ? "" : cancelButton(job));
      tr.dataset.state = job.state;
      return tr;
    }), "No job was asked for.");
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
            progress.set(job.id, service.progressWords(job.kind, data));
            const cell = find("jobs").querySelector(`[data-how="${CSS.escape(job.id)}"]`);
            if (cell) cell.textContent = progress.get(job.id);
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
      const got = await json(`/v1/jobs?limit=50${state && `&state=${state}`}${next && `&cursor=${encodeURIComponent(next)}`}`);
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
