// One rollout with its tokens, and the answers of one group side by side.

import { get, runPath } from "./api.js";
import { firstDifference, markedText, piecesOf } from "./diff.js";
import { element, formatNumber, plural, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import { listLink, listOf, signed } from "./rollouts.js";
import { loadRun, runCrumbs, runHead } from "./run.js";
import { tokenView } from "./tokens.js";
import { changePill, empty, isIndexing, panel, pill, skippedPill, statusPill, textBlock } from "./widgets.js";

export async function rollout({ parts: [, run, , source, step, index], parameters, signal }) {
  const load = () => get(runPath(run, "rollouts", source, step, index), {}, signal);
  const list = { source: source === "train" ? "" : source, ...listOf(parameters) };
  const loadNeighbors = () => get(runPath(run, "neighbors", source, step, index), listOf(parameters), signal);
  const [detail, answer, neighbors] = await Promise.all([loadRun(run, signal), load(), loadNeighbors().catch(() => null)]);
  const text = element("div", {}, textPanel(answer, parameters));
  if (answer.tokens_pending) showTokensLater(text, load, parameters, signal);
  const context = { run, source, step, index, parameters };
  const steps = element("div", { class: "push controls tight" });
  const split = element(
    "div",
    { class: "split" },
    element("div", { class: "stack" }, promptPanel(answer), text),
    sidePanel(answer, context),
  );
  const view = {
    title: `Rollout ${step}/${index} of ${detail.name}`,
    parts: [runHead(detail, "rollouts"), rolloutHead(answer, context, steps), split],
  };
  const showNeighbors = (found) => {
    const at = (other) =>
      other ? link(["run", run, "rollout", other.source, other.step, other.index], parameters) : null;
    Object.assign(view, { previous: at(found?.previous), next: at(found?.next) });
    view.up = listLink(run, list, found?.position ?? 0);
    view.crumbs = runCrumbs(
      detail,
      { text: "Rollouts", href: view.up },
      { text: `step ${Number(step)}, ${index}` },
    );
    steps.replaceChildren(
      element("span", { class: "muted", text: positionText(found) }),
      stepLink("\u2190 Previous", view.previous, "k"),
      stepLink("Next \u2192", view.next, "j"),
    );
  };
  showNeighbors(neighbors);
  if (isPartial(neighbors, detail)) showNeighborsLater(showNeighbors, loadNeighbors, run, signal);
  return view;
}

function positionText(found) {
  if (!found) return "";
  const { position, total } = found;
  return position === null ? "not in the list" : `${formatNumber(position + 1)} of ${formatNumber(total)}`;
}

// The server is still indexing, or searching for the text of the list.
function isPartial(found, detail) {
  return !found || isIndexing(detail) || (found.searched && found.searched.done < found.searched.total);
}

async function showNeighborsLater(show, load, run, signal) {
  for (let detail = null; !signal.aborted;) {
    await new Promise((resolve) => setTimeout(resolve, 300));
    const found = await load().catch(() => null);
    detail = await loadRun(run, signal).catch(() => detail);
    if (!found || !detail || signal.aborted) return;
    show(found);
    if (!isPartial(found, detail)) return;
  }
}

function rolloutHead(answer, { run, source, step, index }, steps) {
  const named = { train: `Step ${Number(step)}, rollout ${index}`, skipped: `Step ${Number(step)}, skipped, rollout ${index}` };
  const place = named[source] ?? `${source}, answer ${index}`;
  const group = named[source]
    ? element("a", {
        href: link(["run", run, "group", step, answer.group], { source: source === "train" ? "" : source }),
        text: "Compare the group",
      })
    : null;
  const story = element("a", { href: link(["run", run, "story"], { prompt: answer.prompt_id }), text: "Learning story" });
  const reason = answer.skipped ? element("span", { class: "muted", text: visibleText(answer.skipped) }) : null;
  return element(
    "div",
    { class: "head" },
    element("h2", { text: place }),
    statusPill(answer.status ?? answer.verdict?.status),
    skippedPill({ source }),
    changePill(answer.changed),
    reason,
    group,
    story,
    steps,
  );
}

function stepLink(text, href, key) {
  return element("a", { class: "button", href, "aria-disabled": href ? null : "true", title: `key ${key}`, text });
}

function promptPanel({ messages }) {
  return panel("Prompt", element("div", { class: "body" }, messageList(messages)));
}

// Messages of a chat; anything else, from a file of another origin, as JSON.
export function messageList(messages) {
  const list = Array.isArray(messages) ? messages : messages ? [messages] : [];
  return list.map((one) => message(one !== null && typeof one === "object" ? one : { role: "", content: one }));
}

function message({ role, content, tool_calls: calls, name }) {
  const text =
    typeof content === "string"
      ? content
      : content === null || content === undefined
        ? ""
        : JSON.stringify(content, null, 1);
  return element(
    "div",
    { class: `message ${role === "assistant" ? "action" : "context"}` },
    element("div", { class: "role", text: visibleText([role, name].filter(Boolean).join(" \u00b7 ")) }),
    text ? textBlock(text) : null,
    (Array.isArray(calls) ? calls : []).map((call) =>
      textBlock(`tool call: ${JSON.stringify(call.function ?? call, null, 1)}`),
    ),
  );
}

// The server is still loading the tokenizer.
async function showTokensLater(place, load, parameters, signal) {
  while (!signal.aborted) {
    await new Promise((resolve) => setTimeout(resolve, 300));
    const answer = await load().catch(() => null);
    if (!answer || answer.tokens_pending) continue;
    if (!signal.aborted) place.replaceChildren(textPanel(answer, parameters));
    return;
  }
}

function textPanel(answer, parameters) {
  const { tokens, tokens_problem: problem, turns } = answer;
  const note = problem ? element("span", { class: "muted", text: visibleText(problem) }) : null;
  if (!tokens) return panel("Answer", element("div", { class: "body" }, note, episode(answer)));
  const view = tokenView(tokens, {
    coloring: parameters.color,
    turns,
    onColoring: (key) => setParameters({ ...parameters, color: key }),
  });
  const section = panel(turns?.length > 2 ? "Episode, token by token" : "Answer, token by token", view, note);
  return turns?.length > 2
    ? element(
        "div",
        { class: "stack" },
        section,
        foldedPanel("Episode as text", element("div", { class: "body" }, episode(answer))),
      )
    : section;
}

function foldedPanel(title, body) {
  return element("details", { class: "panel folded" }, element("summary", {}, element("h2", { text: title })), body);
}

// The turns as text: what the environment said, and what the policy sampled. The prompt has a panel of its own.
function episode({ turns, text }) {
  if (!turns?.length) return textBlock(text);
  let actions = 0;
  const shown = turns[0].role === "action" ? turns : turns.slice(1);
  return shown.map((turn) => {
    const sampled = turn.role === "action";
    actions += sampled;
    const title = sampled ? `Turn ${actions}, sampled` : actions ? "Observation" : "Prompt";
    const facts = [
      turn.tokens === undefined ? "" : plural(turn.tokens, "token"),
      turn.reward ? `reward ${formatNumber(turn.reward)}` : "",
      turn.masked ? "not trained" : "",
    ];
    return element(
      "div",
      { class: `message ${sampled ? "action" : "context"}` },
      element("div", { class: "role", text: [title, ...facts.filter(Boolean)].join(" \u00b7 ") }),
      textBlock(turn.text ?? ""),
    );
  });
}

function sidePanel(answer, { run, source }) {
  const { verdict } = answer;
  const rows = [
    ["reward", formatNumber(answer.reward, 6)],
    ["advantage", answer.advantage === undefined ? null : signed(answer.advantage)],
    ["length", plural(answer.length, "token")],
    ["finish", answer.finish],
    ["truncated", answer.truncated ? "yes" : "no"],
    [
      "expected answer",
      answer.answer === null || answer.answer === undefined || answer.answer === "" ? null : visibleText(String(answer.answer)),
    ],
    [
      "parsed answer",
      verdict?.parsed === null || verdict?.parsed === undefined ? null : visibleText(String(verdict.parsed)),
    ],
    ...Object.entries(verdict?.parts ?? {}).map(([name, value]) => [`part: ${visibleText(name)}`, formatNumber(value)]),
    ["group, sample", `${answer.group}, ${answer.sample}`],
    ["policy version", answer.version === null || answer.version === undefined ? null : String(answer.version)],
    ["in the loss", answer.masked === undefined ? null : answer.masked ? "no" : "yes"],
    [
      "prompt",
      element("a", {
        href: link(["run", run, "rollouts"], { prompt: answer.prompt_id, source: source === "train" ? "" : source }),
        text: visibleText(answer.prompt_id),
      }),
    ],
  ];
  const list = rows
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => [element("dt", { text: name }), element("dd", {}, value)]);
  const body = element(
    "div",
    { class: "body" },
    element("dl", {}, list),
    verdict?.detail ? folded("Detail of the judge", verdict.detail, true) : null,
    answer.solution ? folded("Solution", answer.solution) : null,
    fieldsOf(answer),
  );
  const section = panel("Verdict", body);
  section.classList.add("side");
  return section;
}

