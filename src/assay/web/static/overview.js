// All runs: state, reward, accuracy before and after. Checked runs are compared.

import { get, runPath } from "./api.js";
import { sparkline } from "./charts.js";
import { element, formatDuration, formatNumber, plural, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import {
  accuracyText,
  empty,
  intervalText,
  modelName,
  pValueText,
  pill,
  problemList,
  rowLink,
  searchField,
  statePill,
  stepsText,
  table,
  timeText,
} from "./widgets.js";

export async function overview({ parameters, signal }) {
  const view = { runs: [], checked: new Set(), search: parameters.search ?? "", order: newestFirst, curves: new Map() };
  view.body = element("div", { class: "stack" });
  view.actions = element("div", { class: "push controls" });
  const { runs, problems } = await get("runs", {}, signal);
  view.problems = problems;
  const search = searchField("Search runs", view.search, (text) => {
    view.search = text;
    setParameters({ search: text });
    drawRuns(view);
  });
  view.head = element(
    "div",
    { class: "head" },
    element("h1", { text: "Runs" }),
    (view.count = element("span", { class: "muted" })),
    view.actions,
  );
  view.actions.append(search, (view.compare = compareLink()));
  view.runs = runs;
  drawRuns(view);
  return {
    title: "Runs",
    crumbs: [],
    parts: [view.head, view.body],
    live: () => view.runs.some((run) => run.state === "running"),
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

function newestFirst(a, b) {
  return String(b.started ?? "").localeCompare(String(a.started ?? ""));
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
  const shown = view.runs.filter((run) => matches(run, view.search)).sort(view.order);
  view.count.textContent =
    shown.length === view.runs.length
      ? plural(shown.length, "run")
      : `${shown.length} of ${plural(view.runs.length, "run")}`;
  view.body.replaceChildren(...[problemList(view.problems), runTable(view, shown)].filter(Boolean));
}

function runTable(view, runs) {
  if (!view.runs.length) {
    const command = element("code", { text: "assay train CONFIG" });
    return empty("No runs yet", "Start one with ", command, "; it appears here without a reload.");
  }
  if (!runs.length) return empty("No run matches the search");
  const frame = table(columns(view), runs, { href: (run) => link(["run", run.id]), caption: "Runs" });
  frame.querySelectorAll("[data-run]").forEach((cell) => observe(view, cell));
  return frame;
}

function columns(view) {
  return [
    {
      title: element("span", { class: "visually-hidden", text: "Compare" }),
      class: "check",
      cell: (run) => checkbox(view, run),
    },
    { title: "Run", class: "wide", cell: nameCell },
    { title: "State", label: "State", cell: (run) => statePill(run.state) },
    { title: "Task and model", label: "Task", cell: taskCell },
    { title: "Algorithm", label: "Algorithm", cell: (run) => visibleText(run.algorithm ?? "") },
    { title: "Steps", label: "Steps", class: "number nowrap", cell: stepsText },
    { title: "Reward", label: "Reward", class: "wide", cell: (run) => rewardCell(view, run) },
    { title: "Before", label: "Before", class: "number", cell: (run) => accuracyCell(run.before) },
    { title: "After", label: "After", class: "number", cell: (run) => accuracyCell(run.after) },
    { title: "p", label: "p", class: "number nowrap", cell: (run) => pValueText(run.paired?.p_value) ?? "" },
    { title: "Time", label: "Time", class: "number nowrap", cell: (run) => formatDuration(run.wall_s) },
  ];
}

function nameCell(run, href) {
  const broken = run.problems?.length ? pill(plural(run.problems.length, "problem"), "warn") : null;
  const small = run.error
    ? element("div", { class: "bad small ellipsis", text: visibleText(run.error), title: run.error })
    : null;
  return element(
    "div",
    {},
    element("div", { class: "controls tight" }, rowLink(run.name, href), broken),
    small ?? element("div", { class: "muted small", text: timeText(run.started) }),
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
    updateCompare(view);
  };
  return element("input", {
    type: "checkbox",
    checked: view.checked.has(run.id),
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

// Sparklines: loaded when their row comes into view, and again when the run has made another step.

function rewardCell(view, run) {
  const value = run.reward === null || run.reward === undefined ? "" : formatNumber(run.reward, 3);
  const known = view.curves.get(run.id);
  const attributes = { class: "spark-cell", "data-run": run.id, "data-steps": run.steps };
  return element(
    "div",
    attributes,
    known ? sparkline(known.values, { label: `reward of ${run.name}` }) : null,
    element("span", { text: value }),
  );
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
  cell.querySelector("svg")?.remove();
  if (values.length > 1) cell.prepend(sparkline(values, { label: `reward of ${run}` }));
}
