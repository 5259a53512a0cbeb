// The page: shows the view of the address, keeps it up to date, and says when the server is gone.

import { get, isConnected, onConnection } from "./api.js";
import { changes } from "./changes.js";
import { compare } from "./compare.js";
import { element } from "./dom.js";
import { helpDialog, listenToKeys } from "./keys.js";
import { overview } from "./overview.js";
import { prompts } from "./prompts.js";
import { group, rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";
import { link, parseRoute } from "./route.js";
import { runSummary, showActive } from "./run.js";
import { settings } from "./settings.js";
import { story } from "./story.js";
import { empty, errorPanel } from "./widgets.js";

const LIVE_MS = 2000; // between updates of a run in progress
const IDLE_MS = 10_000; // otherwise
const RETRY_MS = 2000; // while the server does not answer
const RUN_VIEWS = { prompts, rollouts, rollout, group, story, changes, config: settings };

const byId = (id) => document.getElementById(id);
const scrolls = new Map(); // by address: where the page was scrolled to
let current = null;
let shownAddress = null;
let controller = new AbortController();

function viewOf({ parts }) {
  if (!parts.length) return overview;
  if (parts[0] === "compare") return compare;
  if (parts[0] !== "run" || !parts[1]) return unknown;
  return parts[2] === undefined ? runSummary : (RUN_VIEWS[parts[2]] ?? unknown);
}

async function unknown() {
  const text = element("a", { href: "#/", text: "All runs" });
  return { title: "Not found", crumbs: [], parts: [empty("There is no such view", text)] };
}

async function show() {
  const address = location.hash;
  const traversed = Boolean(history.state?.shown); // by the back or forward button, or a reload
  if (shownAddress !== null) scrolls.set(shownAddress, scrollY);
  controller.abort();
  controller = new AbortController();
  const { signal } = controller;
  const slow = setTimeout(() => (byId("progress").hidden = false), 150);
  const route = parseRoute(address);
  const view = await viewOf(route)({ ...route, signal }).catch((error) => failed(error, signal));
  clearTimeout(slow);
  if (signal.aborted) return;
  byId("progress").hidden = true;
  history.replaceState({ shown: true }, "", location.href);
  shownAddress = location.hash;
  if (view) display(view, traversed ? (scrolls.get(address) ?? 0) : 0);
}

function failed(error, signal) {
  if (signal.aborted || !isConnected())
    return current ? null : { title: "assay", crumbs: [], parts: [empty("Waiting for the server")] };
  return { title: "Error", crumbs: [], parts: [errorPanel(error)] };
}

function display(view, scroll) {
  current = view;
  document.title = view.title === "Runs" ? "assay" : `${view.title} \u00b7 assay`;
  byId("main").replaceChildren(...view.parts.filter(Boolean));
  byId("main").dataset.view = parseRoute(location.hash).parts[2] ?? parseRoute(location.hash).parts[0] ?? "overview";
  showActive(document.querySelector(".tabs"));
  byId("announcer").textContent = view.title;
  drawCrumbs(view.crumbs);
  drawLive();
  scrollTo(0, scroll);
  schedule();
}

function drawCrumbs(crumbs) {
  byId("crumbs").replaceChildren(
    ...crumbs.map(({ text, href }, index) =>
      index < crumbs.length - 1 ? element("a", { href, text }) : element("span", { "aria-current": "page", text }),
    ),
  );
}

function drawLive() {
  byId("live").hidden = !current?.live?.();
}

// Updates

let timer;

function schedule() {
  clearTimeout(timer);
  if (!current?.refresh) return;
  timer = setTimeout(update, current.every?.() ?? (current.live?.() ? LIVE_MS : IDLE_MS));
}

async function update() {
  const view = current;
  if (!document.hidden && isConnected()) await view.refresh().catch(report);
  if (view !== current) return;
  drawLive();
  schedule();
}

function report(error) {
  if (isConnected() && error.name !== "AbortError") console.warn(error);
}

onConnection((connected, message) => {
  byId("banner").hidden = connected;
  byId("banner").textContent = connected ? "" : `${message} Trying again \u2026`;
  if (connected) show();
  else setTimeout(retry, RETRY_MS);
});

function retry() {
  if (!isConnected()) get("runs").catch(() => setTimeout(retry, RETRY_MS));
}

// Theme and keys

function darkNow() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function drawThemeButton() {
  const text = darkNow() ? "Switch to light" : "Switch to dark";
  byId("theme").textContent = darkNow() ? "\u2600" : "\u263e";
  byId("theme").title = `${text} (t)`;
  byId("theme").setAttribute("aria-label", text);
}

function toggleTheme() {
  const theme = darkNow() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("assay-theme", theme);
  } catch {
    // storage is disabled: the choice lasts until the page is closed
  }
  drawThemeButton();
}

// One level up: from a rollout to the rollouts, from a tab to the run, from a run to all runs.
function up() {
  const { parts } = parseRoute(location.hash);
  if (parts[0] === "compare" || (parts[0] === "run" && parts.length === 2)) location.hash = "#/";
  else if (current?.up) location.hash = current.up;
  else if (parts[2] === "rollout" || parts[2] === "group") location.hash = link([...parts.slice(0, 2), "rollouts"]);
  else if (parts.length > 2) location.hash = link(parts.slice(0, 2));
  else return false;
  return true;
}

function start() {
  history.scrollRestoration = "manual";
  const dialog = helpDialog();
  const help = () => dialog.showModal();
  byId("help").addEventListener("click", help);
  byId("theme").addEventListener("click", toggleTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawThemeButton);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the fragment is the address of the view
    byId("main").focus();
  });
  addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", () => !document.hidden && current?.refresh && update());
  listenToKeys({ view: () => current, up, toggleTheme, help });
  drawThemeButton();
  show();
}

start();
