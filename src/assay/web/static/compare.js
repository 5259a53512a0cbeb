// Several runs: curves overlaid, results, settings that differ, and a paired test of two of them.

import { get } from "./api.js";
import { Curves, curveControls } from "./curves.js";
import { evalTitle, pairView } from "./changes.js";
import { element, formatDuration, formatNumber, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import { loadRun, PENDING_MS } from "./run.js";
import { flatten } from "./settings.js";
import { spreadOut } from "./charts.js";
import { accuracyText, badgePill, empty, intervalText, panel, rowLink, select, statePill, stepsText, table } from "./widgets.js";

const NOT_COMPARED = ["name", "runs_dir"];

export async function compare({ parameters, signal }) {
  const ids = (parameters.runs ?? "").split(",").filter(Boolean);
  const crumbs = [{ text: "Compare" }];
  if (ids.length < 2)
    return {
      title: "Compare",
      crumbs,
      parts: [empty("Choose two or more runs", element("a", { href: "#/", text: "Check them in the list of runs." }))],
    };
  const details = await Promise.all(ids.map((id) => loadRun(id, signal)));
  const curves = new Curves(details.map(({ id, name }) => ({ id, name })));
  if (parameters.smoothing !== undefined) curves.options.smoothing = Number(parameters.smoothing) || 0;
  curves.options.byTime = parameters.x === "time";
  await curves.load(signal);
  const results = element("div", {}, resultTable(details, curves));
  const view = { parameters: { ...parameters }, details, curves, results, paired: element("div", {}) };
  await drawPaired(view, signal);
  const parts = [head(details), results, differences(details), curvePart(view), view.paired];
  return {
    title: `Compare ${details.map((one) => one.name).join(", ")}`,
    crumbs,
    parts: [...parts.filter(Boolean)],
    live: () => view.details.some((one) => one.state === "running"),
    every: () => (view.details.some((one) => one.findings_pending) ? PENDING_MS : null),
    refresh: () => refresh(view),
  };
}

async function refresh(view) {
  await view.curves.reload();
  if (!view.details.some((one) => one.findings_pending || one.state === "running")) return;
  view.details = await Promise.all(view.details.map(({ id }) => loadRun(id)));
  view.results.replaceChildren(resultTable(view.details, view.curves));
  if (!view.hasTest) await drawPaired(view);
}

function head(details) {
  return element("div", { class: "head" }, element("h1", { text: `Compare ${details.length} runs` }));
}

function resultTable(details, { runs }) {
  const columns = [
    {
      title: "Run",
      class: "wide",
      cell: (run, href) =>
        element(
          "span",
          { class: "controls tight" },
          element("i", { class: "swatch", style: { background: runs.find((one) => one.id === run.id).color } }),
          rowLink(run.name, href),
        ),
    },
    { title: "State", label: "State", cell: (run) => element("span", { class: "controls tight" }, statePill(run), badgePill(run)) },
    { title: "Steps", label: "Steps", class: "number", cell: stepsText },
    { title: "Reward", label: "Reward", class: "number", cell: (run) => formatNumber(run.reward) },
    { title: "Before", label: "Before", class: "number", cell: (run) => resultText(run.before) },
    { title: "After", label: "After", class: "number", cell: (run) => resultText(run.after) },
    { title: "Time", label: "Time", class: "number", cell: (run) => formatDuration(run.wall_s) },
  ];
  return panel("Results", table(columns, details, { href: (run) => link(["run", run.id]), caption: "Results" }));
}

function resultText(result) {
  const interval = intervalText(result);
  const bounds = interval ? element("span", { class: "muted", text: ` (${interval})` }) : null;
  return element("span", { class: "nowrap" }, accuracyText(result) ?? "", bounds);
}

function differences(details) {
  const settings = details.map((one) => new Map(flatten(one.config ?? {})));
  const keys = [...new Set(settings.flatMap((one) => [...one.keys()]))].filter((key) => !NOT_COMPARED.includes(key));
  const rows = keys
    .map((key) => [key, ...settings.map((one) => one.get(key))])
    .filter(([, ...values]) => new Set(values).size > 1);
  if (!rows.length)
    return panel("Settings that differ", element("div", { class: "body muted", text: "The settings are equal." }));
  const columns = [
    { title: "Setting", cell: ([key]) => element("code", { text: visibleText(key) }) },
    ...details.map((run, index) => ({
      title: run.name,
      cell: (row) => element("code", { text: visibleText(row[index + 1] ?? "") || "\u2013" }),
    })),
  ];
  const frame = table(columns, rows, { caption: "Settings that differ", cards: false });
  frame.classList.add("settings-table");
  return panel("Settings that differ", frame);
}

function curvePart(view) {
  const { curves } = view;
  const panels = curves.panels();
  if (!panels.length) return empty("No curves yet");
  const remember = (changes) => setParameters(Object.assign(view.parameters, changes));
  const header = element(
    "div",
    { class: "head" },
    element("h2", { text: "Curves" }),
    runLegend(curves),
    element("div", { class: "push" }, curveControls(curves, remember)),
  );
  return element(
    "div",
    { class: "stack" },
    header,
    spreadOut(
      element(
        "div",
        { class: "charts" },
        panels.map((one) => curves.addChart(one)),
      ),
    ),
  );
}

// Names with colors; a run that is not checked is not drawn.
function runLegend(curves) {
  const items = curves.runs.map((run) => {
    const toggle = (event) => {
      if (event.target.checked) curves.hidden.delete(run.id);
      else curves.hidden.add(run.id);
      curves.redraw();
    };
    const box = element("input", { type: "checkbox", checked: true, onchange: toggle });
    return element(
      "li",
      {},
      element("label", {}, box, element("i", { class: "swatch", style: { background: run.color } }), run.name),
    );
  });
  return element("ul", { class: "legend" }, items);
}

async function drawPaired(view, signal) {
  view.paired.replaceChildren(await pairedPart(view, signal));
}

async function pairedPart(view, signal) {
  const choices = view.details.flatMap((run) =>
    run.evals.map((one) => [`${run.id}|${one.name}`, `${run.name}: ${evalTitle(one)}`, run, one]),
  );
  const finals = view.details.map((run) => lastEval(run)).filter(Boolean);
  view.hasTest = finals.length > 1;
  if (!view.hasTest) return panel("Paired test", element("div", { class: "body muted", text: noTest(view.details) }));
  const { parameters } = view;
  const initial = { ...parameters, a: parameters.a ?? finals[0], b: parameters.b ?? finals[1] };
  const about = element("p", { class: "muted pair-about" });
  const pair = pairView(initial, fetchPair, () =>
    [pair.parameters.a, pair.parameters.b].map((one) => one.split("|")[0]),
  );
  const name = (key) => choices.find(([value]) => value === pair.parameters[key])?.[1] ?? pair.parameters[key];
  const explain = () => (about.textContent = pairText(name("a"), name("b"), view.details));
  const choice = (title, key) =>
    select(title, choices, pair.parameters[key], (value) => (pair.change({ [key]: value }), explain()), { name: key });
  explain();
  await pair
    .load(signal)
    .catch((error) => pair.element.replaceChildren(empty("There is no paired test of these evaluations", error.message)));
  const controls = element("div", { class: "panel filters" }, choice("From", "a"), choice("To", "b"), pair.controls);
  return element(
    "div",
    { class: "stack" },
    element("h2", { text: "Paired test of the same questions" }),
    about,
    controls,
    pair.element,
  );
}

function pairText(a, b, details) {
  const others = details.length > 2 ? ` It compares two of the ${details.length} runs; choose others below.` : "";
  return `From ${a} to ${b}: question by question, only those that both answered.${others}`;
}

// Which runs lack the evaluation that a paired test needs.
function noTest(details) {
  const without = details.filter((run) => !run.evals.length);
  const states = without.map((run) => `${run.name} (${run.state}) has no evaluation with saved answers`);
  return `There is no paired test, because ${states.join(", and ")}. It compares two runs question by question.`;
}

function lastEval(run) {
  const last = run.evals.findLast((one) => one.label === "after") ?? run.evals.at(-1);
  return last ? `${run.id}|${last.name}` : null;
}

function fetchPair({ a, b, show, search, offset, limit }, signal) {
  const [[runA, evalA], [runB, evalB]] = [a, b].map((one) => one.split(/\|(.*)/s));
  return get("compare", { run_a: runA, a: evalA, run_b: runB, b: evalB, show, search, offset, limit }, signal);
}
