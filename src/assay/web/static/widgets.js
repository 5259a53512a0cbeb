// Parts that several views use.

import { spreadOut } from "./charts.js";
import { element, formatDuration, formatNumber, formatShare, plural, shortened, visibleText } from "./dom.js";
import { link } from "./route.js";

const STATE_TONES = {
  running: "note running",
  finished: "good",
  failed: "bad",
  damaged: "bad",
  stopped: "warn",
  interrupted: "warn",
};
const STATUS_TONES = {
  ok: "good",
  wrong: "bad",
  no_answer: "warn",
  unparsable: "warn",
  timeout: "warn",
  error: "warn",
};

export function pill(text, tone = "") {
  return element("span", { class: `pill ${tone}`.trim(), text });
}

const SEVERITY_TONES = { error: "bad", warning: "warn", note: "note" };

// A run with which something is wrong is not green.
export function statePill({ state, badge }) {
  const tone = STATE_TONES[state] ?? "";
  const suspicious = badge && badge.severity !== "note";
  return pill(state ?? "unknown", tone === "good" && suspicious ? SEVERITY_TONES[badge.severity] : tone);
}

// The number of the doctor's findings of the highest severity.
export function badgePill({ badge }) {
  if (!badge) return null;
  const found = pill(plural(badge.count, badge.severity), SEVERITY_TONES[badge.severity] ?? "");
  found.classList.add("badge");
  found.title = visibleText(badge.evidence);
  return found;
}

export function statusPill(status) {
  return pill((status ?? "not judged").replaceAll("_", " "), STATUS_TONES[status] ?? "");
}

export function changePill(changed) {
  if (!changed) return null;
  return pill(changed === "gained" ? "\u2191 gained" : "\u2193 lost", changed === "gained" ? "good" : "bad");
}

export function skippedPill({ source }) {
  return source === "skipped" ? pill("not trained", "bad") : null;
}

export function empty(title, ...explanation) {
  return element("div", { class: "panel empty" }, element("strong", { text: title }), ...explanation);
}

export function errorPanel(error) {
  return element(
    "div",
    { class: "panel empty", role: "alert" },
    element("strong", { text: "This cannot be shown" }),
    error.message,
  );
}

// What could not be read of a run folder.
export function problemList(problems) {
  if (!problems?.length) return null;
  const items = problems.map((problem) => element("li", { text: visibleText(problem) }));
  const summary = element("summary", { text: `${plural(problems.length, "problem")} with the files of this run` });
  return element("details", { class: "problems", open: problems.length < 4 }, summary, element("ul", {}, items));
}

export function isIndexing({ indexed }) {
  return Boolean(indexed) && indexed.done < indexed.total;
}

// Lists are incomplete while the server reads the rollout files.
export function indexNote(detail) {
  if (!isIndexing(detail)) return null;
  const { done, total } = detail.indexed;
  const text = `Reading the rollout files: ${formatNumber(done)} of ${formatNumber(total)} so far.`;
  return element("p", { class: "muted", role: "status", text });
}

export function findingList(findings) {
  const items = findings.map(({ severity = "warning", evidence, remedy, name, examples }) =>
    element(
      "li",
      { class: `finding ${severity}`, "data-name": name },
      element("span", { class: "severity", text: severity[0].toUpperCase() + severity.slice(1) }),
      element("p", { class: "evidence", text: visibleText(evidence) }),
      element("p", { class: "remedy", text: visibleText(remedy) }),
      examples?.length ? exampleList(examples) : null,
    ),
  );
  return element("ul", { class: "findings", "aria-label": "Findings of assay doctor" }, items);
}

function exampleList(examples) {
  const summary = element("summary", { class: "muted", text: plural(examples.length, "example") });
  return element(
    "details",
    { class: "examples" },
    summary,
    examples.map((text) => textBlock(text)),
  );
}

// `items`: [name, value, small print]; values are texts or elements, and items without a value are left out.
export function factList(items) {
  const shown = items.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const list = element(
    "dl",
    { class: "facts" },
    shown.map(([name, value, small]) =>
      element(
        "div",
        {},
        element("dt", { text: name }),
        element("dd", {}, value, small ? element("small", {}, small) : null),
      ),
    ),
  );
  return spreadOut(list);
}

export function pacePart({ eta_s: eta }) {
  return eta === null || eta === undefined ? "" : `${formatDuration(eta)} left`;
}

export function panel(title, body, ...header) {
  const head = element("header", {}, element("h2", { text: title }), ...header);
  return element("section", { class: "panel" }, head, body);
}

export function textBlock(text, className = "text") {
  return element("pre", { class: className, dir: "auto", text: visibleText(text ?? "") });
}

