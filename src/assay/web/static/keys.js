// Keyboard shortcuts, and the dialog that lists them.

import { element } from "./dom.js";

const HELP = [
  [["j", "\u2193"], "next row, or next rollout"],
  [["k", "\u2191"], "previous row, or previous rollout"],
  [["Enter"], "open the row"],
  [["n", "p"], "next page, previous page"],
  [["\u2190", "\u2192"], "in a text: next and previous token; in a curve: its values"],
  [["/"], "search"],
  [["1", "\u2026", "5"], "tabs of a run"],
  [["t"], "light or dark"],
  [["?"], "this list"],
  [["Esc"], "leave the field, close, or go up one level"],
];

export function helpDialog() {
  const rows = HELP.map(([keys, text]) => [
    element(
      "dt",
      {},
      keys.map((key) => [element("kbd", { text: key }), " "]),
    ),
    element("dd", { text }),
  ]);
  const dialog = element("dialog", { "aria-label": "Keyboard shortcuts" });
  const close = element("button", { type: "button", class: "plain", text: "Close", onclick: () => dialog.close() });
  dialog.append(element("header", {}, element("h2", { text: "Keyboard shortcuts" }), close), element("dl", {}, rows));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  return dialog;
}

// `page`: {view() the current view, up() the address one level up, toggleTheme(), help()}.
export function listenToKeys(page) {
  document.addEventListener("keydown", (event) => {
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      event.defaultPrevented ||
      document.querySelector("dialog[open]")
    )
      return;
    const field = event.target.closest("input:not([type=checkbox], [type=range]), select, textarea");
    const handled = field ? event.key === "Escape" && leave(field) : handle(event, page);
    if (handled) event.preventDefault();
  });
}

function leave(field) {
  field.blur();
  document.getElementById("main").focus({ preventScroll: true });
  return true;
}

function handle(event, page) {
  const view = page.view();
  const actions = {
    j: () => move(view, 1),
    k: () => move(view, -1),
    ArrowDown: () => rowLinks().length > 0 && inTable() && moveRow(1),
    ArrowUp: () => rowLinks().length > 0 && inTable() && moveRow(-1),
    n: () => click("[data-key=next-page]"),
    p: () => click("[data-key=previous-page]"),
    "/": () => focusSearch(),
    t: () => page.toggleTheme(),
    "?": () => page.help(),
    Escape: () => page.up(),
  };
  if (/^[1-9]$/.test(event.key)) return click(`.tabs a:nth-child(${event.key})`);
  const action = actions[event.key];
  return action ? action() !== false : false;
}

function rowLinks() {
  return [...document.querySelectorAll("main .row-link")].filter((one) => one.offsetParent !== null);
}

function inTable() {
  return Boolean(document.activeElement?.closest("tr, .card"));
}

function move(view, direction) {
  const target = direction > 0 ? view?.next : view?.previous;
  if (view && "next" in view) return target ? ((location.hash = target), true) : true;
  return moveRow(direction);
}

function moveRow(direction) {
  const links = rowLinks();
  const at = links.indexOf(document.activeElement?.closest("tr, .card, .answer")?.querySelector(".row-link"));
  const next = links[at < 0 ? (direction > 0 ? 0 : links.length - 1) : at + direction];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
  return Boolean(next);
}

function click(selector) {
  const target = document.querySelector(selector);
  if (!target || target.disabled) return false;
  target.click();
  return true;
}

function focusSearch() {
  const field = document.querySelector("main [data-search]");
  field?.focus();
  field?.select();
  return Boolean(field);
}
