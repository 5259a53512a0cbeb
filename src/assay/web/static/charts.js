// Charts as SVG: data in, element out. No server, no state, no other library.
//
//   lineChart(options)            curves with axes, a smoothing, intervals and a crosshair; see below
//   sparkline(values, options)    a small line without axes; options: width, height, label, domain ([low, high])
//   stackedBars(options)          counts by position as stacked bars, as a <figure>; options: title, parts, see below
//   heatStrip(cells, options)     one colored cell per entry {share, label}: pass rates over time
//   intervalPlot(rows, options)   estimates with intervals on one scale; rows: {label, value, low, high, color}
//   heatColor(share)              the color of a pass rate
//   legend(series)                names with their colors
//   pngButton(find, about)        a button that saves the SVG of `find()` as a picture; about(): [title, series]
//   spreadOut(grid)               makes the first item of a grid wider if the last row would have a single one
//   smooth(values, weight)        exponential moving average without the bias of its start; null stays null
//   niceTicks(low, high, count)   round numbers that cover the range
//   seriesColor(index)            color of a series as a CSS value
//
// lineChart({title, series, smoothing, share, xLabel, time, height, note}) returns a <figure> that follows its width:
//   series      [{label, color, x: [...], y: [...], low: [...], high: [...], points: true}]; low and high draw a band,
//               `points` draws a mark per value with its interval as a bar; null leaves a gap
//   smoothing   0 to 0.99: the weight of the past; above 0 the values are thin and the average is thick
//   share       values are fractions from 0 to 1, shown in percent
//   legend      true: names and marks of the series below the title
//   time        x is in seconds
// The figure has methods: update(options) draws again with some options replaced, crosshair(x) marks x and shows its
// value in the caption (null ends that). When the pointer or an arrow key moves the crosshair of the figure itself, it
// shows the values in a box, and dispatches "crosshair" with detail {x}.
// stackedBars({title, labels: [...], parts: [{label, color, values: [...]}], xLabel}): one bar per label.
// Colors are CSS variables of style.css: --series-1 to --series-8, --good, --bad, --line, --muted.

import { element, formatNumber, formatShare, svg } from "./dom.js";

const SERIES_COLORS = 8;
const MARGIN = { top: 8, right: 12, bottom: 22, left: 50 };

export function seriesColor(index) {
  return `var(--series-${(index % SERIES_COLORS) + 1})`;
}

export function smooth(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

export function niceTicks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const distance = (step) => Math.abs(Math.log(step / rough));
  const steps = roundSteps(rough).sort((a, b) => distance(a) - distance(b));
  const found = steps.map((step) => multiples(step, Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)));
  return found.find((ticks) => ticks.length >= Math.min(count, 3)) ?? found[0]; // two ticks hardly show a scale
}

// Ticks of a range that is extended to them: three to five.
function coveringTicks(low, high) {
  const found = roundSteps((high - low) / 4).map((step) =>
    multiples(step, Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)),
  );
  return found.find((ticks) => ticks.length <= 5);
}

// 1, 2 and 5 times powers of ten, from about a tenth of `rough` to ten times as much.
function roundSteps(rough) {
  const power = Math.floor(Math.log10(rough));
  return [power - 1, power, power + 1].flatMap((exponent) => [1, 2, 5].map((digit) => digit * 10 ** exponent));
}

