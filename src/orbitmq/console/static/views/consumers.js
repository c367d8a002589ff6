import { get } from "../api.js";
import { h, keep, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, facts, faults, findings, groupLink, head, memberLink, problem, table, tile } from "../parts.js";
import { toolbar, virtualTable } from "../virtual.js";
import { t, told } from "../words.js";

/** Groups by their members. */
export async function consumers({ query, remember }) {
  const state = { search: query.get("search") ?? "", filter: "", sort: query.get("sort") ?? "-members", noun: "group", empty: t("There is no group yet.") };
  const keep = () => remember({ search: state.search, sort: state.sort === "-members" ? "" : state.sort });
  const list = virtualTable("/groups", [
    { label: t("Group"), sort: "name", cell: (row) => link(path("consumers", row.name), row.name), kind: "name" },
    { label: t("Members"), sort: "members", cell: (row) => row.members ?? t("not asked yet"), kind: "n w-n" },
    { label: t("Out"), sort: "out_rate", cell: (row) => `${f.rate(row.out_rate)}/s`, kind: "n w-n" },
    { label: t("Lag"), sort: "lag", cell: (row) => f.count(row.lag), kind: "n w-n opt" },
    { label: t("Topics"), cell: (row) => h("span", { class: "muted" }, row.topics.join(", ")), kind: "opt" },
  ], state, { label: t("Groups by members"), changed: keep });
  const page = [head(t("Consumers"), { sub: t("Choose a group to see who consumes in it and what each one holds. Out is what it finishes, per second over the last 30 s.") }),
    h("section", { class: "card", "data-own": true }, toolbar(state, [], list, keep), list.node)];
  return { title: t("Consumers"), still: true, draw: () => page, shown: list.reload, refresh: list.refresh, leave: list.leave };
}

/** The members of one group. */
export async function consumerGroup({ params }) {
  const load = () => get(path("groups", params.group));
  let content = await load();
  return {
    title: t("Consumers of {}", params.group),
    draw: () => [
      head(params.group, { crumb: link("/consumers", t("Consumers")), sub: [content.members ? t("{}, {}, starts at {}", content.members.consume_type, told(content.members.model), content.members.consume_from.replaceAll("_", " ")) : t("Nobody is online."), " · ", groupLink(params.group)] }),
      h("div", { class: "stack" },
        faults(findings(content.findings)),
        h("section", { class: "card" }, table([
          [t("Member"), (row) => memberLink(params.group, row.client_id), "name"],
          [t("Address"), (row) => row.address, "opt"],
          [t("Client"), (row) => h("span", { class: "nowrap" }, row.client), "opt"],
          [t("Queues"), (row) => content.queues.filter((each) => each.owner === row.client_id).length, "n"],
          [t("Lag"), (row) => f.count(content.queues.filter((each) => each.owner === row.client_id).reduce((sum, each) => sum + each.lag, 0)), "n"],
        ], content.members?.clients ?? [], { empty: t("Nobody is online."), label: t("Members") }))),
    ],
    refresh: async () => { content = await load(); },
  };
}

/** One consumer, by its own account. */
export async function consumer({ params }) {
  const where = path("groups", params.group, "members", params.client);
  const load = () => get(where);
  let content = await load();
  const stack = h("div", { class: "stack" });
  const ask = h("button", { type: "button" }, t("Ask for its stack"));
  ask.onclick = () => act(ask, async () => {
    try {
      const found = await get(where, { stack: 1 });
      stack.replaceChildren(card(t("What its threads do"), h("div", { class: "body stack" }, h("pre", { class: "code", tabindex: 0 }, found.stack || (found.stack === null ? t("It does not tell.") : t("None of its workers is busy."))), command(found.command))));
    } catch (error) {
      stack.replaceChildren(problem(error));
    }
  });
  return { title: params.client, draw: () => drawn(params, content, stack, ask), refresh: async () => { content = await load(); } };
}

