// Two evaluations of the same questions: which were gained and which were lost, with both answers side by side.

import { get, runPath } from "./api.js";
import { element, formatNumber, plural, visibleText } from "./dom.js";
import { link, setParameters } from "./route.js";
import { messageList } from "./rollout.js";
import { loadRun, runCrumbs, runHead } from "./run.js";
import {
  changePill,
  empty,
  factList,
  pager,
  pill,
  problemList,
  pValueText,
  searchField,
  segmented,
  select,
  statusPill,
  textBlock,
} from "./widgets.js";

const LIMIT = 20;
const SHOWN = { changed: "All changes", gained: "Gained", lost: "Lost", all: "All questions" };

export async function changes({ parts: [, run], parameters, signal }) {
  const detail = await loadRun(run, signal);
  const head = [runHead(detail, "changes"), problemList(detail.problems)];
  const crumbs = runCrumbs(detail, { text: "Before and after" });
  const names = detail.evals.map((one) => one.name);
  if (names.length < 2) {
    const text =
      "A comparison needs two evaluations of the same questions, as before and after training (eval.before).";
    return { title: "Before and after", crumbs, parts: [...head, empty("Nothing to compare yet", text)] };
  }
  const [a, b] = defaultPair(detail.evals);
  const view = pairView(
    { a: parameters.a ?? a, b: parameters.b ?? b, ...parameters },
    (request, abort) => get(runPath(run, "compare"), request, abort),
    () => [run, run],
  );
  await view.load(signal);
  const choice = (title, key) =>
    select(
      title,
      detail.evals.map((one) => [one.name, evalTitle(one)]),
      view.parameters[key],
      (value) => view.change({ [key]: value }),
      { name: key },
    );
  const controls = element("div", { class: "panel filters" }, choice("From", "a"), choice("To", "b"), view.controls);
  return { title: `Before and after of ${detail.name}`, crumbs, parts: [...head, controls, view.element] };
}

export function evalTitle({ label, split, step, name }) {
  return label ? `${label} (${[split, `step ${step}`].filter(Boolean).join(", ")})` : name;
}

// Before and after training; else the first and the last evaluation of the same split.
function defaultPair(evals) {
  const after = evals.findLast((one) => one.label === "after") ?? evals.at(-1);
  const before = evals.find((one) => one.label === "before" && one.split === after.split);
  const first = before ?? evals.find((one) => one.split === after.split && one !== after) ?? evals[0];
  return [first.name, after.name];
}

// The list of changed questions: `fetchPair(parameters, signal)` asks the server, `runsOf()` gives the runs of a and b.
export function pairView(parameters, fetchPair, runsOf) {
  const view = {
    parameters,
    element: element("div", { class: "stack" }),
    controls: element("div", { class: "controls" }),
  };
  view.load = async (signal) => {
    const offset = Number(view.parameters.offset) || 0;
    const ticket = (view.ticket = {});
    const answer = await fetchPair({ show: "changed", ...view.parameters, offset, limit: LIMIT }, signal);
    if (view.ticket === ticket) view.element.replaceChildren(...pairParts(view, answer, offset, runsOf()));
  };
  view.change = async (changes, push = true) => {
    Object.assign(view.parameters, { offset: "" }, changes);
    setParameters(view.parameters, { push });
    await view
      .load()
      .catch((error) => view.element.replaceChildren(empty("There is no paired test of these evaluations", error.message)));
  };
  const show = segmented("Questions", SHOWN, parameters.show || "changed", (choice) =>
    view.change({ show: choice === "changed" ? "" : choice }),
  );
  view.controls.append(
    show,
    searchField("Search questions", parameters.search, (text) => view.change({ search: text }, false)),
  );
  return view;
}

function pairParts(view, answer, offset, runs) {
  const { counts, p_value: p, rows, total, unpaired } = answer;
  const facts = factList([
    ["Gained", element("span", { class: "good", text: formatNumber(counts.gained) }), "wrong before, correct after"],
    ["Lost", element("span", { class: "bad", text: formatNumber(counts.lost) }), "correct before, wrong after"],
    ["Correct in both", formatNumber(counts.same_correct)],
    ["Wrong in both", formatNumber(counts.same_wrong)],
    [
      "Paired test, p",
      pValueText(p) ?? "not available",
      p === null ? "" : p < 0.05 ? "significant at 5 %" : "not significant at 5 %",
    ],
    unpaired ? ["Not in both", formatNumber(unpaired)] : ["", null],
  ]);
  if (!rows.length) return [facts, empty("No such question", view.parameters.search ? "Change the search." : "")];
  const onOffset = (target) => view.change({ offset: target || "" }).then(() => scrollTo(0, 0));
  const list = element(
    "div",
    { class: "pairs" },
    rows.map((row) => pairCard(row, answer, runs)),
  );
  return [facts, list, pager({ total, offset, limit: LIMIT, noun: "question", onOffset })];
}

function pairCard(row, { a, b }, [runA, runB]) {
  const question = element("div", { class: "question" }, messageList(row.messages));
  const changed =
    row.change === "gained" || row.change === "lost"
      ? changePill(row.change)
      : pill(row.change === "same_correct" ? "correct in both" : "wrong in both");
  const expected =
    row.answer === null || row.answer === undefined
      ? null
      : element(
          "span",
          {},
          element("span", { class: "muted", text: "expected " }),
          element("code", { text: visibleText(String(row.answer)) }),
        );
  const sides = [answerSide(row.a, a, runA), answerSide(row.b, b, runB)];
  return element(
    "article",
    { class: "panel pair", "data-prompt": row.prompt_id },
    element("header", {}, question, element("div", { class: "controls tight" }, changed, expected)),
    element("div", { class: "answers" }, sides),
  );
}

function answerSide(answer, evaluation, run) {
  if (!answer) return element("div", { class: "answer muted", text: "no answer" });
  const href = link(["run", run, "rollout", evaluation.name, evaluation.step, answer.index]);
  const title = evaluation.label ?? evaluation.name;
  return element(
    "div",
    { class: "answer" },
    element(
      "h3",
      {},
      element("a", { class: "row-link", href, text: title }),
      statusPill(answer.status),
      element("span", { class: "plain-weight", text: plural(answer.length, "token") }),
    ),
    textBlock(answer.text, "text clipped"),
  );
}
