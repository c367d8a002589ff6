import { get } from "../api.js";
import { h, keep, link, path, s } from "../dom.js";
import * as f from "../format.js";
import { card, head, pace, table } from "../parts.js";
import { t, told } from "../words.js";

const ROW = 62;
const BOX = 44;
const BAD = { stalled: "bad", failed: "bad", failing: "bad", lost: "bad", "falling behind": "warn", "nobody consumes": "warn", paused: "warn", stopped: "idle" };
/** Topics that are drawn at first. */
const DRAWN = 14;
/** The width of the drawing; names have room in a box of a third of it. */
const TOTAL = 1080;
const WIDTH = 262;
/** Letters of a name in one line of a box. */
const LINE = 33;

/** Who sends to whom, and how fast. */
export async function topology({ query, remember }) {
  const state = { search: query.get("search") ?? "", idle: query.get("idle") ?? "" };
  const load = () => get("/topology", { search: state.search, idle: state.idle, count: state.search || state.idle ? 40 : DRAWN });
  let content = await load();
  const search = h("input", { type: "search", value: state.search, placeholder: t("Topic or group"), "aria-label": t("Search") });
  const again = async () => { remember(state); content = await load(); dispatchEvent(new Event("console:redraw")); };
  let timer = 0;
  search.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.search = search.value.trim(); again(); }, 200);
  };
  const fold = (value, words) => h("button", { type: "button", class: "quiet", onclick: () => { state.idle = value; again(); } }, words);
  return {
    title: t("Topology"),
    wantsPipelines: true,
    draw: () => {
      const graph = graphOf(content);
      return [head(t("Topology"), { sub: t("Topics, the groups and Spark pipelines that read them, and where results go. A group that a pipeline consumes as is drawn as that pipeline. Rates are of the last 30 s, those of pipelines of their last batch."), actions: keep("search", search) }),
        h("div", { class: "stack" }, h("section", { class: "card", "aria-label": t("Drawing") }, h("div", { class: "body" }, graph.topics.length || graph.readers.length ? [drawn(graph), listed(graph)] : h("p", { class: "empty" }, state.search ? t("No topic matches.") : t("Nothing flows at the moment.")))),
          h("div", { class: "row" },
            content.idle > 0 && fold("1", t("Show {}", f.plural(content.idle, "idle topic"))),
            state.idle && fold("", t("Fold idle topics")),
            content.left_out > 0 && h("span", { class: "muted" }, t("{} not drawn; search for one.", f.plural(content.left_out, "more topic")))),
          content.producers && card(t("Connected producers"), table([[t("Group"), (row) => row.name, "name"], [t("Connected"), (row) => row.count, "n"]], content.producers, { empty: t("No producer is connected.") }),
            h("span", { class: "small muted" }, t("brokers know who is connected, not which topics they send to"))))];
    },
    refresh: async () => { content = await load(); },
  };
}

/** Nodes and edges of the drawing, readers beside what they read: fewer lines cross. */
function graphOf(content) {
  const readers = [
    ...content.groups.map((each) => ({ ...each, kind: "group", key: `g ${each.name}`, sub: t("lag {}", f.count(each.lag)), word: each.pace, tone: each.lag ? BAD[each.pace] : BAD[each.pace === "paused" ? "paused" : ""], href: path("groups", each.name) })),
    ...content.pipelines.map((each) => ({ ...each, kind: "pipeline", key: `p ${each.name}`, sub: t("Spark, {}{}", each.rate === null ? told(each.state) : `${f.rate(each.rate)}/s`, each.lag === null ? "" : t(", lag {}", f.count(each.lag))), word: each.state, tone: BAD[each.state], href: path("pipelines", each.name) })),
  ];
  const outputs = [...new Set(content.pipelines.flatMap((each) => each.output))];
  // What nobody reads on is where something ends, and is shown there only.
  const read = new Set([...content.edges.map((edge) => edge.topic), ...content.pipelines.flatMap((each) => each.topics)]);
  const rates = new Map(content.topics.map((each) => [each.name, each.in_rate]));
  const topics = content.topics.filter((each) => read.has(each.name) || !outputs.includes(each.name)).map((each) => ({ ...each, key: `t ${each.name}`, sub: t("{}/s in", f.rate(each.in_rate)), href: path("topics", each.name) }));
  const edges = [
    ...content.edges.map((edge) => [`t ${edge.topic}`, `g ${edge.group}`, edge.rate]),
    ...content.pipelines.flatMap((each) => each.topics.map((topic) => [`t ${topic}`, `p ${each.name}`, each.rate])),
  ];
  const onward = content.pipelines.flatMap((each) => each.output.map((topic) => [`p ${each.name}`, `o ${topic}`, each.rate]));
  const rank = new Map(topics.map((each, place) => [each.key, place]));
  const weight = (reader) => {
    const places = edges.filter((edge) => edge[1] === reader.key).map((edge) => rank.get(edge[0]) ?? 99);
    return places.length ? places.reduce((sum, place) => sum + place, 0) / places.length : 99;
  };
  readers.sort((a, b) => weight(a) - weight(b) || a.name.localeCompare(b.name));
  return { topics, readers: readers.slice(0, 60), results: outputs.map((name) => ({ name, key: `o ${name}`, sub: rates.has(name) ? t("{}/s in", f.rate(rates.get(name))) : t("result"), href: path("topics", name) })), edges, onward };
}

