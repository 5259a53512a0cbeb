// All runs: state, reward, accuracy before and after. Checked runs are compared.

import { get, runPath } from "./api.js";
import { lineChart, seriesColor, sparkline } from "./charts.js";
import { element, formatDuration, formatNumber, plural, shortened, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import {
  accuracyText,
  badgePill,
  empty,
  intervalText,
  modelName,
  pValueText,
  pacePart,
  pill,
  problemList,
  rowLink,
  searchField,
  statePill,
  stepsText,
  table,
  timeText,
} from "./widgets.js";

const SORTS = {
  started: (run) => run.started,
  name: (run) => run.name,
  state: (run) => [SEVERITIES.indexOf(run.badge?.severity), run.state].join(" "),
  task: (run) => [run.task, run.model].join(" "),
  algorithm: (run) => run.algorithm,
  steps: (run) => run.steps,
  reward: (run) => run.reward,
  before: (run) => run.before?.accuracy,
  after: (run) => run.after?.accuracy,
  p: (run) => run.paired?.p_value,
  time: (run) => run.wall_s,
};
const SEVERITIES = ["error", "warning", "note"];
const FIRST_ORDER = { name: "asc", state: "desc", task: "asc", algorithm: "asc", p: "asc" }; // else "desc"
const PENDING_MS = 500; // between updates while the doctor examines the runs

export async function overview({ parameters, signal }) {
  const { checked, ...rest } = parameters;
  const view = { runs: [], checked: new Set((checked ?? "").split(",").filter(Boolean)), parameters: rest, curves: new Map() };
  view.body = element("div", { class: "stack" });
  view.actions = element("div", { class: "push controls" });
  const { runs, problems } = await get("runs", {}, signal);
  view.problems = problems;
  const search = searchField("Search runs", parameters.search, (text) => change(view, { search: text }));
  view.head = element(
    "div",
    { class: "head" },
    element("h1", { text: "Runs" }),
    (view.count = element("span", { class: "muted" })),
    view.actions,
  );
  view.actions.append(search, (view.compare = compareLink()));
  view.runs = runs;
  view.chart = lineChart({ title: "Reward of the checked runs", series: [], smoothing: 0.6, xLabel: "step", legend: true });
  view.top = element("div", {});
  drawRuns(view);
  return {
    title: "Runs",
    crumbs: [],
    parts: [view.head, view.top, view.body],
    live: () => view.runs.some((run) => run.state === "running"),
    every: () => (view.runs.some((run) => run.findings_pending) ? PENDING_MS : null),
    refresh: () => refresh(view),
  };
}

async function refresh(view) {
  const { runs, problems } = await get("runs");
  if (JSON.stringify(runs) === JSON.stringify(view.runs)) return;
  Object.assign(view, { runs, problems });
  const focused = document.activeElement?.closest("tr")?.dataset.href;
  drawRuns(view);
  if (focused) view.body.querySelector(`tr[data-href="${CSS.escape(focused)}"] a`)?.focus();
}

function change(view, changes, push = false) {
  Object.assign(view.parameters, changes);
  setParameters({ ...view.parameters, checked: [...view.checked] }, { push });
  drawRuns(view);
}

// The newest runs first, unless a column was chosen; runs without a value are the last.
function sorted(runs, { sort = "started", order = FIRST_ORDER[sort] ?? "desc" }) {
  const value = SORTS[sort] ?? SORTS.started;
  const direction = order === "asc" ? 1 : -1;
  const lacks = (run) => value(run) === null || value(run) === undefined;
  const compared = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
  return [...runs].sort((a, b) => lacks(a) - lacks(b) || (lacks(a) ? 0 : direction * compared(value(a), value(b))));
}

function sortBy(view, key) {
  const { sort = "started", order = FIRST_ORDER[sort] ?? "desc" } = view.parameters;
  const turned = order === "asc" ? "desc" : "asc";
  change(view, { sort: key, order: key === sort ? turned : (FIRST_ORDER[key] ?? "desc") }, true);
}

function compareLink() {
  return element("a", { class: "button", "aria-disabled": "true", text: "Compare", role: "link" });
}

function updateCompare(view) {
  const names = [...view.checked];
  const ready = names.length > 1;
  view.compare.textContent = ready ? `Compare ${names.length} runs` : "Compare";
  view.compare.classList.toggle("primary", ready);
  view.compare.setAttribute("aria-disabled", String(!ready));
  view.compare.title = ready ? "" : "Check two or more runs to compare them";
  if (ready) view.compare.href = link(["compare"], { runs: names.join(",") });
  else view.compare.removeAttribute("href");
}

function matches(run, search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [run.name, run.state, run.task, run.model, run.algorithm].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function drawRuns(view) {
  const ids = new Set(view.runs.map((run) => run.id));
  view.checked = new Set([...view.checked].filter((id) => ids.has(id)));
  updateCompare(view);
  const shown = sorted(
    view.runs.filter((run) => matches(run, view.parameters.search ?? "")),
    view.parameters,
  );
  view.count.textContent =
    shown.length === view.runs.length
      ? plural(shown.length, "run")
      : `${shown.length} of ${plural(view.runs.length, "run")}`;
  const folders = new Set(view.runs.map((run) => run.folder));
  if (folders.size === 1) view.count.textContent += ` in ${visibleText([...folders][0])}`;
  const focused = document.activeElement?.closest("input[data-check]")?.dataset.check;
  view.body.replaceChildren(...[problemList(view.problems), runTable(view, shown)].filter(Boolean));
  if (focused) view.body.querySelector(`[data-check="${CSS.escape(focused)}"]`)?.focus();
  drawChecked(view);
}

// The reward curves of the checked runs in one chart, above the list.
async function drawChecked(view) {
  const runs = view.runs.filter((run) => view.checked.has(run.id));
  if (Boolean(runs.length) !== view.top.contains(view.chart)) view.top.replaceChildren(...(runs.length ? [view.chart] : []));
  const ticket = (view.ticket = {});
  const answers = await Promise.all(
    runs.map((run) => get(runPath(run.id, "metrics"), { names: "reward/mean", points: 500 }).catch(() => ({}))),
  );
  if (view.ticket !== ticket || !runs.length) return;
  const series = answers.map(({ series: found }, index) => ({
    label: runs[index].name,
    color: seriesColor(index),
    ...(found?.["reward/mean"] ?? { x: [], y: [] }),
  }));
  view.chart.update({ series });
}

function runTable(view, runs) {
  if (!view.runs.length) {
    const command = element("code", { text: "assay train CONFIG" });
    return empty("No runs yet", "Start one with ", command, "; it appears here without a reload.");
  }
  if (!runs.length) return empty("No run matches the search");
  const { sort = "started", order = FIRST_ORDER[sort] ?? "desc" } = view.parameters;
  const sorting = { key: sort, order, onSort: (key) => sortBy(view, key) };
  const frame = table(columns(view), runs, { href: (run) => link(["run", run.id]), sort: sorting, caption: "Runs" });
  frame.querySelectorAll("[data-run]").forEach((cell) => observe(view, cell));
  return frame;
}

function columns(view) {
  const folders = new Set(view.runs.map((run) => run.folder)).size;
  return [
    {
      title: element("span", { class: "visually-hidden", text: "Compare" }),
      class: "check",
      cell: (run) => checkbox(view, run),
    },
    { title: "Run", key: "name", class: "wide", cell: (run, href) => nameCell(run, href, folders > 1) },
    { title: "State", key: "state", label: "State", cell: stateCell },
    { title: "Task and model", key: "task", label: "Task", cell: taskCell },
    { title: "Algorithm", key: "algorithm", label: "Algorithm", cell: (run) => visibleText(run.algorithm ?? "") },
    { title: "Steps", key: "steps", label: "Steps", class: "number nowrap", cell: stepsCell },
    { title: "Reward", key: "reward", label: "Reward", class: "wide", cell: (run) => rewardCell(view, run) },
    { title: "Before", key: "before", label: "Before", class: "number", cell: (run) => accuracyCell(run.before) },
    { title: "After", key: "after", label: "After", class: "number", cell: (run) => accuracyCell(run.after) },
    { title: "p", key: "p", label: "p", class: "number nowrap", cell: (run) => pValueText(run.paired?.p_value) ?? "" },
    { title: "Time", key: "time", label: "Time", class: "number nowrap", cell: (run) => formatDuration(run.wall_s) },
    { title: "Started", key: "started", label: "Started", class: "nowrap", cell: (run) => timeText(run.started) },
  ];
}

function stateCell(run) {
  return element("div", { class: "controls tight" }, statePill(run), badgePill(run));
}

function stepsCell(run) {
  const left = pacePart(run);
  return element(
    "div",
    {},
    element("div", { text: stepsText(run) }),
    left ? element("div", { class: "muted small eta", text: left }) : null,
  );
}

function nameCell(run, href, withFolder) {
  const broken = run.problems?.length ? pill(plural(run.problems.length, "problem"), "warn") : null;
  const small = run.error
    ? element("div", { class: "bad small ellipsis", text: visibleText(run.error), title: run.error })
    : null;
  return element(
    "div",
    {},
    element("div", { class: "controls tight" }, rowLink(run.name, href), broken),
    withFolder
      ? element("div", { class: "muted small ellipsis", title: run.folder, text: shortened(visibleText(run.folder)) })
      : null,
    small,
  );
}

function taskCell(run) {
  const task = element("div", { class: "ellipsis", title: run.task, text: visibleText(run.task ?? "") });
  return element(
    "div",
    {},
    task,
    element("div", { class: "muted small ellipsis", title: run.model, text: visibleText(modelName(run.model)) }),
  );
}

function checkbox(view, run) {
  const toggle = (event) => {
    if (event.target.checked) view.checked.add(run.id);
    else view.checked.delete(run.id);
    change(view, {});
  };
  return element("input", {
    type: "checkbox",
    checked: view.checked.has(run.id),
    "data-check": run.id,
    "aria-label": `Compare ${run.name}`,
    onchange: toggle,
  });
}

function accuracyCell(result) {
  const text = accuracyText(result);
  if (!text) return "";
  return element(
    "div",
    { class: "nowrap" },
    element("div", { text }),
    element("div", { class: "muted small", text: intervalText(result) }),
  );
}

// Sparklines: loaded when their row comes into view, and again when the run has made another step. All have the same
// scale, so that runs can be compared.

function rewardCell(view, run) {
  const value = run.reward === null || run.reward === undefined ? "" : formatNumber(run.reward, 3);
  const attributes = { class: "spark-cell", "data-run": run.id, "data-steps": run.steps };
  const cell = element("div", attributes, element("span", { text: value }));
  drawSparkline(view, cell);
  return cell;
}

function drawSparkline(view, cell) {
  const { run } = cell.dataset;
  const values = view.curves.get(run)?.values ?? [];
  cell.querySelector("svg")?.remove();
  if (values.length > 1) cell.prepend(sparkline(values, { label: `reward of ${run}`, domain: view.domain }));
}

const observers = new WeakMap();

function observe(view, cell) {
  if (!observers.has(view))
    observers.set(
      view,
      new IntersectionObserver((entries) =>
        entries.forEach((entry) => entry.isIntersecting && loadCurve(view, entry.target)),
      ),
    );
  observers.get(view).observe(cell);
}

async function loadCurve(view, cell) {
  observers.get(view).unobserve(cell);
  const { run, steps } = cell.dataset;
  if (view.curves.get(run)?.steps === steps) return;
  view.curves.set(run, { steps, values: view.curves.get(run)?.values ?? [] });
  const { series } = await get(runPath(run, "metrics"), { names: "reward/mean", points: 80 }).catch(() => ({}));
  const values = series?.["reward/mean"]?.y ?? [];
  view.curves.set(run, { steps, values });
  const [low, high] = view.domain ?? [Infinity, -Infinity];
  view.domain = [Math.min(low, ...values), Math.max(high, ...values)];
  const wider = view.domain[0] < low || view.domain[1] > high;
  for (const shown of wider ? view.body.querySelectorAll(".spark-cell") : [cell]) drawSparkline(view, shown);
}
