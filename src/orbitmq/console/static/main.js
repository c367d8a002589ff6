// The frame around the views: which view an address means, the list on the left, what is new.

import { base, get, here, may, me, post, url } from "./api.js";
import { h, link, morphChildren, path } from "./dom.js";
import * as f from "./format.js";
import { ILL, head, problem, readOnlyDialog, toast } from "./parts.js";
import { login } from "./views/login.js";
import { now } from "./views/now.js";
import { topics } from "./views/topics.js";
import { topic } from "./views/topic.js";
import { groups } from "./views/groups.js";
import { group } from "./views/group.js";
import { messages } from "./views/messages.js";
import { deadLetterGroups, deadLetters } from "./views/deadletters.js";
import { progress } from "./views/progress.js";
import { consumer, consumerGroup, consumers } from "./views/consumers.js";
import { charts } from "./views/charts.js";
import { send } from "./views/send.js";
import { topology } from "./views/topology.js";
import { pipeline, pipelines } from "./views/pipelines.js";
import { brokers } from "./views/brokers.js";
import { alerts } from "./views/alerts.js";
import { audit } from "./views/audit.js";
import { access, passwordDialog } from "./views/access.js";
import { clusters, stateOf, toneOf } from "./views/clusters.js";
import { LANGUAGES, language, speak, t } from "./words.js";

const VIEWS = [
  ["/", now], ["/topics", topics], ["/topics/:topic", topic], ["/groups", groups], ["/groups/:group", group],
  ["/messages", messages], ["/dead-letters", deadLetterGroups], ["/dead-letters/:group", deadLetters],
  ["/progress", progress], ["/consumers", consumers], ["/consumers/:group", consumerGroup], ["/consumers/:group/:client", consumer],
  ["/charts", charts], ["/send", send], ["/topology", topology], ["/pipelines", pipelines], ["/pipelines/:name", pipeline],
  ["/brokers", brokers], ["/alerts", alerts], ["/audit", audit], ["/access", access], ["/clusters", clusters],
];

const PLACES = [
  ["/", t("Now")], null,
  ["/topics", t("Topics")], ["/groups", t("Groups")], ["/messages", t("Messages")], ["/dead-letters", t("Dead letters")], null,
  ["/consumers", t("Consumers")], ["/progress", t("Progress")], ["/send", t("Send")], null,
  ["/pipelines", t("Spark pipelines")], ["/charts", t("Charts")], ["/topology", t("Topology")], ["/brokers", t("Brokers")], ["/alerts", t("Alerts")], ["/audit", t("Audit")], ["/access", t("Users"), "access"],
];

const shell = document.getElementById("shell");
const boot = JSON.parse(document.getElementById("boot").textContent);
const main = h("main", { id: "main", tabindex: -1 });
const counts = new Map();
let current = null;
let turn = 0;
let source = null;
let timer = null;
let choice = null;

Object.assign(me, boot.me);
theme(localStorage.getItem("theme"));
if (me.login) showLogin();
else begin(boot.now);

/** Whether the page is about all clusters of several, and so in none of them. */
function isList() {
  return Boolean(me.clusters && !base);
}

function showLogin() {
  source?.close();
  clearInterval(timer);
  shell.replaceChildren(login(async (answer) => {
    Object.assign(me, answer);
    counts.clear();
    begin(await get(isList() ? "/clusters" : "/now"));
  }));
}

addEventListener("console:login", async () => {
  if (me.login || me.changing) return;
  Object.assign(me, { login: true, user: null, role: null, rights: [] });
  Object.assign(me, await get("/me").catch(() => ({})));
  if (me.login) showLogin();
});

function begin(first) {
  shell.replaceChildren(side(), main);
  tell(first);
  open(first);
  clearInterval(timer);
  // Nothing is to be heard of a cluster that does not answer.
  if (isList()) timer = setInterval(refresh, Math.max(1, me.every) * 1000);
  else listen();
  if (isList()) tellClusters(first);
  else if (me.clusters) get("/clusters").then(tellClusters, lost);
}

// The list on the left.

