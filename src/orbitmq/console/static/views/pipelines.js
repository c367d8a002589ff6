import { base, get, may, remove } from "../api.js";
import { h, keep, link, path } from "../dom.js";
import * as f from "../format.js";
import { ILL, UP, act, card, command, dialog, failedShare, faults, groupLink, head, pace, readOnlyNote, table, tile, topicLink, writing } from "../parts.js";
import { chart } from "../charts.js";
import { t } from "../words.js";

/** Spark pipelines that report to this console. */
export async function pipelines() {
  const load = () => get("/pipelines");
  let content = await load();
  return {
    title: t("Spark pipelines"),
    wantsPipelines: true,
    draw: () => [
      head(t("Spark pipelines"), { sub: t("What runs on Spark and reports its progress here.") }),
      content.pipelines.length ? h("section", { class: "card" }, table([
        [t("Pipeline"), (row) => [link(path("pipelines", row.name), row.name), row.error && h("div", { class: `${ILL.includes(row.state) ? "bad-text" : "muted"} small clip`, title: row.error }, row.error)], "name"],
        ["", (row) => pace(row.state)],
        [t("Batch"), (row) => f.exact(row.batch), "n"],
        [t("Rows"), (row) => (row.rows_per_second === null ? "–" : `${f.rate(row.rows_per_second)}/s`), "n"],
        [t("Group"), (row) => (row.group ? groupLink(row.group) : ""), "name opt"],
        [t("Batch takes"), (row) => h("span", { class: row.is_late ? "warn-text" : "" }, f.fine(row.batch_seconds)), "n opt"],
        [t("Failed"), (row) => failedShare(row), "n"],
        [t("Unread"), (row) => f.count(row.unread), "n"],
        [t("Reported"), (row) => f.when(row.reported_at), "n opt"],
      ], content.pipelines, { label: t("Spark pipelines") })) : h("section", { class: "card" }, h("div", { class: "body stack" },
        h("p", null, t("No pipeline has reported yet. One does so when it knows where the console is:")),
        command(`ORBITMQ_CONSOLE=${location.origin}${base} orbitmq pipeline run FILE`))),
    ],
    refresh: async () => { content = await load(); },
  };
}

/** One pipeline. */
export async function pipeline({ params, go }) {
  const names = [t("rows"), "lag", "failed"].map((each) => `pipeline/${params.name}/${each}`);
  const load = () => Promise.all([get(path("pipelines", params.name), { console: location.origin + base }), get("/charts", { series: names, minutes: 60 })]);
  let [content, curves] = await load();
  let asked = null;
  let isForgotten = false;
  // What is asked about a pipeline that is taken off would be answered with an error.
  const forgotten = async () => {
    isForgotten = true;
    await Promise.allSettled([asked]);
    await remove(path("pipelines", params.name)).catch((error) => { isForgotten = false; throw error; });
    go("/pipelines");
  };
  const forget = writing("pipelines", t("Take off the list"), () => forgetDialog(content, forgotten), { does: content.commands.forget });
  return {
    title: params.name,
    wantsPipelines: true,
    draw: () => drawn(content, curves, names, forget),
    refresh: async () => { if (!isForgotten) [content, curves] = await (asked = load()); },
  };
}

function forgetDialog(content, forgotten) {
  const button = h("button", { type: "button", class: "primary", disabled: !may("pipelines") }, t("Take it off"));
  button.onclick = () => act(button, async () => {
    await forgotten();
    opened.close();
  });
  const opened = dialog(t("Take {} off the list", content.name), [
    h("p", null, t("Nothing is stopped: if it still runs, it is there again with its next report.")),
    command(content.commands.forget), readOnlyNote("pipelines"),
  ], { footer: () => button });
}

