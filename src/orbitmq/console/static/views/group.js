import { get, may, post } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, dialog, drains, facts, faults, findings, head, memberLink, pace, readOnlyNote, table, tile, toast, topicLink, writing } from "../parts.js";
import { chart, heat } from "../charts.js";

/** One group: how far it is behind, who consumes, and what is wrong. */
export async function group({ params, query, remember }) {
  const name = params.group;
  let minutes = Number(query.get("minutes")) || 60;
  const names = ["lag", "seconds", "in", "out"].map((each) => `group/${name}/${each}`);
  const load = () => Promise.all([get(path("groups", name)), get("/charts", { series: names, minutes }), get(path("groups", name, "heat"))]);
  let [content, curves, map] = await load();
  const view = {
    title: name,
    draw: () => drawn(content, curves, map, names, ranges),
    refresh: async () => { [content, curves, map] = await load(); },
  };
  const ranges = () => h("div", { class: "chips", role: "group", "aria-label": "Time span" }, [[60, "1 h"], [360, "6 h"], [1440, "24 h"], [10080, "7 d"]].map(([value, word]) => h("button", {
    type: "button", class: "chip", "aria-pressed": String(value === minutes),
    onclick: async () => { minutes = value; remember({ minutes: value === 60 ? "" : value }); await view.refresh(); dispatchEvent(new Event("console:redraw")); },
  }, word)));
  return view;
}

function drawn(content, curves, map, names, ranges) {
  const sample = content.sample ?? { lag: content.lag, lag_seconds: content.lag_seconds, pace: content.state, in_rate: null, out_rate: null, drains_in: null };
  const settings = Object.values(content.settings)[0];
  const isPaused = content.state === "paused";
  const own = content.queues.filter((each) => !each.topic.startsWith("%RETRY%"));
  return [
    head(content.name, {
      crumb: link("/groups", "Groups"),
      sub: [pace(sample.pace, sample.lag), " ", content.members ? `${f.plural(content.members.clients.length, "member")}, ${content.members.model}` : "nobody is online",
        content.pipelines.map((name) => [" · consumed by Spark: ", link(path("pipelines", name), name)])],
      actions: [
        link(`/progress?group=${encodeURIComponent(content.name)}`, h("span", { class: "button" }, "Move progress")),
        link(path("dead-letters", content.name), h("span", { class: "button" }, "Dead letters")),
        writing("progress", isPaused ? "Resume" : "Pause", () => switchDialog(content.name, isPaused, content.commands), { does: content.commands[isPaused ? "resume" : "pause"] }),
      ],
    }),
    h("div", { class: "stack" },
      wrong(content),
      h("div", { class: "tiles plain six" },
        tile("Lag", f.count(content.lag), { hint: waiting(content) }),
        tile("Oldest", f.brief(content.lag_seconds), { hint: content.lag ? "has waited so long" : "nothing waits" }),
        tile("In", f.rate(sample.in_rate), { unit: "/s", hint: "stored, last 30 s" }),
        tile("Out", f.rate(sample.out_rate), { unit: "/s", hint: "finished, last 30 s" }),
        tile("Empty in", drains(sample), { hint: !content.lag ? "" : sample.pace === "keeping up" ? "as much comes as goes" : "at this pace" }),
        tile("Dead letters", f.count(content.sample?.open_letters ?? content.dead_letters), { href: path("dead-letters", content.name), hint: content.sample?.resent ? `open; ${f.count(content.sample.resent)} were resent` : "open" })),
      card("Lag over time", h("div", { class: "body split three" },
        labelled("Lag", chart([{ name: "lag", points: curves.series[names[0]] }], { from: curves.from, to: curves.to, label: "Lag" })),
        labelled("Oldest", chart([{ name: "oldest", points: curves.series[names[1]] }], { from: curves.from, to: curves.to, format: f.duration, label: "Age of the oldest message" })),
        labelled("Messages per second", chart([{ name: "in", points: curves.series[names[2]] }, { name: "out", points: curves.series[names[3]] }], { from: curves.from, to: curves.to, format: f.rate, label: "Messages per second" }))), ranges()),
      handlers(content),
      card("Each queue over the last hour", h("div", { class: "body" }, heat(map))),
      card("Queues", queues(content, own)),
      h("div", { class: "split" }, members(content), card("Settings", h("div", { class: "body stack" }, facts([
        ["Attempts", attempts(content.member_retries, settings.max_retries)],
        ["Retry queues", settings.retry_queues],
        ["Order", settings.is_orderly ? "in order" : "concurrent"],
        ["Broadcasting", settings.may_broadcast ? "allowed" : "not allowed"],
        ["Handler limit", f.duration(settings.consume_timeout)],
        ["Known to", Object.keys(content.settings).join(", ")],
      ]), command(content.command))))),
  ];
}

