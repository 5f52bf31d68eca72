/* Helpers for the scripts of several pages: elements, units, names of layers, the theme. Text is only ever
   textContent, so no data becomes markup. */
"use strict";

const parts = (() => {
  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  /* ---- units ---- */
  const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;
  const UNITS = [["GiB", GIB], ["MiB", MIB], ["KiB", KIB]];
  const size = bytes => {
    for (const [name, unit] of UNITS)
      if (Math.abs(bytes) >= unit) return `${(bytes / unit).toFixed(2)} ${name}`;
    return `${bytes} B`;
  };
  /* The unit of a plot or a field that goes up to `most` bytes: [name, bytes]. */
  const unitOf = most => UNITS.find(([, unit]) => most >= unit) || UNITS[UNITS.length - 1];
  const time = us => us === 0 ? "none" : us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(1)} ms` : `${us.toFixed(0)} µs`;
  const at = us => us >= 1e5 ? `${(us / 1e3).toFixed(1)} ms` : `${(us / 1e3).toFixed(3)} ms`;
  const percent = share => `${share >= 0 ? "+" : "−"}${Math.abs(share * 100).toFixed(Math.abs(share) < .1 ? 2 : 1)} %`;

  /* ---- names ---- */
  const LAYER = /^(?:[^.]+\.)*?\d+(?=\.|$)/;  // up to the first number that stands alone: h.3 of h.3.attn
  const layerOf = path => (LAYER.exec(path) || [""])[0];
  const layerName = layer => layer === "" ? "outside all layers" : layer;
  const moduleName = path => path === "." || path === "" ? "the model itself" : path;

  /* ---- tables ---- */
  function row(kind, name, ...cells) {
    const tr = make("tr", undefined, kind), head = make("th");
    head.scope = "row";
    if (name instanceof Node) head.append(name); else head.textContent = name;
    tr.append(head, ...cells.map(cell => cell instanceof HTMLTableCellElement ? cell : cellOf(cell)));
    return tr;
  }
  function cellOf(content, kind) {
    const td = make("td", undefined, kind);
    td.append(content);
    return td;
  }
  /* Text of any length: as wide as needed up to a limit, and never one letter per line. */
  function wrapped(...content) {
    const span = make("span", undefined, "cell");
    span.append(...content);
    return span;
  }
  /* A table. On a narrow screen its rows may be cards or two lines (timeline.css); ARIA's roles keep it a table. */
  function headed(table, names, rows, caption) {
    const head = make("thead"), tr = make("tr"), body = make("tbody");
    names.forEach((name, i) => {
      const kind = rows.length && rows[0].children[i] ? rows[0].children[i].className : "";
      const th = make(name ? "th" : "td", name, kind.startsWith("wide") || kind.startsWith("text") ? kind : "");
      if (name) th.scope = "col";
      tr.append(th);
    });
    head.append(tr);
    body.append(...rows);
    const inside = [head, body];
    if (caption) inside.unshift(make("caption", caption));
    table.replaceChildren(...inside);
    const roles = [[table, "table"], [head, "rowgroup"], [body, "rowgroup"], [tr, "row"]];
    for (const th of tr.children) roles.push([th, th.tagName === "TH" ? "columnheader" : "cell"]);
    for (const one of rows) {
      roles.push([one, "row"]);
      [...one.children].forEach((cell, i) => {
        roles.push([cell, cell.tagName === "TH" ? "rowheader" : "cell"]);
        if (i && names[i]) cell.dataset.label = names[i];
      });
    }
    for (const [element, role] of roles) element.setAttribute("role", role);
  }

  /* ---- dark and light ---- */
  const page = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const color = name => getComputedStyle(page).getPropertyValue("--" + name).trim();
  /* Let the button change the theme, and call `keep` with the new one. */
  function themeButton(button, keep) {
    button.onclick = () => {
      page.dataset.theme = (page.dataset.theme ? page.dataset.theme === "dark" : dark.matches) ? "light" : "dark";
      if (keep) keep(page.dataset.theme);
    };
  }
  function onTheme(redraw) {
    dark.addEventListener("change", redraw);
    new MutationObserver(redraw).observe(page, {attributes: true, attributeFilter: ["data-theme"]});
  }

  return {make, KIB, MIB, GIB, size, unitOf, time, at, percent, layerOf, layerName, moduleName, row, cellOf, wrapped, headed, color, themeButton, onTheme};
})();