function multiples(step, first, last) {
  const length = Math.max(0, Math.round(last - first) + 1);
  return Array.from({ length }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function tickLabel(value, share) {
  if (share) return `${Number((100 * value).toPrecision(6))}\u00a0%`;
  if (Math.abs(value) >= 1e4) return formatNumber(value / 1000, 4) + "k";
  return formatNumber(value, 4);
}

const TIME_UNITS = [
  { limit: 300, seconds: 1, label: "seconds" },
  { limit: 3 * 3600, seconds: 60, label: "minutes" },
  { limit: Infinity, seconds: 3600, label: "hours" },
];

function timeUnit(seconds) {
  return TIME_UNITS.find((unit) => seconds <= unit.limit);
}

export function lineChart(options) {
  const state = { smoothing: 0, height: 190, share: false, time: false, legend: false, ...options };
  const readout = element("div", { class: "chart-readout", hidden: true });
  const plot = svg("svg", { class: "chart-plot", tabindex: 0, role: "img" });
  const caption = element("figcaption", {});
  const figure = element("figure", { class: "chart" }, caption, element("div", { class: "chart-body" }, plot, readout));
  const save = pngButton(() => plot, () => [state.title, state.series]);
  const chart = { state, plot, readout, caption, figure, save, frame: null };
  figure.update = (changes) => {
    Object.assign(state, changes);
    draw(chart);
  };
  figure.crosshair = (x) => showCrosshair(chart, x, false);
  listen(chart);
  new ResizeObserver(() => draw(chart)).observe(plot.parentElement);
  return figure;
}

function draw(chart) {
  const { state, plot, caption } = chart;
  const width = Math.floor(plot.parentElement.clientWidth);
  caption.replaceChildren(
    element("span", { class: "chart-title", text: state.title, title: state.title }),
    element("span", { class: "chart-last", text: lastValue(state) }),
    chart.save,
    state.legend && state.series.length > 1 ? legend(state.series) : "",
  );
  if (!width) return;
  const list = caption.querySelector(".legend");
  const height = state.height - (list ? list.offsetHeight + 2 : 0); // charts next to each other have the same height
  const series = state.series.map((one) => ({ ...one, shown: one.points ? one.y : smooth(one.y, state.smoothing) }));
  const frame = makeFrame(state, series, width, height);
  chart.frame = frame;
  plot.setAttribute("width", width);
  plot.setAttribute("height", height);
  plot.setAttribute("aria-label", describe(state));
  plot.replaceChildren(axes(frame, state), ...series.map((one) => drawSeries(one, frame, state)));
  plot.append(svg("g", { class: "crosshair" }));
}

function describe(state) {
  const last = lastValue(state);
  return `${state.title}${last ? `, last value ${last}` : ""}. Arrow keys show the values.`;
}

function lastValue({ series, share }) {
  if (series.length !== 1) return "";
  const value = series[0].y.findLast((one) => one !== null);
  return value === undefined ? "" : share ? formatShare(value) : formatNumber(value, 3);
}

function shownValue(value, share) {
  return share ? formatShare(value, 2) : formatNumber(value, 6);
}

// Domains and scales: functions from data to pixels.
function makeFrame(state, series, width, height) {
  const unit = state.time ? timeUnit(Math.max(...series.flatMap((one) => one.x), 0)) : { seconds: 1, label: "" };
  const inner = {
    left: MARGIN.left,
    right: width - MARGIN.right,
    top: MARGIN.top,
    bottom: height - MARGIN.bottom,
  };
  const xDomain = extent(series.flatMap((one) => one.x));
  const yDomain = yRange(state, series);
  const scale = (value, [low, high], from, to) => from + ((value - low) / (high - low || 1)) * (to - from);
  return {
    ...inner,
    series,
    unit,
    xDomain,
    yDomain,
    x: (value) => scale(value, xDomain, inner.left, inner.right),
    y: (value) => scale(value, yDomain, inner.bottom, inner.top),
  };
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  return low === high ? [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5] : [low, high];
}

function yRange(state, series) {
  const values = series.flatMap((one) => [...one.y, ...(one.low ?? []), ...(one.high ?? [])]);
  if (state.share) return [0, Math.min(1, Math.max(...values.filter(Number.isFinite), 0.05) * 1.04)];
  let [low, high] = extent(values);
  const tolerance = 1e-3 * Math.max(Math.abs(low), Math.abs(high)); // rounding errors of a constant
  if (high - low < tolerance) [low, high] = [low - 50 * tolerance, high + 50 * tolerance];
  const room = 0.06 * (high - low);
  const keepsZero = low >= 0 && low - room < 0;
  return [keepsZero ? 0 : low - room, high + room];
}

function axes(frame, state) {
  const group = svg("g", { class: "axes" });
  for (const tick of niceTicks(...frame.yDomain, 4)) {
    const y = Math.round(frame.y(tick)) + 0.5;
    group.append(
      svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y, y2: y }),
      svg("text", {
        class: "tick",
        x: frame.left - 8,
        y: y + 3.5,
        "text-anchor": "end",
        text: tickLabel(tick, state.share),
      }),
    );
  }
  const { seconds, label } = frame.unit;
  const count = Math.max(2, Math.floor((frame.right - frame.left) / 70));
  const [first, last] = frame.xDomain;
  for (const tick of niceTicks(first / seconds, last / seconds, count)) {
    const x = frame.x(tick * seconds);
    if ((!state.time && !Number.isInteger(tick)) || x < frame.left + 8) continue; // the name of the axis is there
    group.append(
      svg("text", { class: "tick", x, y: frame.bottom + 15, "text-anchor": "middle", text: tickLabel(tick) }),
    );
  }
  const name = state.time ? label : (state.xLabel ?? "");
  group.append(
    svg("text", { class: "axis-name", x: frame.left - 8, y: frame.bottom + 15, "text-anchor": "end", text: name }),
  );
  return group;
}

