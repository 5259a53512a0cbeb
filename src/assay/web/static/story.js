// The learning story of one question: its answers at some times of a run, and what is new in each of them.

import { get, runPath } from "./api.js";
import { heatColor } from "./charts.js";
import { markedText, newPieces, piecesOf } from "./diff.js";
import { element, formatNumber, plural, visibleText } from "./dom.js";
import { questionBody } from "./rollout.js";
import { link, setParameters } from "./route.js";
import { loadRun, runCrumbs, runHead } from "./run.js";
import { empty, indexNote, panel, pill, problemList, statusPill } from "./widgets.js";

const MAX_TIMES = 24; // as in story.py

export async function story({ parts: [, run], parameters, signal }) {
  const detail = await loadRun(run, signal);
  const view = { run, detail, parameters: { ...parameters }, body: element("div", { class: "stack" }) };
  await loadStory(view, signal);
  const list = { prompt: parameters.prompt };
  return {
    title: `Learning story of ${detail.name}`,
    crumbs: runCrumbs(detail, { text: "Prompts", href: link(["run", run, "prompts"]) }, { text: "Learning story" }),
    parts: [
      runHead(detail, "prompts"),
      problemList(detail.problems),
      element(
        "div",
        { class: "head" },
        element("h2", { text: "Learning story" }),
        element("a", { href: link(["run", run, "rollouts"], list), text: visibleText(parameters.prompt ?? "") }),
        copyButton(),
      ),
      view.body,
    ],
    up: link(["run", run, "prompts"]),
    live: () => view.detail.state === "running",
    refresh: async () => {
      view.detail = await loadRun(run);
      await loadStory(view);
    },
  };
}

function copyButton() {
  const copy = async ({ target }) => {
    const done = await navigator.clipboard.writeText(location.href).then(
      () => "Copied",
      () => "Copying is not allowed here",
    );
    target.textContent = done;
  };
  return element("button", { type: "button", class: "push", text: "Copy link", onclick: copy });
}

async function loadStory(view, signal) {
  const { prompt, at } = view.parameters;
  const answer = await get(runPath(view.run, "story"), { prompt, at }, signal);
  const text = JSON.stringify(answer);
  if (text === view.shown) return;
  view.shown = text;
  view.body.replaceChildren(...storyParts(view, answer).filter(Boolean));
}

function storyParts(view, { prompt, times, answers, first_correct: first }) {
  if (!times.length)
    return [indexNote(view.detail) ?? empty("No answers to this question", "This run has no saved rollouts of it.")];
  const solved =
    first === null
      ? `Never solved in ${plural(times.length, "time")}.`
      : `First solved at ${timeTitle(times[first])} (time ${formatNumber(first + 1)} of ${formatNumber(times.length)}).`;
  return [
    panel("Question", questionBody(prompt)),
    panel("Times", element("div", { class: "body times" }, timeButtons(view, times, answers)), element("span", { class: "muted", text: solved })),
    element("p", {
      class: "muted",
      text: "One answer of each chosen time: of the majority, correct or not, and the correct one when the question was first solved. Marked tokens are new compared with the answer before.",
    }),
    element(
      "ol",
      { class: "story" },
      answers.map((one, index) => storyStep(view, one, answers[index - 1])),
    ),
  ];
}

function timeTitle({ label, step }) {
  return label === "training" ? `step ${formatNumber(step)}` : `${label}, step ${formatNumber(step)}`;
}

// One button per time, colored by the pass rate; pressed ones are shown.
function timeButtons(view, times, answers) {
  const chosen = new Set(answers.map((one) => one.at));
  return times.map((time) => {
    const title = `${timeTitle(time)}: ${time.correct} of ${time.count} correct`;
    const toggle = () => {
      if (!chosen.delete(time.at)) chosen.add(time.at);
      const at = times.map((one) => one.at).filter((key) => chosen.has(key));
      view.parameters.at = at.slice(0, MAX_TIMES).join(",");
      setParameters(view.parameters, { push: true });
      loadStory(view);
    };
    return element(
      "button",
      { type: "button", class: "time", "aria-pressed": String(chosen.has(time.at)), "aria-label": title, title, onclick: toggle },
      element("i", { style: { background: heatColor(time.correct / time.count) } }),
      time.label === "training" ? formatNumber(time.step) : `${time.label} ${formatNumber(time.step)}`,
    );
  });
}

function storyStep(view, one, before) {
  const pieces = piecesOf(one);
  const isNew = before ? newPieces(pieces, piecesOf(before)) : [];
  const href = link(["run", view.run, "rollout", one.source, one.step, one.index]);
  return element(
    "li",
    { class: `card ${one.status === "ok" ? "good" : "bad"}${one.is_first_correct ? " first-correct" : ""}` },
    element(
      "header",
      {},
      element("a", { class: "row-link", href, text: timeTitle(one) }),
      statusPill(one.status),
      one.is_first_correct ? pill("first correct answer", "good") : null,
      element("span", { class: "push muted", text: `${one.correct} of ${one.count} correct \u00b7 reward ${formatNumber(one.reward)}` }),
    ),
    markedText(pieces, (index) => isNew[index]),
  );
}