/** What is behind the lag, and what is not in it. */
function waiting(content) {
  const parts = [];
  if (content.retry_lag) parts.push(`${f.count(content.retry_lag)} of them failed before`);
  if (content.later === null) parts.push("without those that wait for a later attempt");
  else if (content.later.count || !content.later.is_all) parts.push(`besides, ${content.later_text}`);
  return parts.join("; ") || "messages";
}

/** After how many retries a message is given up: members may have a limit of their own. */
function attempts(ofMembers, ofBrokers) {
  if (ofMembers === null) return `${ofBrokers} retries before a message is dead, unless its consumers give up earlier`;
  return `${ofMembers} retries before a message is dead, as its members have it; ${ofBrokers} at brokers`;
}

function labelled(title, figure) {
  return h("div", { class: "stack" }, h("h3", { class: "muted" }, title), figure);
}

function wrong(content) {
  return faults([
    ...findings(content.findings),
    ...content.faults,
    ...content.unreachable.map((each) => ({ kind: "unreachable", text: `${each.server}: ${each.reason}` })),
  ]);
}

/** What members say of their handlers. */
function handlers(content) {
  const times = content.handlers;
  if (!times) return null;
  // Consumers with other clients tell means only: a percentile of theirs is unknown, and not 0.
  const calls = times.p50 === null ? [
    tile("A call takes", f.fine(times.median), { hint: "mean, usual member" }),
    tile("At the slowest", f.fine(times.slowest), { hint: "mean, slowest member" }),
    tile("p99 of calls", "unknown", { hint: "its clients do not tell" }),
    tile("Longest call", "unknown", { hint: "its clients do not tell" }),
  ] : [
    tile("p50 of calls", f.fine(times.p50), { hint: "half take at most that" }),
    tile("p95 of calls", f.fine(times.p95), { hint: "95 of 100" }),
    tile("p99 of calls", f.fine(times.p99), { hint: "99 of 100" }),
    tile("Longest call", f.fine(times.longest), { hint: "of the last minute" }),
  ];
  return card("Handlers", h("div", { class: "tiles plain six bare" },
    tile("Handled well", f.rate(times.ok_rate), { unit: "/s" }),
    tile("Failed", f.rate(times.failed_rate), { unit: "/s", tone: times.failed_rate ? "warn-text" : "" }),
    calls), h("span", { class: "small muted" }, `pulls ${f.rate(times.pull_rate)}/s, waits ${f.fine(times.pull_time)} for messages`));
}

function queues(content, own) {
  const retries = content.queues.filter((each) => each.topic.startsWith("%RETRY%") && each.lag);
  const most = Math.max(1, ...content.queues.map((each) => each.lag));
  return table([
    ["Topic", (row) => topicLink(row.topic), "name"],
    ["Queue", (row) => h("span", { class: "mono" }, `${row.broker}:${row.id}`), "nowrap"],
    ["Lag", (row) => f.exact(row.lag), "n"],
    ["", (row) => h("div", { class: "bar", "aria-hidden": "true" }, h("span", { class: "hot", style: { width: `${(row.lag / most) * 100}%` } })), "opt"],
    ["Oldest", (row) => f.duration(row.lag_seconds), "n"],
    ["In flight", (row) => f.exact(row.in_flight), "n opt"],
    ["Progress", (row) => `${f.exact(row.done)} of ${f.exact(row.end)}`, "n opt"],
    ["Finished up to", (row) => h("span", { title: "when the last finished message was stored" }, f.when(row.finished_stored_at)), "n opt"],
    ["Owner", (row) => (row.owner ? memberLink(content.name, row.owner) : h("span", { class: content.members && row.lag ? "warn-text" : "faint" }, "nobody")), "name opt"],
  ], [...own, ...retries], { empty: "The group has no progress in any queue yet." });
}

function members(content) {
  if (!content.members) return card("Members", h("p", { class: "empty" }, "Nobody is online."));
  return card("Members", table([
    ["Member", (row) => [memberLink(content.name, row.client_id), h("div", { class: "faint small" }, row.address)], "name"],
    ["Client", (row) => h("span", { class: "nowrap" }, row.client), "opt"],
    ["Queues", (row) => content.queues.filter((each) => each.owner === row.client_id).length, "n"],
  ], content.members.clients), h("span", { class: "small muted" }, content.members.subscriptions.map((each) => `${each.topic} ${each.expression}`).join(" · ")));
}

function switchDialog(name, isPaused, commands) {
  const word = isPaused ? "resume" : "pause";
  const button = h("button", { type: "button", class: "primary", disabled: !may("progress") }, isPaused ? "Resume" : "Pause");
  button.onclick = () => act(button, async () => {
    const answer = await post(path("groups", name, word));
    toast(`${name}: ${answer.outcome}`);
    opened.close();
  });
  const opened = dialog(isPaused ? `Resume ${name}` : `Pause ${name}`, [
    h("p", null, isPaused ? "Its members may pull again." : "Its members stay connected and get nothing until it is resumed; messages wait."),
    command(commands[word]), readOnlyNote("progress"),
  ], { footer: () => button });
}