// A table whose rows are links. columns: [{title, cell(row), key (to sort by), class, label, has(row)}]. `href(row)` of
// a row is the address of its first link. With `sort` {key, order, onSort}, headings with a key sort the rows. A column
// with `has` is left out if no row has it. `groupHead(row)`: a title above the rows that have the same one, with a key.
export function table(allColumns, rows, { href, sort, caption, cards = true, groupHead } = {}) {
  const columns = allColumns.filter(({ has }) => !has || rows.some(has));
  const head = element(
    "tr",
    {},
    columns.map((column) => heading(column, sort)),
  );
  let last = null;
  const body = element(
    "tbody",
    {},
    rows.flatMap((row) => {
      const title = groupHead?.(row) ?? null;
      const begins = title !== null && title.key !== last;
      last = title?.key ?? null;
      const heading = begins ? element("td", { colspan: columns.length }, title.content()) : null;
      return [begins ? element("tr", { class: "group-head" }, heading) : null, tableRow(columns, row, href?.(row))];
    }),
  );
  body.addEventListener("click", openRow);
  const parts = [element("caption", { class: "visually-hidden", text: caption }), element("thead", {}, head), body];
  return element("div", { class: `table-frame${cards ? " as-cards" : ""}` }, element("table", {}, parts));
}

function heading(column, sort) {
  const active = sort && column.key && sort.key === column.key;
  const order = active ? (sort.order === "asc" ? "ascending" : "descending") : null;
  const content =
    sort && column.key
      ? element("button", { type: "button", onclick: () => sort.onSort(column.key), text: column.title })
      : column.title;
  return element("th", { scope: "col", class: column.class, "aria-sort": order }, content);
}

export function tableRow(columns, row, href) {
  const cells = columns.map((column) =>
    element("td", { class: column.class, "data-label": column.label ?? null }, column.cell(row, href)),
  );
  return element("tr", { "data-href": href }, cells);
}

function openRow(event) {
  if (event.target.closest("a, button, input, label") || String(getSelection())) return;
  const href = event.target.closest("tr")?.dataset.href;
  if (href) location.hash = href;
}

export function rowLink(text, href) {
  return element("a", { class: "row-link", href, dir: "auto", text: visibleText(text) });
}

export function pager({ total, offset, limit, noun, onOffset }) {
  const last = Math.min(offset + limit, total);
  const count = total
    ? `${formatNumber(offset + 1)} to ${formatNumber(last)} of ${plural(total, noun)}`
    : `No ${noun}s`;
  const button = (text, target, disabled, key) =>
    element("button", { type: "button", disabled, "data-key": key, onclick: () => onOffset(target), text });
  return element(
    "nav",
    { class: "pager", "aria-label": "Pages" },
    element("span", { class: "count", text: count }),
    button("\u2190 Previous", Math.max(0, offset - limit), offset === 0, "previous-page"),
    button("Next \u2192", offset + limit, last >= total, "next-page"),
  );
}

export function segmented(label, choices, chosen, onChoice) {
  const buttons = Object.entries(choices).map(([key, text]) =>
    element("button", {
      type: "button",
      "aria-pressed": String(key === chosen),
      text,
      onclick: choose,
      "data-choice": key,
    }),
  );
  function choose(event) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
    onChoice(event.currentTarget.dataset.choice);
  }
  return element("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

export function select(label, choices, chosen, onChoice, attributes = {}) {
  const options = choices.map(([value, text]) =>
    element("option", { value, selected: String(value) === String(chosen ?? ""), text }),
  );
  const control = element("select", { ...attributes, onchange: (event) => onChoice(event.target.value) }, options);
  return element("label", { class: "field" }, element("span", { text: label }), control);
}

// A search field that calls `onSearch` when typing pauses.
export function searchField(placeholder, value, onSearch) {
  let timer;
  const type = (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => onSearch(event.target.value), 250);
  };
  const attributes = { type: "search", class: "search", placeholder, "aria-label": placeholder, "data-search": true };
  return element("input", {
    ...attributes,
    value: value ?? "",
    autocomplete: "off",
    spellcheck: "false",
    oninput: type,
  });
}

export function accuracyText(result) {
  if (!result || result.accuracy === undefined || result.accuracy === null) return null;
  return formatShare(result.accuracy);
}

export function intervalText(result) {
  if (!result?.ci95) return "";
  return `${(100 * result.ci95[0]).toFixed(1)}\u2013${(100 * result.ci95[1]).toFixed(1)}`;
}

export function pValueText(value) {
  if (value === null || value === undefined) return null;
  return value < 1e-4 ? "< 0.0001" : formatNumber(value, 2);
}

export function timeText(iso) {
  const time = iso ? new Date(iso) : null;
  if (!time || Number.isNaN(time.valueOf())) return "";
  return time.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

export function stepsText({ steps, steps_planned: planned }) {
  return planned ? `${formatNumber(steps)} / ${formatNumber(planned)}` : formatNumber(steps);
}

export function modelName(model) {
  const parts = String(model ?? "").split("/");
  return shortened(parts.filter(Boolean).slice(-2).join("/"));
}

export { formatDuration, link };