function fieldsOf({ fields }) {
  return fields && Object.keys(fields).length ? folded("Fields of the prompt", JSON.stringify(fields, null, 1)) : null;
}

function folded(title, text, open = false) {
  return element("details", { open }, element("summary", { text: title }), textBlock(text, "text clipped"));
}

export async function group({ parts: [, run, , step, number], parameters, signal }) {
  const [detail, answer] = await Promise.all([
    loadRun(run, signal),
    get(runPath(run, "groups", step, number), { source: parameters.source }, signal),
  ]);
  const at = (other) =>
    other === null || other === undefined ? null : link(["run", run, "group", step, other], parameters);
  const { prompt, rollouts } = answer;
  const correct = rollouts.filter((one) => statusOf(one) === "ok").length;
  const head = element(
    "div",
    { class: "head" },
    element("h2", { text: `Step ${Number(step)}, group ${number}` }),
    skippedPill(parameters),
    element("span", { class: "muted", text: `${correct} of ${plural(rollouts.length, "answer")} correct` }),
    element("a", { href: link(["run", run, "rollouts"], { prompt: prompt.id }), text: visibleText(prompt.id ?? "") }),
    element("a", { href: link(["run", run, "story"], { prompt: prompt.id }), text: "Learning story" }),
    element(
      "div",
      { class: "push controls tight" },
      stepLink("\u2190 Previous", at(answer.previous), "k"),
      stepLink("Next \u2192", at(answer.next), "j"),
    ),
  );
  const href = (one) => link(["run", run, "rollout", one.source, step, one.index], { step });
  const distinct = distinctAnswers(rollouts);
  const best = piecesOf(distinct[0]?.[0] ?? {});
  const cards = element(
    "div",
    { class: "cards" },
    distinct.map((same, number) => card(same, href, number ? best : null)),
  );
  const about = "Highest reward first. The mark is the first token that differs from the first answer.";
  const question = questionBody(prompt);
  return {
    title: `Group ${step}/${number} of ${detail.name}`,
    crumbs: runCrumbs(
      detail,
      { text: "Rollouts", href: link(["run", run, "rollouts"], { step, source: parameters.source }) },
      { text: `step ${Number(step)}, group ${number}` },
    ),
    parts: [
      runHead(detail, "rollouts"),
      head,
      panel("Prompt", question),
      distinct.length > 1 ? element("p", { class: "muted", text: about }) : null,
      rollouts.length ? cards : empty("This group has no answers"),
    ],
    previous: at(answer.previous),
    next: at(answer.next),
  };
}

