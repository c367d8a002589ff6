// Pieces that several views are made of.

import { get, may, me } from "./api.js";
import { h, link, path } from "./dom.js";
import * as f from "./format.js";
import { language, t, told } from "./words.js";

export function head(title, { crumb, sub, actions } = {}) {
  return h("div", { class: "head" },
    h("div", { class: "titles" }, crumb && h("div", { class: "crumb" }, crumb), h("h1", null, title), sub && h("p", null, sub)),
    actions && h("div", { class: "row" }, actions));
}

/** Of which seconds rates are, and of what; `rates.py` has the same. */
export const RATES = t("In is what is stored, out what groups finish, per second over the last 30 s.");

export function card(title, body, actions) {
  return h("section", { class: "card", "aria-label": title }, h("header", null, h("h2", null, title), actions), body);
}

export function tile(what, value, { unit, hint, href, spark, tone } = {}) {
  return h(href ? "a" : "div", { class: "tile", href },
    h("span", { class: "what" }, what),
    h("span", { class: `value ${tone ?? ""}` }, value, unit && h("small", null, unit)),
    h("span", { class: "hint" }, hint ?? ""),
    spark);
}

/** `columns`: [label, row => content, class]. `open` is what a click on a row does, besides those on its links and buttons. */
export function table(columns, rows, { empty = t("Nothing here."), label, open } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  return h("div", { class: "table-box" },
    h("table", { "aria-label": label },
      h("thead", null, h("tr", null, columns.map(([name, , kind]) => h("th", { class: kind, scope: "col" }, name)))),
      h("tbody", null, rows.map((row) => h("tr", open && { class: "link opens", onclick: (event) => event.target.closest("a, button, input") || open(row) }, columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row))))))));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

export function command(text) {
  const copy = async (event) => {
    event.preventDefault();
    toast((await copied(text)) ? t("Copied") : t("The browser does not let it be copied; select it"));
  };
  return h("div", { class: "command" }, h("code", null, text.split(" ").map((word, place) => [place ? " " : "", h("span", null, word)])), h("button", { type: "button", class: "quiet", "aria-label": t("Copy the command"), onclick: copy }, t("Copy")));
}

async function copied(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { return false; }
}

const TONES = { stalled: "bad", "falling behind": "warn", "nobody consumes": "warn", paused: "warn", lost: "bad", failed: "bad", failing: "bad" };

/** States of a pipeline: its driver is there; it needs a hand. */
export const UP = ["running", "waiting", "failing"];
export const ILL = ["failed", "failing", "lost"];

/** What a group's lag does, coloured only when it needs a hand. */
export function pace(word, lag = 1) {
  const tone = word === "paused" || lag ? TONES[word] ?? "" : "";
  return h("span", { class: `tag ${tone}` }, told(word) ?? t("unknown"));
}

/** Of what a pipeline handled lately, the share that failed. */
export function failedShare(row) {
  return h("span", { class: row.state === "failing" ? "bad-text" : row.failed_share ? "warn-text" : "" }, f.percent(row.failed_share));
}

/** What is wrong, what to do, and the command that does it. */
export function fault(each) {
  return h("div", { class: "fault" },
    h("span", { class: `dot ${each.weight ?? "bad"}`, "aria-hidden": "true" }),
    h("div", { class: "words" }, h("b", null, upper(told(each.kind))),
      h("div", null, sentence(told(each.text))),
      each.others?.length > 0 && h("details", null, h("summary", { class: "muted small" }, t("and {} more", f.exact(each.others.length))), each.others.map((text) => h("div", { class: "small muted" }, sentence(told(text)))))),
    remedy(each));
}

/** What to do: repair first, and what gives something up last. */
function remedy(each) {
  if (!each.remedy && !each.command) return null;
  return h("div", { class: "fix" },
    each.remedy && h("span", null, sentence(told(each.remedy))), each.command && command(each.command),
    each.otherwise && h("details", null, h("summary", { class: "small" }, t("If repair is not wanted")),
      h("div", { class: "fix" }, h("span", null, sentence(told(each.otherwise))), each.otherwise_command && command(each.otherwise_command))));
}

const SEVERITY = { bad: t("Critical"), warn: t("Warning") };

/** All that is wrong with one group, server, topic or pipeline. */
export function faultCard(each, { silent = [], silence } = {}) {
  return h("article", { class: `fault-card ${each.weight}`, "data-key": `${each.link} ${each.subject}`, "aria-label": each.subject },
    h("header", null, h("span", { class: `tag ${each.weight}` }, SEVERITY[each.weight] ?? each.weight), link(each.link, each.subject),
      h("span", { class: "muted small" }, [...new Set(each.faults.map((one) => told(one.kind)))].join(" · ")),
      silent.length > 0 && h("span", { class: "tag" }, silent[0].until ? t("silent until {}", f.when(silent[0].until, false)) : t("silent")),
      silence),
    each.faults.map((one) => h("div", { class: "finding" }, h("p", null, sentence(told(one.text))), remedy(one))));
}

/** Faults of one thing, one below the other; null without any. */
export function faults(found) {
  return found.length ? h("section", { class: "card faults", "aria-label": t("What needs a hand") }, found.map((each) => fault(each))) : null;
}

/** Findings of one kind as one: six queues that nobody pulls are one thing that happened. */
export function findings(found) {
  const kinds = Map.groupBy ? Map.groupBy(found, (each) => each.kind) : found.reduce((map, each) => map.set(each.kind, [...(map.get(each.kind) ?? []), each]), new Map());
  return [...kinds].map(([kind, some]) => ({ kind, text: some[0].text, remedy: some[0].remedy, command: some[0].command, others: some.slice(1).map((each) => each.text) }));
}

