/* A policy: memory over the step it makes (timeline.js), and what it keeps of each layer (map.js). */
"use strict";

service.run(async () => {
  const {find, json, ask, run, when, toModel, oneLiner, aliasLine, lastOfPath} = service;
  const {size} = parts;
  const id = lastOfPath();
  const drawing = json(`/v1/policies/${id}/drawing`);
  drawing.catch(() => {});  // said below, where it is waited for
  let about;
  try {
    about = await json(`/v1/policies/${id}/about`);
  } catch (error) {
    if (error.status !== 404 && error.status !== 422) throw error;
    service.missing(`There is no policy ${id.slice(0, 12)}… here. It may have been deleted.`);
    return;
  }
  await service.learnModel(about.fingerprint);
  const name = service.nameOf(about);
  document.title = `${name}, ${size(about.budget_bytes)} · autoac`;
  find("timeline").querySelector('[data-part="model"]').textContent = name;
  find("which").textContent = `${size(about.budget_bytes)}, version ${about.version}`;
  find("made").replaceChildren("Made ", when(about.created_at), ` by ${about.created_by} · id ${id.slice(0, 12)}`);
  find("to-model").href = toModel(about).href;
  find("to-difference").href = service.at(`/difference?before=${id}`);
  const file = `${about.model.replace(/[^\w.-]+/g, "-").slice(0, 60) || "policy"}-${size(about.budget_bytes).replace(" ", "")}.json`;
  service.copies(find("copy"), find("one-liner"));
  find("download").onclick = () => run(async () => {  // by fetch: a link could not send the key
    const url = URL.createObjectURL(await (await ask(`/v1/policies/${id}`)).blob()), a = service.link("", url);
    a.download = file;
    a.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  });
  find("content").hidden = false;

  /* The line that gets this very policy: by its budget where the service would find it so, as the client asks; else by a name; else from a file. */
  async function line() {
    const asked = {fingerprint: about.fingerprint, device: about.device, budget_bytes: about.budget_bytes, headroom_bytes: 0, limit: 1};
    const [found, names] = await Promise.all([json(`/v1/policies?${new URLSearchParams(asked)}`), json(`/v1/aliases?policy=${id}&limit=1`)]);
    if (found.items.length && found.items[0].id === id) return [oneLiner(about.budget_bytes), "The service answers with this policy; nothing is planned again."];
    if (names.items.length) return [aliasLine(names.items[0].name), "Gets this policy for as long as the alias names it."];
    return [`model = ac_client.apply(model, policy="${file}")`, "Download the JSON first: for this budget alone the service would answer with another policy."];
  }
  const lined = run(async () => { [find("one-liner").textContent, find("line-about").textContent] = await line(); });

  let picture;
  try {
    picture = await drawing;
  } catch (error) {
    find("drawing").textContent = "";
    await lined;
    find("main").dataset.ready = "undrawn";
    throw error;
  }
  find("drawing").hidden = true;
  timeline(find("timeline"), {...picture, model: name});
  performance.mark("interactive");
  await lined;
  setTimeout(() => {  // the timeline is there and answers; what follows may come a moment later
    layerMap(find("map"), find("map-says"), picture);
    find("main").dataset.ready = "true";
  });
});
