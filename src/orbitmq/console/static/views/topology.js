import { get } from "../api.js";
import { h, keep, path, s } from "../dom.js";
import * as f from "../format.js";
import { card, head, table } from "../parts.js";

const ROW = 58;
const BOX = 40;
const WIDTH = 218;
const BAD = { stalled: "bad", failed: "bad", failing: "bad", lost: "bad", "falling behind": "warn", "nobody consumes": "warn", paused: "warn" };

/** Who sends to whom, and how fast. */
export async function topology({ query, remember }) {
  const state = { search: query.get("search") ?? "" };
  const load = () => get("/topology", { search: state.search, count: 14 });
  let content = await load();
  const search = h("input", { type: "search", value: state.search, placeholder: "Topic or group", "aria-label": "Search" });
  let timer = 0;
  search.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(async () => { state.search = search.value.trim(); remember(state); content = await load(); dispatchEvent(new Event("console:redraw")); }, 200);
  };
  return {
    title: "Topology",
    wantsPipelines: true,
    draw: () => [head("Topology", { sub: "Topics, the groups and Spark pipelines that read them, and where results go. A group that a pipeline consumes as is drawn as that pipeline. Rates are of the last 30 s, those of pipelines of their last batch.", actions: keep("search", search) }),
      h("div", { class: "stack" }, h("section", { class: "card" }, h("div", { class: "body" }, drawn(content))),
        content.left_out > 0 && h("p", { class: "muted" }, `${f.exact(content.left_out)} more topics are not shown; search for one.`),
        content.producers && card("Connected producers", table([["Group", (row) => row.name, "name"], ["Connected", (row) => row.count, "n"]], content.producers, { empty: "No producer is connected." }),
          h("span", { class: "small muted" }, "brokers know who is connected, not which topics they send to")))],
    refresh: async () => { content = await load(); },
  };
}

function drawn(content) {
  const readers = [
    ...content.groups.map((each) => ({ ...each, kind: "group", key: `g ${each.name}`, sub: `lag ${f.count(each.lag)}`, tone: each.lag ? BAD[each.pace] : BAD[each.pace === "paused" ? "paused" : ""], href: path("groups", each.name) })),
    ...content.pipelines.map((each) => ({ ...each, kind: "pipeline", key: `p ${each.name}`, sub: `Spark, ${f.rate(each.rate)}/s${each.lag === null ? "" : `, lag ${f.count(each.lag)}`}`, tone: BAD[each.state], href: path("pipelines", each.name) })),
  ];
  if (!content.topics.length) return h("p", { class: "empty" }, "No topic matches.");
  const outputs = [...new Set(content.pipelines.flatMap((each) => each.output))];
  // What nobody reads on is where something ends, and is shown there only.
  const read = new Set([...content.edges.map((edge) => edge.topic), ...content.pipelines.flatMap((each) => each.topics)]);
  const rates = new Map(content.topics.map((each) => [each.name, each.in_rate]));
  const topics = content.topics.filter((each) => read.has(each.name) || !outputs.includes(each.name)).map((each) => ({ ...each, key: `t ${each.name}`, sub: `${f.rate(each.in_rate)}/s in`, href: path("topics", each.name) }));
  const edges = [
    ...content.edges.map((edge) => [`t ${edge.topic}`, `g ${edge.group}`, edge.rate]),
    ...content.pipelines.flatMap((each) => each.topics.map((topic) => [`t ${topic}`, `p ${each.name}`, each.rate])),
  ];
  const onward = content.pipelines.flatMap((each) => each.output.map((topic) => [`p ${each.name}`, `o ${topic}`, each.rate]));
  // Readers beside what they read: fewer lines cross.
  const rank = new Map(topics.map((each, place) => [each.key, place]));
  const weight = (reader) => {
    const places = edges.filter((edge) => edge[1] === reader.key).map((edge) => rank.get(edge[0]) ?? 99);
    return places.length ? places.reduce((sum, place) => sum + place, 0) / places.length : 99;
  };
  readers.sort((a, b) => weight(a) - weight(b) || a.name.localeCompare(b.name));
  const shown = readers.slice(0, 60);
  const columns = [topics, shown, ...(outputs.length ? [outputs.map((name) => ({ name, key: `o ${name}`, sub: rates.has(name) ? `${f.rate(rates.get(name))}/s in` : "result", href: path("topics", name) }))] : [])];
  const height = Math.max(...columns.map((each) => each.length)) * ROW + 44;
  const total = outputs.length ? 1000 : 860;
  const gap = (total - WIDTH) / Math.max(1, columns.length - 1);
  const at = new Map();
  columns.forEach((nodes, column) => {
    const top = 34 + (height - 44 - nodes.length * ROW) / 2;
    nodes.forEach((node, place) => at.set(node.key, { x: Math.max(1, column * gap - (column ? 1 : 0)), y: top + place * ROW }));
  });
  const words = edges.length === 1 ? "line" : "lines";
  return h("div", { class: "map", tabindex: 0, role: "group", "aria-label": `${topics.length} topics, ${shown.length} readers, ${edges.length} ${words}` },
    s("svg", { viewBox: `0 0 ${total} ${height}` },
      ["Topics", "Groups and Spark pipelines", "Results"].slice(0, columns.length).map((title, column) => s("text", { class: "title", x: Math.max(2, column * gap), y: 16 }, title)),
      [...edges, ...onward].map(([from, to, rate]) => edge(at.get(from), at.get(to), rate)),
      columns.flat().map((node) => box(node, at.get(node.key))),
      rates_([...edges, ...onward], at)));
}

/** Where along a line its rate may stand, the best place first. */
const PLACES = [0.5, 0.38, 0.62, 0.27, 0.73, 0.17, 0.83];

/** The rate of each line, written on it where no other one stands. */
function rates_(lines, at) {
  const taken = [];
  return lines.map(([from, to, rate]) => {
    if (!at.has(from) || !at.has(to)) return null;
    const ends = endsOf(at.get(from), at.get(to));
    const isFree = ([x, y]) => taken.every(([left, top]) => Math.abs(left - x) > 44 || Math.abs(top - y) > 13);
    const points = PLACES.map((place) => pointOn(ends, place));
    const [x, y] = points.find(isFree) ?? points[0];
    taken.push([x, y]);
    return s("text", { class: "rate", x: x.toFixed(1), y: (y + 4).toFixed(1), "text-anchor": "middle" }, `${f.rate(rate ?? 0)}/s`);
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
  return s("path", { class: rate > 0 ? "flows" : "", d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`, "stroke-width": (1.2 + Math.min(4, Math.log10(1 + (rate ?? 0)))).toFixed(2) },
    s("title", null, `${f.plural(rate ?? 0, "message", f.rate)} per second`));
}

function box(node, { x, y }) {
  const cut = node.name.length > 28 ? `${node.name.slice(0, 27)}…` : node.name;
  return s("a", { href: node.href }, s("g", { class: `node ${node.tone ?? ""}` }, s("title", null, node.name),
    s("rect", { x, y, width: WIDTH, height: BOX, rx: 8 }), s("text", { x: x + 12, y: y + 17 }, cut), s("text", { class: "sub", x: x + 12, y: y + 32 }, node.sub)));
}

