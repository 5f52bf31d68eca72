/* What one policy keeps and another does not. */
"use strict";

service.run(async () => {
  const {find, json, every, run, table, text, toPolicy, link} = service;
  const {row, size, time, make} = parts;
  const [policies, aliases] = await Promise.all([every("/v1/policies"), every("/v1/aliases"), service.learnModels()]);
  const before = find("before"), after = find("after");
  const byId = new Map(policies.items.map(policy => [policy.id, policy]));
  const wanted = new URLSearchParams(location.search);
  const spelled = policy => {
    const model = service.models.get(policy.fingerprint);
    return model && !model.name ? `${policy.model}, ${size(model.parameter_bytes)} of parameters` : service.nameOf(policy);
  };
  for (const [select, name] of [[before, "before"], [after, "after"]]) {
    const group = (label, options) => {
      const optgroup = make("optgroup");
      optgroup.label = label;
      optgroup.append(...options);
      if (options.length) select.append(optgroup);
    };
    select.append(new Option("choose a policy", ""));
    group("aliases", aliases.items.map(alias => new Option(alias.name, alias.name)));
    group("policies, newest first", policies.items.map(policy => new Option(`${size(policy.budget_bytes)} · version ${policy.version} · ${spelled(policy)} · ${policy.device} · ${policy.created_at.slice(0, 10)}`, policy.id)));
    const given = wanted.get(name);
    if (given && ![...select.options].some(option => option.value === given)) select.append(new Option(given, given));
    if (given) select.value = given;
  }

  find("pick").hidden = !policies.items.length && !wanted.size;
  find("none").hidden = policies.items.length > 1 || wanted.size > 0;
  find("none").textContent = policies.items.length ? "One policy is stored; a second one is needed to compare. Plan another budget on the model's page." : "No policy is stored yet. Plan two budgets of a model, on its page or with POST /v1/policies, and compare them here.";

  let asked = 0;
  async function compare() {
    const mine = ++asked, names = {before: before.value, after: after.value};
    history.replaceState(null, "", `?${new URLSearchParams(Object.entries(names).filter(([, value]) => value))}`);
    find("answer").hidden = true;
    if (!names.before || !names.after) return;
    service.fine();
    const found = await json(`/v1/differences?${new URLSearchParams(names)}`);
    if (mine !== asked) return;  // others were chosen in the meantime
    const name = (id, said) => byId.has(id) ? toPolicy(byId.get(id), said.length === 64 ? undefined : said) : link(said.slice(0, 40), `/policies/${id}`);
    const sides = [["first", found.before_id, names.before, found.before], ["second", found.after_id, names.after, found.after]];
    const moves = sides.some(([, , , side]) => side.moved);
    table(find("sides"), ["", "policy", "model", "budget", "peak", "recompute", "kept", "run again", ...(moves ? ["moved"] : []), "not needed", "the peak is at"], sides.map(([which, id, said, side]) =>
      row("", which, text(name(id, said)), text(side.model), size(side.budget), size(side.peak), time(side.recompute_us), `${side.kept} ops`, `${side.again} ops`, ...(moves ? [`${side.moved} ops`] : []), side.idle === null ? "" : `${side.idle} ops`, text(side.peak_at))), "");
    const peak = found.after.peak - found.before.peak, spent = found.after.recompute_us - found.before.recompute_us;
    const than = (value, form, more, less) => value ? `${form(Math.abs(value))} ${value > 0 ? more : less}` : "";
    find("verdict").textContent = [found.same ? "Both keep the same." : "They decide otherwise.",
      `The second peaks ${than(peak, size, "higher", "lower") || "as high"} and recomputes ${than(spent, time, "more", "less") || "as long"}.`,
      found.before.profile === found.after.profile ? "" : "They are of two profiles: the recompute time of each is by the run times of its own.",
      found.before.idle === null ? "Ops that backward does not need count as kept: the profile of one of the two was deleted, or its plot took too long." : ""].filter(Boolean).join(" ");
    table(find("changes"), ["modules", "only the second keeps", "only the first keeps", "of the rest, the second"], found.changes.map(change =>
      row("", `${change.name || "outside all modules"}${change.modules.length > 1 ? ` (${change.modules.length} modules)` : ""}`, text(change.gained.join(", ")), text(change.lost.join(", ")), text(change.otherwise.join(", ")))), "No module decides otherwise.");
    find("only").replaceChildren(...[["first", found.only_before], ["second", found.only_after]].filter(([, keys]) => keys.length).map(([which, keys]) => {
      const details = make("details"), list = make("ul");
      details.append(make("summary", `${keys.length} ops that only the ${which} has`), list);
      list.append(...keys.slice(0, 500).map(key => make("li", key)));
      if (keys.length > 500) list.append(make("li", `and ${keys.length - 500} more`));
      return details;
    }));
    find("answer").hidden = false;
  }
  before.onchange = after.onchange = () => run(compare);
  find("swap").onclick = () => {
    [before.value, after.value] = [after.value, before.value];
    run(compare);
  };
  await compare();
  find("main").dataset.ready = "true";
});
