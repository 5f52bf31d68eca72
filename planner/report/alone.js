/* timeline.html as a file of its own: its data is inside it. */
"use strict";

parts.themeButton(document.querySelector('[data-part="theme"]'));
timeline(document.getElementById("timeline"), JSON.parse(document.getElementById("data").textContent));
