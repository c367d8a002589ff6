// Lines, small curves and heat maps, as SVG. Labels are HTML, so that they keep their size.

import { h, s } from "./dom.js";
import * as f from "./format.js";
import { me } from "./api.js";
import { t } from "./words.js";

const W = 1000;
const H = 100;
const SHORTEST = 120;

/** Seconds after its last sample from which a line ends there, and is not drawn on to now. */
const ends = () => Math.max(45, 3 * (me.every ?? 5));

/** The stretches of a series without a gap; the last one goes on to now if it is fresh. */
function stretches(points, to) {
  const parts = [[]];
  for (const point of points) {
    if (point[1] === null) parts.push([]);
    else parts[parts.length - 1].push(point);
  }
  const last = parts[parts.length - 1];
  if (last.length && to - last[last.length - 1][0] < ends()) last.push([to, last[last.length - 1][1]]);
  return parts.filter((part) => part.length);
}

/** `series`: [{ name, points: [[time, value]...] }]; a value of null is a gap. `equal`: none matters more than the others. */
export function chart(series, { from, to, format = f.count, label, equal = false }) {
  const shown = series.map((each, place) => ({ ...each, place, parts: stretches(each.points, to) })).filter((each) => each.parts.length);
  // A console that has just begun shows the time that it knows, not an empty hour.
  const known = Math.min(to - SHORTEST, ...shown.map((each) => each.parts[0][0][0]));
  if (known > from + (to - from) / 2) from = known;
  const highest = Math.max(0, ...shown.flatMap((each) => each.parts.flat().map((point) => point[1])));
  const top = format === f.duration ? niceTime(highest) : nice(format === f.count ? Math.max(2, highest) : highest);
  const x = (time) => ((Math.max(from, Math.min(to, time)) - from) / (to - from)) * W;
  const y = (value) => H - (value / top) * H;
  const plot = h("div", { class: "plot", role: "img", "aria-label": `${label}: ${described(shown, format)}` },
    s("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      [0, 0.5].map((part) => s("line", { class: "grid", x1: 0, x2: W, y1: H * part, y2: H * part })),
      shown.map((each, number) => {
        return [number === 0 && !equal && s("path", { class: "area", d: each.parts.map((part) => `${drawn(part, x, y)} L${x(part[part.length - 1][0]).toFixed(1)},${H} L${x(part[0][0]).toFixed(1)},${H} Z`).join(" ") }),
          s("path", { class: `s${each.place}`, d: each.parts.map((part) => drawn(part, x, y)).join(" ") })];
      })),
    [1, 0.5].map((part) => h("span", { class: "y", style: { top: `${(1 - part) * 100}%` } }, (format === f.duration ? f.brief : format)(top * part))));
  hover(plot, shown, { from, to, format });
  return h("figure", { class: "chart" },
    shown.length ? plot : h("p", { class: "empty" }, t("No samples yet; the first ones come in a few seconds.")),
    shown.length > 0 && h("div", { class: "x", "aria-hidden": "true" }, h("span", null, f.when(from, false)), h("span", null, f.when((from + to) / 2, false)), h("span", null, t("now"))),
    series.length > 1 && h("figcaption", { class: "legend" }, series.map((each, place) => h("span", null, h("i", { class: `s${place}` }), each.name))));
}

function described(shown, format) {
  return shown.map((each) => t("{} {} now", each.name, format(each.points[each.points.length - 1][1]))).join(", ");
}

function drawn(points, x, y) {
  // A single sample is a dot: a line without a length, with a round cap.
  if (points.length === 1) return `M${x(points[0][0]).toFixed(1)},${y(points[0][1]).toFixed(2)} l0.01,0`;
  return points.map(([time, value], place) => `${place ? "L" : "M"}${x(time).toFixed(1)},${y(value).toFixed(2)}`).join(" ");
}

function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  // Half of it is written at the line in the middle: that of 5 would not be whole.
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

