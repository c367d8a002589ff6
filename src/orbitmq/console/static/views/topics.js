import { h, path } from "../dom.js";
import * as f from "../format.js";
import { RATES, head, topicLink, writing } from "../parts.js";
import { toolbar, virtualTable } from "../virtual.js";
import { topicDialog } from "./topicdialog.js";
import { t, told } from "../words.js";

/** All topics. */
export async function topics({ query, go, remember }) {
  const state = { search: query.get("search") ?? "", filter: query.get("filter") ?? "own", sort: query.get("sort") ?? "name", noun: "topic", empty: t("There is no topic yet.") };
  const keep = () => remember({ search: state.search, filter: state.filter === "own" ? "" : state.filter, sort: state.sort === "name" ? "" : state.sort });
  const list = virtualTable("/topics", [
    { label: t("Topic"), sort: "name", cell: (row) => topicLink(row.name), kind: "name" },
    { label: t("In"), sort: "in_rate", cell: (row) => `${f.rate(row.in_rate)}/s`, kind: "n w-s" },
    { label: t("Lag"), sort: "lag", cell: (row) => (row.worst_group ? h("a", { href: path("groups", row.worst_group), title: t("most of it in {}", row.worst_group) }, f.count(row.lag)) : "0"), kind: "n w-s" },
    { label: t("Messages"), sort: "messages", cell: (row) => f.count(row.messages), kind: "n w-n opt" },
    { label: t("Kept"), sort: "span", cell: (row) => h("span", { title: row.first_stored_at ? t("the oldest is of {}", f.precise(row.first_stored_at)) : "" }, f.brief(row.span)), kind: "n w-s opt" },
    { label: t("Last message"), sort: "last_stored_at", cell: (row) => f.when(row.last_stored_at), kind: "n w-m opt" },
    { label: t("Groups"), sort: "groups", cell: (row) => f.count(row.groups), kind: "n w-s opt" },
    { label: t("Queues"), sort: "queues", cell: (row) => [f.count(row.queues), row.permission !== "rw" ? h("span", { class: "warn-text" }, ` ${row.permission}`) : ""], kind: "n w-s opt" },
    { label: t("Kind"), sort: "kind", cell: (row) => h("span", { class: "muted" }, told(row.kind)), kind: "w-n opt" },
  ], state, { label: t("Topics"), changed: keep });
  const box = h("section", { class: "card", "data-own": true },
    toolbar(state, [["own", t("Applications'")], ["", t("All")], ["retry", t("Retries")], ["dlq", t("Dead letters")], ["system", t("System")]], list, keep), list.node);
  const make = writing("topics", t("New topic"), () => topicDialog({ done: (name) => go(path("topics", name)) }), { kind: "primary", does: "orbitmq topic create TOPIC" });
  const page = [head(t("Topics"), { sub: RATES, actions: make }), box];
  return { title: t("Topics"), still: true, draw: () => page, shown: list.reload, refresh: list.refresh, leave: list.leave };
}

