/* What every page of the service has: the theme, the key, and how the JSON API is asked.
   What comes from there is only ever text (parts.js). A key goes into the header of requests to this service,
   and nowhere else: never into an address. */
"use strict";

const service = (() => {
  const KEY = "autoac-key", THEME = "autoac-theme";
  const POLL_MS = 700;  // between two looks at a job
  const find = id => document.getElementById(id);
  const ROOT = new URL(document.documentElement.dataset.root, location.href);  // the service may be below a path of a proxy
  const at = path => new URL(path.replace(/^\//, ""), ROOT).href;
  try {
    const theme = localStorage.getItem(THEME);
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch { /* storage is switched off: the system's theme it is */ }
  let key = null;
  try { key = sessionStorage.getItem(KEY); } catch { /* kept in this page alone */ }

  function keep(secret) {
    key = secret;
    try {
      if (secret) sessionStorage.setItem(KEY, secret); else sessionStorage.removeItem(KEY);
    } catch { /* kept in this page alone */ }
  }

  class Refused extends Error {
    constructor(status, problem) {
      super(problem.detail || problem.title || `the service answered ${status}`);
      this.status = status;
      this.problem = problem;
    }
  }

  let asking = null;
  /* Whether there is a key now. Several requests that were refused at once ask once. */
  function askForKey(why) {
    asking ??= new Promise(resolve => {
      const dialog = find("key-dialog"), field = find("key"), before = document.activeElement;
      find("key-why").textContent = why;
      const end = given => {
        asking = null;
        field.value = "";
        dialog.close();
        if (before instanceof HTMLElement) before.focus();
        resolve(given);
      };
      find("key-form").onsubmit = event => { event.preventDefault(); keep(field.value.trim()); end(true); };
      find("key-forget").onclick = () => { keep(null); end(false); };
      find("key-cancel").onclick = () => end(false);
      dialog.oncancel = event => { event.preventDefault(); end(false); };
      dialog.showModal();
      field.focus();
    });
    return asking;
  }

  /* The answer to a request. Throws Refused. */
  async function ask(path, {method = "GET", body, headers = {}, signal} = {}) {
    for (;;) {
      const sent = {...headers}, used = key;
      if (used) sent.Authorization = `Bearer ${used}`;
      if (body !== undefined) sent["Content-Type"] = "application/json";
      const answer = await fetch(at(path), {method, headers: sent, signal, body: body === undefined ? undefined : JSON.stringify(body)});
      if (answer.ok) return answer;
      if (answer.status === 401) {
        if (key !== used) continue;  // another request got one meanwhile
        const why = used ? "The service does not know that key, or it was revoked." : "This service shows its content only with a key.";
        if (await askForKey(why)) continue;
      }
      let problem = {};
      try { problem = await answer.json(); } catch { /* no problem document: its status says enough */ }
      throw new Refused(answer.status, problem);
    }
  }
  const json = async (path, options) => (await ask(path, options)).json();

  /* The job once it has ended, however long that takes; `tell` gets it meanwhile. */
  async function ended(job, tell) {
    while (!["succeeded", "failed", "cancelled"].includes(job.state)) {
      tell(job);
      await new Promise(resolve => setTimeout(resolve, POLL_MS));
      job = await json(`/v1/jobs/${job.id}`);
    }
    return job;
  }

  function trouble(error) {
    const line = find("trouble");
    line.textContent = error instanceof Refused && error.problem.problems ? `${error.message}: ${error.problem.problems.join("; ")}` : error.message;
    line.hidden = false;
  }
  const fine = () => { find("trouble").hidden = true; };
  const say = text => { find("said").textContent = text; };
  /* Runs a page, or what a button does; what goes wrong is said on the page. */
  async function run(work) {
    try { return await work(); } catch (error) {
      if (error.name !== "AbortError") trouble(error);
      return undefined;
    }
  }

  /* What a page shows in place of everything else where the thing that it is about is not there. */
  function missing(text) {
    find("content").hidden = true;
    find("main").append(make("p", text, "trouble"), make("p"));
    find("main").lastChild.append(link("Back to all profiles and policies", "/"));
    find("main").dataset.ready = "missing";
  }

  /* ---- what pages show alike ---- */
  const {make, size, GIB} = parts;
  function link(text, path) {
    const a = make("a", text);
    a.href = path.startsWith("/") ? at(path) : path;
    return a;
  }
  const stepOf = profile => [`${size(profile.parameter_bytes)} of parameters`, profile.inputs.join(", "), `${profile.ops} ops`].filter(Boolean).join(" · ");
  const toProfile = row => link(row.model || "(no name)", `/profiles/${row.profile_digest || row.digest}`);
  const toPolicy = row => link(size(row.budget_bytes), `/policies/${row.id}`);
  function when(iso) {
    const time = make("time", `${iso.slice(0, 16).replace("T", " ")} UTC`);
    time.dateTime = iso;
    time.title = `${iso.slice(0, 19).replace("T", " ")} UTC`;
    return time;
  }
  /* Seconds in words. */
  const duration = s => s < 10 ? `${s.toFixed(1)} s` : s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.round(s / 60)} min` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  const share = (us, of) => of ? `${(100 * us / of).toFixed(1)} %` : "";
  const made = (iso, by) => parts.cellOf(parts.wrapped(when(iso), ` by ${by}`), "text made");
  const text = content => parts.cellOf(parts.wrapped(content), "text");
  /* The shortest number of GiB that Python's floor(gb * 2**30) makes these very bytes of. */
  function gb(bytes) {
    for (let digits = 0; digits < 12; digits++) {
      const number = Number((Math.ceil(bytes / GIB * 10 ** digits) / 10 ** digits).toFixed(digits));
      if (Math.floor(number * GIB) === bytes) return String(number);
    }
    return String(bytes / GIB);  // a division by a power of two is exact
  }
  const line = source => `model = ac_client.apply(model, ${source}, optimizer=optimizer)`;
  const oneLiner = bytes => line(`budget_gb=${gb(bytes)}, service="${ROOT.href.replace(/\/$/, "")}"`);
  function copies(button, code) {
    button.onclick = () => run(async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        say("Copied");
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      } catch {  // no clipboard over plain HTTP: have it selected, so that Ctrl+C does it
        getSelection().selectAllChildren(code);
        say("Selected");
      }
    });
  }
  /* A table with a line where there is nothing to show. */
  function table(element, names, rows, none) {
    for (const tr of rows) tr.firstChild.replaceChildren(parts.wrapped(...tr.firstChild.childNodes));
    if (rows.length) parts.headed(element, names, rows);
    else element.replaceChildren(make("caption", none));
  }
  /* A list of the service, ten to a page: puts two buttons behind its table, and returns what reads the page again.
     `show` gets the rows of a page. */
  function pages(element, path, show) {
    const before = [], older = make("button", "Older"), newer = make("button", "Newer"), bar = make("div", undefined, "tools pager");
    let cursor = "", next = null;
    async function read() {
      const address = path(), answer = await ask(`${address}${address.includes("?") ? "&" : "?"}limit=10${cursor && `&cursor=${cursor}`}`), page = await answer.json();
      next = page.next;
      newer.disabled = !before.length;
      older.disabled = next === null;
      bar.hidden = newer.disabled && older.disabled;
      await show(page.items, Date.parse(answer.headers.get("date")) || Date.now());
      return page.items;
    }
    for (const button of [newer, older]) button.type = "button";
    older.onclick = () => { before.push(cursor); cursor = next; run(read); };
    newer.onclick = () => { cursor = before.pop(); run(read); };
    bar.append(newer, older);
    bar.hidden = true;
    element.closest(".scroll").after(bar);
    return again => { if (again) { before.length = 0; cursor = ""; } return read(); };
  }
  const lastOfPath = () => location.pathname.split("/").pop();
  /* How far a solve is, in words. */
  function progressWords(job) {
    if (!job.progress) return `${job.state}`;
    const {incumbent, bound, gap, seconds, point, points} = job.progress;
    const number = job.kind === "floor" || job.kind === "frontier" && !points ? size : parts.time;  // a frontier begins with the smallest peak
    return [points ? `point ${point} of ${points}` : job.kind === "frontier" ? "the smallest peak" : "", incumbent === null ? "no plan yet" : `best ${number(incumbent)}`, bound === null ? "" : `proven ${number(Math.max(bound, 0))}`,
      gap === null ? "" : `gap ${(100 * gap).toFixed(1)} %`, seconds === null ? "" : `${seconds.toFixed(1)} s`].filter(Boolean).join(", ");
  }

  addEventListener("DOMContentLoaded", () => {
    parts.themeButton(find("theme"), theme => { try { localStorage.setItem(THEME, theme); } catch { /* for this page alone */ } });
    find("key-button").onclick = () => run(async () => {
      if (await askForKey(key ? "A key is in use. Give another one, or forget it." : "No key is in use.")) location.reload();
    });
  });

  return {find, at, ask, json, ended, run, trouble, fine, say, missing, link, stepOf, toProfile, toPolicy, when, made, duration, share, text, gb, line, oneLiner, copies, table, pages, lastOfPath, progressWords};
})();
