import { get, url } from "../api.js";
import { h } from "../dom.js";
import * as f from "../format.js";
import { card, command, field, head, problem, suggestions, table } from "../parts.js";
import { decoderDialog } from "./decoder.js";
import { messageDialog } from "./message.js";
import { t } from "../words.js";

const MODES = [["newest", t("The newest")], ["time", t("From a time")], ["offset", t("From an offset")], ["key", t("With a key")], ["id", t("With an id")], ["tail", t("As they arrive")]];
/** Messages of the first page, and of each one after it. */
const FIRST = 50;
const MORE = 200;

/** Messages of a topic. */
export async function messages({ query, remember }) {
  const input = (name, props) => h("input", { value: query.get(name) ?? "", autocomplete: "off", spellcheck: "false", ...props });
  const topic = input("topic", { list: "topic-names", required: true, placeholder: "orders" });
  const names = suggestions("topic-names", topic, "/topics");
  const mode = h("select", null, MODES.map(([value, word]) => h("option", { value }, word)));
  mode.value = MODES.some(([value]) => value === query.get("mode")) ? query.get("mode") : "newest";
  const since = input("since", { type: "datetime-local", step: 1 });
  const until = input("until", { type: "datetime-local", step: 1 });
  const queue = input("queue", { placeholder: "broker-a:0" });
  const offset = input("offset", { type: "number", min: 0 });
  const key = input("key", { placeholder: "order-17" });
  const id = input("id", { placeholder: "7F000001…" });
  const expression = input("expression", { placeholder: "paid || shipped" });
  const type = h("select", null, h("option", { value: "TAG" }, "tags"), h("option", { value: "SQL92" }, "SQL"));
  type.value = query.get("type") ?? "TAG";
  const where = input("where", { placeholder: "cents > 1000 and customer.country = \"CH\"" });
  const order = h("select", null, h("option", { value: "" }, t("newest first")), h("option", { value: "oldest" }, t("oldest first")));
  order.value = query.get("order") ?? "";
  const fields = {
    newest: [], tail: [], time: [field(t("Since"), since), field(t("Until"), until), field(t("Order"), order)], offset: [field(t("Queue"), queue), field(t("Offset"), offset)], key: [field(t("Key"), key)], id: [field(t("Id"), id)],
  };
  const filter = [field(t("Filter"), expression), field(t("As"), type), field(t("Fields of the body"), where, "double")];
  const decoder = h("button", { type: "button", class: "quiet", onclick: () => decoderDialog(topic.value.trim(), () => show(false)) }, t("How bodies are read"));
  const place = h("div", { class: "form" });
  const button = h("button", { class: "primary" }, t("Show"));
  const result = h("div", { class: "stack" });
  const form = h("form", { class: "card" }, h("div", { class: "body" }, place));
  let rows = [];
  let cursor = null;
  let text = "";
  let looked = 0;
  let stream = null;

  function lay() {
    const isOne = mode.value === "id";
    place.replaceChildren(field(t("Topic"), topic), names, field(t("Which"), mode), ...fields[mode.value], ...(isOne || mode.value === "key" ? [] : filter), button);
    button.textContent = mode.value === "tail" ? t("Follow") : t("Show");
  }

  function wanted() {
    const local = (value) => (value ? new Date(value).getTime() / 1000 : undefined);
    const base = { topic: topic.value.trim() };
    const filtered = { ...base, expression: expression.value.trim(), type: expression.value.trim() ? type.value : "", where: where.value.trim() };
    switch (mode.value) {
      case "time": return { ...filtered, since: local(since.value), until: local(until.value), newest: order.value ? "" : 1 };
      case "offset": return { ...filtered, queue: queue.value.trim(), offset: offset.value || "0", newest: query.get("newest") };
      case "key": return { ...base, key: key.value.trim() };
      default: return { ...filtered, newest: 1 };
    }
  }

  function leave() {
    stream?.close();
    stream = null;
  }

  async function show(more) {
    leave();
    if (!more) { rows = []; cursor = null; }
    const kept = { topic: topic.value.trim(), mode: mode.value === "newest" ? "" : mode.value, since: since.value, until: until.value, queue: mode.value === "offset" ? queue.value : "", offset: mode.value === "offset" ? offset.value : "", key: mode.value === "key" ? key.value : "", id: mode.value === "id" ? id.value : "", expression: expression.value, where: where.value.trim(), order: mode.value === "time" ? order.value : "", type: expression.value ? type.value : "", newest: mode.value === "offset" ? query.get("newest") : "" };
    remember(kept);
    button.disabled = true;
    try {
      if (mode.value === "tail") return follow();
      if (mode.value === "id") {
        const found = await get("/messages/one", { id: id.value.trim(), topic: topic.value.trim() });
        rows = [found];
        looked = 1;
        text = found.command;
        draw();
        messageDialog(found.id, found.topic, found.offset_id);
        return;
      }
      const page = await get("/messages", more ? { ...wanted(), cursor, count: MORE, listed: rows.length } : { ...wanted(), count: FIRST });
      rows = rows.concat(page.rows);
      looked = (more ? looked : 0) + page.looked;
      cursor = page.cursor;
      text = page.command;
      if (more) append(page.rows); else draw();
    } catch (error) {
      result.replaceChildren(problem(error));
    } finally {
      button.disabled = false;
    }
  }

  function draw() {
    result.replaceChildren(card(heading(), list(rows), decoder), h("div", { class: "stack", "data-rest": true }, rest(), command(text)));
  }

  /** Rows below those that are there: however many pages were shown, one more costs as much as the first. */
  function append(some) {
    const body = result.querySelector("tbody");
    if (!body) return draw();
    body.append(...list(some, rows).querySelectorAll("tbody tr"));
    result.querySelector("h2").textContent = heading();
    result.querySelector("[data-rest]").replaceChildren(rest(), command(text));
  }

  function heading() {
    const found = f.plural(rows.length, "message");
    return where.value.trim() && mode.value !== "key" && mode.value !== "id" ? t("{} of {} looked at", found, f.exact(looked)) : found;
  }

  function rest() {
    return h("div", null, cursor ? h("button", { type: "button", onclick: () => show(true) }, where.value.trim() ? t("Look further") : t("Show more")) : h("span", { class: "small muted" }, t("that is all")));
  }

  function follow() {
    const asked = wanted();
    stream = new EventSource(url("/messages/tail", { topic: asked.topic, expression: asked.expression, type: asked.type, where: asked.where }));
    const state = h("span", { class: "small muted", role: "status" }, t("waiting for messages"));
    const body = h("div");
    let passed = 0;
    const stop = h("button", { type: "button", onclick: () => { leave(); state.textContent = t("stopped"); stop.disabled = true; } }, t("Stop"));
    const same = h("div");
    result.replaceChildren(card(t("{}, as messages arrive", asked.topic), body, [state, stop, decoder]), same);
    let isWaiting = false;
    const paint = () => { isWaiting = false; body.replaceChildren(list(rows)); };
    stream.addEventListener("message", (event) => {
      if (!event.data) return;
      rows.unshift(JSON.parse(event.data));
      rows.sort(newestFirst);
      rows.length = Math.min(rows.length, 200);
      state.textContent = passed ? t("{} more were not shown", f.count(passed)) : t("following");
      if (!isWaiting) { isWaiting = true; requestAnimationFrame(paint); }
    });
    stream.addEventListener("command", (event) => same.replaceChildren(command(JSON.parse(event.data).command)));
    stream.addEventListener("refused", (event) => { result.replaceChildren(problem({ message: JSON.parse(event.data).text })); leave(); });
    stream.addEventListener("passed", (event) => { passed += JSON.parse(event.data).count; });
    stream.onopen = () => { state.textContent = t("following"); state.dataset.open = "yes"; };
    stream.onerror = () => { if (stream?.readyState === EventSource.CLOSED) { state.textContent = t("the topic cannot be followed; is its name right?"); leave(); } };
  }

  mode.onchange = lay;
  form.onsubmit = (event) => { event.preventDefault(); show(false); };
  lay();
  const page = [head(t("Messages")), h("div", { class: "stack", "data-own": true }, form, result)];
  return { title: t("Messages"), still: true, draw: () => page, shown: () => (topic.value ? show(false) : topic.focus({ preventScroll: true })), leave };
}

function newestFirst(a, b) {
  return b.stored_at - a.stored_at || b.born_at - a.born_at || b.offset - a.offset;
}

/** Rows that open beside the page; with the arrows one goes on to the next. */
export function list(rows, all = rows) {
  const open = (row) => {
    let place = all.indexOf(row);
    messageDialog(row.id, row.topic, row.offset_id, (by) => {
      const next = all[place + by];
      if (next) place += by;
      return next;
    });
  };
  return table([
    [t("Stored"), (row) => h("button", { type: "button", class: "quiet nowrap", onclick: () => open(row), title: f.precise(row.stored_at) }, f.instant(row.stored_at)), ""],
    [t("Queue"), (row) => h("span", { class: "mono nowrap" }, `${row.broker}:${row.queue}`), "opt"],
    [t("Offset"), (row) => f.exact(row.offset), "n"],
    [t("Tag"), (row) => row.tags ?? "", "opt"],
    [t("Keys"), (row) => row.keys.join(" "), "opt"],
    [t("Body"), (row) => row.preview, "preview"],
    [t("Size"), (row) => f.bytes(row.size), "n opt"],
  ], rows, { empty: t("No message matches."), label: t("Messages"), open });
}
