// A grid of curves of one or several runs, with smoothing and a choice of the x axis.

import { get, runPath } from "./api.js";
import { lineChart, seriesColor } from "./charts.js";
import { element } from "./dom.js";
import { segmented } from "./widgets.js";

const X_NAMES = { step: "step", "sft/step": "step", "time/wall": "" };
const ACCURACY = "eval/accuracy";
const KEPT = ["reward/mean", ACCURACY];
const FINALS = ["start/accuracy", "before/accuracy", "after/accuracy"]; // on another split: points, not a line

// The curves of some runs: [{id, name, color}]. Read with `load`, and again with `reload` if the files have grown.
export class Curves {
  constructor(runs) {
    this.runs = runs.map((run, index) => ({ color: seriesColor(index), ...run }));
    this.answers = new Map(); // by run, then by x axis: the answer of the server
    this.charts = new Map(); // by panel
    this.options = { smoothing: 0.6, byTime: false };
    this.hidden = new Set();
  }

  async load(signal) {
    await Promise.all(this.runs.map((run) => this.fetchPanels(run, signal)));
  }

  // Returns whether a run has new values.
  async reload() {
    const changed = await Promise.all(this.runs.map((run) => this.fetchPanels(run)));
    if (changed.some(Boolean)) for (const key of this.charts.keys()) this.drawChart(key);
    return changed.some(Boolean);
  }

  // Returns whether the run has new values. Each x axis has its own answer.
  async fetchPanels(run, signal) {
    const path = runPath(run.id, "metrics");
    const first = await get(path, { x: "step", since: this.answers.get(run.id)?.step.cursor }, signal);
    if (first.unchanged) return false;
    const others = await Promise.all(["time/wall", "sft/step"].map((x) => get(path, { x }, signal)));
    this.answers.set(run.id, { step: first, "time/wall": others[0], "sft/step": others[1] });
    await this.fetchMetrics(
      run,
      [...this.charts.values()].filter((one) => one.extra).map((one) => one.panel.metric),
      signal,
    );
    return true;
  }

  // Adds metrics without a panel to the answers.
  async fetchMetrics(run, names, signal) {
    if (!names.length) return;
    for (const x of ["step", "time/wall"]) {
      const { series } = await get(runPath(run.id, "metrics"), { x, names }, signal);
      Object.assign(this.answers.get(run.id)[x].series, series);
    }
  }

  // Panels that at least one run has. Accuracy by time is the accuracy with the other x axis.
  panels() {
    const panels = new Map();
    for (const run of this.runs) {
      for (const panel of this.answers.get(run.id)?.step.panels ?? []) {
        const onlyByTime = panel.x === "time/wall" && !this.hasStepPanel(panel.metric);
        if (panel.x !== "time/wall" || onlyByTime) panels.set(`${panel.metric}|${panel.x}`, panel);
      }
    }
    return [...panels.values()].filter((panel) => !this.isZero(panel));
  }

  // A metric that is always 0 needs no panel; "All metrics" has it. A reward of 0 is important.
  isZero(panel) {
    if (KEPT.includes(panel.metric)) return false;
    const series = this.runs.map((run) => this.answers.get(run.id)?.[panel.x].series[panel.metric]).filter(Boolean);
    return series.every(({ y }) => y.every((value) => value === 0));
  }

  hasStepPanel(metric) {
    return this.runs.some((run) =>
      this.answers.get(run.id)?.step.panels.some((one) => one.metric === metric && one.x === "step"),
    );
  }

  xOf(panel) {
    return panel.x === "step" && this.options.byTime ? "time/wall" : panel.x;
  }

  series(panel) {
    const x = this.xOf(panel);
    const names = panel.metric === ACCURACY ? [ACCURACY, ...FINALS] : [panel.metric];
    return this.runs
      .filter((run) => !this.hidden.has(run.id))
      .flatMap((run) => names.map((name) => oneSeries(run, name, this.answers.get(run.id)?.[x], this.runs.length > 1)))
      .filter(Boolean);
  }

  chartOptions(panel) {
    const x = this.xOf(panel);
    const smoothing = panel.metric === ACCURACY || panel.metric === "optim/lr" ? 0 : this.options.smoothing;
    const title = panel.metric === ACCURACY ? "Evaluation accuracy (95 % interval)" : panel.title;
    return {
      title,
      share: panel.share,
      series: this.series(panel),
      smoothing,
      time: x === "time/wall",
      xLabel: X_NAMES[x],
      legend: panel.metric === ACCURACY && this.runs.length === 1,
    };
  }

  addChart(panel, extra = false) {
    const key = `${panel.metric}|${panel.x}|${extra}`;
    const chart = lineChart(this.chartOptions(panel));
    chart.dataset.metric = panel.metric;
    this.charts.set(key, { panel, chart, extra });
    chart.addEventListener("crosshair", ({ detail }) => this.syncCrosshair(chart, detail.x));
    return chart;
  }

  // The other charts with the same x axis show their values at the same place.
  syncCrosshair(source, x) {
    const from = [...this.charts.values()].find((one) => one.chart === source);
    for (const { chart, panel } of this.charts.values()) {
      if (chart !== source && from && this.xOf(panel) === this.xOf(from.panel)) chart.crosshair(x);
    }
  }

  drawChart(key) {
    const { panel, chart } = this.charts.get(key);
    chart.update(this.chartOptions(panel));
  }

  redraw(changes = {}) {
    Object.assign(this.options, changes);
    for (const key of this.charts.keys()) this.drawChart(key);
  }

  // Charts of metrics without a panel, by name.
  async addMetrics(names) {
    await Promise.all(this.runs.map((run) => this.fetchMetrics(run, names)));
    return names.map((name) => this.addChart({ metric: name, title: name, share: false, x: "step" }, true));
  }
}

function oneSeries(run, name, answer, several) {
  const curve = answer?.series[name];
  if (!curve?.x.length) return null;
  const points = FINALS.includes(name);
  const interval = alignedInterval(curve, answer.intervals?.[name]);
  const label = points ? name.split("/")[0] : several ? "" : name === ACCURACY ? "periodic" : "";
  return {
    label: [several ? run.name : "", label].filter(Boolean).join(", "),
    color: points && !several ? "var(--text)" : run.color,
    x: curve.x,
    y: curve.y,
    points,
    ...interval,
  };
}

// Bounds at the positions of the curve; null where there are none.
function alignedInterval(curve, interval) {
  if (!interval) return {};
  const bounds = new Map(interval.x.map((x, index) => [x, [interval.low[index], interval.high[index]]]));
  return { low: curve.x.map((x) => bounds.get(x)?.[0] ?? null), high: curve.x.map((x) => bounds.get(x)?.[1] ?? null) };
}

export function curveControls(curves, onChange) {
  const { smoothing, byTime } = curves.options;
  const output = element("output", { class: "muted", text: smoothing.toFixed(2) });
  const slide = (event) => {
    const value = Number(event.target.value);
    output.textContent = value.toFixed(2);
    curves.redraw({ smoothing: value });
    onChange({ smoothing: value });
  };
  const slider = element("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: smoothing,
    oninput: slide,
    name: "smoothing",
  });
  const axis = segmented("x axis", { step: "Steps", time: "Time" }, byTime ? "time" : "step", (choice) => {
    curves.redraw({ byTime: choice === "time" });
    onChange({ x: choice });
  });
  return element(
    "div",
    { class: "controls" },
    element("label", { class: "field" }, element("span", { text: "Smoothing" }), slider, output),
    axis,
  );
}
