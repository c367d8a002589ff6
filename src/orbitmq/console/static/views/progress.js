import { get, may, post } from "../api.js";
import { h, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, field, head, problem, readOnlyNote, suggestions, table, toast } from "../parts.js";
import { auditTable } from "./audit.js";
import { t } from "../words.js";

const ACTIONS = [["reset", t("Go to another place")], ["skip", t("Skip what waits")], ["clone", t("Copy from another group")]];
const PLACES = [["earliest", t("the earliest message")], ["latest", t("the latest: the end")], ["time", t("a time")], ["offset", t("an offset")], ["shift", t("back or forward")]];

/** Older names of positions, in addresses that were kept. */
const SYNONYMS = { begin: "earliest", first: "earliest", end: "latest", last: "latest" };
/** Groups that are offered before one is chosen. */
const OFFERED = 8;

/** Move a group's progress: a plan first, then exactly that plan. */
export async function progress({ query }) {
  const input = (name, props) => h("input", { value: query.get(name) ?? "", autocomplete: "off", spellcheck: "false", ...props });
  const choice = (options, value) => { const node = h("select", null, options.map(([name, word]) => h("option", { value: name }, word))); node.value = value; return node; };
  const group = input("group", { list: "groups", required: true });
  const topic = input("topic", { list: "topics" });
  const action = choice(ACTIONS, query.get("action") ?? "reset");
  const to = choice(PLACES, SYNONYMS[query.get("to")] ?? query.get("to") ?? "time");
  const time = h("input", { type: "datetime-local", step: 1 });
  const number = h("input", { type: "number" });
  const queues = input("queues", { placeholder: t("all") });
  const source = input("source", { list: "sources" });
  const names = [suggestions("groups", group, "/groups"), suggestions("sources", source, "/groups"), suggestions("topics", topic, "/topics", { filter: "own" })];
  const place = h("div", { class: "form" });
  const plan = h("button", { class: "primary" }, t("Plan"));
  const result = h("div", { class: "stack" });
  const lines = h("div");
  const standing = h("div");
  const form = h("form", { class: "card" }, h("div", { class: "body" }, place));

  function lay() {
    const parts = action.value === "clone" ? [field(t("From group"), source)] : [];
    parts.push(field(action.value === "reset" ? t("Topic") : t("Topic (empty: all)"), topic));
    if (action.value === "reset") parts.push(field(t("To"), to));
    if (action.value === "reset") {
      if (to.value === "time") parts.push(field(t("Time"), time));
      if (to.value === "offset") parts.push(field(t("Offset"), number));
      if (to.value === "shift") parts.push(field(t("Messages, - is back"), number));
      parts.push(field(t("Queues"), queues));
    }
    topic.required = action.value === "reset";
    place.replaceChildren(field(t("Group"), group), ...names, field(t("What"), action), ...parts, plan);
  }

  const wish = () => ({
    action: action.value, group: group.value.trim(), topic: topic.value.trim() || null,
    ...(action.value === "clone" ? { source: source.value.trim() } : {}),
    ...(action.value === "reset" ? {
      to: to.value, time: to.value === "time" && time.value ? new Date(time.value).toISOString() : null,
      number: ["offset", "shift"].includes(to.value) && number.value !== "" ? Number(number.value) : null,
      queues: queues.value.split(/[\s,]+/).filter(Boolean),
    } : {}),
  });

  form.onsubmit = async (event) => {
    event.preventDefault();
    plan.disabled = true;
    try {
      showPlan(await post("/progress/plan", wish()));
    } catch (error) {
      result.replaceChildren(problem(error));
    } finally {
      plan.disabled = false;
    }
  };

  function showPlan(planned) {
    const moves = planned.topics.flatMap((each) => each.moves.map((move) => ({ ...move, topic: each.topic })));
    const sum = (name) => planned.topics.reduce((total, each) => total + each[name], 0);
    const online = [...new Set(planned.topics.flatMap((each) => each.online))];
    const apply = h("button", { type: "button", class: "primary", disabled: !may("progress") || !moves.length }, t("Do this"));
    apply.onclick = () => act(apply, async () => showOutcome(await post("/progress/apply", { plan: planned.plan })));
    result.replaceChildren(card(t("Plan: nothing is changed yet"), h("div", null,
      h("div", { class: "body stack" },
        h("p", null, t("{} would be skipped, {} consumed again", f.plural(sum("skipped"), "message"), f.exact(sum("replayed"))),
          online.length ? t("; {} online would be sent there", f.plural(online.length, "member")) : t("; nobody is online"), "."),
        command(planned.command), readOnlyNote("progress"), h("div", null, apply)),
      table([
        [t("Topic"), (row) => row.topic, "name"],
        [t("Queue"), (row) => h("span", { class: "mono" }, `${row.broker}:${row.id}`), "nowrap"],
        [t("From"), (row) => (row.from === null ? t("none") : f.exact(row.from)), "n"],
        [t("To"), (row) => h("b", null, f.exact(row.to)), "n"],
        [t("Skipped"), (row) => f.exact(row.skipped), "n"],
        [t("Again"), (row) => f.exact(row.replayed), "n"],
        [t("Queue has"), (row) => `${f.exact(row.min)}–${f.exact(row.max)}`, "n opt"],
      ], moves, { empty: t("There is nothing to move.") }))));
  }

  async function showOutcome(outcome) {
    const queues = outcome.topics.flatMap((each) => each.queues.map((queue) => ({ ...queue, topic: each.topic })));
    toast(outcome.outcome, !outcome.is_effective);
    result.replaceChildren(card(outcome.is_effective ? t("Done, and read back") : t("Not everywhere"), h("div", null,
      h("div", { class: "body stack" }, h("p", { role: "status", class: outcome.is_effective ? "" : "bad-text" }, outcome.outcome), command(outcome.command)),
      table([
        [t("Topic"), (row) => row.topic, "name"],
        [t("Queue"), (row) => h("span", { class: "mono" }, `${row.broker}:${row.id}`), "nowrap"],
        [t("Wanted"), (row) => f.exact(row.wanted), "n"],
        [t("Read back"), (row) => f.exact(row.read_back), "n"],
        ["", (row) => (row.problem ? h("span", { class: "bad-text" }, row.problem) : t("as wanted")), "name"],
      ], queues))));
    await showLines();
  }

  async function showLines() {
    const { lines: found } = await get("/audit");
    lines.replaceChildren(card(t("What was done here"), auditTable(found.slice(0, 10))));
  }

  let stood = null;
  /** Where the chosen group stands; before one is chosen, those that are furthest behind. */
  async function stand() {
    const name = group.value.trim();
    if (name === stood) return;
    stood = name;
    const found = name ? await get(path("groups", name)).catch(() => null) : null;
    const { rows } = found ? { rows: [] } : await get("/groups", { filter: "behind", sort: "-lag", count: OFFERED });
    if (name !== stood) return;
    standing.replaceChildren(found ? standingOf(found) : card(t("Furthest behind"), table([
      [t("Group"), (row) => h("button", { type: "button", class: "quiet", onclick: () => { group.value = row.name; topic.value = row.topics[0] ?? ""; stand(); } }, row.name), "name"],
      [t("Lag"), (row) => f.count(row.lag), "n"],
      [t("Oldest"), (row) => f.brief(row.lag_seconds), "n"],
    ], rows, { empty: t("No group is behind."), label: t("Groups to choose from") })));
  }

  function standingOf(found) {
    const own = found.queues.filter((each) => each.lag || !each.topic.startsWith("%RETRY%"));
    return card(t("Where {} stands", found.name), table([
      [t("Topic"), (row) => h("button", { type: "button", class: "quiet", onclick: () => { topic.value = row.topic; } }, row.topic), "name"],
      [t("Queue"), (row) => h("span", { class: "mono" }, `${row.broker}:${row.id}`), "nowrap"],
      [t("Finished"), (row) => f.exact(row.done), "n"],
      [t("End"), (row) => f.exact(row.end), "n opt"],
      [t("Lag"), (row) => h("b", null, f.exact(row.lag)), "n"],
    ], own, { empty: t("It has no progress in any queue yet."), label: t("Where it stands") }), h("span", { class: "small muted" }, t("lag {}", f.exact(found.lag))));
  }

  group.addEventListener("change", stand);
  action.onchange = lay;
  to.onchange = lay;
  lay();
  await Promise.all([showLines(), stand()]);
  const page = [head(t("Progress"), { sub: t("Send a group back, forward or past what waits. A plan first; every queue is read back.") }), h("div", { class: "split sides", "data-own": true }, h("div", { class: "stack" }, form, result, lines), standing)];
  return { title: t("Progress"), still: true, draw: () => page };
}
