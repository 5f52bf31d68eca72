/* The registry: models, aliases, policies, and a box that filters all three. */
"use strict";

service.run(async () => {
  const {find, every, table, text, toModelCell, toPolicy, made, share} = service;
  const {row, size, make} = parts;
  const [profiles, policies, aliases] = await Promise.all([every("/v1/profiles"), every("/v1/policies"), every("/v1/aliases"), service.learnModels()]);
  const byId = new Map(policies.items.map(policy => [policy.id, policy]));
  const named = new Map();
  for (const alias of aliases.items) named.set(alias.policy_id, [...(named.get(alias.policy_id) || []), alias.name]);

  const models = new Map();  // by fingerprint
  for (const one of [...profiles.items, ...policies.items]) {
    let model = models.get(one.fingerprint);
    if (!model) models.set(one.fingerprint, model = {...one, budgets: new Set(), policies: 0, profile: null});
    if (one.digest) model.profile ??= one;
    if (one.budget_bytes !== undefined) { model.policies++; model.budgets.add(one.budget_bytes); }
    if (one.created_at > model.created_at) { model.created_at = one.created_at; model.created_by = one.created_by; }
  }
  /* A frontier in small: recompute over peak, in steps; its ends in words. */
  function small(model) {
    if (!model || !model.frontier || model.frontier.length < 2) return "";
    const WIDTH = 96, HEIGHT = 26, points = model.frontier, low = points[0], high = points[points.length - 1];
    const x = point => 2 + (WIDTH - 4) * (point.peak_bytes - low.peak_bytes) / (high.peak_bytes - low.peak_bytes);
    const y = point => HEIGHT - 2 - (HEIGHT - 4) * point.recompute_us / (low.recompute_us || 1);
    const path = points.map((point, i) => i ? `H${x(point).toFixed(1)}V${y(point).toFixed(1)}` : `M${x(point).toFixed(1)} ${y(point).toFixed(1)}`).join("");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "path");
    for (const [name, value] of [["class", "small"], ["viewBox", `0 0 ${WIDTH} ${HEIGHT}`], ["width", WIDTH], ["height", HEIGHT], ["role", "img"],
      ["aria-label", `from ${size(low.peak_bytes)} and ${share(low.recompute_us, low.step_us)} slower to ${size(high.peak_bytes)} and ${share(high.recompute_us, high.step_us)}`]]) svg.setAttribute(name, value);
    line.setAttribute("d", path);
    svg.append(line);
    const cell = make("span");
    cell.append(svg, make("span", `${size(low.peak_bytes)} to ${size(high.peak_bytes)}`, "soft under"));
    return cell;
  }
  const few = names => names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");

  function budgets(model) {
    const cell = make("span", String(model.policies));
    if (model.policies) cell.append(make("span", few([...model.budgets].sort((a, b) => a - b).map(size)), "soft under"));
    return cell;
  }
  table(find("models"), ["model", "step", "device", "frontier", "policies", "newest"], [...models.values()].map(model =>
    row("", toModelCell(model, true), text(model.profile ? service.stepOf(model.profile) : ""), text(model.device), text(small(service.models.get(model.fingerprint))), text(budgets(model)),
      made(model.created_at, model.created_by))), "No profile and no policy is stored.");
  table(find("aliases"), ["alias", "policy", "model", "revision", "moved"], aliases.items.map(alias => {
    const policy = byId.get(alias.policy_id);
    return row("", alias.name, text(policy ? toPolicy(policy) : service.link(alias.policy_id.slice(0, 12), `/policies/${alias.policy_id}`)),
      text(policy ? toModelCell(policy) : ""), String(alias.revision), made(alias.moved_at, alias.moved_by));
  }), "No alias is set. PUT /v1/aliases/NAME makes one.");
  table(find("policies"), ["model", "policy", "device", "peak", "recompute", "aliases", "made"], policies.items.map(policy =>
    row("", toModelCell(policy), text(toPolicy(policy)), text(policy.device), size(policy.peak_bytes), share(policy.recompute_us, policy.step_us),
      text((named.get(policy.id) || []).join(", ")), made(policy.created_at, policy.created_by))), "No policy is stored.");
  if (policies.more) find("policies").append(make("caption", "The newest 2,000; the rest is in /v1/policies."));
  if (!models.size) {
    find("empty").hidden = false;
    for (const id of ["models", "aliases", "policies"]) find(id).closest("section").hidden = true;
    find("python").textContent = service.oneLiner(8 * parts.GIB);
    find("shell").textContent = ["autoac profile train_setup:make -o profile.json",
      `curl -s ${service.at("/v1/profiles")} -H 'Content-Type: application/json' --data-binary @profile.json`].join("\n");
    for (const id of ["python", "shell"]) service.copies(find(`copy-${id}`), find(id));
  }

  const filter = find("filter");
  const apply = () => {
    const wanted = filter.value.trim().toLowerCase().split(/\s+/);
    let shown = 0;
    for (const id of ["models", "aliases", "policies"]) {
      let here = 0;
      for (const tr of find(id).querySelectorAll("tbody tr")) {
        const has = tr.textContent.toLowerCase();
        tr.hidden = !wanted.every(word => has.includes(word));
        here += !tr.hidden;
      }
      if (models.size) find(id).closest("section").hidden = Boolean(filter.value) && !here;
      shown += here;
    }
    find("none").hidden = !filter.value || shown > 0;
    find("none").textContent = `No model, alias or policy has “${filter.value.trim()}” in it.`;
    const search = new URLSearchParams(filter.value ? {q: filter.value} : {});
    history.replaceState(null, "", search.size ? `?${search}` : location.pathname);
    service.say(filter.value ? shown ? `${shown} rows match` : find("none").textContent : "");
  };
  filter.value = new URLSearchParams(location.search).get("q") || "";
  filter.oninput = apply;
  if (filter.value) apply();
  find("main").dataset.ready = "true";
});
