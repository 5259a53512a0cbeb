// The tokens of a rollout, colored by one of their numbers: data in, element out. No server, no other library.
//
//   tokenView(tokens, options)       chooser, scale and text; hovering or focusing a token shows its exact numbers
//   tokenColorings(tokens)           the numbers that these tokens have: [{key, label, values, ...}]
//   startColoring(colorings)         the key of the coloring that is shown first: one in which tokens differ
//   tokenFacts(tokens, index)        the numbers of one token as [name, text] pairs
//   exactNumber(value)               all digits of a 32-bit float
//
// tokens: {text: [...] or null, ids, mask, sampled, engine_logprobs, sampling_logprobs, trainer_logprobs, ref_logprobs,
//          entropies, advantages}, arrays of the same length or null; without texts, ids are shown.
//          bytes: {index: "E2 82"} of tokens that are not whole characters.
// options: coloring (a key of COLORINGS), onColoring(key), turns ([{role, ...}], for the titles of segments).
// Tokens are appended in blocks while the browser is idle, so that 100,000 of them do not block the page.
// Arrow keys move between tokens, with shift ten at a time; Home and End go to the first and the last token.

import { element, formatNumber, visibleText } from "./dom.js";

const BLOCK = 400; // tokens per block; a block ends at a line break if there is one
const MAX_BLOCK = 1200;
const VISIBLE = 0.1; // nats: if all tokens of an answer are more certain, their color says nothing

// `of` gives a token's number or null; `size` its strength before scaling; `signed`: colors differ below and above 0.
export const COLORINGS = [
  {
    key: "engine",
    label: "engine log-probability",
    unit: "nats",
    limit: [VISIBLE, 6],
    of: (t, i) => sampledValue(t, t.engine_logprobs, i),
    size: (value) => -value,
    help: "log-probability of the sampled token under the engine's distribution; stronger color: less likely",
  },
  {
    key: "trainer",
    label: "trainer log-probability",
    unit: "nats",
    limit: [VISIBLE, 6],
    of: (t, i) => t.trainer_logprobs?.[i] ?? null,
    size: (value) => -value,
    help: "log-probability of the same token in the trainer's forward pass; stronger color: less likely",
  },
  {
    key: "ratio",
    label: "trainer / engine ratio",
    unit: "",
    limit: [0.02, 2],
    signed: true,
    logarithmic: true,
    of: ratioOf,
    size: (value) => Math.log(value),
    help: "probability in the trainer divided by probability in the engine; 1 if both compute the same",
  },
  {
    key: "advantage",
    label: "advantage",
    unit: "",
    limit: [0.1, Infinity],
    signed: true,
    of: (t, i) => (t.mask?.[i] === 0 ? null : (t.advantages?.[i] ?? null)),
    size: (value) => value,
    help: "above 0: the update makes the token more likely; below 0: less likely",
  },
  {
    key: "entropy",
    label: "entropy",
    unit: "nats",
    limit: [0.5, Infinity],
    of: (t, i) => t.entropies?.[i] ?? null,
    size: (value) => value,
    help: "entropy of the trainer's distribution at this token; stronger color: more uncertain",
  },
  {
    key: "mask",
    label: "loss mask",
    unit: "",
    limit: [1, 1],
    of: (t, i) => t.mask?.[i] ?? null,
    size: (value) => value,
    help: "colored tokens are trained",
  },
];

function sampledValue(tokens, values, index) {
  return tokens.sampled && !tokens.sampled[index] ? null : (values?.[index] ?? null);
}

function ratioOf(tokens, index) {
  const [trainer, engine] = [
    tokens.trainer_logprobs?.[index] ?? null,
    sampledValue(tokens, tokens.engine_logprobs, index),
  ];
  return trainer === null || engine === null ? null : Math.exp(trainer - engine);
}

export function tokenColorings(tokens) {
  const count = tokens.ids.length;
  return COLORINGS.map((coloring) => ({
    ...coloring,
    values: Array.from({ length: count }, (_, i) => coloring.of(tokens, i)),
  }))
    .filter(({ values }) => values.some((value) => value !== null))
    .map((coloring) => ({ ...coloring, top: topOf(coloring) }));
}