const TIMES = [10, 20, 60, 120, 240, 600, 1200, 3600, 7200, 14400, 43200, 86400, 172800, 345600, 691200];

function niceTime(seconds) {
  return TIMES.find((step) => step >= seconds) ?? nice(seconds);
}

function hover(plot, shown, { from, to, format }) {
  // What lies over the lines is the plot's own, so that a refresh leaves it.
  plot.append(h("div", { class: "over", "data-own": true, "data-key": "over" }));
  plot.onpointermove = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const time = from + share * (to - from);
    const side = share > 0.6 ? { right: `calc(${(1 - share) * 100}% + 10px)` } : { left: `calc(${share * 100}% + 10px)` };
    event.currentTarget.querySelector(".over").replaceChildren(
      h("div", { class: "cross", style: { left: `${share * 100}%` } }),
      h("div", { class: "tip", style: side }, h("div", null, f.when(time)), shown.map((each) => h("div", null, `${each.name}  ${format(at(each.points, time))}`))));
  };
  plot.onpointerleave = (event) => event.currentTarget.querySelector(".over").replaceChildren();
}

function at(points, time) {
  let value = points[0]?.[1] ?? null;
  for (const [moment, each] of points) { if (moment > time) break; value = each; }
  return value;
}

/** A small curve without axes. */
export function spark(points) {
  points = points?.filter((point) => point[1] !== null);
  if (!points || points.length < 2) return s("svg", { class: "spark", viewBox: "0 0 100 30", "aria-hidden": "true" });
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const top = Math.max(...points.map((point) => point[1])) || 1;
  const line = points.map(([time, value], place) => `${place ? "L" : "M"}${(((time - first) / (last - first || 1)) * 100).toFixed(1)},${(28 - (value / top) * 26).toFixed(1)}`).join(" ");
  return s("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("path", { class: "area", d: `${line} L100,30 L0,30 Z` }), s("path", { d: line }));
}

/** The lag of each queue over time: a row each, darker for more. */
export function heat({ queues, times, lags }) {
  if (!times.length || !lags.flat().some(Boolean)) return h("p", { class: "empty" }, t("No queue of this group was behind in the last hour."));
  const most = Math.max(1, ...lags.flat());
  // Half of the scale belongs to the small numbers: a queue with few messages is not an empty one.
  const shade = (lag) => (lag ? 0.12 + 0.88 * Math.sqrt(lag / most) : 0);
  const isOneTopic = new Set(queues.map((queue) => queue.replace(/@.*$/, ""))).size === 1;
  const rows = queues.map((queue, place) => [
    h("div", { class: "label mono" }, isOneTopic ? queue.replace(/^.*@/, "") : queue),
    s("svg", { viewBox: `0 0 ${times.length} 1`, preserveAspectRatio: "none", "shape-rendering": "crispEdges", role: "img", "aria-label": t("{}: {} {} now", queue, f.plural(lags[place].at(-1), "message"), lags[place].at(-1) === 1 ? t("waits") : t("wait")) },
      lags[place].map((lag, column) => lag > 0 && s("rect", { x: column, y: 0, width: 1, height: 1, opacity: shade(lag).toFixed(3) },
        s("title", null, t("{} at {}: {}", queue, f.when(times[column]), f.exact(lag)))))),
  ]);
  return h("div", { class: "stack" }, h("div", { class: "heat", tabindex: 0, role: "group", "aria-label": t("Lag of each queue over the last hour") }, rows),
    h("div", { class: "scale" }, t("{} to now", f.when(times[0], false)), h("span", { class: "grow" }), "0",
      s("svg", { viewBox: "0 0 10 1", preserveAspectRatio: "none", "shape-rendering": "crispEdges", "aria-hidden": "true" },
        [...Array(10).keys()].map((step) => s("rect", { x: step, y: 0, width: 1, height: 1, opacity: (step / 9).toFixed(2) }))),
      f.plural(most, "message", f.count)));
}
