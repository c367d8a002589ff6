import { t } from "./words.js";
// Asking the console's own process.

export class Problem extends Error {
  constructor(status, content) {
    super(content?.error ?? t("the console answered {}", status));
    this.status = status;
    this.kind = content?.kind;
  }
}

/** What stands before the addresses of the cluster that the page shows, where the console has several. */
export const base = /^\/clusters\/[^/]+/.exec(location.pathname)?.[0] ?? "";

/** An address of the console in the cluster of the page. */
export function here(href) {
  return !base || !href.startsWith("/") || /^\/(clusters|api|static|login)(\/|$)/.test(href) ? href : base + (href === "/" ? "" : href.startsWith("/?") ? href.slice(1) : href);
}

export const me = { write: false, rights: [], needs: {}, csrf: "", login: false };

/** Whether this session has a right, which `roles.py` lists. */
export function may(right) {
  return me.rights.includes(right);
}

export async function get(path, query, signal) {
  return call("GET", path, query, undefined, signal);
}

export async function post(path, content) {
  return call("POST", path, undefined, content ?? {});
}

export async function patch(path, content) {
  return call("PATCH", path, undefined, content);
}

export async function put(path, content) {
  return call("PUT", path, undefined, content);
}

export async function remove(path) {
  return call("DELETE", path);
}

/** The address of a part of the interface. */
export function url(path, query) {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value === null || value === undefined || value === "") continue;
    for (const each of Array.isArray(value) ? value : [value]) params.append(name, each);
  }
  const text = params.toString();
  return `${base}/api/v1${path}${text ? "?" + text : ""}`;
}

async function call(method, path, query, content, signal) {
  const headers = { accept: "application/json" };
  if (method !== "GET") headers["x-csrf-token"] = me.csrf ?? "";
  if (content !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(url(path, query), { method, headers, signal, body: content === undefined ? undefined : JSON.stringify(content) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { error: t("the console does not answer; is it still running?") });
  }
  if (response.status === 204) return null;
  const answer = await response.json().catch(() => null);
  if (!response.ok) {
    if (response.status === 401) dispatchEvent(new Event("console:login"));
    throw new Problem(response.status, answer);
  }
  return answer;
}
