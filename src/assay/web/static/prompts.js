// Prompts of a run: how often each was answered correctly, over time.

import { get, runPath } from "./api.js";
import { heatStrip, stackedBars } from "./charts.js";
import { element, formatNumber, formatShare, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import { INDEXING_MS } from "./rollouts.js";
import { loadRun, runCrumbs, runHead } from "./run.js";
import { empty, indexNote, isIndexing, pager, problemList, rowLink, searchField, segmented, table } from "./widgets.js";

const LIMIT = 50;
const SORT = "pass_rate"; // the hardest prompts first
const FIRST_ORDER = { id: "asc", pass_rate: "asc", change: "desc", seen: "desc" };

export async function prompts({ parts: [, run], parameters, signal }) {
  const detail = await loadRun(run, signal);
  const view = {
    run,
    detail,
    parameters: { ...parameters },
    list: element("div", { class: "stack", "aria-live": "off" }),
  };
  await loadPrompts(view, signal);
  return {
    title: `Prompts of ${detail.name}`,
    crumbs: runCrumbs(detail, { text: "Prompts" }),
    parts: [runHead(detail, "prompts"), problemList(detail.problems), promptFilters(view), view.list],
    live: () => view.detail.state === "running",
    every: () => (isIndexing(view.detail) ? INDEXING_MS : null),
    refresh: () => refresh(view),
  };
}

async function refresh(view) {
  view.detail = await loadRun(view.run);
  await loadPrompts(view);
}

function promptFilters(view) {
  const search = searchField("Search prompts", view.parameters.search, (text) =>
    change(view, { search: text, offset: "" }),
  );
  const source = segmented(
    "Answers of",
    { train: "Training", eval: "Evaluations" },
    view.parameters.source ?? "train",
    (choice) => change(view, { source: choice === "train" ? "" : choice, offset: "" }, true),
  );
  const legend = element(
    "span",
    { class: "controls tight muted" },
    "none correct",
    heatStrip(
      [0, 0.25, 0.5, 0.75, 1].map((share) => ({ share })),
      { width: 70 },
    ),
    "all correct",
  );
  return element("div", { class: "panel filters" }, search, source, legend);
}

function change(view, changes, push = false) {
  Object.assign(view.parameters, changes);
  setParameters(view.parameters, { push });
  return loadPrompts(view);
}

async function loadPrompts(view, signal) {
  const { parameters, run } = view;
  const offset = Number(parameters.offset) || 0;
  const request = { sort: SORT, order: FIRST_ORDER[parameters.sort ?? SORT], ...parameters, offset, limit: LIMIT };
  const ticket = (view.ticket = {});
  const answer = await get(runPath(run, "prompts"), request, signal);
  if (view.ticket !== ticket) return; // a later request was made in the meantime
  const text = JSON.stringify([answer, view.detail.indexed]);
  if (text === view.shown) return;
  view.shown = text;
  if (!answer.rows.length) {
    view.list.replaceChildren(indexNote(view.detail) ?? nothing(view));
    return;
  }
  const onOffset = (target) => change(view, { offset: target || "" }, true).then(() => scrollTo(0, 0));
  const page = pager({ total: answer.total, offset, limit: LIMIT, noun: "prompt", onOffset });
  const sort = { key: request.sort, order: request.order, onSort: (key) => sortBy(view, key) };
  const href = (row) =>
    link(["run", run, "rollouts"], { prompt: row.prompt_id, source: parameters.source === "eval" ? "eval" : "" });
  const frame = table(columns(run), answer.rows, { href, sort, caption: "Prompts" });
  view.list.replaceChildren(...[indexNote(view.detail), solvedChart(answer.solved), frame, page].filter(Boolean));
}

// The curriculum at a glance: prompts of a step that all, some or none of their answers solved.
function solvedChart({ first, last, always, sometimes, never }) {
  if (first.length < 2) return null;
  const labels = first.map((step, index) => (step === last[index] ? String(step) : `${step}\u2013${last[index]}`));
  const parts = [
    { label: "always solved", color: "var(--good)", values: always },
    { label: "sometimes", color: "var(--part)", values: sometimes },
    { label: "never", color: "var(--heat-zero)", values: never },
  ];
  return stackedBars({ title: "Solved prompts", labels, parts, xLabel: "step" });
}

function nothing({ parameters, detail }) {
  if (parameters.search) return empty("No prompt matches the search");
  const text =
    detail.state === "running" ? "They appear when the first step is complete." : "This run has no saved rollouts.";
  return empty("No prompts", text);
}

function sortBy(view, key) {
  const active = (view.parameters.sort ?? SORT) === key;
  const now = view.parameters.order ?? FIRST_ORDER[key];
  const order = active ? (now === "asc" ? "desc" : "asc") : FIRST_ORDER[key];
  change(view, { sort: key, order, offset: "" }, true);
}

function columns(run) {
  return [
    { title: "Prompt", key: "id", class: "preview", cell: (row, href) => rowLink(row.preview || row.prompt_id, href) },
    {
      title: "Id",
      label: "Id",
      cell: (row) =>
        element("span", { class: "muted prompt-id", title: row.prompt_id, text: visibleText(row.prompt_id) }),
      has: (row) => row.preview,
    },
    { title: "Seen", key: "seen", label: "Seen", class: "number", cell: (row) => formatNumber(row.seen) },
    {
      title: "Pass rate",
      key: "pass_rate",
      label: "Pass rate",
      class: "number",
      cell: (row) => formatShare(row.pass_rate, 0),
    },
    { title: "Change", key: "change", label: "Change", class: "number", cell: changeCell, has: changeCell },
    { title: "Over time", class: "wide", cell: (row) => strip(run, row) },
  ];
}

function changeCell({ first_rate: first, last_rate: last, rates }) {
  if (first === null || last === null || rates.length < 2) return "";
  const change = last - first;
  const text = change > 0 ? `+${formatShare(change, 0)}` : formatShare(change, 0);
  return element("span", { class: change > 0 ? "good" : change < 0 ? "bad" : "muted", text });
}

function strip(run, { rates, prompt_id: prompt }) {
  const cells = rates.map(([step, correct, count]) => ({
    share: count ? correct / count : null,
    label: `step ${step}: ${correct} of ${count} correct`,
  }));
  const label = cells.map((cell) => cell.label).join(", ");
  return element(
    "a",
    { class: "strip", href: link(["run", run, "story"], { prompt }), title: "Learning story" },
    heatStrip(cells, { width: 130, label }),
    "Story",
  );
}
