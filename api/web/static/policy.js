/* A policy: memory over the step that it makes (timeline.js), and how to get it. */
"use strict";

service.run(async () => {
  const {find, json, ask, run, toProfile, lastOfPath} = service;
  const {size} = parts;
  const id = lastOfPath();
  const drawing = json(`/v1/policies/${id}/drawing`);
  drawing.catch(() => {});  // said below, where it is waited for
  let about;
  try {
    about = await json(`/v1/policies/${id}/about`);
  } catch (error) {
    if (error.status !== 404 && error.status !== 422) throw error;
    return service.missing(`There is no policy ${id.slice(0, 12)}… here. It may have been deleted.`);
  }
  document.title = `${about.model}, ${size(about.budget_bytes)} · autoac`;
  find("timeline").querySelector('[data-part="model"]').textContent = about.model;
  find("which").textContent = `within ${size(about.budget_bytes)}`;
  find("made").replaceChildren("Planned ", service.when(about.created_at), ` by ${about.created_by} · id ${id.slice(0, 12)}`);
  find("to-profile").href = toProfile(about).href;
  find("to-difference").href = service.at(`/difference?before=${id}`);
  const file = `${about.model.replace(/[^\w.-]+/g, "-").slice(0, 60) || "policy"}-${size(about.budget_bytes).replace(" ", "")}.json`;
  find("download").onclick = () => run(async () => {  // by fetch: a link could not send the key
    const url = URL.createObjectURL(await (await ask(`/v1/policies/${id}`)).blob()), a = service.link("", url);
    a.download = file;
    a.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  });
  find("content").hidden = false;

  /* The line that gets this very policy: by its budget where the service would find it so, as the client asks; else from a file. */
  async function showLine() {
    const asked = {fingerprint: about.fingerprint, device: about.device, budget_bytes: about.budget_bytes, limit: 1};
    const {items: [found]} = await json(`/v1/policies?${new URLSearchParams(asked)}`), stored = Boolean(found) && found.id === id;
    find("one-liner").textContent = stored ? service.oneLiner(about.budget_bytes) : service.line(`policy="${file}"`);
    find("line-about").textContent = stored ? "The service answers with this policy; nothing is planned again." : "Download the JSON first: for this budget alone the service would answer with another policy.";
    service.copies(find("copy"), find("one-liner"));
  }
  const lined = run(showLine);
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
  timeline(find("timeline"), {...picture, model: about.model});
  performance.mark("interactive");
  await lined;
  find("main").dataset.ready = "true";
});
