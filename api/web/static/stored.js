/* What is stored: profiles and policies, each ten to a page. */
"use strict";

service.run(async () => {
  const {find, table, text, pages, toProfile, toPolicy, made, share} = service;
  const {row, size} = parts;
  const profiles = pages(find("profiles"), () => "/v1/profiles", items => table(find("profiles"), ["profile", "step", "device", "stored"], items.map(profile =>
    row("", toProfile(profile), text(service.stepOf(profile)), text(profile.device), made(profile.created_at, profile.created_by))), "No profile is stored."));
  const policies = pages(find("policies"), () => "/v1/policies", items => table(find("policies"), ["budget", "profile", "device", "peak", "recompute", "planned"], items.map(policy =>
    row("", toPolicy(policy), text(toProfile(policy)), text(policy.device), size(policy.peak_bytes), share(policy.recompute_us, policy.step_us), made(policy.created_at, policy.created_by))), "No policy is stored."));
  const found = await Promise.all([profiles(), policies()]);
  if (!found.some(items => items.length)) {
    find("empty").hidden = false;
    for (const id of ["profiles", "policies"]) find(id).closest("section").hidden = true;
    find("python").textContent = service.oneLiner(8 * parts.GIB);
    find("shell").textContent = ["autoac profile train_setup:make -o profile.json",
      `curl -s ${service.at("/v1/profiles")} -H 'Content-Type: application/json' --data-binary @profile.json`].join("\n");
    for (const id of ["python", "shell"]) service.copies(find(`copy-${id}`), find(id));
  }
  find("main").dataset.ready = "true";
});
