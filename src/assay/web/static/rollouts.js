// Rollouts of a run, with search and filters.

import { get, runPath } from "./api.js";
import { element, formatNumber, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import { loadRun, runCrumbs, runHead } from "./run.js";
import {
  changePill,
  empty,
  indexNote,
  isIndexing,
  pager,
  pill,
  problemList,
  rowLink,
  searchField,
  select,
  skippedPill,
  statusPill,
  table,
} from "./widgets.js";

const LIMIT = 50;
const REASONS = 5; // skipped batches whose reason is shown
export const INDEXING_MS = 500; // between updates while the server reads the rollout files
const SORTS = [
  ["", "newest step"],
  ["step asc", "oldest step"],
  ["reward desc", "highest reward"],
  ["reward asc", "lowest reward"],
  ["length desc", "longest"],
  ["length asc", "shortest"],
  ["advantage desc", "highest advantage"],
  ["advantage asc", "lowest advantage"],
];
const CHANGES = [
  ["", "any"],
  ["gained", "gained"],
  ["lost", "lost"],
  ["any", "gained or lost"],
];

export async function rollouts({ parts: [, run], parameters, signal }) {
  const detail = await loadRun(run, signal);
  const view = {
    run,
    detail,
    parameters: { ...parameters },
    list: element("div", { class: "stack" }),
    chips: element("div", { class: "chips", role: "group", "aria-label": "Status" }),
  };
  await loadRollouts(view, signal);
  const box = element("div", {});
  const draw = () => box.replaceChildren(filters(view, draw));
  draw();
  return {
    title: `Rollouts of ${detail.name}`,
    crumbs: runCrumbs(detail, { text: "Rollouts" }),
    parts: [runHead(detail, "rollouts"), problemList(detail.problems), box, view.list],
    live: () => view.detail.state === "running",
    every: () => (isIndexing(view.detail) ? INDEXING_MS : null),
    refresh: () => refresh(view),
  };
}

async function refresh(view) {
  view.detail = await loadRun(view.run);
  await loadRollouts(view);
}

function filters(view, draw) {
  const { parameters } = view;
  const set = (name) => (value) => change(view, { [name]: value }, true);
  const search = searchField("Search the text of answers", parameters.search, (text) => change(view, { search: text }));
  const clear = element("button", {
    type: "button",
    class: "plain",
    text: "Clear filters",
    onclick: () => change(view, emptied(parameters), true).then(draw),
  });
  const order = [parameters.sort, parameters.order].filter(Boolean).join(" ");
  const fields = [
    select("Answers of", sources(view), parameters.source, set("source"), { name: "source" }),
    isTraining(parameters) ? numberField("Step", "step", view) : null,
    select("Verdict", CHANGES, parameters.changed, set("changed"), {
      name: "changed",
      title: "compared with the previous time the prompt was answered",
    }),
    rangeField("Reward", "reward", view, "any"),
    rangeField("Length", "length", view, "1"),
    element(
      "label",
      { class: "field" },
      element("input", {
        type: "checkbox",
        name: "truncated",
        checked: parameters.truncated === "1",
        onchange: (event) => set("truncated")(event.target.checked ? "1" : ""),
      }),
      element("span", { text: "truncated" }),
    ),
    select("Sort by", SORTS, order, (value) => change(view, { sort: value.split(" ")[0], order: value.split(" ")[1] }, true), {
      name: "sort",
    }),
    clear,
  ];
  return element(
    "form",
    { class: "panel filters", role: "search", onsubmit: (event) => event.preventDefault() },
    search,
    foldedFilters(fields.filter(Boolean)),
    view.chips,
    parameters.prompt ? promptChip(view, draw) : null,
  );
}

// On a phone, the filters are folded.
function foldedFilters(fields) {
  const open = !matchMedia("(max-width: 700px)").matches;
  return element("details", { class: "more-filters", open }, element("summary", { text: "Filters and order" }), element("div", {}, fields));
}

function isTraining({ source }) {
  return !source || source === "train" || source === "skipped";
}

// What identifies the list: rollouts keep it in their address, so that "next" and "previous" walk through it.
export function listOf({ offset: _offset, color: _color, ...parameters }) {
  return parameters;
}

export function listLink(run, parameters, position = 0) {
  const offset = LIMIT * Math.floor(position / LIMIT) || "";
  return link(["run", run, "rollouts"], { ...parameters, offset });
}

function emptied(parameters) {
  return Object.fromEntries(Object.keys(parameters).map((name) => [name, ""]));
}

function sources({ detail }) {
  const evals = detail.evals.map(({ name, label, split, step }) => [
    name,
    `${label} (${[split, `step ${step}`].filter(Boolean).join(", ")})`,
  ]);
  const skipped = detail.skipped.length ? [["skipped", "skipped batches (not trained)"]] : [];
  return [["", "training"], ...skipped, ["eval", "all evaluations"], ...evals];
}

function numberField(title, name, view) {
  const steps = view.detail.train_steps;
  const attributes = {
    type: "number",
    name,
    min: steps[0] ?? 0,
    max: steps.at(-1) ?? 0,
    placeholder: "all",
    value: view.parameters[name] ?? "",
  };
  const input = element("input", {
    ...attributes,
    onchange: (event) => change(view, { [name]: event.target.value }, true),
  });
  return element("label", { class: "field" }, element("span", { text: title }), input);
}

function rangeField(title, name, view, step) {
  const input = (end) =>
    element("input", {
      ...{
        type: "number",
        name: `${end}_${name}`,
        step,
        placeholder: end,
        "aria-label": `${title}, ${end === "min" ? "minimum" : "maximum"}`,
      },
      value: view.parameters[`${end}_${name}`] ?? "",
      onchange: (event) => change(view, { [`${end}_${name}`]: event.target.value }, true),
    });
  return element(
    "div",
    { class: "field" },
    element("span", { text: title }),
    element("span", { class: "range" }, input("min"), "\u2013", input("max")),
  );
}

function promptChip(view, draw) {
  const text = `prompt ${visibleText(view.parameters.prompt)} \u00d7`;
  return element("button", {
    type: "button",
    class: "chip",
    "aria-pressed": "true",
    text,
    title: "Show all prompts",
    onclick: () => change(view, { prompt: "" }, true).then(draw),
  });
}

function drawChips(view, statuses) {
  const chosen = new Set((view.parameters.status ?? "").split(",").filter(Boolean));
  const names = [...new Set([...Object.keys(statuses ?? {}), ...chosen])];
  view.chips.replaceChildren(
    ...names.map((status) =>
      element(
        "button",
        {
          type: "button",
          class: "chip",
          "data-status": status,
          "aria-pressed": String(chosen.has(status)),
          onclick: () => toggleStatus(view, chosen, status),
        },
        visibleText(status.replaceAll("_", " ")),
        element("span", { class: "muted", text: formatNumber(statuses[status] ?? 0) }),
      ),
    ),
  );
}

function toggleStatus(view, chosen, status) {
  if (!chosen.delete(status)) chosen.add(status);
  change(view, { status: [...chosen].join(",") }, true);
}

function change(view, changes, push = false) {
  Object.assign(view.parameters, { offset: "" }, changes);
  setParameters(view.parameters, { push });
  return loadRollouts(view);
}

async function loadRollouts(view, signal) {
  const { parameters, run } = view;
  const offset = Number(parameters.offset) || 0;
  const ticket = (view.ticket = {});
  const answer = await get(runPath(run, "rollouts"), { ...parameters, offset, limit: LIMIT }, signal);
  if (view.ticket !== ticket) return; // a later request was made in the meantime
  if (isSearching(answer)) setTimeout(() => view.ticket === ticket && loadRollouts(view).catch(() => {}), 100);
  const text = JSON.stringify([answer, view.detail.indexed]);
  if (text === view.shown) return;
  view.shown = text;
  drawChips(view, answer.statuses);
  const focused = document.activeElement?.closest("tr")?.dataset.href;
  view.list.replaceChildren(
    ...[indexNote(view.detail), skippedNote(view), searchNote(answer), ...rows(view, answer, offset)].filter(Boolean),
  );
  if (focused) view.list.querySelector(`tr[data-href="${CSS.escape(focused)}"] a`)?.focus();
}

// A search reads some files per request; the next request continues it.
function isSearching({ searched }) {
  return Boolean(searched) && searched.done < searched.total;
}

function searchNote(answer) {
  if (!isSearching(answer)) return null;
  const { done, total } = answer.searched;
  return element("p", { class: "muted", role: "status", text: `Searching: ${done} of ${total} files so far.` });
}

function skippedNote({ parameters, detail }) {
  if (parameters.source !== "skipped") return null;
  const reasons = detail.skipped.map(({ step, reason }) => `Step ${formatNumber(step)}: ${visibleText(reason)}.`);
  return element(
    "p",
    { class: "muted skipped-note" },
    "The policy was not trained on these batches. ",
    reasons.slice(0, REASONS).join(" "),
    reasons.length > REASONS ? ` And ${formatNumber(reasons.length - REASONS)} more.` : "",
  );
}

function rows(view, answer, offset) {
  if (!answer.rows.length) return isIndexing(view.detail) ? [] : [nothing(view)];
  const list = listOf(view.parameters);
  const href = ({ source, step, index }) => link(["run", view.run, "rollout", source, step, index], list);
  const onOffset = (target) => change(view, { offset: target || "" }, true).then(() => scrollTo(0, 0));
  const page = pager({ total: answer.total, offset, limit: LIMIT, noun: "rollout", onOffset });
  const byStep = !view.parameters.sort || view.parameters.sort === "step";
  const grouped = byStep && answer.rows.some((row) => row.passed[1] > 1);
  const groupHead = (row) => ({
    key: [row.source, row.step, row.group].join("/"),
    content: () => groupTitle(view.run, row),
  });
  return [
    table(columns(view, grouped), answer.rows, { href, caption: "Rollouts", groupHead: grouped ? groupHead : null }),
    page,
  ];
}

// The question above its answers, with its pass rate at this time.
function groupTitle(run, row) {
  const [correct, count] = row.passed;
  const isStep = row.source === "train" || row.source === "skipped";
  const group = { source: row.source === "train" ? "" : row.source };
  return element(
    "div",
    { class: "controls tight" },
    element("span", { class: "nowrap muted", text: isStep ? `Step ${formatNumber(row.step)}, group ${row.group}` : row.source }),
    element("span", { class: "question-line", dir: "auto", title: visibleText(row.prompt_preview), text: visibleText(row.prompt_preview || row.prompt_id) }),
    pill(`${formatNumber(correct)} of ${formatNumber(count)} correct`, correct === count ? "good" : correct ? "" : "bad"),
    isStep ? element("a", { href: link(["run", run, "group", row.step, row.group], group), text: "Group" }) : null,
    element("a", { href: link(["run", run, "story"], { prompt: row.prompt_id }), text: "Story" }),
  );
}

function nothing({ parameters, detail }) {
  if (Object.entries(parameters).some(([name, value]) => value && !["offset", "sort", "order"].includes(name))) {
    return empty("No rollout matches", "Change the search or clear the filters.");
  }
  const text =
    detail.state === "running"
      ? "They appear when the first step is complete."
      : "This run has no saved rollouts, or they were pruned (log.keep_rollouts).";
  return empty("No rollouts", text);
}

function columns(view, grouped) {
  const training = isTraining(view.parameters);
  const group = (row) =>
    element("a", {
      href: link(["run", view.run, "group", row.step, row.group], { source: row.source === "train" ? "" : row.source }),
      title: "All answers to this prompt in this step",
      text: formatNumber(row.group),
    });
  const question = (row) => element("div", { class: "muted small question-line", dir: "auto", text: visibleText(row.prompt_preview || row.prompt_id) });
  const answer = (row, href) => [grouped ? null : question(row), rowLink(row.preview || "(empty)", href)];
  return [
    grouped ? null : { title: "Step", label: "Step", class: "number", cell: (row) => formatNumber(row.step) },
    training && !grouped ? { title: "Group", label: "Group", class: "number", cell: group } : null,
    { title: "Status", label: "Status", class: "nowrap", cell: (row) => [statusPill(row.status), skippedPill(row)] },
    { title: grouped ? "Answer" : "Question and answer", class: "preview", cell: answer },
    { title: "Reward", label: "Reward", class: "number", cell: (row) => formatNumber(row.reward) },
    training ? { title: "Advantage", label: "Advantage", class: "number", cell: (row) => signed(row.advantage) } : null,
    { title: "Length", label: "Length", class: "number", cell: (row) => formatNumber(row.length) },
    { title: "Turns", label: "Turns", class: "number", cell: (row) => formatNumber(row.turns), has: (row) => row.turns > 1 },
    { title: "Finish", label: "Finish", cell: (row) => row.finish ?? "", has: (row) => row.finish },
    {
      title: "Verdict",
      label: "Verdict",
      class: "nowrap",
      cell: (row) => changePill(row.changed) ?? "",
      has: (row) => row.changed,
    },
  ].filter(Boolean);
}

export function signed(value) {
  const text = formatNumber(value);
  if (value > 0) return element("span", { class: "good", text: `+${text}` });
  return value < 0 ? element("span", { class: "bad", text }) : text;
}
