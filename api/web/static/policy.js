/* A policy: memory over the step it makes (timeline.js), and what it keeps of each layer (map.js). */
"use strict";

service.run(async () => {
  const {find, json, ask, run, when, toModel, oneLiner, lastOfPath} = service;
  const {size} = parts;
  const id = lastOfPath();
  const drawing = json(`/v1/policies/${id}/drawing`);
  drawing.catch(() => {});  // told below, where it is waited for
  const about = await json(`/v1/policies/${id}/about`);
  document.title = `${about.model}, ${size(about.budget_bytes)} · autoac`;
  find("timeline").querySelector('[data-part="model"]').textContent = about.model;
  find("which").textContent = `${size(about.budget_bytes)}, version ${about.version}`;
  find("made").replaceChildren("Made ", when(about.created_at), ` by ${about.created_by} · id ${id.slice(0, 12)}`);
  find("to-model").href = toModel(about).href;
  find("to-difference").href = `/difference?before=${id}`;
  find("one-liner").textContent = oneLiner(about.budget_bytes);
  service.copies(find("copy"), find("one-liner"));
  find("download").onclick = () => run(async () => {  // by fetch: a link could not send the key
    const url = URL.createObjectURL(await (await ask(`/v1/policies/${id}`)).blob()), a = service.link("", url);
    a.download = `${about.model.replace(/[^\w.-]+/g, "-").slice(0, 60) || "policy"}-${size(about.budget_bytes).replace(" ", "")}.json`;
    a.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  });
  let picture;
  try {
    picture = await drawing;
  } catch (error) {
    find("drawing").textContent = "";
    throw error;
  }
  find("drawing").hidden = true;
  timeline(find("timeline"), picture);
  performance.mark("interactive");
  setTimeout(() => {  // the timeline is there and answers; what follows may come a moment later
    layerMap(find("map"), find("map-says"), picture);
    find("main").dataset.ready = "true";
  });
});