function drawSeries(one, frame, state) {
  const group = svg("g", { class: "series", style: { color: one.color } });
  if (one.points || one.x.length === 1) return drawPoints(group, one, frame);
  if (one.low && one.high) group.append(svg("path", { class: "band", d: bandPath(one, frame) }));
  const smoothed = state.smoothing > 0 && one.y.length > 2;
  if (smoothed) group.append(svg("path", { class: "raw", d: linePath(one.x, one.y, frame) }));
  group.append(svg("path", { class: "curve", d: linePath(one.x, smoothed ? one.shown : one.y, frame) }));
  if (one.x.length <= 30) for (const [x, y] of pairs(one.x, one.shown)) group.append(dot(frame, x, y, 2.4));
  return group;
}

function drawPoints(group, one, frame) {
  one.x.forEach((x, index) => {
    if (one.y[index] === null) return;
    const [low, high] = [one.low?.[index], one.high?.[index]];
    const at = frame.x(x);
    if (low !== undefined && low !== null) {
      group.append(svg("line", { class: "bar", x1: at, x2: at, y1: frame.y(low), y2: frame.y(high) }));
    }
    group.append(dot(frame, x, one.y[index], 4));
  });
  return group;
}

function dot(frame, x, y, radius) {
  return svg("circle", { class: "dot", cx: frame.x(x), cy: frame.y(y), r: radius });
}

function pairs(xs, ys) {
  return xs.map((x, index) => [x, ys[index]]).filter(([, y]) => y !== null && y !== undefined);
}

// A missing value ends a piece of the line; the next value begins another one.
function linePath(xs, ys, frame) {
  let path = "";
  let pen = "M";
  xs.forEach((x, index) => {
    if (ys[index] === null) pen = "M";
    else {
      path += `${pen}${frame.x(x).toFixed(1)},${frame.y(ys[index]).toFixed(1)}`;
      pen = "L";
    }
  });
  return path;
}

function bandPath({ x, low, high }, frame) {
  const there = x.map((at, index) => [at, low[index], high[index]]).filter((row) => !row.includes(null));
  const upper = there.map(([at, , top]) => `${frame.x(at).toFixed(1)},${frame.y(top).toFixed(1)}`);
  const lower = there.map(([at, bottom]) => `${frame.x(at).toFixed(1)},${frame.y(bottom).toFixed(1)}`).reverse();
  return there.length ? `M${[...upper, ...lower].join("L")}Z` : "";
}

// The crosshair

function listen(chart) {
  const { plot, figure } = chart;
  const tell = (x) => {
    showCrosshair(chart, x, true);
    figure.dispatchEvent(new CustomEvent("crosshair", { detail: { x }, bubbles: true }));
  };
  plot.addEventListener("pointermove", (event) => {
    if (chart.frame) tell(nearestX(chart.frame, event.clientX - plot.getBoundingClientRect().left));
  });
  plot.addEventListener("pointerleave", () => tell(null));
  plot.addEventListener("blur", () => tell(null));
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !chart.frame) return;
    event.preventDefault();
    event.stopPropagation();
    tell(neighborX(chart.frame, chart.at, move));
  });
}

function allX(frame) {
  return [...new Set(frame.series.flatMap((one) => one.x))].sort((a, b) => a - b);
}

function nearestX(frame, pixel) {
  return allX(frame).reduce((best, x) => (distance(frame, x, pixel) < distance(frame, best, pixel) ? x : best), null);
}

function distance(frame, x, pixel) {
  return x === null ? Infinity : Math.abs(frame.x(x) - pixel);
}

function neighborX(frame, at, move) {
  const xs = allX(frame);
  const index = at === null || at === undefined ? (move < 0 ? xs.length : -1) : xs.indexOf(at);
  return xs[Math.min(Math.max(index + move, 0), xs.length - 1)] ?? null;
}

// Values at x: of each series the nearest value, if it is next to x; steps of long runs are thinned differently.
function valuesAt(frame, x) {
  const near = (frame.xDomain[1] - frame.xDomain[0]) / 100;
  return frame.series.flatMap((one) => {
    const index = nearestIndex(one.x, x);
    if (index < 0 || one.y[index] === null || Math.abs(one.x[index] - x) > (one.points ? 0 : near)) return [];
    return [{ one, index, x: one.x[index], y: one.y[index], shown: one.shown[index] }];
  });
}

