import { get } from "../api.js";
import { h, keep } from "../dom.js";
import * as f from "../format.js";
import { card, field, head, suggestions } from "../parts.js";
import { chart } from "../charts.js";
import { t } from "../words.js";

const SPANS = [[60, t("1 hour")], [360, t("6 hours")], [1440, t("24 hours")], [10080, t("7 days")]];

/** Groups and topics that are shown by themselves: those with the most to do. */
const BUSIEST = 5;

/** The names to show: groups with lag or traffic, and topics that messages come into. */
async function busiest() {
  const [byLag, byRate, topics] = await Promise.all([
    get("/groups", { sort: "-lag", count: BUSIEST }), get("/groups", { sort: "-out_rate", count: BUSIEST }), get("/topics", { filter: "own", sort: "-in_rate", count: BUSIEST }),
  ]);
  return {
    behind: byLag.rows.filter((row) => row.lag).map((row) => row.name),
    fast: byRate.rows.filter((row) => row.out_rate).map((row) => row.name),
    topics: topics.rows.filter((row) => row.in_rate).map((row) => row.name),
  };
}

/** Numbers over time: of the cluster, of the busiest groups and topics, of a chosen one. */
export async function charts({ query, remember }) {
  const state = { minutes: Number(query.get("minutes")) || 60, group: query.get("group") ?? "", topic: query.get("topic") ?? "" };
  let top = await busiest();
  const each = (names, kind, what) => names.map((name) => [name, `${kind}/${name}/${what}`]);
  const wanted = () => [
    [t("Messages per second"), f.rate, [[t("in"), "cluster/in"], [t("out"), "cluster/out"]]],
    [t("Lag"), f.count, [[t("lag"), "cluster/lag"]]],
    [t("Oldest"), f.duration, [[t("oldest"), "cluster/seconds"]]],
    [t("Open dead letters"), f.count, [[t("dead letters"), "cluster/dead"]]],
    ...(state.group || state.topic ? [] : [
      ...(top.behind.length ? [[t("Lag of the groups furthest behind"), f.count, each(top.behind, "group", "lag"), true]] : []),
      ...(top.fast.length ? [[t("Finished per second, busiest groups"), f.rate, each(top.fast, "group", "out"), true]] : []),
      ...(top.topics.length ? [[t("In per second, busiest topics"), f.rate, each(top.topics, "topic", "in"), true]] : []),
    ]),
    ...(state.group ? [
      [t("{}: messages per second", state.group), f.rate, [[t("in"), `group/${state.group}/in`], [t("out"), `group/${state.group}/out`]]],
      [t("{}: lag", state.group), f.count, [[t("lag"), `group/${state.group}/lag`], [t("failed before"), `group/${state.group}/retry`]]],
      [t("{}: oldest", state.group), f.duration, [[t("oldest"), `group/${state.group}/seconds`]]],
      [t("{}: a call of a handler takes", state.group), f.fine, [["p50", `group/${state.group}/p50`], ["p95", `group/${state.group}/p95`], ["p99", `group/${state.group}/p99`]]],
      [t("{}: mean time of a call", state.group), f.fine, [[t("the member in the middle"), `group/${state.group}/median`], [t("the slowest member"), `group/${state.group}/slowest`]]],
      [t("{}: handled per second", state.group), f.rate, [[t("well"), `group/${state.group}/ok`], [t("failed"), `group/${state.group}/failed`]]],
      [t("{}: pulled per second", state.group), f.rate, [[t("pulled"), `group/${state.group}/pulled`]]],
      [t("{}: a pull waits for messages", state.group), f.fine, [[t("the slowest member"), `group/${state.group}/pull`]]],
      [t("{}: dead letters", state.group), f.count, [[t("dead letters"), `group/${state.group}/dead`]]],
    ] : []),
    ...(state.topic ? [[t("{}: in per second", state.topic), f.rate, [[t("in"), `topic/${state.topic}/in`]]]] : []),
  ];
  const load = () => get("/charts", { minutes: state.minutes, series: wanted().flatMap(([, , series]) => series.map(([, name]) => name)) });
  let content = await load();
  const again = async () => {
    top = await busiest();
    remember({ minutes: state.minutes === 60 ? "" : state.minutes, group: state.group, topic: state.topic });
    content = await load();
    dispatchEvent(new Event("console:redraw"));
  };
  const chosen = (name, word, list, place, query) => {
    const input = h("input", { list, value: state[name], placeholder: t("the busiest"), onchange: (event) => { state[name] = event.target.value.trim(); again(); } });
    return [field(word, input), suggestions(list, input, place, query)];
  };
  const choice = h("div", { class: "choice" }, chosen("group", t("Group"), "chart-groups", "/groups"), chosen("topic", t("Topic"), "chart-topics", "/topics", { filter: "own" }));
  return {
    title: t("Charts"),
    draw: () => [
      head(t("Charts"), { sub: t("Every sample of the last hour, and the peaks of five minutes for seven days."), actions: [keep("choice", choice), h("div", { class: "chips", role: "group", "aria-label": t("Time span") }, SPANS.map(([minutes, word]) => h("button", { type: "button", class: "chip", "aria-pressed": String(minutes === state.minutes), onclick: () => { state.minutes = minutes; again(); } }, word)))] }),
      h("div", { class: "stack" },
        h("div", { class: "split even" }, wanted().map(([title, format, series, equal]) => card(title, h("div", { class: equal ? "body equal" : "body" }, chart(series.map(([name, key]) => ({ name, points: content.series[key] ?? [] })), { from: content.from, to: content.to, format, label: title, equal })))))),
    ],
    refresh: async () => { content = await load(); },
  };
}