function statusOf(one) {
  return one.status ?? one.verdict?.status;
}

export function questionBody({ messages, answer }) {
  const expected = element(
    "p",
    { class: "expected" },
    element("span", { class: "muted", text: "expected answer " }),
    element("code", { text: visibleText(String(answer)) }),
  );
  return element("div", { class: "body" }, messageList(messages), answer ? expected : null);
}

// Lists of equal answers: the same text with the same verdict. The highest reward first.
function distinctAnswers(rollouts) {
  const groups = Map.groupBy(rollouts, (one) => JSON.stringify([one.text, one.reward, statusOf(one), one.truncated]));
  return [...groups.values()].sort(([a], [b]) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
}

// `best`: the pieces of the first answer, with which the text is compared; null for that answer.
function card(same, href, best) {
  const [one] = same;
  const status = statusOf(one);
  const pieces = piecesOf(one);
  const at = best ? firstDifference(pieces, best) : pieces.length;
  const facts = [
    `reward ${formatNumber(one.reward)}`,
    plural(one.length, "token"),
    one.verdict?.parsed ? `parsed ${visibleText(one.verdict.parsed)}` : "",
    one.truncated ? "truncated" : "",
    visibleText(one.verdict?.detail ?? ""),
  ];
  const others = same.slice(1).map((other) => element("a", { href: href(other), text: String(other.sample) }));
  return element(
    "article",
    { class: `card ${status === "ok" ? "good" : "bad"}` },
    element(
      "header",
      {},
      element("a", { class: "row-link", href: href(one), text: `Sample ${one.sample}` }),
      same.length > 1 ? pill(`\u00d7${same.length}`) : null,
      statusPill(status),
      changePill(one.changed),
      element("span", { class: "push muted" }, "advantage ", signed(one.advantage)),
    ),
    markedText(pieces, (index) => index === at),
    element(
      "footer",
      {},
      facts.filter(Boolean).map((text) => element("span", { text })),
      others.length ? element("span", { class: "controls tight" }, "also samples", others) : null,
    ),
  );
}
