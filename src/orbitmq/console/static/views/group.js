import { get, may, post } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, dialog, drains, facts, faults, findings, head, memberLink, pace, readOnlyNote, table, tile, toast, topicLink, writing } from "../parts.js";
import { chart, heat } from "../charts.js";
import { t, told } from "../words.js";

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
  const ranges = () => h("div", { class: "chips", role: "group", "aria-label": t("Time span") }, [[60, "1 h"], [360, "6 h"], [1440, "24 h"], [10080, "7 d"]].map(([value, word]) => h("button", {
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
      crumb: link("/groups", t("Groups")),
      sub: [pace(sample.pace, sample.lag), " ", content.members ? `${f.plural(content.members.clients.length, "member")}, ${told(content.members.model)}` : t("nobody is online"),
        content.pipelines.map((name) => [t(" · consumed by Spark: "), link(path("pipelines", name), name)])],
      actions: [
        link(`/progress?group=${encodeURIComponent(content.name)}`, h("span", { class: "button" }, t("Move progress"))),
        link(path("dead-letters", content.name), h("span", { class: "button" }, t("Dead letters"))),
        writing("progress", isPaused ? t("Resume") : t("Pause"), () => switchDialog(content.name, isPaused, content.commands), { does: content.commands[isPaused ? "resume" : "pause"] }),
      ],
    }),
    h("div", { class: "stack" },
      wrong(content),
      h("div", { class: "tiles plain six" },
        tile(t("Lag"), f.count(content.lag), { hint: waiting(content) }),
        tile(t("Oldest"), f.brief(content.lag_seconds), { hint: content.lag ? t("has waited so long") : t("nothing waits") }),
        tile(t("In"), f.rate(sample.in_rate), { unit: "/s", hint: t("stored, last 30 s") }),
        tile(t("Out"), f.rate(sample.out_rate), { unit: "/s", hint: t("finished, last 30 s") }),
        tile(t("Empty in"), drains(sample), { hint: !content.lag ? "" : sample.pace === "keeping up" ? t("as much comes as goes") : t("at this pace") }),
        tile(t("Dead letters"), f.count(content.sample?.open_letters ?? content.dead_letters), { href: path("dead-letters", content.name), hint: content.sample?.resent ? t("open; {} were resent", f.count(content.sample.resent)) : t("open") })),
      card(t("Lag over time"), h("div", { class: "body split three" },
        labelled(t("Lag"), chart([{ name: t("lag"), points: curves.series[names[0]] }], { from: curves.from, to: curves.to, label: t("Lag") })),
        labelled(t("Oldest"), chart([{ name: t("oldest"), points: curves.series[names[1]] }], { from: curves.from, to: curves.to, format: f.duration, label: t("Age of the oldest message") })),
        labelled(t("Messages per second"), chart([{ name: t("in"), points: curves.series[names[2]] }, { name: t("out"), points: curves.series[names[3]] }], { from: curves.from, to: curves.to, format: f.rate, label: t("Messages per second") }))), ranges()),
      handlers(content),
      card(t("Each queue over the last hour"), h("div", { class: "body" }, heat(map))),
      card(t("Queues"), queues(content, own)),
      h("div", { class: "split" }, members(content), card(t("Settings"), h("div", { class: "body stack" }, facts([
        [t("Attempts"), attempts(content.member_retries, settings.max_retries)],
        [t("Retry queues"), settings.retry_queues],
        [t("Order"), settings.is_orderly ? t("in order") : t("concurrent")],
        [t("Broadcasting"), settings.may_broadcast ? t("allowed") : t("not allowed")],
        [t("Handler limit"), f.duration(settings.consume_timeout)],
        [t("Known to"), Object.keys(content.settings).join(", ")],
      ]), command(content.command))))),
  ];
}

/** What is behind the lag, and what is not in it. */
function waiting(content) {
  const parts = [];
  if (content.retry_lag) parts.push(t("{} of them failed before", f.count(content.retry_lag)));
  if (content.later === null) parts.push(t("without those that wait for a later attempt"));
  else if (content.later.count || !content.later.is_all) parts.push(t("besides, {}", content.later_text));
  return parts.join("; ") || t("messages");
}