// The strongest size that the scale shows: of the tokens, within the limits of the coloring.
function topOf({ values, size, limit: [least, most] }) {
  let top = least;
  for (const value of values) if (value !== null) top = Math.max(top, Math.abs(size(value)));
  return Math.min(top, most);
}

export function startColoring(colorings) {
  const strongest = ({ values, size }) => Math.max(0, ...values.map((value) => (value === null ? 0 : Math.abs(size(value)))));
  const [first] = colorings;
  const advantage = colorings.find(({ key }) => key === "advantage");
  return first && strongest(first) < VISIBLE && advantage && strongest(advantage) > 0 ? advantage.key : first?.key;
}

export function exactNumber(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  return String(Number(value.toPrecision(9)))
    .replace("-", "\u2212")
    .replace("e\u2212", "e-");
}

export function tokenFacts(tokens, index) {
  const engine = sampledValue(tokens, tokens.engine_logprobs, index);
  const numbers = [
    ["engine log-probability", engine],
    ["engine probability", engine === null ? null : Math.exp(engine)],
    ["sampling log-probability", sampledValue(tokens, tokens.sampling_logprobs, index)],
    ["trainer log-probability", tokens.trainer_logprobs?.[index] ?? null],
    ["trainer / engine ratio", ratioOf(tokens, index)],
    ["reference log-probability", tokens.ref_logprobs?.[index] ?? null],
    ["advantage", COLORINGS.find((one) => one.key === "advantage").of(tokens, index)],
    ["entropy", tokens.entropies?.[index] ?? null],
  ];
  return [
    ["index", `${formatNumber(index)} of ${formatNumber(tokens.ids.length)}`],
    ["id", String(tokens.ids[index])],
    ...(tokens.bytes?.[index] ? [["bytes", tokens.bytes[index]]] : []),
    ...numbers.filter(([, value]) => value !== null).map(([name, value]) => [name, exactNumber(value)]),
    ["loss mask", maskText(tokens, index)],
  ];
}

function maskText(tokens, index) {
  if (tokens.mask?.[index]) return "1, trained";
  return tokens.sampled?.[index] ? "0, sampled but not trained" : "0, context";
}

