/* What became of each op, by layer: layerMap(root, says, drawing). A table for each kind of layer, a column for each
   layer and a row for each op of which backward needs something. Returns a function that shows other fates of the ops. */
"use strict";

function layerMap(root, says, drawing) {
  const {make, size, time, layerOf, moduleName} = parts;
  const KINDS = [["idle", "nothing needed"], ["saved", "kept"], ["again", "run again"], ["moved", "moved to the host"]];  // as policy_plot.py numbers them
  const NARROWEST = 8;  // pixels of a column
  const DIGIT = 7;  // pixels
  const {ops, modules, labels} = drawing;
  let fates = drawing.fates;
  const needed = drawing.needed || fates.fate.map(Boolean);  // by op
  const families = new Map();  // "model.layers.N" -> {layers: Map(layer -> Map(op's name in it -> op)), rows: Set(names)}
  ops.module.forEach((module, op) => {
    const path = modules[module], layer = layerOf(path);
    const family = layer.slice(0, layer.lastIndexOf(".") + 1) + (layer ? "N" : "");
    const inner = layer ? path.slice(layer.length + 1) : moduleName(path);
    const name = [inner, labels[ops.label[op]]].filter(Boolean).join("/");
    let of = families.get(family);
    if (!of) families.set(family, of = {layers: new Map(), rows: new Set()});
    if (!of.layers.has(layer)) of.layers.set(layer, new Map());
    of.layers.get(layer).set(name, op);
    if (needed[op]) of.rows.add(name);
  });

  const cells = new Array(ops.module.length);  // by op
  const numberOf = layer => layer.split(".").pop();
  /* The step between layers whose numbers stand above their columns, so that none reaches into the next. */
  function stepOf(layers) {
    const width = Math.max(NARROWEST, (root.clientWidth - 250) / layers.length), digits = Math.max(...layers.map(layer => numberOf(layer).length));
    return [1, 2, 5, 10, 20, 50, 100].find(step => step * width >= DIGIT * digits + 3) || 200;
  }
  function column(layer, i, every) {
    const th = make("th"), full = layer || "outside all layers";
    th.scope = "col";
    th.title = full;
    const named = make("span", i % every ? "" : numberOf(layer));
    named.setAttribute("aria-hidden", "true");
    th.append(make("span", full, "unseen"), named);
    return th;
  }
  const tables = [];
  for (const [family, {layers, rows}] of [...families].sort((a, b) => b[1].layers.size - a[1].layers.size)) {
    if (!rows.size) continue;
    const table = make("table", undefined, "map"), head = make("tr"), body = make("tbody"), first = make("th", "op");
    first.scope = "col";
    const every = stepOf([...layers.keys()]);
    head.append(first, ...[...layers.keys()].map((layer, i) => column(layer, i, every)));
    for (const name of rows) {
      const tr = make("tr"), th = make("th", name);
      th.scope = "row";
      th.title = name;
      tr.append(th, ...[...layers.values()].map(of => {
        const op = of.get(name), td = make("td");
        if (op === undefined) td.className = "none";
        else { td.dataset.op = String(op); cells[op] = td; }
        return td;
      }));
      body.append(tr);
    }
    const thead = make("thead"), scroll = make("div", undefined, "scroll"), title = family || "outside all layers";
    thead.append(head);
    table.append(make("caption", title), thead, body);
    if (layers.size === 1) table.classList.add("single");
    else table.style.minWidth = `${250 + NARROWEST * layers.size}px`;
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "group");
    scroll.setAttribute("aria-label", `Saved and recomputed, ${title}`);
    scroll.append(table);
    tables.push(scroll);
  }
  root.replaceChildren(...tables);

  const words = op => {
    const fate = fates.fate[op], name = `${moduleName(modules[ops.module[op]])}/${labels[ops.label[op]]}`;
    return `${name}: ${KINDS[fate][1]}${fate && fates.nbytes[op] ? `, ${size(fates.nbytes[op])}` : ""}${fate === 2 ? `, ${time(fates.runtime_us[op])}` : ""}`;
  };
  root.onmouseover = event => {
    const {op} = event.target.dataset;
    if (op !== undefined) says.textContent = words(Number(op));
  };
  function show(other) {
    fates = other;
    const counts = [0, 0, 0, 0];
    fates.fate.forEach((fate, op) => {
      counts[fate]++;
      const [kind, text] = KINDS[fate];
      if (!cells[op]) return;
      if (cells[op].className !== kind) { cells[op].className = kind; cells[op].textContent = text; }
    });
    says.textContent = `${counts[1]} ops are kept, ${counts[2]} are run again, ${counts[3] ? `${counts[3]} are moved to the host, ` : ""}backward needs nothing of ${counts[0]}.`;
  }
  show(fates);
  return show;
}