function drawn(params, content, stack, ask) {
  // Above this number a consumer stops pulling a queue until it has finished some.
  const most = Number(content.properties.pullThresholdForQueue) || Infinity;
  const oldest = Math.min(...content.queues.map((each) => each.last_pull_at ?? Infinity));
  return [
    head(params.client, { crumb: [link("/consumers", t("Consumers")), " / ", link(path("consumers", params.group), params.group)], sub: content.is_orderly ? t("consumes in order") : t("consumes concurrently"), actions: keep("ask", ask) }),
    h("div", { class: "stack" }, keep("stack", stack),
      h("div", { class: "tiles plain" },
        tile(t("Queues"), f.count(content.queues.length)),
        tile(t("Held messages"), f.count(content.cached_messages), { hint: t("pulled and not finished") }),
        tile(t("Longest since a pull"), Number.isFinite(oldest) ? f.duration(content.at - oldest) : "–"),
        content.is_orderly && tile(t("Locks"), t("{} of {}", content.queues.filter((each) => each.is_locked).length, content.queues.length))),
      card(t("Topics"), table([
        [t("Topic"), (row) => row[0], "name"],
        [t("Handled well"), (row) => `${f.rate(row[1].ok_rate)}/s`, "n"],
        [t("Failed"), (row) => h("span", { class: row[1].failed_rate ? "warn-text" : "" }, `${f.rate(row[1].failed_rate)}/s`), "n"],
        [t("Mean call"), (row) => f.fine(row[1].consume_time || null), "n"],
        ["p50", (row) => known(row[1], "p50"), "n opt"],
        ["p95", (row) => known(row[1], "p95"), "n opt"],
        ["p99", (row) => known(row[1], "p99"), "n"],
        [t("Longest"), (row) => known(row[1], "longest"), "n opt"],
        [t("Pulled"), (row) => `${f.rate(row[1].pull_rate)}/s`, "n opt"],
        [t("Pull waits"), (row) => f.fine(row[1].pull_time || null), "n opt"],
        [t("Failed last hour"), (row) => f.exact(row[1].failed_last_hour), "n opt"],
      ], Object.entries(content.topics).sort(), { empty: t("It has not consumed anything yet.") })),
      card(t("Queues"), table([
        [t("Topic"), (row) => row.topic, "name"],
        [t("Queue"), (row) => h("span", { class: "mono" }, `${row.broker}:${row.id}`), "nowrap"],
        [t("Held"), (row) => (row.cached_messages >= most ? h("span", { class: "warn-text", title: t("from {} on nothing more is pulled", f.exact(most)) }, t("{}, pulling waits", f.exact(row.cached_messages))) : f.exact(row.cached_messages)), "n"],
        [t("Size"), (row) => `${row.cached_mib} MiB`, "n opt"],
        [t("Committed"), (row) => f.exact(row.commit_offset), "n opt"],
        [t("Last pull"), (row) => f.when(row.last_pull_at), "n"],
        [t("Last handled"), (row) => f.when(row.last_consume_at), "n opt"],
        content.is_orderly ? [t("Lock"), (row) => (row.is_locked ? t("since {}", f.when(row.last_lock_at)) : h("span", { class: "warn-text" }, t("not held"))), ""] : ["", (row) => (row.is_dropped ? t("being given away") : ""), "opt"],
      ], content.queues, { empty: t("It has no queue.") })),
      h("div", { class: "split" },
        card(t("Subscriptions"), table([
          [t("Topic"), (row) => row.topic, "name"],
          [t("Wants"), (row) => row.expression ?? h("span", { class: "faint" }, t("nothing")), "name"],
          [t("As"), (row) => row.expression_type ?? ""],
          [t("Others"), (row) => row.others.length > 0 && [h("span", { class: "tag bad" }, t("differs")), row.others.map((each) => h("div", { class: "small muted" }, others(each)))], "name"],
        ], content.subscriptions, { label: t("Subscriptions") })),
        card(t("Settings, as it names them"), h("div", { class: "body stack" }, facts(Object.entries(content.properties).sort().map(([name, value]) => [name, value])), command(content.command))))),
  ];
}

/** `client-2 and 3 more want a || b` */
function others({ clients, expression }) {
  const [first, ...more] = clients;
  const who = more.length ? t("{} and {} more", first, f.exact(more.length)) : first;
  return expression === null ? t("{}: not subscribed", who) : `${who}: ${expression}`;
}

/** A time of handler calls. Other clients than ours make calls and do not tell: that is unknown, and not 0. */
function known(topic, name) {
  if (topic[name] !== null || !(topic.ok_rate + topic.failed_rate)) return f.fine(topic[name]);
  return h("span", { class: "faint" }, t("unknown"));
}
