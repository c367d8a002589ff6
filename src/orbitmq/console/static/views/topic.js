import { get, may, remove } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, dialog, field, groupLink, head, pace, readOnlyNote, table, tile, toast, writing } from "../parts.js";
import { chart } from "../charts.js";
import { topicDialog } from "./topicdialog.js";
import { t, told } from "../words.js";

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
      crumb: link("/topics", t("Topics")),
      sub: [told(content.kind), content.is_ordered ? t(", ordered") : "", t(" · {} on {} · ", f.plural(content.queues.length, "queue"), f.plural(content.brokers.length, "broker")), h("span", { class: content.permission === "rw" ? "" : "warn-text" }, content.permission)],
      actions: [
        link(`/messages${query}`, h("span", { class: "button" }, t("Messages"))),
        link(`/send${query}`, h("span", { class: "button" }, t("Send"))),
        writing("topics", t("Change"), () => topicDialog({ topic: content, done: () => go(location.pathname) }), { does: content.commands.update }),
        writing("topics", t("Delete"), () => deleteDialog(content.name, content.commands.delete, deleted), { kind: "danger", does: content.commands.delete }),
      ],
    }),
    h("div", { class: "stack" },
      h("div", { class: "tiles plain" },
        tile(t("In"), f.rate(content.in_rate), { unit: "/s", hint: t("stored, last 30 s") }),
        tile(t("Messages"), f.count(content.messages), { hint: t("stored now") }),
        tile(t("Time span"), span, { hint: content.first_stored_at ? t("since {}", f.when(content.first_stored_at)) : "" }),
        tile(t("Last message"), f.when(content.last_stored_at)),
        tile(t("Groups"), f.count(content.groups.length))),
      card(t("Messages in, per second"), h("div", { class: "body" }, chart([{ name: "in", points: curve.series[series] }], { from: curve.from, to: curve.to, format: f.rate, label: t("Messages in per second") }))),
      h("div", { class: "split" },
        card(t("Groups"), table([
          [t("Group"), (row) => groupLink(row.name), "name"],
          [t("Lag"), (row) => f.count(row.lag), "n"],
          [t("Oldest"), (row) => f.duration(row.lag_seconds), "n"],
          [t("Out"), (row) => `${f.rate(row.out_rate)}/s`, "n opt"],
          ["", (row) => row.pace && pace(row.pace, row.lag), "opt"],
        ], content.groups, { empty: t("No group consumes this topic.") })),
        card(t("Queues"), table([
          [t("Queue"), (row) => link(`/messages${query}&mode=offset&queue=${encodeURIComponent(`${row.broker}:${row.id}`)}&offset=${Math.max(row.min_offset, row.max_offset - 1)}&newest=1`, `${row.broker}:${row.id}`), "name mono"],
          [t("First"), (row) => f.exact(row.min_offset), "n opt"],
          [t("Next"), (row) => f.exact(row.max_offset), "n"],
          [t("Messages"), (row) => f.count(row.messages), "n"],
          [t("Last"), (row) => f.when(row.last_stored_at), "n"],
        ], content.queues)))),
  ];
}

function deleteDialog(name, text, deleted) {
  const typed = h("input", { autocomplete: "off", spellcheck: "false" });
  const button = h("button", { type: "button", class: "danger", disabled: true }, t("Delete for good"));
  typed.oninput = () => { button.disabled = !may("topics") || typed.value !== name; };
  button.onclick = () => act(button, async () => {
    await deleted();
    toast(t("{} is deleted", name));
    opened.close();
  });
  const opened = dialog(t("Delete {}", name), [
    h("p", null, t("Its messages are gone then, and the progress of every group in it.")),
    command(text), readOnlyNote("topics"),
    may("topics") && field(t("Type the name of the topic"), typed),
  ], { footer: () => button });
}