function drawn(content, curves, names, forget) {
  const over = content.batch_seconds && content.trigger_seconds ? t("of {}", f.fine(content.trigger_seconds)) : "";
  return [
    head(content.name, {
      crumb: link("/pipelines", t("Spark pipelines")),
      sub: [pace(content.state), t(" reported {}", f.when(content.reported_at)), content.group ? [t(" · as group "), groupLink(content.group)] : ""],
      actions: [content.url && h("a", { class: "button", href: content.url, rel: "noreferrer noopener", target: "_blank" }, t("Spark's own page")), keep("forget", forget)],
    }),
    h("div", { class: "stack" },
      faults(content.faults),
      content.error && !content.faults.length && h("div", { class: "note" }, h("b", null, t("Last error: ")), content.error),
      h("div", { class: "tiles plain four" },
        tile(t("Batch"), f.exact(content.batch), { hint: content.rows === null ? "" : t("{} in it", f.plural(content.rows, "row")) }),
        tile(t("Rows"), f.rate(content.rows_per_second), { unit: content.rows_per_second === null ? "" : "/s", tone: content.is_slow ? "warn-text" : "", hint: !UP.includes(content.state) ? t("it is {}", content.state) : content.input_rows_per_second === null ? "" : t("{}/s come in", f.rate(content.input_rows_per_second)) }),
        tile(t("Batch takes"), f.fine(content.batch_seconds), { unit: over, tone: content.is_late ? "warn-text" : "", hint: content.is_late ? t("longer than its trigger") : "" }),
        tile(t("Unread"), f.count(content.unread), { hint: t("messages that it has not read yet") }),
        content.done !== null && tile(t("Failed"), f.percent(content.failed_share), { hint: content.failed_share === null ? t("nothing handled lately") : t("of the last five minutes"), tone: content.state === "failing" ? "bad-text" : content.failed_share ? "warn-text" : "" }),
        content.done !== null && tile(t("Handled well"), f.count(content.done), { hint: t("since its start") }),
        content.done !== null && tile(t("Retried"), f.count(content.retried), { hint: t("since its start"), tone: content.retried && !content.done ? "warn-text" : "" }),
        content.done !== null && tile(t("Given up"), f.count(content.dead), { hint: t("dead letters since its start"), tone: content.dead ? "warn-text" : "", href: content.group ? path("dead-letters", content.group) : null })),
      h("div", { class: curves.series[names[2]].length ? "split three" : "split" },
        card(t("Rows per second"), h("div", { class: "body" }, chart([{ name: t("rows"), points: curves.series[names[0]] }], { from: curves.from, to: curves.to, format: f.rate, label: t("Rows per second") }))),
        card(t("Unread"), h("div", { class: "body" }, chart([{ name: t("unread"), points: curves.series[names[1]] }], { from: curves.from, to: curves.to, label: t("Unread") }))),
        curves.series[names[2]].length > 0 && card(t("Failed"), h("div", { class: "body" }, chart([{ name: t("failed"), points: curves.series[names[2]] }], { from: curves.from, to: curves.to, format: f.percent, label: t("Failed") })))),
      h("div", { class: "split" },
        card(t("Unread in each queue"), table([[t("Queue"), (row) => h("span", { class: "mono" }, row[0]), "name"], ["", (row) => h("div", { class: "bar", "aria-hidden": "true" }, h("span", { class: "hot", style: { width: `${(row[1] / Math.max(1, ...Object.values(content.unread_by_queue))) * 100}%` } })), "opt"], [t("Messages"), (row) => f.exact(row[1]), "n"]], Object.entries(content.unread_by_queue).sort((a, b) => b[1] - a[1]), { empty: t("It did not report its queues.") })),
        card(t("Topics"), table([["", (row) => row[0], ""], [t("Topic"), (row) => topicLink(row[1]), "name"],
          [t("Rows"), (row) => row[2] && f.exact(row[2].numInputRows), "n"], [t("Bytes"), (row) => row[2] && f.bytes(row[2].numInputBytes), "n opt"], [t("Unread"), (row) => row[2] && f.exact(row[2].lag), "n"]],
          [...content.topics.map((name) => [t("reads"), name, content.by_topic.find((each) => each.topic === name)]), ...content.output.map((name) => [t("writes"), name])], { empty: t("It did not report its topics.") })))),
  ];
}
