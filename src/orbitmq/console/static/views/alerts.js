import { get, may, post, remove } from "../api.js";
import { h, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, dialog, field, head, readOnlyNote, table, toast, writing } from "../parts.js";
import { t, told } from "../words.js";

/** Who is told, how posts go, and what is silent. */
export async function alerts() {
  let content = await get("/alerts");
  const load = async () => { content = await get("/alerts"); dispatchEvent(new Event("console:redraw")); };
  return {
    title: t("Alerts"),
    draw: () => [
      head(t("Alerts"), { sub: t("Webhooks are told when a finding of Now begins, while it lasts, and when it is resolved."), actions: writing("alerts", t("Silence"), () => silenceDialog({ done: load })) }),
      h("div", { class: "stack" }, webhooks(content), silences(content, load), posts(content)),
    ],
    refresh: async () => { content = await get("/alerts"); },
  };
}

const FILE = `[webhooks.ops]
url = "..."           # of the receiver
format = "slack"      # or json, feishu, dingtalk
severity = "critical" # or warning
for = "1m"
repeat = "4h"`;

function webhooks(content) {
  if (!content.webhooks.length) {
    return card(t("Webhooks"), h("div", { class: "body stack" }, h("p", null, t("Nobody is told. Name receivers in a file, and start the console with it:")),
      h("pre", { class: "code", tabindex: 0 }, FILE), command("orbitmq console --alerts alerts.toml --history console.sqlite")));
  }
  return card(t("Webhooks"), table([
    [t("Name"), (row) => [h("b", null, row.name), h("div", { class: "faint small" }, `${row.host} · ${row.format}`)], "name"],
    ["", (row) => (row.problem ? h("span", { class: "tag bad" }, t("failing")) : h("span", { class: "muted small" }, t("ready")))],
    [t("Told of"), (row) => [row.severity === "critical" ? t("critical findings") : t("all findings"), row.subjects.length > 0 && h("div", { class: "faint small" }, row.subjects.join(", "))], "opt"],
    [t("For"), (row) => f.duration(row.for), "n opt"],
    [t("Repeat"), (row) => (row.repeat ? f.duration(row.repeat) : t("never")), "n opt"],
    [t("Lasting"), (row) => f.exact(row.lasting), "n opt"],
    [t("Posted"), (row) => [f.exact(row.posted), row.posted_at && h("div", { class: "faint small" }, f.when(row.posted_at))], "n"],
    [t("Waiting"), (row) => f.exact(row.waiting), "n"],
    [t("Given up"), (row) => h("span", { class: row.lost ? "bad-text" : "" }, f.exact(row.lost)), "n opt"],
    ["", (row) => writing("alerts", t("Test"), async (event) => { await act(event.currentTarget, () => post(`${path("alerts", row.name)}/test`)); toast(t("A test is posted")); }, { kind: "quiet" })],
  ], content.webhooks, { label: t("Webhooks") }),
  content.webhooks.some((each) => each.problem) && h("div", null, content.webhooks.filter((each) => each.problem).map((each) =>
    h("div", { class: "note bad small" }, h("b", null, each.name), ": ", each.problem, each.next_at ? t(" · next attempt {}", f.when(each.next_at)) : ""))));
}

function silences(content, load) {
  return card(t("Silences"), table([
    [t("Subject"), (row) => [row.subject, row.kind && h("div", { class: "faint small" }, told(row.kind))], "name"],
    [t("Until"), (row) => (row.until ? f.when(row.until, false) : t("for ever")), "nowrap"],
    [t("Reason"), (row) => row.reason, "name"],
    [t("Who"), (row) => row.who, "opt"],
    ["", (row) => (row.is_fixed ? h("span", { class: "faint small" }, t("in the file")) : writing("alerts", t("End"), async (event) => { await act(event.currentTarget, () => remove(path("silences", row.id))); load(); }, { kind: "quiet" }))],
  ], content.silences, { empty: t("Nothing is silent."), label: t("Silences") }));
}

function posts(content) {
  return card(t("Latest posts"), table([
    [t("When"), (row) => f.when(row.at), "nowrap"],
    [t("Webhook"), (row) => row.webhook, "opt"],
    [t("What"), (row) => [row.first, row.alerts > 1 && h("span", { class: "faint" }, t(" and {} more", f.exact(row.alerts - 1)))], "name"],
    [t("Outcome"), (row) => h("span", { class: row.problem ? "bad-text" : "" }, row.problem ?? t("posted")), "name"],
  ], content.posts, { empty: t("Nothing was posted since the console started."), label: t("Latest posts") }));
}

const LENGTHS = [[3600, t("1 hour")], [8 * 3600, t("8 hours")], [24 * 3600, t("1 day")], [7 * 86400, t("7 days")], [0, t("until a time")]];

/** Silence a name, or one finding about it. */
export function silenceDialog({ subject = "", kind = null, kinds = [], done }) {
  const name = h("input", { value: subject, required: true, autocomplete: "off", spellcheck: "false" });
  const what = h("select", null, h("option", { value: "" }, t("all findings")), kinds.map((each) => h("option", { value: each }, told(each))));
  what.value = kind ?? "";
  const length = h("select", null, LENGTHS.map(([seconds, label]) => h("option", { value: String(seconds) }, label)));
  const until = h("input", { type: "datetime-local" });
  const untilField = field(t("Until"), until);
  untilField.hidden = true;
  length.onchange = () => { untilField.hidden = length.value !== "0"; until.required = !untilField.hidden; };
  const reason = h("input", { required: true, maxlength: 500 });
  const apply = h("button", { class: "primary", disabled: !may("alerts") }, t("Silence"));
  const form = h("form", { class: "stack" },
    h("p", { class: "muted" }, t("Webhooks are not told of it; this page shows it all the same. An asterisk stands for any text.")),
    h("div", { class: "form" }, field(t("Subject"), name, "wide"), field(t("Findings"), what), field(t("How long"), length), untilField, field(t("Reason"), reason, "wide")),
    readOnlyNote("alerts"), h("footer", null, apply));
  form.onsubmit = async (event) => {
    event.preventDefault();
    await act(apply, async () => {
      const ends = length.value === "0" ? { until: new Date(until.value).getTime() / 1000 } : { for: Number(length.value) };
      await post("/silences", { subject: name.value.trim(), kind: what.value || null, reason: reason.value, ...ends });
      toast(t("Silent: {}", name.value.trim()));
      opened.close();
      done?.();
    });
  };
  const opened = dialog(t("Silence"), form);
}
