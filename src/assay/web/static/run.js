// One run: its header with tabs, and the summary with findings, facts and curves.

import { get, runPath } from "./api.js";
import { intervalPlot, pngButton, spreadOut } from "./charts.js";
import { Curves, curveControls } from "./curves.js";
import { element, formatDuration, formatNumber, formatShare, plural, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import {
  badgePill,
  empty,
  factList,
  findingList,
  modelName,
  pValueText,
  pacePart,
  panel,
  problemList,
  rowLink,
  searchField,
  statePill,
  statusPill,
  stepsText,
  timeText,
} from "./widgets.js";

export const PENDING_MS = 500; // between updates while the doctor examines a run
export const TABS = [
  ["", "Summary"],
  ["prompts", "Prompts"],
  ["rollouts", "Rollouts"],
  ["changes", "Before and after"],
  ["config", "Config"],
];

export function loadRun(run, signal) {
  return get(runPath(run), {}, signal);
}

export function runHead(detail, active) {
  const links = TABS.map(([part, title]) =>
    element("a", {
      href: link(["run", detail.id, part].filter(Boolean)),
      "aria-current": part === active ? "page" : null,
      text: title,
    }),
  );
  const facts = [detail.task, modelName(detail.model), detail.algorithm]
    .filter(Boolean)
    .map(visibleText)
    .join(" \u00b7 ");
  const head = element(
    "div",
    { class: "head" },
    element("h1", { text: detail.name }),
    statePill(detail),
    badgePill(detail),
    element("span", { class: "muted", text: facts }),
  );
  const tabs = element("nav", { class: "tabs", "aria-label": "Views of the run" }, links);
  requestAnimationFrame(() => showActive(tabs));
  return element("div", {}, head, tabs);
}

// On a phone, the tabs are wider than the screen: the active one is scrolled into view.
export function showActive(tabs) {
  const active = tabs?.querySelector("[aria-current]");
  if (active) tabs.scrollLeft = active.offsetLeft - (tabs.clientWidth - active.offsetWidth) / 2;
}

export function runCrumbs(detail, ...more) {
  return [{ text: detail.name, href: link(["run", detail.id]) }, ...more];
}

export async function runSummary({ parts: [, run], parameters, signal }) {
  const detail = await loadRun(run, signal);
  const curves = new Curves([{ id: run, name: detail.name }]);
  if (parameters.smoothing !== undefined) curves.options.smoothing = Number(parameters.smoothing) || 0;
  curves.options.byTime = parameters.x === "time";
  await curves.load(signal);
  const view = {
    run,
    detail,
    curves,
    parameters: { ...parameters },
    top: element("div", { class: "stack" }),
    samples: element("div", {}),
    body: element("div", { class: "stack" }),
  };
  drawTop(view);
  drawCurves(view);
  await drawSamples(view, signal);
  return {
    title: detail.name,
    crumbs: runCrumbs(detail),
    parts: [view.top, view.samples, view.body],
    live: () => view.detail.state === "running",
    every: () => (view.detail.findings_pending ? PENDING_MS : null),
    refresh: () => refreshSummary(view),
  };
}

async function refreshSummary(view) {
  const grown = await view.curves.reload();
  const detail = await loadRun(view.run);
  if (JSON.stringify(detail) === JSON.stringify(view.detail)) return;
  await drawSamples(view); // after the index has grown
  const hadPanels = view.curves.charts.size > 0;
  view.detail = detail;
  drawTop(view);
  if (grown && (!hadPanels || view.panels !== view.curves.panels().length)) drawCurves(view);
}

// The newest answers to two prompts: of each, the one with the highest reward.
async function drawSamples(view, signal) {
  const { run } = view;
  const { rows } = await get(runPath(run, "rollouts"), { limit: 100 }, signal).catch(() => ({ rows: [] }));
  const groups = [...Map.groupBy(rows, ({ step, group }) => `${step}/${group}`).values()].slice(0, 2);
  const newest = groups.map((group) => group.reduce((best, row) => (row.reward > best.reward ? row : best)));
  const text = JSON.stringify(newest);
  if (text === view.shownSamples) return;
  view.shownSamples = text;
  const cards = element(
    "div",
    { class: "body columns" },
    newest.map((row) => sampleCard(run, row)),
  );
  const more = element("a", { class: "push", href: link(["run", run, "rollouts"]), text: "All rollouts \u2192" });
  view.samples.replaceChildren(...(newest.length ? [panel("Newest answers", cards, more)] : []));
}

function sampleCard(run, row) {
  const [correct, count] = row.passed;
  return element(
    "article",
    { class: "sample" },
    element("p", { class: "muted", dir: "auto", text: visibleText(row.prompt_preview || row.prompt_id) }),
    element("p", { class: "preview-text" }, rowLink(row.preview || "(empty)", link(["run", run, "rollout", row.source, row.step, row.index]))),
    element(
      "p",
      { class: "controls tight muted small" },
      statusPill(row.status),
      `reward ${formatNumber(row.reward)} \u00b7 step ${formatNumber(row.step)} \u00b7 ${correct} of ${count} correct`,
    ),
  );
}

function drawTop(view) {
  const { detail } = view;
  const parts = [
    runHead(detail, ""),
    failure(detail),
    problemList(detail.problems),
    findings(detail),
    skippedBatches(detail),
    facts(detail),
    results(detail),
  ];
  view.top.replaceChildren(...parts.filter(Boolean));
}

function failure({ error }) {
  if (!error) return null;
  const text = element("p", { class: "evidence", text: visibleText(error) });
  return element(
    "div",
    { class: "finding error", role: "alert" },
    element("span", { class: "severity", text: "Failed" }),
    text,
  );
}

function skippedBatches({ id, skipped }) {
  if (!skipped.length) return null;
  const steps = skipped.length > 1 ? `${formatNumber(skipped.length)} steps` : `step ${formatNumber(skipped[0].step)}`;
  return element(
    "p",
    { class: "muted" },
    `The batch of ${steps} was not trained: ${visibleText(skipped[0].reason)}. `,
    element("a", { href: link(["run", id, "rollouts"], { source: "skipped" }), text: "Show the skipped rollouts" }),
  );
}

function findings({ findings, findings_pending: pending, state, steps }) {
  if (findings.length) return findingList(findings);
  if (pending) return element("p", { class: "muted", role: "status", text: "The doctor is examining the run \u2026" });
  if (!steps || state === "failed") return null;
  return element("p", {
    class: "healthy",
    text: state === "running" ? "The doctor has found no problems so far." : "The doctor found no problems.",
  });
}

function facts(detail) {
  const { summary, steps, steps_planned: planned } = detail;
  const done = planned ? Math.min(1, steps / planned) : null;
  const bar =
    done !== null && detail.state === "running"
      ? element("div", { class: "bar" }, element("i", { style: { width: `${100 * done}%` } }))
      : null;
  return factList([
    ["Steps", stepsText(detail), bar],
    ["Remaining", pacePart(detail), "from the median time of the last steps"],
    ["Tokens per second", detail.tokens_per_s === null ? null : formatNumber(detail.tokens_per_s), "sampled, while generating"],
    ["Reward, last step", formatNumber(detail.reward)],
    [
      "Time",
      formatDuration(detail.wall_s),
      summary?.train_s ? `${formatDuration(summary.train_s)} in training steps` : "",
    ],
    [
      "Answers sampled",
      summary?.answers ? formatNumber(summary.answers) : null,
      summary?.tokens ? plural(summary.tokens, "token") : "",
    ],
    ["Task", visibleText(detail.task ?? "")],
    ["Model", element("span", { title: detail.model, text: visibleText(modelName(detail.model)) })],
    ["Algorithm", visibleText(detail.algorithm ?? "")],
    ["Seed", detail.seed === null || detail.seed === undefined ? null : String(detail.seed)],
    ["Started", timeText(detail.started)],
  ]);
}

function results({ id, before, after, paired, summary }) {
  if (!before || before.accuracy === undefined) return null;
  const rows = [
    resultRow("Before", before, "var(--muted)"),
    after ? resultRow("After", after, "var(--accent)") : null,
  ].filter(Boolean);
  const plot = intervalPlot(rows, { width: Math.min(520, document.documentElement.clientWidth - 62) });
  const split = summary?.split ? `on ${plural(before.n ?? 0, "question")} of the ${summary.split} split` : "";
  const more = paired
    ? element("a", { class: "push", href: link(["run", id, "changes"]), text: "Questions gained and lost \u2192" })
    : null;
  const body = element(
    "div",
    { class: "body controls" },
    plot,
    paired
      ? changeText(before, after, paired)
      : element("p", { class: "muted", text: "The evaluation after training has not been made yet." }),
  );
  const save = pngButton(() => plot, () => ["Accuracy before and after"]);
  return panel("Accuracy before and after", body, element("span", { class: "muted", text: split }), more, save);
}

function changeText(before, after, paired) {
  const gain = after.accuracy - before.accuracy;
  const sign = gain >= 0 ? "+" : "";
  return element(
    "p",
    { class: "result-text" },
    element("b", {
      class: gain > 0 ? "good" : gain < 0 ? "bad" : "muted",
      text: `${sign}${formatShare(gain).replace("\u00a0%", "")} points`,
    }),
    ` \u00b7 ${plural(paired.gained, "question")} gained, ${formatNumber(paired.lost)} lost`,
    element("br"),
    element("span", { class: "muted", text: `paired test: p ${pText(paired.p_value)}` }),
  );
}

function pText(value) {
  const text = pValueText(value) ?? "unknown";
  return text.startsWith("<") ? text : `= ${text}`;
}

function resultRow(label, result, color) {
  return { label, value: result.accuracy, low: result.ci95?.[0] ?? null, high: result.ci95?.[1] ?? null, color };
}

function drawCurves(view) {
  const { curves } = view;
  const panels = curves.panels();
  view.panels = panels.length;
  curves.charts.clear();
  if (!panels.length) {
    const text =
      view.detail.state === "running"
        ? "They appear here as soon as the first step is logged."
        : "This run has logged no metrics.";
    view.body.replaceChildren(empty("No curves yet", text));
    return;
  }
  const remember = (changes) => setParameters(Object.assign(view.parameters, changes));
  const head = element(
    "div",
    { class: "head" },
    element("h2", { text: "Curves" }),
    element("div", { class: "push" }, curveControls(curves, remember)),
  );
  const grid = spreadOut(
    element(
      "div",
      { class: "charts" },
      panels.map((one) => curves.addChart(one)),
    ),
  );
  view.body.replaceChildren(head, grid, allMetrics(view, new Set(panels.map((one) => one.metric))));
}

// All other metrics, by the first part of their name, loaded when a group is opened.
function allMetrics(view, shown) {
  const groups = Map.groupBy(
    view.detail.metrics.filter((name) => !shown.has(name)),
    (name) => name.split("/")[0],
  );
  const list = element(
    "div",
    { class: "body" },
    [...groups].map(([prefix, names]) => metricGroup(view, prefix, names)),
  );
  const search = searchField("Search metrics", "", (text) => {
    for (const group of list.children) group.hidden = !group.dataset.names.includes(text.toLowerCase());
  });
  search.removeAttribute("data-search"); // the key / goes to the search of the page
  return panel(
    "All metrics",
    list,
    element("span", { class: "muted", text: plural(view.detail.metrics.length, "metric") }),
    element("div", { class: "push" }, search),
  );
}

function metricGroup(view, prefix, names) {
  const grid = spreadOut(element("div", { class: "charts" }));
  const open = async (event) => {
    if (!event.target.open || grid.childElementCount) return;
    grid.append(...(await view.curves.addMetrics(names)));
  };
  const summary = element(
    "summary",
    {},
    prefix,
    element("span", { class: "muted", text: names.map((name) => name.slice(prefix.length + 1)).join(", ") }),
  );
  return element(
    "details",
    { class: "metric-group", "data-names": names.join(" ").toLowerCase(), ontoggle: open },
    summary,
    grid,
  );
}
