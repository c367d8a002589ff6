import { get, may, remove } from "../api.js";
import { h, keep, link, path } from "../dom.js";
import * as f from "../format.js";
import { ILL, UP, act, card, command, dialog, failedShare, faults, groupLink, head, pace, readOnlyNote, table, tile, topicLink, writing } from "../parts.js";
import { chart } from "../charts.js";

/** Spark pipelines that report to this console. */
export async function pipelines() {
  const load = () => get("/pipelines");
  let content = await load();
  return {
    title: "Spark pipelines",
    wantsPipelines: true,
    draw: () => [
      head("Spark pipelines", { sub: "What runs on Spark and reports its progress here." }),
      content.pipelines.length ? h("section", { class: "card" }, table([
        ["Pipeline", (row) => [link(path("pipelines", row.name), row.name), row.error && h("div", { class: `${ILL.includes(row.state) ? "bad-text" : "muted"} small clip`, title: row.error }, row.error)], "name"],
        ["", (row) => pace(row.state)],
        ["Batch", (row) => f.exact(row.batch), "n"],
        ["Rows", (row) => (row.rows_per_second === null ? "–" : `${f.rate(row.rows_per_second)}/s`), "n"],
        ["Group", (row) => (row.group ? groupLink(row.group) : ""), "name opt"],
        ["Batch takes", (row) => h("span", { class: row.is_late ? "warn-text" : "" }, f.fine(row.batch_seconds)), "n opt"],
        ["Failed", (row) => failedShare(row), "n"],
        ["Unread", (row) => f.count(row.unread), "n"],
        ["Reported", (row) => f.when(row.reported_at), "n opt"],
      ], content.pipelines, { label: "Spark pipelines" })) : h("section", { class: "card" }, h("div", { class: "body stack" },
        h("p", null, "No pipeline has reported yet. One does so when it knows where the console is:"),
        command(`ORBITMQ_CONSOLE=${location.origin} orbitmq pipeline run FILE`))),
    ],
    refresh: async () => { content = await load(); },
  };
}

/** One pipeline. */
export async function pipeline({ params, go }) {
  const names = ["rows", "lag", "failed"].map((each) => `pipeline/${params.name}/${each}`);
  const load = () => Promise.all([get(path("pipelines", params.name), { console: location.origin }), get("/charts", { series: names, minutes: 60 })]);
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
  const forget = writing("pipelines", "Take off the list", () => forgetDialog(content, forgotten), { does: content.commands.forget });
  return {
    title: params.name,
    wantsPipelines: true,
    draw: () => drawn(content, curves, names, forget),
    refresh: async () => { if (!isForgotten) [content, curves] = await (asked = load()); },
  };
}

function forgetDialog(content, forgotten) {
  const button = h("button", { type: "button", class: "primary", disabled: !may("pipelines") }, "Take it off");
  button.onclick = () => act(button, async () => {
    await forgotten();
    opened.close();
  });
  const opened = dialog(`Take ${content.name} off the list`, [
    h("p", null, "Nothing is stopped: if it still runs, it is there again with its next report."),
    command(content.commands.forget), readOnlyNote("pipelines"),
  ], { footer: () => button });
}

function drawn(content, curves, names, forget) {
  const over = content.batch_seconds && content.trigger_seconds ? `of ${f.fine(content.trigger_seconds)}` : "";
  return [
    head(content.name, {
      crumb: link("/pipelines", "Spark pipelines"),
      sub: [pace(content.state), ` reported ${f.when(content.reported_at)}`, content.group ? [" · as group ", groupLink(content.group)] : ""],
      actions: [content.url && h("a", { class: "button", href: content.url, rel: "noreferrer noopener", target: "_blank" }, "Spark's own page"), keep("forget", forget)],
    }),
    h("div", { class: "stack" },
      faults(content.faults),
      content.error && !content.faults.length && h("div", { class: "note" }, h("b", null, "Last error: "), content.error),
      h("div", { class: "tiles plain four" },
        tile("Batch", f.exact(content.batch), { hint: content.rows === null ? "" : `${f.plural(content.rows, "row")} in it` }),
        tile("Rows", f.rate(content.rows_per_second), { unit: content.rows_per_second === null ? "" : "/s", tone: content.is_slow ? "warn-text" : "", hint: !UP.includes(content.state) ? `it is ${content.state}` : content.input_rows_per_second === null ? "" : `${f.rate(content.input_rows_per_second)}/s come in` }),
        tile("Batch takes", f.fine(content.batch_seconds), { unit: over, tone: content.is_late ? "warn-text" : "", hint: content.is_late ? "longer than its trigger" : "" }),
        tile("Unread", f.count(content.unread), { hint: "messages that it has not read yet" }),
        content.done !== null && tile("Failed", f.percent(content.failed_share), { hint: content.failed_share === null ? "nothing handled lately" : "of the last five minutes", tone: content.state === "failing" ? "bad-text" : content.failed_share ? "warn-text" : "" }),
        content.done !== null && tile("Handled well", f.count(content.done), { hint: "since its start" }),
        content.done !== null && tile("Retried", f.count(content.retried), { hint: "since its start", tone: content.retried && !content.done ? "warn-text" : "" }),
        content.done !== null && tile("Given up", f.count(content.dead), { hint: "dead letters since its start", tone: content.dead ? "warn-text" : "", href: content.group ? path("dead-letters", content.group) : null })),
      h("div", { class: curves.series[names[2]].length ? "split three" : "split" },
        card("Rows per second", h("div", { class: "body" }, chart([{ name: "rows", points: curves.series[names[0]] }], { from: curves.from, to: curves.to, format: f.rate, label: "Rows per second" }))),
        card("Unread", h("div", { class: "body" }, chart([{ name: "unread", points: curves.series[names[1]] }], { from: curves.from, to: curves.to, label: "Unread" }))),
        curves.series[names[2]].length > 0 && card("Failed", h("div", { class: "body" }, chart([{ name: "failed", points: curves.series[names[2]] }], { from: curves.from, to: curves.to, format: f.percent, label: "Failed" })))),
      h("div", { class: "split" },
        card("Unread in each queue", table([["Queue", (row) => h("span", { class: "mono" }, row[0]), "name"], ["", (row) => h("div", { class: "bar", "aria-hidden": "true" }, h("span", { class: "hot", style: { width: `${(row[1] / Math.max(1, ...Object.values(content.unread_by_queue))) * 100}%` } })), "opt"], ["Messages", (row) => f.exact(row[1]), "n"]], Object.entries(content.unread_by_queue).sort((a, b) => b[1] - a[1]), { empty: "It did not report its queues." })),
        card("Topics", table([["", (row) => row[0], ""], ["Topic", (row) => topicLink(row[1]), "name"]],
          [...content.topics.map((name) => ["reads", name]), ...content.output.map((name) => ["writes", name])], { empty: "It did not report its topics." })))),
  ];
}
