// Requests to the server, and whether it answers.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const listeners = new Set();
let connected = true;

// Calls `listener(connected, message)` when the server stops answering, and when it answers again.
export function onConnection(listener) {
  listeners.add(listener);
}

function setConnected(value, message = "") {
  if (value === connected) return;
  connected = value;
  for (const listener of listeners) listener(connected, message);
}

export function isConnected() {
  return connected;
}

// Answer of the API as an object. Parameters that are null, undefined, "" or an empty list are left out.
export async function get(path, parameters = {}, signal = undefined) {
  const response = await request(`/api/${path}${queryOf(parameters)}`, signal);
  if (response.status === 401 || response.status === 403) {
    setConnected(false, "Access denied: open the address that assay view printed when it started.");
    throw new ApiError(response.status, "access denied");
  }
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  setConnected(true);
  if (!response.ok) throw new ApiError(response.status, answer.error ?? `the server answered ${response.status}`);
  return answer;
}

async function request(address, signal) {
  try {
    return await fetch(address, { signal, credentials: "same-origin", headers: { Accept: "application/json" } });
  } catch (error) {
    if (error.name !== "AbortError") setConnected(false, "The server does not answer: is assay view still running?");
    throw error;
  }
}

export function queryOf(parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    if (Array.isArray(value) ? value.length : true) query.set(name, value === true ? "1" : String(value));
  }
  const text = query.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  return text ? `?${text}` : "";
}

export function runPath(run, ...parts) {
  return ["runs", run, ...parts].map((part) => encodeURIComponent(part)).join("/");
}