function nearestIndex(xs, x) {
  return xs.reduce((best, at, index) => (best < 0 || Math.abs(at - x) < Math.abs(xs[best] - x) ? index : best), -1);
}

function showCrosshair(chart, x, boxed) {
  const { plot, readout, frame, state, caption } = chart;
  chart.at = x;
  const group = plot.querySelector(".crosshair");
  if (!group) return;
  const values = x === null || !frame ? [] : valuesAt(frame, x);
  const last = caption.querySelector(".chart-last");
  last.textContent = values.length === 1 && !boxed ? shownValue(values[0].y, state.share) : lastValue(state);
  last.classList.toggle("at-crosshair", values.length === 1 && !boxed);
  group.replaceChildren(...(values.length ? crosshairMarks(frame, x, values) : []));
  readout.hidden = values.length === 0 || !boxed;
  if (readout.hidden) return;
  const name = element("div", { class: "readout-x", text: xText(state, frame, x) });
  readout.replaceChildren(name, ...values.map((value) => row(state, value)));
  const room = plot.parentElement.clientWidth - readout.offsetWidth;
  const [right, left] = [frame.x(x) + 12, frame.x(x) - readout.offsetWidth - 12];
  readout.style.left = `${Math.max(0, right > room ? left : right)}px`;
}

function crosshairMarks(frame, x, values) {
  const at = frame.x(x);
  const dots = values.map((value) =>
    svg("circle", { cx: frame.x(value.x), cy: frame.y(value.shown), r: 3.5, style: { fill: value.one.color } }),
  );
  return [svg("line", { x1: at, x2: at, y1: frame.top, y2: frame.bottom }), ...dots];
}

function xText(state, frame, x) {
  if (state.time) return `${formatNumber(x / frame.unit.seconds, 4)} ${frame.unit.label}`;
  return `${state.xLabel ?? ""} ${formatNumber(x, 6)}`.trim();
}

function row(state, { one, index, y, shown }) {
  const [low, high] = [one.low?.[index], one.high?.[index]];
  const parts = [shownValue(y, state.share)];
  if (low !== undefined && low !== null) {
    parts.push(`${shownValue(low, state.share)} to ${shownValue(high, state.share)}`);
  }
  if (state.smoothing > 0 && !one.points && one.y.length > 2) parts.push(`mean ${shownValue(shown, state.share)}`);
  return element(
    "div",
    { class: "readout-row" },
    element("i", { class: "swatch", style: { background: one.color } }),
    one.label ? element("span", { class: "readout-name", text: one.label }) : null,
    element("b", { text: parts[0] }),
    parts.length > 1 ? element("span", { class: "muted", text: parts.slice(1).join(" \u00b7 ") }) : null,
  );
}

export function legend(series) {
  const items = series.map((one) =>
    element(
      "li",
      {},
      element("i", { class: one.points ? "swatch round" : "swatch", style: { background: one.color } }),
      element("span", { text: one.label }),
    ),
  );
  return element("ul", { class: "legend" }, items);
}

export function sparkline(values, { width = 96, height = 24, label = "", domain = null } = {}) {
  const root = svg("svg", {
    class: "sparkline",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": label,
  });
  const there = pairs(
    values.map((_, index) => index),
    values,
  );
  if (!there.length) return root;
  const [low, high] = domain ?? extent(values);
  const x = (index) => 2 + (index / Math.max(values.length - 1, 1)) * (width - 6);
  const y = (value) => height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
  const path = there
    .map(([index, value], place) => `${place ? "L" : "M"}${x(index).toFixed(1)},${y(value).toFixed(1)}`)
    .join("");
  const [lastIndex, lastValueOf] = there.at(-1);
  root.append(svg("path", { d: path }), svg("circle", { cx: x(lastIndex), cy: y(lastValueOf), r: 2 }));
  return root;
}