function drawn({ topics, readers, results, edges, onward }) {
  const columns = [topics, readers, ...(results.length ? [results] : [])];
  const height = Math.max(...columns.map((each) => each.length)) * ROW + 44;
  const gap = (TOTAL - WIDTH - 2) / Math.max(1, columns.length - 1);
  const at = new Map();
  columns.forEach((nodes, column) => {
    const top = 34 + (height - 44 - nodes.length * ROW) / 2;
    nodes.forEach((node, place) => at.set(node.key, { x: 1 + column * gap, y: top + place * ROW }));
  });
  const words = edges.length === 1 ? t("line") : t("lines");
  return h("div", { class: "map", tabindex: 0, role: "group", "aria-label": t("{} topics, {} readers, {} {}", topics.length, readers.length, edges.length, words) },
    s("svg", { viewBox: `0 0 ${TOTAL} ${height}` },
      [t("Topics"), t("Groups and Spark pipelines"), t("Results")].slice(0, columns.length).map((title, column) => s("text", { class: "title", x: 2 + column * gap, y: 16 }, title)),
      [...edges, ...onward].map(([from, to, rate]) => edge(at.get(from), at.get(to), rate)),
      columns.flat().map((node) => box(node, at.get(node.key))),
      rates_([...edges, ...onward], at)));
}

/** The same as a list, for narrow windows. */
function listed({ topics, readers, edges, onward }) {
  const byKey = new Map(readers.map((each) => [each.key, each]));
  return h("ul", { class: "flows-list", "aria-label": t("Who reads what") }, topics.map((topic) => h("li", null,
    h("div", { class: "row" }, link(topic.href, h("b", null, topic.name)), h("span", { class: "muted small" }, topic.sub)),
    h("ul", null, edges.filter(([from]) => from === topic.key).map(([, to, rate]) => {
      const reader = byKey.get(to);
      if (!reader) return null;
      const outputs = onward.filter(([from]) => from === to).map(([, name]) => name.slice(2));
      return h("li", null, h("span", { "aria-hidden": "true", class: "faint" }, "→ "), link(reader.href, reader.name), h("span", { class: "muted small" }, reader.kind === "pipeline" ? ` ${reader.sub} ` : ` ${said(rate)}, ${reader.sub} `),
        reader.tone && reader.tone !== "idle" ? pace(reader.word) : null, outputs.length ? h("div", { class: "muted small" }, t("writes "), outputs.map((name) => link(path("topics", name), name))) : null);
    })))));
}

/** The rate of a line; nothing flows on that of a pipeline that ended. */
function said(rate) {
  return rate === null || rate === undefined ? t("stopped") : `${f.rate(rate)}/s`;
}

/** Where along a line its rate may stand, the best place first. */
const PLACES = [0.5, 0.38, 0.62, 0.27, 0.73, 0.17, 0.83];

/** The rate of each line, written on it where no other one stands. */
function rates_(lines, at) {
  const taken = [];
  return lines.map(([from, to, rate]) => {
    if (!at.has(from) || !at.has(to)) return null;
    const ends = endsOf(at.get(from), at.get(to));
    const isFree = ([x, y]) => taken.every(([left, top]) => Math.abs(left - x) > 50 || Math.abs(top - y) > 14);
    const points = PLACES.map((place) => pointOn(ends, place));
    const [x, y] = points.find(isFree) ?? points[0];
    taken.push([x, y]);
    return s("text", { class: "rate", x: x.toFixed(1), y: (y + 4).toFixed(1), "text-anchor": "middle" }, said(rate));
  });
}

function endsOf(from, to) {
  return [from.x + WIDTH, from.y + BOX / 2, to.x, to.y + BOX / 2];
}

/** A point of the curve that `edge` draws, a share of its way from the beginning. */
function pointOn([x1, y1, x2, y2], share) {
  const rest = 1 - share;
  const [a, b, c, d] = [rest ** 3, 3 * rest ** 2 * share, 3 * rest * share ** 2, share ** 3];
  const middle = (x1 + x2) / 2;
  return [a * x1 + (b + c) * middle + d * x2, (a + b) * y1 + (c + d) * y2];
}

function edge(from, to, rate) {
  if (!from || !to) return null;
  const [x1, y1, x2, y2] = endsOf(from, to);
  const bend = (x2 - x1) / 2;
  const kind = rate > 0 ? "flows" : rate === null || rate === undefined ? "ended" : "";
  return s("path", { class: kind, d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`, "stroke-width": (1.2 + Math.min(4, Math.log10(1 + (rate ?? 0)))).toFixed(2) },
    s("title", null, rate === null || rate === undefined ? t("stopped") : t("{} per second", f.plural(rate, "message", f.rate))));
}

function box(node, { x, y }) {
  // Of a longer name the middle is left out: beginnings and ends tell names apart.
  const cut = node.name.length > LINE ? `${node.name.slice(0, LINE - 14)}…${node.name.slice(-13)}` : node.name;
  return s("a", { href: node.href }, s("g", { class: `node ${node.tone ?? ""}` }, s("title", null, node.name),
    s("rect", { x, y, width: WIDTH, height: BOX, rx: 8 }), s("text", { x: x + 12, y: y + 18 }, cut), s("text", { class: "sub", x: x + 12, y: y + 35 }, node.sub)));
}
