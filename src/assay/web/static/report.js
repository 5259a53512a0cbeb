// The parts of a report that need a script: curves, tokens, the theme switch, and printing with everything unfolded.

import { element } from "./dom.js";
import { intervalPlot, lineChart, seriesColor } from "./charts.js";
import { tokenView } from "./tokens.js";

const FINALS = { start: "before the warm start", before: "before training", after: "after training" };
const AXES = { step: "step", "sft/step": "step", "time/wall": "" };
const MIN_SMOOTHED = 40; // values from which curves are smoothed
const UNSMOOTHED = ["optim/lr", "sft/loss", "eval/accuracy"];

const data = JSON.parse(document.getElementById("data").textContent);

function seriesOf({ metric }, { series, intervals }) {
  const found = [];
  const add = (name, options) => {
    if (!series[name]?.y.length) return;
    const bounds = intervals[name];
    const at = (values) => bounds && series[name].x.map((x) => values[bounds.x.indexOf(x)] ?? null);
    found.push({ ...series[name], low: at(bounds?.low), high: at(bounds?.high), color: seriesColor(found.length), ...options });
  };
  if (metric !== "eval/accuracy") add(metric, { label: "" });
  else {
    add(metric, { label: "during training" });
    for (const [label, title] of Object.entries(FINALS)) add(`${label}/accuracy`, { label: title, points: true, color: "var(--text)" });
  }
  return found;
}

function drawCurves(place) {
  for (const panel of data.metrics.step?.panels ?? []) {
    const series = seriesOf(panel, data.metrics[panel.x]);
    if (!series.length) continue;
    const long = series.every((one) => one.y.length >= MIN_SMOOTHED);
    const options = { title: panel.title, series, share: panel.share, xLabel: AXES[panel.x], time: panel.x === "time/wall" };
    place.append(lineChart({ ...options, smoothing: long && !UNSMOOTHED.includes(panel.metric) ? 0.8 : 0 }));
  }
  if (!place.childElementCount) place.append(element("p", { class: "muted", text: "There are no metrics." }));
}

function drawTokens(details) {
  for (const place of details.querySelectorAll("[data-tokens]:not([data-drawn])")) {
    place.dataset.drawn = "";
    place.append(tokenView(data.tokens[Number(place.dataset.tokens)]));
  }
}

function listen() {
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => details.open && drawTokens(details));
    if (details.open) drawTokens(details);
  }
  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const details of closed) details.open = true;
  });
  addEventListener("afterprint", () => closed.forEach((details) => (details.open = false)));
}

drawCurves(document.getElementById("curves"));
if (data.intervals.length) {
  const rows = data.intervals.map((row, index) => ({ ...row, color: seriesColor(index) }));
  document.getElementById("intervals").append(intervalPlot(rows, { share: true }));
}
listen();
document.documentElement.dataset.ready = "true";
