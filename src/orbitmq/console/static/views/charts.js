import { get } from "../api.js";
import { h, keep } from "../dom.js";
import * as f from "../format.js";
import { card, field, head, suggestions } from "../parts.js";
import { chart } from "../charts.js";

const SPANS = [[60, "1 hour"], [360, "6 hours"], [1440, "24 hours"], [10080, "7 days"]];

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
    ["Messages per second", f.rate, [["in", "cluster/in"], ["out", "cluster/out"]]],
    ["Lag", f.count, [["lag", "cluster/lag"]]],
    ["Oldest", f.duration, [["oldest", "cluster/seconds"]]],
    ["Open dead letters", f.count, [["dead letters", "cluster/dead"]]],
    ...(state.group || state.topic ? [] : [
      ...(top.behind.length ? [["Lag of the groups furthest behind", f.count, each(top.behind, "group", "lag"), true]] : []),
      ...(top.fast.length ? [["Finished per second, busiest groups", f.rate, each(top.fast, "group", "out"), true]] : []),
      ...(top.topics.length ? [["In per second, busiest topics", f.rate, each(top.topics, "topic", "in"), true]] : []),
    ]),
    ...(state.group ? [
      [`${state.group}: messages per second`, f.rate, [["in", `group/${state.group}/in`], ["out", `group/${state.group}/out`]]],
      [`${state.group}: lag`, f.count, [["lag", `group/${state.group}/lag`], ["failed before", `group/${state.group}/retry`]]],
      [`${state.group}: oldest`, f.duration, [["oldest", `group/${state.group}/seconds`]]],
      [`${state.group}: a call of a handler takes`, f.fine, [["p50", `group/${state.group}/p50`], ["p95", `group/${state.group}/p95`], ["p99", `group/${state.group}/p99`]]],
      [`${state.group}: mean time of a call`, f.fine, [["the member in the middle", `group/${state.group}/median`], ["the slowest member", `group/${state.group}/slowest`]]],
      [`${state.group}: handled per second`, f.rate, [["well", `group/${state.group}/ok`], ["failed", `group/${state.group}/failed`]]],
      [`${state.group}: pulled per second`, f.rate, [["pulled", `group/${state.group}/pulled`]]],
      [`${state.group}: a pull waits for messages`, f.fine, [["the slowest member", `group/${state.group}/pull`]]],
      [`${state.group}: dead letters`, f.count, [["dead letters", `group/${state.group}/dead`]]],
    ] : []),
    ...(state.topic ? [[`${state.topic}: in per second`, f.rate, [["in", `topic/${state.topic}/in`]]]] : []),
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
    const input = h("input", { list, value: state[name], placeholder: "the busiest", onchange: (event) => { state[name] = event.target.value.trim(); again(); } });
    return [field(word, input), suggestions(list, input, place, query)];
  };
  const choice = h("div", { class: "choice" }, chosen("group", "Group", "chart-groups", "/groups"), chosen("topic", "Topic", "chart-topics", "/topics", { filter: "own" }));
  return {
    title: "Charts",
    draw: () => [
      head("Charts", { sub: "Every sample of the last hour, and the peaks of five minutes for seven days.", actions: [keep("choice", choice), h("div", { class: "chips", role: "group", "aria-label": "Time span" }, SPANS.map(([minutes, word]) => h("button", { type: "button", class: "chip", "aria-pressed": String(minutes === state.minutes), onclick: () => { state.minutes = minutes; again(); } }, word)))] }),
      h("div", { class: "stack" },
        h("div", { class: "split even" }, wanted().map(([title, format, series, equal]) => card(title, h("div", { class: equal ? "body equal" : "body" }, chart(series.map(([name, key]) => ({ name, points: content.series[key] ?? [] })), { from: content.from, to: content.to, format, label: title, equal })))))),
    ],
    refresh: async () => { content = await load(); },
  };
}
