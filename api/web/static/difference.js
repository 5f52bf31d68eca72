/* What two policies decide otherwise. */
"use strict";

service.run(async () => {
  const {find, json, run, table, text, toPolicy, toProfile} = service;
  const {make, moduleName, row, size, time} = parts;
  const LISTED = 100, SHOWN = 40;
  const wanted = new URLSearchParams(location.search), sides = [find("before"), find("after")];
  const {items} = await json(`/v1/policies?limit=${LISTED}`);
  for (const select of sides) {
    const given = wanted.get(select.id);
    select.append(new Option("choose a policy", ""), ...items.map(policy => new Option(`${size(policy.budget_bytes)} · ${policy.model} · ${policy.device} · ${policy.created_at.slice(0, 10)} · ${policy.id.slice(0, 6)}`, policy.id)));
    if (given && !items.some(policy => policy.id === given)) select.append(new Option(given, given));  // an older one
    select.value = given || "";
  }
  find("none").hidden = items.length > 1 || wanted.size > 0;
  find("pick").hidden = !find("none").hidden;

  let asked = 0;
  async function compare() {
    const mine = ++asked, [before, after] = sides.map(select => select.value);
    history.replaceState(null, "", `?${new URLSearchParams(Object.entries({before, after}).filter(([, id]) => id))}`);
    find("answer").hidden = find("comparing").hidden = true;
    if (!before || !after) return;
    service.fine();
    find("comparing").hidden = false;
    const answers = [json(`/v1/differences?before=${before}&after=${after}`), ...[before, after].map(id => json(`/v1/policies/${encodeURIComponent(id)}/about`))];
    const [found, ...both] = await Promise.all(answers).finally(() => { if (mine === asked) find("comparing").hidden = true; });
    if (mine !== asked) return;  // others were chosen in the meantime
    table(find("sides"), ["", "budget", "profile", "device", "peak", "recompute", "planned"], both.map((side, i) =>
      row("", i ? "second" : "first", text(toPolicy(side)), text(toProfile(side)), text(side.device), size(side.peak_bytes), time(side.recompute_us), service.made(side.created_at, side.created_by))), "");
    const [peak, spent] = ["peak_bytes", "recompute_us"].map(name => both[1][name] - both[0][name]);
    const than = (value, form, more, less) => value ? `${form(Math.abs(value))} ${value > 0 ? more : less}` : "";
    find("verdict").textContent = [found.rows.length ? "" : "Both decide the same.", `The second peaks ${than(peak, size, "higher", "lower") || "as high"} and recomputes ${than(spent, time, "more", "less") || "as long"}.`,
      found.held ? "" : "The profile of one was deleted: bytes are not known, and ops that backward does not need count as saved."].filter(Boolean).join(" ");
    const signed = (value, form) => value ? `${value > 0 ? "+" : "−"}${form(Math.abs(value))}` : "";
    const bytes = found.held ? ["held", "recompute"] : [];
    function list(changes) {
      const rows = changes.map(one => row("", `${one.module ? moduleName(one.module) : "outside all modules"}${one.modules.length > 1 ? ` (${one.modules.length} modules)` : ""}`, text(one.op), text(one.before), text(one.after), ...(found.held ? [signed(one.held_bytes, size), signed(one.recompute_us, time)] : [])));
      const rest = found.rows.slice(changes.length), more = make("button", `${rest.length} more`);
      more.type = "button";
      more.onclick = () => { list(found.rows); find("changes").closest(".scroll").focus(); };
      if (rest.length) rows.push(row("", more, ...["op", "first", "second", ...bytes].map(() => "")));
      table(find("changes"), ["modules", "op", "first", "second", ...bytes], rows, "No op is decided otherwise.");
    }
    list(found.rows.slice(0, SHOWN));
    find("answer").hidden = false;
  }
  for (const select of sides) select.onchange = () => run(compare);
  find("swap").onclick = () => {
    [sides[0].value, sides[1].value] = [sides[1].value, sides[0].value];
    run(compare);
  };
  await compare();
  find("main").dataset.ready = "true";
});
