import { get } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { ILL, UP, card, drains, failedShare, faultCard, groupLink, head, pace, problem, table, tile, topicLink, writing } from "../parts.js";
import { silenceDialog } from "./alerts.js";
import { spark } from "../charts.js";
import { t, told } from "../words.js";

/** What is wrong and where. */
export async function now({ known }) {
  let content = known ?? await get("/now");
  return {
    title: t("Now"),
    wantsPipelines: true,
    draw: () => (content.at ? drawn(content) : content.problem ? [head(verdict(content)), problem({ message: content.problem })] : head(t("Looking at the cluster"), { sub: t("The first look takes a moment.") })),
    refresh: async (fresh) => { content = fresh ?? await get("/now"); },
  };
}

function drawn(content) {
  const up = content.brokers.filter((each) => each.is_up).length;
  const isBad = content.cards[0]?.weight === "bad" || content.problem;
  const lamp = isBad ? "bad" : content.card_count ? "warn" : "";
  return [
    h("div", { class: "head" }, h("div", { class: "titles" },
      h("div", { class: "verdict" }, h("span", { class: `lamp ${lamp}`, "aria-hidden": "true" }), h("h1", null, verdict(content))),
      h("p", null, link("/brokers", t("{} of {} up", up, f.plural(content.brokers.length, "broker"))), " · ",
        link("/topics", f.plural(content.topics, "topic")), " · ", link("/groups", f.plural(content.groups, "group")),
        t(" · seen {}", f.when(content.at))))),
    h("div", { class: "stack" },
      content.problem && h("div", { class: "note bad", role: "alert" }, t("The cluster cannot be seen at the moment, this is how it was: {}", content.problem)),
      tiles(content),
      content.cards.length > 0 && cards(content),
      h("div", { class: "split" }, worst(content), h("div", { class: "stack" }, dying(content), spark_(content))),
      h("div", { class: "split" }, busy(content), brokers(content))),
  ];
}

function verdict(content) {
  if (content.problem) return t("The cluster does not answer");
  if (!content.card_count) return t("Nothing needs a hand");
  return content.card_count === 1 ? t("One thing needs a hand") : t("{} things need a hand", f.exact(content.card_count));
}

/** One card for each group, server, topic or pipeline, the worst first. */
function cards(content) {
  return h("section", { class: "cards", "aria-label": t("What needs a hand") }, content.cards.map((each) => shownCard(each, content.silenced)),
    content.more_cards.length > 0 && h("p", { class: "muted small" }, t("And less urgent: "), content.more_cards.map((each, place) => [place ? " · " : "", link(MORE[each.check] ?? "/groups?filter=wrong", `${f.exact(each.count)} × ${told(each.kind)}`)])));
}

/** A card, with what is silent of it and the button that silences it. */
function shownCard(each, silenced) {
  const silent = silenced.filter((one) => one.subject === each.subject && each.faults.some((fault) => fault.kind === one.kind));
  const kinds = [...new Set(each.faults.map((one) => one.kind))];
  const open = () => silenceDialog({ subject: each.subject, kinds, done: () => dispatchEvent(new Event("console:refresh")) });
  return faultCard(each, { silent, silence: writing("alerts", t("Silence"), open, { kind: "quiet small" }) });
}

/** Where all faults of a check are to be seen. */
const MORE = { "dead letters": "/dead-letters", pipelines: "/pipelines", topics: "/topics", brokers: "/brokers", health: "/brokers", clocks: "/brokers", disks: "/brokers", "advertised addresses": "/brokers", "name servers": "/brokers" };