function side() {
  const bar = h("aside", { class: "side" });
  const menu = h("button", { type: "button", class: "menu", "aria-expanded": "false", "aria-controls": "places" }, t("Menu"));
  menu.onclick = () => {
    const isOpen = bar.classList.toggle("open");
    menu.setAttribute("aria-expanded", String(isOpen));
  };
  bar.append(
    h("div", { class: "bar-top" }, h("a", { class: "brand", href: "/" }, h("img", { src: "/static/icon.svg", alt: "" }), "OrbitMQ"), me.clusters && switcher(), menu),
    h("nav", { id: "places", "aria-label": t("Views") }, h("ul", null, places().map((place) => {
      if (!place) return h("li", { class: "gap", "aria-hidden": "true" });
      const count = h("span", { class: "count", hidden: true });
      counts.set(place[0], count);
      return h("li", null, h("a", { href: place[0], "data-place": place[0] }, place[1], count));
    }))),
    h("div", { class: "foot" },
      !isList() && h("span", null, (me.name_servers ?? []).join(", ")),
      me.user && h("span", { class: "who" }, `${me.user} · ${me.role}`),
      me.can_change_password && h("button", { type: "button", class: "quiet", onclick: passwordDialog }, t("Change password")),
      me.write ? h("span", null, may("send") ? t("May change things · {}", me.version ?? "") : t("Read-only · {}", me.version ?? "")) : h("button", { type: "button", class: "quiet", onclick: () => readOnlyDialog("topics", t("Changes")) }, t("Read-only · {}", me.version ?? "")),
      h("button", { type: "button", class: "quiet", onclick: nextTheme }, t("Light or dark")),
      languages(),
      me.can_log_out && h("button", { type: "button", class: "quiet", onclick: logOut }, t("Log out"))));
  return bar;
}

function places() {
  if (isList()) return [["/clusters", t("Clusters")], null, ...me.clusters.map((name) => [path("clusters", name), name])];
  const shown = PLACES.filter((place) => !place?.[2] || may(place[2]));
  return me.clusters ? [["/clusters", t("Clusters")], null, ...shown] : shown;
}

/** Leads to the same view of another cluster. */
function switcher() {
  choice = h("select", { class: "switcher", "aria-label": t("Cluster") });
  choice.onchange = () => {
    // A member is of one cluster; whatever else the view is about may be in both.
    const view = isList() ? "" : within().replace(/^(\/consumers\/[^/]+)\/.*/, "$1").replace(/^\/$/, "") + location.search;
    location.assign(choice.value ? choice.value + view : "/clusters");
  };
  tellClusters({ clusters: me.clusters.map((name) => ({ name })) });
  return choice;
}

/** The states of all clusters, in the switcher and beside the list of them. */
function tellClusters({ clusters: found }) {
  const label = (each) => (each.state && each.state !== "up" ? `${each.name} · ${stateOf(each)}` : each.name);
  morphChildren(choice, [...found.map((each) => h("option", { value: path("clusters", each.name) }, label(each))), h("option", { value: "" }, t("All clusters"))]);
  choice.value = me.cluster && base ? path("clusters", me.cluster) : "";
  const tones = found.map(toneOf).filter(Boolean);
  mark("/clusters", tones.length, tones.includes("bad") ? "bad" : "warn");
  for (const each of found) mark(path("clusters", each.name), each.state === "unreachable" ? "!" : each.card_count, toneOf(each));
}

/** The address of the view, without the cluster's part. */
function within() {
  return location.pathname.slice(base.length) || "/";
}

function languages() {
  const choice = h("select", { "aria-label": t("Language") }, Object.entries(LANGUAGES).map(([name, own]) => h("option", { value: name, lang: name }, own)));
  choice.value = language;
  choice.onchange = () => speak(choice.value);
  return choice;
}

async function logOut() {
  await post("/logout");
  location.assign("/");
}

function nextTheme() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const wanted = isDark ? "light" : "dark";
  localStorage.setItem("theme", wanted);
  theme(wanted);
}

function theme(wanted) {
  if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
}

function tell(content) {
  if (!content?.at) return;
  f.sync(content.at);
  mark("/", content.card_count, content.cards[0]?.weight === "bad" ? "bad" : "warn");
  mark("/dead-letters", content.open_letters, content.open_last_hour ? "warn" : "");
  const failed = content.pipelines.filter((each) => ILL.includes(each.state)).length;
  mark("/pipelines", failed || content.pipelines.length, failed ? "bad" : "");
}

function mark(place, number, tone) {
  const node = counts.get(place);
  if (!node) return;
  node.hidden = !number;
  node.className = `count ${tone}`;
  node.textContent = number === "!" ? number : f.count(number);
}

// From an address to a view.

function meant(path) {
  for (const [pattern, view] of VIEWS) {
    const names = pattern.split("/");
    const parts = path.split("/");
    if (names.length !== parts.length) continue;
    const params = {};
    const fits = names.every((name, place) => {
      if (!name.startsWith(":")) return name === parts[place];
      params[name.slice(1)] = decodeURIComponent(parts[place]);
      return parts[place] !== "";
    });
    if (fits) return [view, params];
  }
  return [nowhere, {}];
}

