import { get } from "../api.js";
import { h, keep, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, facts, faults, findings, groupLink, head, memberLink, problem, table, tile } from "../parts.js";
import { toolbar, virtualTable } from "../virtual.js";

/** Groups by their members. */
export async function consumers({ query, remember }) {
  const state = { search: query.get("search") ?? "", filter: "", sort: query.get("sort") ?? "-members", noun: "group", empty: "There is no group yet." };
  const keep = () => remember({ search: state.search, sort: state.sort === "-members" ? "" : state.sort });
  const list = virtualTable("/groups", [
    { label: "Group", sort: "name", cell: (row) => link(path("consumers", row.name), row.name), kind: "name" },
    { label: "Members", sort: "members", cell: (row) => row.members ?? "not asked yet", kind: "n w-n" },
    { label: "Out", sort: "out_rate", cell: (row) => `${f.rate(row.out_rate)}/s`, kind: "n w-n" },
    { label: "Lag", sort: "lag", cell: (row) => f.count(row.lag), kind: "n w-n opt" },
    { label: "Topics", cell: (row) => h("span", { class: "muted" }, row.topics.join(", ")), kind: "opt" },
  ], state, { label: "Groups by members", changed: keep });
  const page = [head("Consumers", { sub: "Choose a group to see who consumes in it and what each one holds. Out is what it finishes, per second over the last 30 s." }),
    h("section", { class: "card", "data-own": true }, toolbar(state, [], list, keep), list.node)];
  return { title: "Consumers", still: true, draw: () => page, shown: list.reload, refresh: list.refresh, leave: list.leave };
}

/** The members of one group. */
export async function consumerGroup({ params }) {
  const load = () => get(path("groups", params.group));
  let content = await load();
  return {
    title: `Consumers of ${params.group}`,
    draw: () => [
      head(params.group, { crumb: link("/consumers", "Consumers"), sub: [content.members ? `${content.members.consume_type}, ${content.members.model}, starts at ${content.members.consume_from.replaceAll("_", " ")}` : "Nobody is online.", " · ", groupLink(params.group)] }),
      h("div", { class: "stack" },
        faults(findings(content.findings)),
        h("section", { class: "card" }, table([
          ["Member", (row) => memberLink(params.group, row.client_id), "name"],
          ["Address", (row) => row.address, "opt"],
          ["Client", (row) => h("span", { class: "nowrap" }, row.client), "opt"],
          ["Queues", (row) => content.queues.filter((each) => each.owner === row.client_id).length, "n"],
          ["Lag", (row) => f.count(content.queues.filter((each) => each.owner === row.client_id).reduce((sum, each) => sum + each.lag, 0)), "n"],
        ], content.members?.clients ?? [], { empty: "Nobody is online.", label: "Members" }))),
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
  const ask = h("button", { type: "button" }, "Ask for its stack");
  ask.onclick = () => act(ask, async () => {
    try {
      const found = await get(where, { stack: 1 });
      stack.replaceChildren(card("What its threads do", h("div", { class: "body stack" }, h("pre", { class: "code", tabindex: 0 }, found.stack || (found.stack === null ? "It does not tell." : "None of its workers is busy.")), command(found.command))));
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
    head(params.client, { crumb: [link("/consumers", "Consumers"), " / ", link(path("consumers", params.group), params.group)], sub: content.is_orderly ? "consumes in order" : "consumes concurrently", actions: keep("ask", ask) }),
    h("div", { class: "stack" }, keep("stack", stack),
      h("div", { class: "tiles plain" },
        tile("Queues", f.count(content.queues.length)),
        tile("Held messages", f.count(content.cached_messages), { hint: "pulled and not finished" }),
        tile("Longest since a pull", Number.isFinite(oldest) ? f.duration(content.at - oldest) : "–"),
        content.is_orderly && tile("Locks", `${content.queues.filter((each) => each.is_locked).length} of ${content.queues.length}`)),
      card("Topics", table([
        ["Topic", (row) => row[0], "name"],
        ["Handled well", (row) => `${f.rate(row[1].ok_rate)}/s`, "n"],
        ["Failed", (row) => h("span", { class: row[1].failed_rate ? "warn-text" : "" }, `${f.rate(row[1].failed_rate)}/s`), "n"],
        ["Mean call", (row) => f.fine(row[1].consume_time || null), "n"],
        ["p50", (row) => known(row[1], "p50"), "n opt"],
        ["p95", (row) => known(row[1], "p95"), "n opt"],
        ["p99", (row) => known(row[1], "p99"), "n"],
        ["Longest", (row) => known(row[1], "longest"), "n opt"],
        ["Pulled", (row) => `${f.rate(row[1].pull_rate)}/s`, "n opt"],
        ["Pull waits", (row) => f.fine(row[1].pull_time || null), "n opt"],
        ["Failed last hour", (row) => f.exact(row[1].failed_last_hour), "n opt"],
      ], Object.entries(content.topics).sort(), { empty: "It has not consumed anything yet." })),
      card("Queues", table([
        ["Topic", (row) => row.topic, "name"],
        ["Queue", (row) => h("span", { class: "mono" }, `${row.broker}:${row.id}`), "nowrap"],
        ["Held", (row) => (row.cached_messages >= most ? h("span", { class: "warn-text", title: `from ${f.exact(most)} on nothing more is pulled` }, `${f.exact(row.cached_messages)}, pulling waits`) : f.exact(row.cached_messages)), "n"],
        ["Size", (row) => `${row.cached_mib} MiB`, "n opt"],
        ["Committed", (row) => f.exact(row.commit_offset), "n opt"],
        ["Last pull", (row) => f.when(row.last_pull_at), "n"],
        ["Last handled", (row) => f.when(row.last_consume_at), "n opt"],
        content.is_orderly ? ["Lock", (row) => (row.is_locked ? `since ${f.when(row.last_lock_at)}` : h("span", { class: "warn-text" }, "not held")), ""] : ["", (row) => (row.is_dropped ? "being given away" : ""), "opt"],
      ], content.queues, { empty: "It has no queue." })),
      h("div", { class: "split" },
        card("Subscriptions", table([
          ["Topic", (row) => row.topic, "name"],
          ["Wants", (row) => row.expression ?? h("span", { class: "faint" }, "nothing"), "name"],
          ["As", (row) => row.expression_type ?? ""],
          ["Others", (row) => row.others.length > 0 && [h("span", { class: "tag bad" }, "differs"), row.others.map((each) => h("div", { class: "small muted" }, others(each)))], "name"],
        ], content.subscriptions, { label: "Subscriptions" })),
        card("Settings, as it names them", h("div", { class: "body stack" }, facts(Object.entries(content.properties).sort().map(([name, value]) => [name, value])), command(content.command))))),
  ];
}

/** `client-2 and 3 more want a || b` */
function others({ clients, expression }) {
  const [first, ...more] = clients;
  const who = more.length ? `${first} and ${f.exact(more.length)} more` : first;
  return expression === null ? `${who}: not subscribed` : `${who}: ${expression}`;
}

/** A time of handler calls. Other clients than ours make calls and do not tell: that is unknown, and not 0. */
function known(topic, name) {
  if (topic[name] !== null || !(topic.ok_rate + topic.failed_rate)) return f.fine(topic[name]);
  return h("span", { class: "faint" }, "unknown");
}