/** After how many retries a message is given up: members may have a limit of their own. */
function attempts(ofMembers, ofBrokers) {
  if (ofMembers === null) return t("{} retries before a message is dead, unless its consumers give up earlier", ofBrokers);
  return t("{} retries before a message is dead, as its members have it; {} at brokers", ofMembers, ofBrokers);
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
    tile(t("A call takes"), f.fine(times.median), { hint: t("mean, usual member") }),
    tile(t("At the slowest"), f.fine(times.slowest), { hint: t("mean, slowest member") }),
    tile(t("p99 of calls"), t("unknown"), { hint: t("its clients do not tell") }),
    tile(t("Longest call"), t("unknown"), { hint: t("its clients do not tell") }),
  ] : [
    tile(t("p50 of calls"), f.fine(times.p50), { hint: t("half take at most that") }),
    tile(t("p95 of calls"), f.fine(times.p95), { hint: t("95 of 100") }),
    tile(t("p99 of calls"), f.fine(times.p99), { hint: t("99 of 100") }),
    tile(t("Longest call"), f.fine(times.longest), { hint: t("of the last minute") }),
  ];
  return card(t("Handlers"), h("div", { class: "tiles plain six bare" },
    tile(t("Handled well"), f.rate(times.ok_rate), { unit: "/s" }),
    tile(t("Failed"), f.rate(times.failed_rate), { unit: "/s", tone: times.failed_rate ? "warn-text" : "" }),
    calls), h("span", { class: "small muted" }, t("pulls {}/s, waits {} for messages", f.rate(times.pull_rate), f.fine(times.pull_time))));
}

function queues(content, own) {
  const retries = content.queues.filter((each) => each.topic.startsWith("%RETRY%") && each.lag);
  const most = Math.max(1, ...content.queues.map((each) => each.lag));
  return table([
    [t("Topic"), (row) => topicLink(row.topic), "name"],
    [t("Queue"), (row) => h("span", { class: "mono" }, `${row.broker}:${row.id}`), "nowrap"],
    [t("Lag"), (row) => f.exact(row.lag), "n"],
    ["", (row) => h("div", { class: "bar", "aria-hidden": "true" }, h("span", { class: "hot", style: { width: `${(row.lag / most) * 100}%` } })), "opt"],
    [t("Oldest"), (row) => f.duration(row.lag_seconds), "n"],
    [t("In flight"), (row) => f.exact(row.in_flight), "n opt"],
    [t("Progress"), (row) => t("{} of {}", f.exact(row.done), f.exact(row.end)), "n opt"],
    [t("Finished up to"), (row) => h("span", { title: t("when the last finished message was stored") }, f.when(row.finished_stored_at)), "n opt"],
    [t("Owner"), (row) => (row.owner ? memberLink(content.name, row.owner) : h("span", { class: content.members && row.lag ? "warn-text" : "faint" }, t("nobody"))), "name opt"],
  ], [...own, ...retries], { empty: t("The group has no progress in any queue yet.") });
}

function members(content) {
  if (!content.members) return card(t("Members"), h("p", { class: "empty" }, t("Nobody is online.")));
  return card(t("Members"), table([
    [t("Member"), (row) => [memberLink(content.name, row.client_id), h("div", { class: "faint small" }, row.address)], "name"],
    [t("Client"), (row) => h("span", { class: "nowrap" }, row.client), "opt"],
    [t("Queues"), (row) => content.queues.filter((each) => each.owner === row.client_id).length, "n"],
  ], content.members.clients), h("span", { class: "small muted" }, content.members.subscriptions.map((each) => `${each.topic} ${each.expression}`).join(" · ")));
}

function switchDialog(name, isPaused, commands) {
  const word = isPaused ? "resume" : "pause";
  const button = h("button", { type: "button", class: "primary", disabled: !may("progress") }, isPaused ? t("Resume") : t("Pause"));
  button.onclick = () => act(button, async () => {
    const answer = await post(path("groups", name, word));
    toast(`${name}: ${answer.outcome}`);
    opened.close();
  });
  const opened = dialog(isPaused ? t("Resume {}", name) : t("Pause {}", name), [
    h("p", null, isPaused ? t("Its members may pull again.") : t("Its members stay connected and get nothing until it is resumed; messages wait.")),
    command(commands[word]), readOnlyNote("progress"),
  ], { footer: () => button });
}