async function nowhere() {
  return { title: t("Nothing here"), draw: () => [h("h1", null, t("Nothing here")), h("p", { class: "muted" }, t("This address means no view."))] };
}

/** Show what the address means. `known` is the content of the first view, when it is there already. */
async function open(known) {
  turn += 1;
  const mine = turn;
  current?.leave?.();
  current = null;
  dispatchEvent(new Event("console:leave"));
  const at = within();
  const [make, params] = meant(at.replace(/(.)\/$/, "$1"));
  for (const each of document.querySelectorAll("#places a")) {
    const place = each.dataset.place;
    const isHere = place === "/" ? at === "/" : at === place || at.startsWith(place + "/");
    if (isHere) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  document.querySelector(".side")?.classList.remove("open");
  let view;
  try {
    view = await make({ params, query: new URLSearchParams(location.search), known, go, remember });
  } catch (error) {
    const list = PLACES.find((place) => place && place[0] !== "/" && at.startsWith(place[0] + "/"));
    view = { title: t("Trouble"), draw: () => [head(t("That did not work"), { crumb: list && link(list[0], list[1]) }), problem(error)] };
  }
  if (mine !== turn) { view.leave?.(); return; }
  current = view;
  document.title = [view.title, base && me.cluster, "OrbitMQ"].filter(Boolean).join(" · ");
  main.replaceChildren(...flat(view.draw()));
  await view.shown?.();
  main.dataset.view = view.title;
  // The frame after the next one is drawn when this view has been.
  requestAnimationFrame(() => requestAnimationFrame(() => performance.mark(PAINTED)));
}

/** The moment at which a view is to be seen with what is on it, among the browser's own measures. */
const PAINTED = "view painted";

function flat(nodes) {
  return [nodes].flat(Infinity).filter((node) => node instanceof Node);
}

function redraw() {
  if (current?.draw && !current.still) morphChildren(main, flat(current.draw()));
}

function go(href) {
  history.pushState(null, "", href.startsWith(base) ? href : here(href));
  scrollTo(0, 0);
  open();
  main.focus({ preventScroll: true });
}

/** Keep what was searched for in the address, without a step back for each letter. */
function remember(query) {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) if (value) params.set(name, value);
  const text = params.toString();
  history.replaceState(null, "", location.pathname + (text ? "?" + text : ""));
}

document.addEventListener("click", (event) => {
  const anchor = event.target.closest("a[href]");
  const href = anchor?.getAttribute("href");
  if (!href || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (!href.startsWith("/") || href.startsWith(`${base}/api/`) || anchor.hasAttribute("download") || anchor.rel === "external") return;
  // Another cluster, or all of them: a page of its own.
  if (me.clusters && !(base && (href === base || href.startsWith(base + "/") || href.startsWith(base + "?")))) return;
  event.preventDefault();
  go(href);
});
addEventListener("popstate", () => open());

// What is new.

let isAsking = false;

async function refresh() {
  if (isAsking || document.hidden) return;
  isAsking = true;
  try {
    const [content, all] = await Promise.all([get(isList() ? "/clusters" : "/now"), me.clusters && base ? get("/clusters") : null]);
    tell(content);
    if (me.clusters) tellClusters(all ?? content);
    const mine = turn;
    await current?.refresh?.(content);
    if (mine === turn) redraw();
  } catch (error) {
    if (error.status !== 401 && error.name !== "AbortError") lost(error);
  } finally {
    isAsking = false;
  }
}

let lastTrouble = "";

function lost(error) {
  if (lastTrouble !== error.message) toast(error.message, true);
  lastTrouble = error.message;
}

function listen() {
  source?.close();
  source = new EventSource(url("/events"));
  source.onopen = () => { lastTrouble = ""; document.documentElement.dataset.live = "yes"; };
  source.onerror = () => {
    delete document.documentElement.dataset.live;
    // Refused for good: the session has ended, which the next question is told.
    if (source.readyState === EventSource.CLOSED) refresh();
  };
  source.addEventListener("sample", refresh);
  source.addEventListener("pipeline", () => current?.wantsPipelines && refresh());
  source.addEventListener("replay", (event) => current?.replayed?.(JSON.parse(event.data)));
}

addEventListener("console:redraw", redraw);
addEventListener("console:refresh", refresh);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !me.login) refresh(); });
addEventListener("pagehide", () => source?.close());