export function tokenView(tokens, options = {}) {
  const colorings = tokenColorings(tokens);
  const tip = element("div", { class: "token-tip", role: "tooltip", hidden: true });
  const text = element("div", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys move between them" });
  const scale = element("div", { class: "token-scale" });
  const root = element("div", { class: "token-view" });
  const current = Math.max(0, tokens.sampled?.findIndex(Boolean) ?? 0);
  const view = { tokens, text, tip, spans: [], current, coloring: null };
  const choose = (key) => {
    view.coloring = colorings.find((one) => one.key === key) ?? colorings[0] ?? null;
    view.spans.forEach((span, index) => paint(view, span, index));
    scale.replaceChildren(...(view.coloring ? scaleParts(view.coloring) : []));
    root.dataset.coloring = view.coloring?.key ?? "";
    root.toggleAttribute("data-signed", Boolean(view.coloring?.signed));
  };
  choose(options.coloring || startColoring(colorings));
  const chooser = colorChooser(colorings, view.coloring?.key, (key) => {
    choose(key);
    options.onColoring?.(key);
  });
  root.append(element("div", { class: "token-bar" }, chooser, scale), text, tip);
  listenToTokens(view);
  appendSegments(view, segmentsOf(tokens, options.turns), root);
  return root;
}

function colorChooser(colorings, chosen, onChoice) {
  const options = colorings.map(({ key, label }) =>
    element("option", { value: key, selected: key === chosen, text: label }),
  );
  const select = element("select", { onchange: (event) => onChoice(event.target.value), name: "coloring" }, options);
  return element("label", { class: "field" }, element("span", { text: "Color by" }), select);
}

function scaleParts({ top, signed, logarithmic, unit, size, help, key }) {
  if (key === "mask") return [element("span", { class: "muted", text: help })];
  const round = (value) => formatNumber(value, 3);
  const ends = logarithmic
    ? [round(Math.exp(-top)), round(Math.exp(top))]
    : signed
      ? [round(-top), round(top)]
      : ["0", round(size(top) < 0 ? -top : top)];
  return [
    element("span", { class: "scale-end", text: ends[0] }),
    element("i", { class: signed ? "gradient signed" : "gradient", "aria-hidden": "true" }),
    element("span", { class: "scale-end", text: `${ends[1]} ${unit}`.trim() }),
    element("span", { class: "muted scale-help", text: help }),
  ];
}

// Runs of context tokens and of sampled tokens, in the order of the episode.
function segmentsOf(tokens, turns) {
  const segments = [];
  let actions = 0;
  for (let index = 0; index < tokens.ids.length; index++) {
    const role = !tokens.sampled || tokens.sampled[index] ? "action" : "context";
    const last = segments.at(-1);
    if (last?.role === role) last.end = index + 1;
    else {
      actions += role === "action";
      segments.push({ role, start: index, end: index + 1, turn: actions });
    }
  }
  return segments.map((one) => ({ ...one, title: segmentTitle(one, segments, turns) }));
}

function segmentTitle({ role, turn, start, end }, segments, turns) {
  const size = `${formatNumber(end - start)} token${end - start === 1 ? "" : "s"}`;
  const several = segments.filter((one) => one.role === "action").length > 1;
  if (role === "action") {
    const { reward, masked } = turns?.filter((one) => one.role === "action")[turn - 1] ?? {};
    const facts = [several && typeof reward === "number" ? `reward ${formatNumber(reward)}` : "", masked ? "not trained" : ""];
    return [`${several ? `Turn ${turn}, sampled` : "Sampled"} \u00b7 ${size}`, ...facts.filter(Boolean)].join(" \u00b7 ");
  }
  const reply = turns?.filter((one) => one.role === "context")[turn]?.title;
  return `${turn === 0 ? "Prompt" : (reply ?? "Observation")} \u00b7 ${size}`;
}

function appendSegments(view, segments, root) {
  const blocks = segments.flatMap((segment) => {
    const body = element("div", { class: "segment-text" });
    view.text.append(segmentElement(segment, body));
    return blocksOf(view.tokens, segment).map((range) => ({ body, range }));
  });
  const appendNext = (deadline) => {
    do {
      const { body, range } = blocks.shift() ?? {};
      if (!body) break;
      body.append(tokenBlock(view, range));
    } while (deadline.timeRemaining() > 4);
    if (blocks.length) whenIdle(appendNext);
    else root.dataset.complete = "true";
  };
  appendNext({ timeRemaining: () => (view.spans.length < 2 * MAX_BLOCK ? 5 : 0) });
}

// The prompt is folded: pages show it as text as well.
function segmentElement({ role, turn, title }, body) {
  const attributes = { class: `segment ${role}`, "aria-label": title };
  if (role === "context" && turn === 0)
    return element("details", attributes, element("summary", { class: "segment-title", text: title }), body);
  return element("section", attributes, element("div", { class: "segment-title", text: title }), body);
}

function whenIdle(call) {
  if (window.requestIdleCallback) window.requestIdleCallback(call, { timeout: 200 });
  else setTimeout(() => call({ timeRemaining: () => 0 }), 0);
}

function blocksOf(tokens, { start, end }) {
  const blocks = [];
  for (let from = start; from < end; from = blocks.at(-1)[1]) {
    let to = Math.min(from + BLOCK, end);
    while (to < end && to - from < MAX_BLOCK && !tokens.text?.[to - 1]?.includes("\n")) to++;
    blocks.push([from, to]);
  }
  return blocks;
}

function tokenBlock(view, [start, end]) {
  const block = element("div", { class: "token-block" });
  for (let index = start; index < end; index++) {
    const span = document.createElement("span");
    span.textContent = tokenText(view.tokens, index);
    span.dataset.index = index;
    span.tabIndex = index === view.current ? 0 : -1;
    view.spans[index] = span;
    paint(view, span, index);
    block.append(span);
  }
  return block;
}

// A line break is shown by a sign before it, so that its token can be seen and hovered.
function tokenText({ text, ids, bytes }, index) {
  if (!text) return `${ids[index]} `;
  if (text[index] === "") return bytes?.[index] ? `\u27e8${bytes[index]}\u27e9` : "\u2205";
  return visibleText(text[index]).replaceAll("\n", "\u21b5\n");
}

function paint({ coloring, tokens }, span, index) {
  const value = coloring?.values[index] ?? null;
  const strength = value === null ? 0 : Math.max(-1, Math.min(1, coloring.size(value) / coloring.top));
  const off = tokens.sampled?.[index] && tokens.mask?.[index] === 0;
  span.className = (strength < 0 && coloring.signed ? "token negative" : "token") + (off ? " untrained" : "");
  span.style.setProperty(
    "--strength",
    `${(90 * Math.abs(coloring?.signed ? strength : Math.max(strength, 0))).toFixed(1)}%`,
  );
}

// Hovering and focus

function listenToTokens(view) {
  const { text } = view;
  const indexOf = (event) => event.target.dataset?.index;
  text.addEventListener("pointerover", (event) =>
    indexOf(event) === undefined ? hideTip(view) : showTip(view, Number(indexOf(event))),
  );
  text.addEventListener("pointerleave", () => hideTip(view));
  text.addEventListener("focusin", (event) => {
    if (indexOf(event) === undefined) return;
    makeCurrent(view, Number(indexOf(event)));
    showTip(view, view.current);
  });
  text.addEventListener("focusout", () => hideTip(view));
  text.addEventListener("click", (event) => indexOf(event) !== undefined && focusToken(view, Number(indexOf(event))));
  text.addEventListener("keydown", (event) => moveFocus(view, event));
}

function moveFocus(view, event) {
  if (event.key === "Escape" && !view.tip.hidden) {
    hideTip(view);
    event.stopPropagation();
    return;
  }
  const far = event.shiftKey ? 10 : 1;
  const moves = { ArrowLeft: -far, ArrowRight: far, ArrowUp: "up", ArrowDown: "down", Home: -Infinity, End: Infinity };
  const move = moves[event.key];
  if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  event.stopPropagation();
  const last = view.spans.length - 1;
  const next = typeof move === "string" ? inLine(view, move) : Math.min(Math.max(view.current + move, 0), last);
  focusToken(view, next);
}

// The token above or below the current one: the nearest in the first other line in that direction.
function inLine(view, direction) {
  const here = view.spans[view.current].getBoundingClientRect();
  const step = direction === "up" ? -1 : 1;
  let best = view.current;
  let line = null;
  for (let index = view.current + step; view.spans[index]; index += step) {
    const box = view.spans[index].getBoundingClientRect();
    if (!box.height || Math.abs(box.top - here.top) < 3) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) >= 3) break;
    if (
      best === view.current ||
      Math.abs(box.left - here.left) < Math.abs(view.spans[best].getBoundingClientRect().left - here.left)
    )
      best = index;
  }
  return best;
}

