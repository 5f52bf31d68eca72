/* Draw timeline.html from the data inside the file. */
"use strict";

parts.themeButton(document.querySelector('[data-part="theme"]'));
timeline(document.getElementById("timeline"), JSON.parse(document.getElementById("data").textContent));
