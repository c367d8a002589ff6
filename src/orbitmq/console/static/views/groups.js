import { h, path, link } from "../dom.js";
import * as f from "../format.js";
import { RATES, drains, groupLink, head, pace } from "../parts.js";
import { toolbar, virtualTable } from "../virtual.js";
import { t, told } from "../words.js";

/** All groups. */
export async function groups({ query, remember }) {
  const state = { search: query.get("search") ?? "", filter: query.get("filter") ?? "", sort: query.get("sort") ?? "-lag", noun: "group", empty: t("There is no group yet.") };
  const keep = () => remember({ search: state.search, filter: state.filter, sort: state.sort === "-lag" ? "" : state.sort });
  const list = virtualTable("/groups", [
    { label: t("Group"), sort: "name", cell: (row) => [groupLink(row.name), row.pipelines.map((name) => [" ", h("a", { class: "tag spark-tag", href: path("pipelines", name), title: t("consumed by the Spark pipeline {}", name) }, "Spark")])], kind: "name" },
    { label: t("Lag"), sort: "lag", cell: (row) => f.count(row.lag), kind: "n w-s" },
    { label: t("Oldest"), sort: "lag_seconds", cell: (row) => h("span", { title: f.duration(row.lag_seconds) }, f.brief(row.lag_seconds)), kind: "n w-s" },
    { label: "", sort: "pace", cell: (row) => (row.lag || row.pace === "paused" ? pace(row.pace, row.lag) : h("span", { class: "faint small" }, told(row.pace))), kind: "w-m opt" },
    { label: t("In"), sort: "in_rate", cell: (row) => `${f.rate(row.in_rate)}/s`, kind: "n w-s opt" },
    { label: t("Out"), sort: "out_rate", cell: (row) => `${f.rate(row.out_rate)}/s`, kind: "n w-s opt" },
    { label: t("Empty in"), cell: (row) => drains(row), kind: "n w-s opt" },
    { label: t("Members"), sort: "members", cell: (row) => link(path("consumers", row.name), row.members ?? "?"), kind: "n w-s opt" },
    { label: t("Dead letters"), sort: "open_letters", cell: (row) => (row.dead_letters ? link(path("dead-letters", row.name), h("span", { class: row.open_last_hour ? "warn-text" : "" }, f.count(row.open_letters))) : "0"), kind: "n w-n opt" },
  ], state, { label: t("Groups"), changed: keep });
  const box = h("section", { class: "card", "data-own": true },
    toolbar(state, [["", t("All")], ["behind", t("Behind")], ["wrong", t("Need a hand")], ["dead", t("With dead letters")]], list, keep), list.node);
  const page = [head(t("Groups"), { sub: RATES }), box];
  return { title: t("Groups"), still: true, draw: () => page, shown: list.reload, refresh: list.refresh, leave: list.leave };
}
