// Elements and formatted numbers. No server, no state.
//
//   element(tag, attributes, ...children)   an HTML element; strings become text nodes, so text is never parsed as HTML
//   svg(tag, attributes, ...children)       the same for SVG
//   formatNumber(value, digits)             a number with at most `digits` significant digits
//   formatShare(value, decimals)            0.915 as "91.5 %"
//   formatDuration(seconds)                 3700 as "1 h 2 min"
//   shortened(text, limit)                  a long text without its middle
//   plural(count, noun, nouns)              "1 step", "2 steps", "1,000 steps"
//   visibleText(text)                       text with control and bidirectional characters made visible
//
// `assay report` inlines this file, charts.js and tokens.js: imports are one line each, and exports are
// `export function` or `export const` at the beginning of a line.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

// Attributes: `class`, `text`, functions for events ("onclick"), an object for `style`; null and false are left out.
function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "style") for (const [key, part] of Object.entries(value)) node.style.setProperty(key, part);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const MINUS = "\u2212";
const NONE = "\u2013"; // shown for a missing value

export function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return grouped(value);
  const size = Math.abs(value);
  if (size >= 10 ** digits && size < 1e9) return grouped(Math.round(value));
  const text = size < 1e-4 || size >= 1e9 ? exponential(value, digits) : String(Number(value.toPrecision(digits)));
  return text.replace("-", MINUS).replace("e" + MINUS, "e-");
}

function exponential(value, digits) {
  return value
    .toExponential(digits - 1)
    .replace(/\.?0+e/, "e")
    .replace("e+", "e");
}

function grouped(integer) {
  return String(integer)
    .replace(/\B(?=(\d{3})+$)/g, ",")
    .replace("-", MINUS);
}

export function formatShare(value, decimals = 1) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return (100 * value).toFixed(decimals).replace("-", MINUS) + "\u00a0%";
}

export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds < 10) return `${formatNumber(seconds, 2)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  const minutes = Math.round(seconds / 60);
  return `${grouped(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

// A long text without its middle: names of models differ at their ends.
export function shortened(text, limit = 34) {
  const half = Math.floor((limit - 1) / 2);
  return text.length <= limit ? text : `${text.slice(0, half)}\u2026${text.slice(-half)}`;
}

export function plural(count, noun, nouns = noun + "s") {
  return `${formatNumber(count)} ${count === 1 ? noun : nouns}`;
}

// C0, DEL and C1 except tab and newline; zero-width and bidirectional controls; separators; the byte order mark.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;

export function visibleText(text) {
  return String(text).replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code); // the picture of a control character
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}
