// Deep links: the fragment holds the view and its parameters, as in #/run/demo/rollouts?status=wrong&offset=50.

import { queryOf } from "./api.js";

export function parseRoute(fragment) {
  const [path, query = ""] = fragment.replace(/^#\/?/, "").split(/\?(.*)/s);
  return {
    parts: path.split("/").filter(Boolean).map(decoded),
    parameters: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(parts, parameters = {}) {
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${queryOf(parameters)}`;
}

// Replaces the parameters in the address. The view has already changed, so it is not drawn again. With `push`, the back
// button returns to the previous parameters.
export function setParameters(parameters, { push = false } = {}) {
  const { parts } = parseRoute(location.hash);
  const target = link(parts, parameters);
  if (target === location.hash) return;
  history[push ? "pushState" : "replaceState"]({ shown: true }, "", target);
}