function tiles(content) {
  const running = content.pipelines.filter((each) => UP.includes(each.state)).length;
  const ill = content.pipelines.filter((each) => ILL.includes(each.state)).length;
  return h("div", { class: "tiles six" },
    tile(t("In"), f.rate(content.in_rate), { unit: "/s", href: "/charts", hint: t("stored, last {} s", f.exact(content.rate_seconds)), spark: spark(content.curves.in) }),
    tile(t("Out"), f.rate(content.out_rate), { unit: "/s", href: "/charts", hint: t("finished, last {} s", f.exact(content.rate_seconds)), spark: spark(content.curves.out) }),
    tile(t("Lag"), f.count(content.lag), { href: "/groups?filter=behind", hint: t("in {}", f.plural(content.groups_behind, "group")), spark: spark(content.curves.lag) }),
    tile(t("Oldest"), f.brief(content.oldest), { href: content.oldest_group ? path("groups", content.oldest_group) : "/groups", hint: content.oldest_group ?? t("nothing waits") }),
    tile(t("Dead letters"), f.count(content.open_letters), { href: "/dead-letters", hint: content.open_letters ? t("open, {} of the last hour", f.count(content.open_last_hour)) : t("none is open"), tone: content.open_last_hour ? "warn-text" : "" }),
    tile(t("Spark pipelines"), f.count(running), { unit: content.pipelines.length > running ? t("of {}", content.pipelines.length) : "", href: "/pipelines", hint: ill ? ill === 1 ? t("{} needs a hand", "1") : t("{} need a hand", f.exact(ill)) : t("running"), tone: ill ? "bad-text" : "" }));
}

/** Where a number of a group or topic is drawn over time. */
function chartOf(kind, name) {
  return `/charts?${kind}=${encodeURIComponent(name)}`;
}

function worst(content) {
  return card(t("Furthest behind"), table([
    [t("Group"), (row) => [groupLink(row.name), h("div", null, pace(row.pace, row.lag))], "name"],
    [t("Lag"), (row) => link(path("groups", row.name), f.count(row.lag)), "n"],
    [t("Oldest"), (row) => link(path("groups", row.name), f.brief(row.lag_seconds)), "n"],
    [t("Empty in"), (row) => link(chartOf("group", row.name), drains(row)), "n opt"],
  ], content.worst, { empty: t("No group is behind."), label: t("Groups that are furthest behind") }), link("/groups?filter=behind", h("span", { class: "small muted" }, t("all"))));
}

function dying(content) {
  return card(t("Open dead letters"), table([
    [t("Group"), (row) => link(path("dead-letters", row.name), row.name), "name"],
    [t("Last hour"), (row) => link(path("dead-letters", row.name), f.count(row.open_last_hour)), "n opt"],
    [t("Open"), (row) => h("a", { href: path("dead-letters", row.name), class: row.open_last_hour ? "warn-text" : "" }, f.count(row.open_letters)), "n"],
  ], content.dying.filter((row) => row.open_letters), { empty: t("No dead letter is open.") }));
}

function spark_(content) {
  if (!content.pipelines.length) return null;
  return card(t("Spark pipelines"), table([
    [t("Pipeline"), (row) => link(path("pipelines", row.name), row.name), "name"],
    ["", (row) => pace(row.state)],
    [t("Rows"), (row) => link(path("pipelines", row.name), row.rows_per_second === null ? "–" : `${f.rate(row.rows_per_second)}/s`), "n"],
    [t("Failed"), (row) => link(path("pipelines", row.name), failedShare(row)), "n opt"],
    [t("Unread"), (row) => link(path("pipelines", row.name), f.count(row.unread)), "n"],
  ], content.pipelines.slice(0, 8)));
}

function busy(content) {
  return card(t("Busiest topics"), table([
    [t("Topic"), (row) => topicLink(row.name), "name"],
    [t("In"), (row) => link(chartOf("topic", row.name), `${f.rate(row.in_rate)}/s`), "n"],
    [t("Lag"), (row) => link(path("topics", row.name), f.count(row.lag)), "n"],
  ], content.busy, { empty: t("Nothing comes in at the moment.") }), link("/topics?sort=-in_rate", h("span", { class: "small muted" }, t("all"))));
}

function brokers(content) {
  return card(t("Brokers"), table([
    [t("Broker"), (row) => [link("/brokers", row.name), h("div", { class: "faint small" }, row.address)], "name"],
    ["", (row) => (row.is_up ? h("span", { class: "muted small" }, t("up")) : h("span", { class: "tag bad" }, t("down")))],
    [t("In"), (row) => link("/brokers", `${f.rate(row.in_rate)}/s`), "n"],
    [t("Out"), (row) => link("/brokers", `${f.rate(row.out_rate)}/s`), "n"],
    [t("Disk"), (row) => h("a", { href: "/brokers", class: row.disk_used >= 0.85 ? "bad-text" : "" }, f.percent(row.disk_used)), "n opt"],
  ], content.brokers), link("/brokers", h("span", { class: "small muted" }, t("all"))));
}
