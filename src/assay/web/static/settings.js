// Config, environment and command of a run.

import { element, visibleText } from "./dom.js";
import { loadRun, runCrumbs, runHead } from "./run.js";
import { empty, panel, problemList, searchField, table } from "./widgets.js";

export async function settings({ parts: [, run], signal }) {
  const detail = await loadRun(run, signal);
  const { environment = {} } = detail;
  const command = (environment.command ?? []).map(quoted).join(" ");
  const parts = [
    command ? commandPanel(command, environment.folder) : null,
    changedPanel(detail.changed),
    configPanel(detail.config),
    Object.keys(environment).length
      ? panel("Environment", keyTable(flatten(without(environment, "command", "folder"))))
      : null,
  ];
  return {
    title: `Config of ${detail.name}`,
    crumbs: runCrumbs(detail, { text: "Config" }),
    parts: [runHead(detail, "config"), problemList(detail.problems), ...parts.filter(Boolean)],
  };
}

function without(object, ...names) {
  return Object.fromEntries(Object.entries(object).filter(([name]) => !names.includes(name)));
}

function quoted(part) {
  return /^[\w@%+=:,./-]+$/.test(part) ? part : `'${String(part).replaceAll("'", "'\\''")}'`;
}

function commandPanel(command, folder) {
  const copied = element("span", { class: "muted", role: "status" });
  const copy = async () => {
    await navigator.clipboard.writeText(command).then(
      () => (copied.textContent = "copied"),
      () => (copied.textContent = "copying is not allowed here"),
    );
  };
  const body = element(
    "div",
    { class: "body" },
    element("pre", { class: "text command", text: visibleText(command) }),
    folder ? element("p", { class: "muted", text: `in ${visibleText(folder)}` }) : null,
  );
  return panel(
    "Command",
    body,
    element(
      "div",
      { class: "push controls tight" },
      copied,
      element("button", { type: "button", text: "Copy", onclick: copy }),
    ),
  );
}

// Settings that differ from their defaults: what this run is about.
function changedPanel(changed) {
  if (!changed.length) return null;
  const code = (value) => element("code", { text: value === null || value === "" ? "\u2013" : visibleText(settingText(value)) });
  const columns = [
    { title: "Setting", cell: ([key]) => element("code", { text: visibleText(key) }) },
    { title: "Value", cell: ([, value]) => code(value) },
    { title: "Default", class: "muted", cell: ([, , value]) => code(value) },
  ];
  const frame = table(columns, changed, { caption: "Changed settings", cards: false });
  frame.classList.add("settings-table");
  return panel("Changed settings", frame, element("span", { class: "muted", text: "those that differ from their defaults" }));
}

function configPanel(config) {
  const rows = flatten(config ?? {});
  if (!rows.length) return empty("No settings", "config.toml is missing or cannot be read.");
  const list = element("div", {}, keyTable(rows));
  const search = searchField("Search settings", "", (text) => {
    const words = text.toLowerCase();
    list.replaceChildren(keyTable(rows.filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(words))));
  });
  return panel("All settings", list, element("div", { class: "push" }, search));
}

// Nested settings as [key, text] with dots in the key.
export function flatten(object, prefix = "") {
  return Object.entries(object).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flatten(value, `${prefix}${key}.`)
      : [[prefix + key, settingText(value)]],
  );
}

function settingText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function keyTable(rows) {
  const columns = [
    { title: "Setting", cell: ([key]) => element("code", { text: visibleText(key) }) },
    { title: "Value", cell: ([, value]) => element("code", { text: visibleText(value) || "\u2013" }) },
  ];
  const frame = table(columns, rows, { caption: "Settings", cards: false });
  frame.classList.add("settings-table");
  return frame;
}