export function stackedBars({ title, labels, parts, xLabel = "", height = 120 }) {
  const readout = element("span", { class: "chart-last" });
  const plot = svg("svg", { class: "chart-plot bars", role: "img" });
  const body = element("div", { class: "chart-body" }, plot);
  const save = pngButton(() => plot, () => [title, parts]);
  const caption = element("figcaption", {}, element("span", { class: "chart-title", text: title }), readout, save, legend(parts));
  const totals = labels.map((_, index) => parts.reduce((sum, part) => sum + part.values[index], 0));
  const text = (index) => {
    const counts = parts.map((part) => `${formatNumber(part.values[index])} ${part.label}`);
    return `${xLabel} ${labels[index]}: ${counts.join(", ")}`;
  };
  plot.setAttribute("aria-label", `${title}. ${labels.map((_, index) => text(index)).join("; ")}`);
  plot.addEventListener("pointerover", ({ target }) => {
    readout.textContent = target.dataset?.index === undefined ? "" : text(Number(target.dataset.index));
  });
  plot.addEventListener("pointerleave", () => (readout.textContent = ""));
  const drawBars = () => {
    const width = Math.floor(body.clientWidth);
    if (!width) return;
    plot.setAttribute("width", width);
    plot.setAttribute("height", height);
    plot.replaceChildren(...barParts({ labels, parts, totals, xLabel, width, height }));
  };
  new ResizeObserver(drawBars).observe(body);
  return element("figure", { class: "chart" }, caption, body);
}

// Shares of the parts, so that bars of different totals can be compared.
function barParts({ labels, parts, totals, xLabel, width, height }) {
  const [bottom, room] = [height - MARGIN.bottom, width - MARGIN.left - MARGIN.right];
  const y = (share) => bottom - share * (bottom - MARGIN.top);
  const size = room / labels.length;
  const nodes = [0, 0.5, 1].flatMap((tick) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
    svg("text", { class: "tick", x: MARGIN.left - 8, y: y(tick) + 3.5, "text-anchor": "end", text: tickLabel(tick, true) }),
  ]);
  labels.forEach((_, index) => {
    let below = 0;
    for (const part of parts) {
      const share = part.values[index] / (totals[index] || 1);
      const box = { x: MARGIN.left + index * size, width: Math.max(size - 1, 0.5), y: y(below + share), height: y(below) - y(below + share) };
      nodes.push(svg("rect", { ...box, "data-index": index, style: { fill: part.color } }));
      below += share;
    }
  });
  const every = Math.ceil(labels.length / Math.max(1, Math.floor(room / 70)));
  labels.forEach((label, index) => {
    if (index % every) return;
    const x = MARGIN.left + (index + 0.5) * size;
    nodes.push(svg("text", { class: "tick", x, y: bottom + 15, "text-anchor": "middle", text: label }));
  });
  nodes.push(svg("text", { class: "axis-name", x: MARGIN.left - 8, y: bottom + 15, "text-anchor": "end", text: xLabel }));
  return nodes;
}

export function heatStrip(cells, { width = 160, height = 14, label = "" } = {}) {
  const root = svg("svg", {
    class: "heat",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": label,
  });
  const size = Math.min(width / Math.max(cells.length, 1), 14);
  cells.forEach(({ share, label: title }, index) => {
    const color = share === null ? "var(--line)" : heatColor(share);
    const gap = size > 4 ? 1 : 0;
    const box = { x: (index * size).toFixed(2), y: 0, width: Math.max(size - gap, 0.5).toFixed(2), height, rx: gap };
    root.append(svg("rect", { ...box, style: { fill: color } }, title ? svg("title", { text: title }) : null));
  });
  return root;
}

