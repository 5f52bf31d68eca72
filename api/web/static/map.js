/* What became of each op, by layer: layerMap(root, says, drawing). A table for each kind of layer. */
"use strict";

function layerMap(root, says, drawing) {
  const {make, size, time, layerOf, moduleName} = parts;
  const KINDS = [["idle", "nothing needed"], ["saved", "kept"], ["again", "run again"]];  // as drawing.py numbers them
  const {ops, modules, labels, fates} = drawing;
  const families = new Map();  // "model.layers" -> {layers: Map(layer -> Map(column -> op)), columns: Map(column -> needed)}
  ops.module.forEach((module, op) => {
    const path = modules[module], layer = layerOf(path);
    const family = layer.slice(0, layer.lastIndexOf(".") + 1) + (layer ? "N" : "");
    const inner = layer ? path.slice(layer.length + 1) : moduleName(path);
    const column = [inner, labels[ops.label[op]]].filter(Boolean).join("/");
    let of = families.get(family);
    if (!of) families.set(family, of = {layers: new Map(), columns: new Map()});
    if (!of.layers.has(layer)) of.layers.set(layer, new Map());
    of.layers.get(layer).set(column, op);
    of.columns.set(column, of.columns.get(column) || fates.fate[op] !== 0);
  });

  const words = (name, op) => {
    const fate = fates.fate[op];
    return `${name}: ${KINDS[fate][1]}${fates.nbytes[op] ? `, ${size(fates.nbytes[op])}` : ""}${fate === 2 ? `, ${time(fates.runtime_us[op])}` : ""}`;
  };
  const tables = [];
  for (const [family, {layers, columns}] of [...families].sort((a, b) => b[1].layers.size - a[1].layers.size)) {
    const shown = [...columns].filter(([, needed]) => needed).map(([column]) => column);
    if (!shown.length) continue;
    const table = make("table", undefined, "map"), head = make("tr"), body = make("tbody");
    const first = make("th", "layer");
    first.scope = "col";
    head.append(first, ...shown.map(column => {
      const th = make("th"), span = make("span", column);
      th.scope = "col";
      th.title = column;
      th.append(span);
      return th;
    }));
    for (const [layer, of] of layers) {
      const tr = make("tr"), th = make("th", layer || "outside all layers");
      th.scope = "row";
      tr.append(th, ...shown.map(column => {
        const op = of.get(column), td = make("td");
        if (op === undefined) td.className = "none";
        else {
          td.className = KINDS[fates.fate[op]][0];
          td.textContent = KINDS[fates.fate[op]][1];
          td.dataset.op = String(op);
        }
        return td;
      }));
      body.append(tr);
    }
    const thead = make("thead");
    thead.append(head);
    table.append(make("caption", family ? family : "outside all layers"), thead, body);
    const scroll = make("div", undefined, "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", `Saved and recomputed, ${family || "outside all layers"}`);
    scroll.append(table);
    tables.push(scroll);
  }
  root.replaceChildren(...tables);
  root.addEventListener("mouseover", event => {
    const {op} = event.target.dataset;
    if (op === undefined) return;
    const module = moduleName(modules[ops.module[op]]);
    says.textContent = words(`${module}/${labels[ops.label[op]]}`, Number(op));
  });
  const counts = KINDS.map((_, kind) => fates.fate.filter(fate => fate === kind).length);
  says.textContent = `${counts[1]} ops are kept, ${counts[2]} are run again, backward needs nothing of ${counts[0]}.`;
}