function upper(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function sentence(text) {
  return upper(text).replace(/[.。]?$/, language === "zh" ? "。" : ".");
}

export function groupLink(name) {
  return link(path("groups", name), name);
}

export function topicLink(name) {
  return link(path("topics", name), name);
}

export function memberLink(group, client) {
  return h("a", { href: path("consumers", group, client), class: "id", title: client }, client);
}

export function drains(row) {
  // Of rates that are as good as equal, neither "never" nor a time would be true.
  if (!row.lag || row.pace === "keeping up") return "–";
  return row.drains_in === null ? t("never") : f.brief(row.drains_in);
}

export function problem(error) {
  return h("div", { class: "note bad", role: "alert" }, error.message);
}

export function toast(text, isBad = false) {
  const node = h("div", { class: `toast ${isBad ? "bad" : ""}` }, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), isBad ? 9000 : 5000);
}

const READ_ONLY = t("This console only shows: it was started without --write.");
const ROLES = ["reader", "operator", "admin"];
const BY_ROLE = { reader: t("a reader"), operator: t("an operator"), admin: t("an admin") };

/** Whether it is the role that is in the way: another one may. */
function lacksRole(right) {
  return ROLES.includes(me.role) && ROLES.indexOf(me.role) < ROLES.indexOf(me.needs[right]);
}

/** Why this session may not do something. */
function whyNot(right) {
  return lacksRole(right) ? t("{} is {} here: {} may do this.", me.user, BY_ROLE[me.role], BY_ROLE[me.needs[right]]) : READ_ONLY;
}

/** Says why a button does nothing here, and how it is enabled. */
export function readOnlyNote(right) {
  if (may(right)) return null;
  if (lacksRole(right)) return h("div", { class: "note read-only" }, h("p", null, whyNot(right)));
  return h("div", { class: "note read-only" }, h("p", null, READ_ONLY, " ", t("The command above does the same; this one starts a console that may change things:")), command(me.enable));
}

/** A button that opens something which needs a right. Without it the button is disabled, and says why. */
export function writing(right, label, open, { kind = "", does, harmless } = {}) {
  if (may(right)) return h("button", { type: "button", class: kind, onclick: open }, label);
  return h("button", { type: "button", class: kind, "aria-disabled": "true", title: lacksRole(right) ? whyNot(right) : `${READ_ONLY} ${me.enable}`, onclick: () => readOnlyDialog(right, label, does, harmless && [harmless, open]) }, label);
}

/** Why a control is disabled, the command that does the same, and the one that enables it. `harmless` is what can be done all the same. */
export function readOnlyDialog(right, label, does, harmless) {
  const opened = dialog(lacksRole(right) ? t("{}: not in this role", label) : t("{}: not in this console", label), [
    h("p", null, whyNot(right)),
    does && [h("p", { class: "muted" }, t("The same from a shell:")), command(does)],
    !lacksRole(right) && [h("p", { class: "muted" }, t("A console that may change things:")), command(me.enable)],
  ], harmless && { footer: () => h("button", { type: "button", onclick: () => { opened.close(); harmless[1](); } }, harmless[0]) });
}

export function field(label, input, kind = "") {
  return h("label", { class: `field ${kind}` }, label, input);
}

/** A window in front of the page, or as a `panel` at its side; resolves when it is closed. */
export function dialog(title, content, { wide, panel, footer, extra } = {}) {
  const node = h("dialog", { class: panel ? "panel" : wide ? "wide" : "", "aria-label": title });
  const close = () => node.close();
  node.append(h("div", { class: "inside" },
    h("header", null, h("h2", null, title), extra, h("button", { type: "button", class: "quiet", onclick: close, "aria-label": t("Close") }, t("Close"))),
    content, footer && h("footer", null, footer(close))));
  node.onclick = (event) => { if (event.target === node) close(); };
  document.body.append(node);
  node.showModal();
  const gone = new Promise((done) => node.addEventListener("close", () => { node.remove(); done(); }, { once: true }));
  addEventListener("console:leave", close, { once: true });
  return { node, close, gone };
}

/** A function that shows the command of a form in `shown`; `ask` may return nothing. A late answer to an earlier question is dropped. */
export function commandPreview(shown, ask) {
  let asked = 0;
  return async () => {
    asked += 1;
    const mine = asked;
    let found = null;
    try { const answer = await ask(); if (answer) found = command(answer.command); } catch (error) { found = problem(error); }
    if (mine === asked) shown.replaceChildren(...(found ? [found] : []));
  };
}

/** Run an action of a button: not twice, and with its problem shown. */
export async function act(button, work) {
  button.disabled = true;
  try {
    return await work();
  } catch (error) {
    toast(error.message, true);
    return undefined;
  } finally {
    button.disabled = false;
  }
}

/** Names that are offered at a time. */
const OFFERED = 50;

/** Names to choose from while typing, asked for as they are typed: there may be thousands. */
export function suggestions(id, input, place, query = {}) {
  const list = h("datalist", { id });
  let asked = null;
  let timer = 0;
  const load = async () => {
    const search = input.value.trim();
    if (search === asked) return;
    asked = search;
    const { rows } = await get(place, { ...query, search, sort: "name", count: OFFERED }).catch(() => ({ rows: [] }));
    if (search === asked) list.replaceChildren(...rows.map((row) => h("option", { value: row.name })));
  };
  input.addEventListener("focus", load);
  input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(load, 120); });
  return list;
}
