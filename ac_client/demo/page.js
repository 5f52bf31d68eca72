/* Draw the demo's rows: live memory over time, both axes from zero. */
"use strict";

for (const table of document.querySelectorAll("table")) {  // without JavaScript they stay as they are
  table.className = "cards";
  parts.headed(table, [...table.tHead.rows[0].cells].map(cell => cell.textContent), [...table.tBodies[0].rows]);
}
JSON.parse(document.getElementById("data").textContent).forEach((rows, number) => {
  const box = document.querySelectorAll(".memory")[number];
  const colors = ["plain", "blocks", "plan"];
  const budget = rows.map(row => row.budget).find(Boolean);
  const times = [...new Set(rows.flatMap(row => row.ms))].sort((a, b) => a - b);
  const mib = bytes => bytes == null ? null : bytes / parts.MIB;

  /* A row's bytes at each of `times`: its last value, until its step ends. */
  function levels(row) {
    let at = -1;
    return times.map(time => {
      while (at + 1 < row.ms.length && row.ms[at + 1] <= time) at++;
      return time > row.ms[row.ms.length - 1] ? null : mib(row.bytes[at]);
    });
  }

  let plot = null;
  function draw() {
    if (plot) plot.destroy();
    const axis = {stroke: parts.color("soft"), grid: {stroke: parts.color("line")}, ticks: {stroke: parts.color("line")}};
    const value = (u, v) => v == null ? "" : v.toFixed(1) + " MiB";
    const series = rows.map((row, i) => ({
      label: row.name, stroke: parts.color(colors[i]), width: 1.5, value, points: {show: false},
      paths: uPlot.paths.stepped({align: 1}),
    }));
    const limit = {label: "budget", stroke: parts.color("budget"), dash: [6, 4], value, points: {show: false}};
    plot = new uPlot({
      width: box.clientWidth, height: 300,
      scales: {x: {time: false}, y: {range: (u, low, high) => [0, high * 1.06]}},
      axes: [{...axis, label: "ms since the step began"}, {...axis, label: "MiB live", size: 64}],
      series: [{label: "time", value: (u, v) => v == null ? "" : v.toFixed(1) + " ms"}, ...series, limit],
    }, [times, ...rows.map(levels), times.map(() => mib(budget))], box);
  }

  parts.onTheme(draw);
  new ResizeObserver(() => { if (plot.width !== box.clientWidth) plot.setSize({width: box.clientWidth, height: 300}); }).observe(box);
  draw();
});
parts.themeButton(document.querySelector('[data-part="theme"]'));
