/* What every page of the service has: the theme, the key, and how the JSON API is asked.
   What comes from there is only ever text (parts.js). A key goes into the header of requests to this service,
   and nowhere else: never into an address. */
"use strict";

const service = (() => {
  const KEY = "autoac-key", THEME = "autoac-theme";
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
        const why = used ? "The service does not know that key, or it was revoked." : "The service shows what it has to who has a key.";
        if (await askForKey(why)) continue;
      }
      let problem = {};
      try { problem = await answer.json(); } catch { /* no problem document: its status says enough */ }
      throw new Refused(answer.status, problem);
    }
  }
  const json = async (path, options) => (await ask(path, options)).json();

  /* All items of a list that comes in pages, up to `most`; `more`: there are further ones. */
  async function every(path, most = 2000) {
    const items = [];
    for (let next = ""; next !== null && items.length < most;) {
      const page = await json(`${path}${path.includes("?") ? "&" : "?"}limit=200${next && `&cursor=${encodeURIComponent(next)}`}`);
      items.push(...page.items);
      next = page.next;
      if (next === null) return {items, more: false};
    }
    return {items, more: true};
  }

  /* Server-sent events of a job, until it has ended. EventSource could not send the key. */
  async function events(path, tell, signal) {
    let last = "", failures = 0;
    while (!signal.aborted) {
      try {
        const answer = await ask(path, {signal, headers: last ? {"Last-Event-ID": last} : {}});
        if (answer.status === 204) return;
        failures = 0;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (;;) {
          const {done, value} = await reader.read();
          if (done) break;
          text += value;
          const events = text.split("\n\n");
          text = events.pop();
          for (const event of events) {
            const fields = Object.fromEntries(event.split("\n").filter(line => !line.startsWith(":")).map(line => {
              const colon = line.indexOf(": ");
              return [line.slice(0, colon), line.slice(colon + 2)];
            }));
            if (fields.id) last = fields.id;
            if (fields.data) tell(fields.event, JSON.parse(fields.data));
          }
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && error.status < 500) throw error;
        if (++failures > 5) throw error;
        await new Promise(resolve => setTimeout(resolve, 1000 * failures));
      }
    }
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
    find("main").lastChild.append(link("Back to the registry", "/"));
    find("main").dataset.ready = "missing";
  }

  /* ---- what pages show alike ---- */
  const {make, size, GIB} = parts;
  function link(text, path) {
    const a = make("a", text);
    a.href = path.startsWith("/") ? at(path) : path;
    return a;
  }
  /* Models by fingerprint, with the names that people gave them; those that `learnModels` has seen. */
  const models = new Map();
  async function learnModels() {
    for (const model of (await every("/v1/models")).items) models.set(model.fingerprint, model);
  }
  async function learnModel(fingerprint) {
    try {
      models.set(fingerprint, await json(`/v1/models/${fingerprint}`));
    } catch (error) {
      if (error.status !== 404) throw error;  // its profile was deleted: it goes by its class
    }
  }
  const nameOf = row => (models.has(row.fingerprint) && models.get(row.fingerprint).name) || row.model || "(no name)";
  const toModel = row => link(nameOf(row), `/models/${row.fingerprint}`);
  /* A link to a model, and below it what tells it from others: its class where it has a name, else its size. */
  function toModelCell(row, alone = false) {
    const cell = make("span"), model = models.get(row.fingerprint);
    cell.append(toModel(row));
    if (model && model.name) cell.append(make("span", row.model, "soft under"));
    else if (model && !alone) cell.append(make("span", `${size(model.parameter_bytes)} of parameters`, "soft under"));
    return cell;
  }
  /* What tells a profile from others of the same class. */
  const stepOf = profile => [`${size(profile.parameter_bytes)} of parameters`, profile.inputs.join(", "), `${profile.ops} ops`].filter(Boolean).join(" · ");
  const toPolicy = (row, text = `${size(row.budget_bytes)}, version ${row.version}`) => link(text, `/policies/${row.id}`);
  function when(iso) {
    const time = make("time", iso.slice(0, 16).replace("T", " "));
    time.dateTime = iso;
    time.title = `${iso.slice(0, 19).replace("T", " ")} UTC`;
    return time;
  }
  /* Seconds in words. */
  const duration = s => s < 10 ? `${s.toFixed(1)} s` : s < 60 ? `${Math.round(s)} s` : s < 3600 ? s < 600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${Math.round(s / 60)} min` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
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
  const SERVICE = `service="${ROOT.href.replace(/\/$/, "")}"`;
  const oneLiner = bytes => `model = ac_client.apply(model, budget_gb=${gb(bytes)}, ${SERVICE})`;
  const aliasLine = name => `model = ac_client.apply(model, alias="${name}", ${SERVICE})`;
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
  const lastOfPath = () => location.pathname.split("/").pop();
  /* How far a solve is, in words. */
  function progressWords(kind, {incumbent, bound, gap, seconds, point, points}, limitS = 0) {
    const number = kind === "floor" || kind === "frontier" && !points ? size : parts.time;  // a frontier begins with the smallest peak
    const left = limitS * (points - point) + Math.max(0, limitS - seconds);
    return [points ? `point ${point} of ${points}${limitS ? `, at most ${duration(left)} more` : ""}` : kind === "frontier" ? "the smallest peak" : "", incumbent === null ? "no plan yet" : `best ${number(incumbent)}`, bound === null ? "" : `proven ${number(Math.max(bound, 0))}`,
      gap === null ? "" : `gap ${(100 * gap).toFixed(1)} %`, seconds === null ? "" : `${seconds.toFixed(1)} s`].filter(Boolean).join(", ");
  }

  addEventListener("DOMContentLoaded", () => {
    parts.themeButton(find("theme"), theme => { try { localStorage.setItem(THEME, theme); } catch { /* for this page alone */ } });
    find("key-button").onclick = () => run(async () => {
      if (await askForKey(key ? "A key is in use. Give another one, or forget it." : "No key is in use.")) location.reload();
    });
  });

  return {find, at, ask, json, every, events, run, trouble, fine, say, missing, link, models, learnModels, learnModel, nameOf, stepOf, toModel, toModelCell, toPolicy, when, made, duration, share, text, gb, oneLiner, aliasLine, copies, table, lastOfPath, progressWords};
})();