export function heatColor(share) {
  return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--heat-zero))`;
}

export function intervalPlot(rows, { width = 360, share = true } = {}) {
  const [left, right, line] = [92, 118, 30];
  const ticks = intervalTicks(rows, share);
  const [low, high] = [ticks[0], ticks.at(-1)];
  const x = (value) => left + ((value - low) / (high - low || 1)) * (width - left - right);
  const height = rows.length * line + 20;
  const text = rows.map((one) => `${one.label} ${shownValue(one.value, share)}`).join(", ");
  const root = svg("svg", {
    class: "interval-plot",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": text,
  });
  for (const tick of ticks) {
    root.append(
      svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 4, y2: rows.length * line }),
      svg("text", { class: "tick", x: x(tick), y: height - 6, "text-anchor": "middle", text: tickLabel(tick, share) }),
    );
  }
  rows.forEach((one, index) => root.append(intervalRow(one, x, index * line + line / 2 + 2, width, share)));
  return root;
}

function intervalTicks(rows, share) {
  const [low, high] = extent(rows.flatMap((one) => [one.value, one.low ?? null, one.high ?? null]));
  return share ? coveringTicks(Math.max(0, low), Math.min(1, high)) : coveringTicks(low, high);
}

function intervalRow(one, x, y, width, share) {
  const group = svg("g", { style: { color: one.color ?? seriesColor(0) } });
  group.append(svg("text", { class: "interval-label", x: 0, y: y + 4, text: one.label }));
  if (one.low !== undefined && one.low !== null) {
    group.append(svg("line", { class: "interval-bar", x1: x(one.low), x2: x(one.high), y1: y, y2: y }));
  }
  group.append(svg("circle", { class: "dot", cx: x(one.value), cy: y, r: 4.5 }));
  const bounds =
    one.low === undefined || one.low === null
      ? ""
      : ` (${boundText(one.low, share)}\u2013${boundText(one.high, share)})`;
  group.append(
    svg(
      "text",
      { class: "interval-value", x: width, y: y + 4, "text-anchor": "end" },
      svg("tspan", { class: "strong", text: share ? formatShare(one.value) : formatNumber(one.value) }),
      svg("tspan", { text: bounds }),
    ),
  );
  return group;
}

// Pictures: a copy of the SVG, with the styles of the page, is drawn on a canvas.

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity", "font", "color"];
const HEAD = 40; // pixels above the chart, for title and legend
const EDGE = 10; // pixels around it
const SCALE = 2; // pixels of the picture per pixel of the page

// `about()`: the title and the series of the picture.
export function pngButton(find, about) {
  const save = async () => {
    const picture = await pictureOf(find(), ...about());
    const address = URL.createObjectURL(picture);
    const name = about()[0].replace(/[^\w-]+/g, "-").replace(/-$/, "").toLowerCase();
    element("a", { href: address, download: `${name}.png` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  };
  const title = "Save as a picture (PNG)";
  return element("button", { type: "button", class: "plain save", title, "aria-label": title, onclick: save, text: "PNG" });
}

async function pictureOf(plot, title, series) {
  const [width, height] = [plot.clientWidth, plot.clientHeight + HEAD];
  const [text, panel] = ["--text", "--panel"].map((name) => resolvedColor(`var(${name})`));
  const copy = plot.cloneNode(true);
  copyStyles(plot, copy);
  for (const [name, value] of Object.entries({ x: 0, y: HEAD, width, height: plot.clientHeight })) copy.setAttribute(name, value);
  const font = getComputedStyle(document.body).fontFamily;
  const [full, tall] = [width + 2 * EDGE, height + EDGE];
  const root = svg("svg", { width: SCALE * full, height: SCALE * tall, viewBox: `${-EDGE} 0 ${full} ${tall}` });
  root.append(
    svg("rect", { x: -EDGE, width: full, height: tall, fill: panel }),
    svg("text", { x: 0, y: 18, fill: text, style: { font: `600 13px ${font}` }, text: title }),
    ...legendMarks(series ?? [], text, font),
    copy,
  );
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(root))}`;
  await image.decode();
  const canvas = element("canvas", { width: SCALE * full, height: SCALE * tall });
  canvas.getContext("2d").drawImage(image, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function legendMarks(series, text, font) {
  let x = 0;
  return series
    .filter((one) => one.label && series.length > 1)
    .flatMap((one) => {
      const marks = [
        svg("rect", { x, y: 26, width: 9, height: 9, rx: one.points ? 5 : 2, fill: resolvedColor(one.color) }),
        svg("text", { x: x + 14, y: 34.5, fill: text, style: { font: `12px ${font}` }, text: one.label }),
      ];
      x += 34 + 7 * one.label.length;
      return marks;
    });
}

function copyStyles(from, to) {
  const style = getComputedStyle(from);
  for (const name of STYLES) to.style.setProperty(name, style.getPropertyValue(name));
  [...from.children].forEach((child, index) => copyStyles(child, to.children[index]));
}

// The color as the browser computes it: a picture does not know the variables of the page.
function resolvedColor(color) {
  const probe = element("i", { style: { color } });
  document.body.append(probe);
  const computed = getComputedStyle(probe).color;
  probe.remove();
  return computed;
}

// A last row with a single item looks like a mistake: then the first item takes two columns.
export function spreadOut(grid) {
  const arrange = () => {
    const items = [...grid.children];
    for (const item of items) item.style.removeProperty("grid-column");
    const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
    if (columns > 1 && items.length % columns === 1) items[0]?.style.setProperty("grid-column", "span 2");
  };
  new ResizeObserver(arrange).observe(grid);
  return grid;
}

function boundText(value, share) {
  return share ? (100 * value).toFixed(1) : formatNumber(value, 3);
}
