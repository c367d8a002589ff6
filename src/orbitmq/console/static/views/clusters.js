import { get, me } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { head, table } from "../parts.js";
import { t } from "../words.js";

/** The state of a cluster in a word. */
export function stateOf(each) {
  return { up: t("up"), unreachable: t("unreachable"), starting: t("starting") }[each.state];
}

/** How urgently a cluster needs a hand, as a tone. */
export function toneOf(each) {
  return each.state === "unreachable" || each.worst === "bad" ? "bad" : each.worst ? "warn" : "";
}

/** All clusters of the console. */
export async function clusters({ known }) {
  let content = known?.clusters ? known : await get("/clusters");
  return {
    title: t("Clusters"),
    draw: () => [
      head(t("Clusters"), { sub: verdict(content.clusters) }),
      h("div", { class: "stack" },
        content.clusters.filter((each) => each.problem).map((each) => h("div", { class: "note bad" }, h("b", null, each.name), ": ", each.problem, each.at && t(" · seen {}", f.when(each.at)))),
        h("section", { class: "card" }, table([
          [t("Cluster"), name, "name"],
          [t("Needs a hand"), (row) => number(row, f.count(row.card_count), "", { bad: "bad-text", warn: "warn-text" }[row.worst]), "n"],
          [t("Brokers"), (row) => number(row, t("{} of {} up", row.brokers_up, row.brokers), "/brokers", row.brokers_up === row.brokers ? "" : "bad-text"), "n opt"],
          [t("In"), (row) => number(row, `${f.rate(row.in_rate)}/s`, "/charts"), "n opt"],
          [t("Out"), (row) => number(row, `${f.rate(row.out_rate)}/s`, "/charts"), "n opt"],
          [t("Lag"), (row) => number(row, f.count(row.lag), "/groups?filter=behind"), "n"],
          [t("Dead letters"), (row) => number(row, f.count(row.open_letters), "/dead-letters", row.open_last_hour ? "warn-text" : ""), "n"],
        ], content.clusters, { label: t("Clusters") }))),
    ],
    refresh: async (fresh) => { content = fresh?.clusters ? fresh : await get("/clusters"); },
  };
}

function verdict(found) {
  const ill = found.filter(toneOf).length;
  if (!ill) return t("Nothing needs a hand");
  return ill === 1 ? t("1 of {} needs a hand", found.length) : t("{} of {} need a hand", ill, found.length);
}

function name(row) {
  const servers = row.name_servers.join(", ");
  return [
    link(home(row), row.name || servers),
    row.name && h("div", { class: "faint small" }, servers),
    row.state !== "up" && h("span", { class: `tag ${toneOf(row)}` }, stateOf(row)),
  ];
}

function home(row) {
  return me.clusters ? path("clusters", row.name) : "/";
}

/** A number of a cluster that answers; what an earlier look found would read like the present. */
function number(row, value, place, tone = "") {
  return row.state === "up" ? h("a", { href: me.clusters ? home(row) + place : place || "/", class: tone }, value) : h("span", { class: "faint" }, "–");
}