function focusToken(view, index) {
  const folded = view.spans[index].closest("details:not([open])");
  if (folded) folded.open = true;
  makeCurrent(view, index);
  view.spans[index].focus();
}

function makeCurrent(view, index) {
  view.spans[view.current]?.setAttribute("tabindex", "-1");
  view.current = index;
  view.spans[index].setAttribute("tabindex", "0");
}

function showTip(view, index) {
  const { tip, tokens, spans, text } = view;
  const rows = tokenFacts(tokens, index).map(([name, value]) => [
    element("dt", { text: name }),
    element("dd", { text: value }),
  ]);
  const shown = tokens.text ? visibleText(JSON.stringify(tokens.text[index])) : `id ${tokens.ids[index]}`;
  tip.replaceChildren(element("div", { class: "token-name", text: shown }), element("dl", {}, rows));
  tip.hidden = false;
  const [frame, box] = [text.parentElement.getBoundingClientRect(), firstBox(spans[index])];
  const left = Math.min(Math.max(box.left - frame.left - 12, 0), Math.max(frame.width - tip.offsetWidth, 0));
  const below = box.bottom + tip.offsetHeight + 12 < window.innerHeight || box.top < tip.offsetHeight + 60;
  tip.style.left = `${left}px`;
  tip.style.top = `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) - frame.top}px`;
}

function firstBox(span) {
  return span.getClientRects()[0] ?? span.getBoundingClientRect();
}

function hideTip({ tip }) {
  tip.hidden = true;
}
