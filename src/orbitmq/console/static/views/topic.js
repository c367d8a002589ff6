import { get, may, remove } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, dialog, field, groupLink, head, pace, readOnlyNote, table, tile, toast, writing } from "../parts.js";
import { chart } from "../charts.js";
import { topicDialog } from "./topicdialog.js";

/** One topic. */
export async function topic({ params, go }) {
  const name = params.topic;
  const series = `topic/${name}/in`;
  const load = () => Promise.all([get(path("topics", name)), get("/charts", { series, minutes: 60 })]);
  let [content, curve] = await load();
  let asked = null;
  let isDeleted = false;
  // What is asked about a topic while it is deleted would be answered with an error.
  const deleted = async () => {
    isDeleted = true;
    await Promise.allSettled([asked]);
    await remove(path("topics", name)).catch((error) => { isDeleted = false; throw error; });
    go("/topics");
  };
  return {
    title: name,
    draw: () => drawn(content, curve, series, go, deleted),
    refresh: async () => { if (!isDeleted) [content, curve] = await (asked = load()); },
  };
}

function drawn(content, curve, series, go, deleted) {
  const span = content.first_stored_at ? f.duration((content.last_stored_at ?? content.first_stored_at) - content.first_stored_at) : "–";
  const query = `?topic=${encodeURIComponent(content.name)}`;
  return [
    head(content.name, {
      crumb: link("/topics", "Topics"),
      sub: [content.kind, content.is_ordered ? ", ordered" : "", ` · ${f.plural(content.queues.length, "queue")} on ${f.plural(content.brokers.length, "broker")} · `, h("span", { class: content.permission === "rw" ? "" : "warn-text" }, content.permission)],
      actions: [
        link(`/messages${query}`, h("span", { class: "button" }, "Messages")),
        link(`/send${query}`, h("span", { class: "button" }, "Send")),
        writing("topics", "Change", () => topicDialog({ topic: content, done: () => go(location.pathname) }), { does: content.commands.update }),
        writing("topics", "Delete", () => deleteDialog(content.name, content.commands.delete, deleted), { kind: "danger", does: content.commands.delete }),
      ],
    }),
    h("div", { class: "stack" },
      h("div", { class: "tiles plain" },
        tile("In", f.rate(content.in_rate), { unit: "/s", hint: "stored, last 30 s" }),
        tile("Messages", f.count(content.messages), { hint: "stored now" }),
        tile("Time span", span, { hint: content.first_stored_at ? `since ${f.when(content.first_stored_at)}` : "" }),
        tile("Last message", f.when(content.last_stored_at)),
        tile("Groups", f.count(content.groups.length))),
      card("Messages in, per second", h("div", { class: "body" }, chart([{ name: "in", points: curve.series[series] }], { from: curve.from, to: curve.to, format: f.rate, label: "Messages in per second" }))),
      h("div", { class: "split" },
        card("Groups", table([
          ["Group", (row) => groupLink(row.name), "name"],
          ["Lag", (row) => f.count(row.lag), "n"],
          ["Oldest", (row) => f.duration(row.lag_seconds), "n"],
          ["Out", (row) => `${f.rate(row.out_rate)}/s`, "n opt"],
          ["", (row) => row.pace && pace(row.pace, row.lag), "opt"],
        ], content.groups, { empty: "No group consumes this topic." })),
        card("Queues", table([
          ["Queue", (row) => link(`/messages${query}&mode=offset&queue=${encodeURIComponent(`${row.broker}:${row.id}`)}&offset=${Math.max(row.min_offset, row.max_offset - 1)}&newest=1`, `${row.broker}:${row.id}`), "name mono"],
          ["First", (row) => f.exact(row.min_offset), "n opt"],
          ["Next", (row) => f.exact(row.max_offset), "n"],
          ["Messages", (row) => f.count(row.messages), "n"],
          ["Last", (row) => f.when(row.last_stored_at), "n"],
        ], content.queues)))),
  ];
}

function deleteDialog(name, text, deleted) {
  const typed = h("input", { autocomplete: "off", spellcheck: "false" });
  const button = h("button", { type: "button", class: "danger", disabled: true }, "Delete for good");
  typed.oninput = () => { button.disabled = !may("topics") || typed.value !== name; };
  button.onclick = () => act(button, async () => {
    await deleted();
    toast(`${name} is deleted`);
    opened.close();
  });
  const opened = dialog(`Delete ${name}`, [
    h("p", null, "Its messages are gone then, and the progress of every group in it."),
    command(text), readOnlyNote("topics"),
    may("topics") && field("Type the name of the topic", typed),
  ], { footer: () => button });
}
