import { get, may, post, url } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, command, dialog, facts, groupLink, problem, readOnlyNote, table, toast, writing } from "../parts.js";
import { t } from "../words.js";

/**
 * One message beside the page. `offsetId` says where the copy lies that is meant; `step(by)` answers
 * the row that many places further in the list that it was opened from.
 */
export function messageDialog(id, topic, offsetId, step) {
  const body = h("div", { class: "stack" }, h("p", { class: "muted" }, t("Asking the broker.")));
  const move = (by, word) => h("button", { type: "button", class: "quiet", "aria-label": word, title: word, onclick: () => go(by) }, by < 0 ? "↑" : "↓");
  const opened = dialog(t("Message"), body, { panel: true, extra: step && [move(-1, t("The message above")), move(1, t("The message below"))] });
  const show = (row) => { opened.node.querySelector("h2").textContent = t("Message {}", row.id); load(body, row.offset_id ?? row.id, row.offset_id ? undefined : row.topic); };
  const go = (by) => { const row = step(by); if (row) show(row); };
  if (step) opened.node.onkeydown = (event) => {
    if (event.target.closest("input, textarea, select, pre, [role=tab]") || (event.key !== "ArrowDown" && event.key !== "ArrowUp")) return;
    event.preventDefault();
    go(event.key === "ArrowDown" ? 1 : -1);
  };
  show({ id, topic, offset_id: offsetId });
  return opened;
}

async function load(body, id, topic) {
  body.dataset.asked = id;
  try {
    const content = await get("/messages/one", { id, topic });
    if (body.dataset.asked === id) body.replaceChildren(...shown(content));
  } catch (error) {
    if (body.dataset.asked === id) body.replaceChildren(problem(error));
  }
}

function shown(content) {
  const tracks = h("div");
  const where = h("button", { type: "button", onclick: () => follow(where, tracks, content) }, t("Where is it now?"));
  return [
    forms(content),
    h("div", { class: "row" }, where,
      writing("send", t("Resend"), () => resendDialog(content), { does: `orbitmq produce ${content.decoded_for}` }),
      content.is_readable && h("a", { class: "button", href: url("/messages/body", { id: content.offset_id }), download: "" }, t("Save the body"))),
    tracks,
    h("h3", null, t("Message")),
    facts([
      [t("Topic"), link(path("topics", content.topic), content.topic)], [t("Queue"), h("span", { class: "mono" }, `${content.broker}:${content.queue}`)], [t("Offset"), f.exact(content.offset)],
      [t("Original"), !content.origin_id || content.origin_id === content.offset_id ? null : h("button", { type: "button", class: "quiet mono", onclick: () => messageDialog(content.origin_id, undefined, content.origin_id) }, content.origin_id)],
      [t("Stored"), f.precise(content.stored_at)], [t("Sent"), f.precise(content.born_at)], [t("From"), h("span", { class: "mono" }, content.born_host)],
      [t("Tag"), content.tags], [t("Keys"), content.keys.join(" ")], [t("Attempts"), content.attempts ? t("{} before this", content.attempts) : t("none before this")],
      [t("Size"), t("{} body, {} stored", f.bytes(content.body_size), f.bytes(content.size))], [t("Id"), h("span", { class: "mono" }, content.id)], [t("Offset id"), h("span", { class: "mono" }, content.offset_id)],
    ]),
    h("h3", null, t("Properties")),
    table([[t("Name"), (row) => h("span", { class: "mono" }, row[0]), "name"], [t("Value"), (row) => h("span", { class: "mono" }, row[1]), "name"]], Object.entries(content.properties).sort(), { empty: t("It has none."), label: t("Properties") }),
    command(content.command),
  ];
}

const FORMS = { json: "JSON", text: t("Text"), hex: "Hex" };
const DECODED = { avro: t("decoded from Avro"), protobuf: t("decoded from Protobuf"), msgpack: t("decoded from MessagePack") };

function forms(content) {
  const names = Object.keys(content.forms);
  if (!names.length) return h("p", { class: "note bad" }, content.problem ?? t("The body cannot be shown."));
  const text = h("pre", { class: "code wrap", tabindex: 0 });
  const bar = h("div", { class: "tabs", role: "tablist" });
  const choose = (name) => {
    text.textContent = content.forms[name] || t("(empty)");
    text.classList.toggle("wrap", name !== "hex");
    for (const each of bar.children) each.setAttribute("aria-selected", String(each.dataset.name === name));
  };
  bar.append(...names.map((name) => h("button", { type: "button", role: "tab", "data-name": name, onclick: () => choose(name) }, FORMS[name])));
  const isStructured = content.form === "json" || content.form in DECODED;
  choose(isStructured && content.forms.json ? "json" : content.forms.text !== undefined ? "text" : "hex");
  return h("div", { class: "stack" }, bar, text,
    content.form in DECODED && h("p", { class: "small muted" }, DECODED[content.form]),
    content.is_masked && h("p", { class: "note" }, t("Fields shown as *** are masked in this console.")),
    content.problem && h("p", { class: "note warn" }, t("As its topic's decoder says, it cannot be read: {}", content.problem)),
    content.is_cut && h("p", { class: "note" }, t("Only the beginning is shown; save the body to see all of it.")));
}

/** A copy of a message, for its topic or another one. */
function resendDialog(content) {
  const to = h("input", { value: content.decoded_for, required: true, autocomplete: "off", spellcheck: "false" });
  const shownCommand = h("div");
  const button = h("button", { class: "primary", disabled: !may("send") }, t("Resend"));
  const wish = () => ({ id: content.offset_id, to: to.value.trim() });
  const preview = async () => {
    try { shownCommand.replaceChildren(command((await post("/messages/resend", { ...wish(), dry_run: true })).command)); } catch (error) { shownCommand.replaceChildren(problem(error)); }
  };
  const form = h("form", { class: "stack" },
    h("p", null, t("A copy with the same body, tag, keys and properties. Every group of the topic receives it.")),
    h("label", { class: "field" }, t("To topic"), to), shownCommand, readOnlyNote("send"), h("footer", null, button));
  to.onchange = preview;
  form.onsubmit = async (event) => {
    event.preventDefault();
    await act(button, async () => {
      const sent = await post("/messages/resend", wish());
      toast(t("Sent to {} as {}", sent.to, sent.id));
      opened.close();
    });
  };
  const opened = dialog(t("Resend the message"), form);
  preview();
}

async function follow(button, place, content) {
  button.disabled = true;
  try {
    const answer = await get("/messages/track", { id: content.offset_id });
    place.replaceChildren(h("div", { class: "stack" }, tracked(answer.tracks), h("h3", null, t("Its path")), path_(answer), command(answer.command)));
  } catch (error) {
    place.replaceChildren(problem(error));
  } finally {
    button.disabled = false;
  }
}

/** What happened to it, in order; times count from the first. */
function path_({ path: steps, trace }) {
  const [first] = steps;
  return h("div", { class: "stack" }, table([
    [t("When"), (row) => h("span", { class: "nowrap", title: f.precise(row.at) }, row === first ? f.instant(row.at) : `+${f.fine(row.at - first.at)}`), "nowrap"],
    [t("What"), (row) => h("span", { class: row.is_bad ? "bad-text" : "" }, row.what), "name"],
    [t("Group"), (row) => (row.group ? groupLink(row.group) : ""), "opt"],
    [t("Where"), (row) => h("span", { class: "mono" }, row.where), "name opt"],
    [t("Took"), (row) => (row.took === null ? "" : f.fine(row.took)), "n"],
  ], steps, { label: t("Path") }), trace && h("p", { class: "muted small" }, t("OpenTelemetry trace "), h("span", { class: "mono" }, trace.split("-")[1] ?? trace)));
}

export function tracked(tracks) {
  return table([
    [t("Group"), (row) => groupLink(row.group), "name"],
    ["", (row) => h("span", { class: row.fate === "dead" ? "bad-text" : row.failures ? "warn-text" : "" }, row.text)],
    [t("Failed"), (row) => (row.failures ? `${row.failures}×` : ""), "n"],
    [t("Copy"), (row) => (row.copy ? h("button", { type: "button", class: "quiet", onclick: () => messageDialog(row.copy.id, row.copy.topic, row.copy.offset_id) }, f.instant(row.copy.stored_at)) : ""), ""],
  ], tracks, { empty: t("No group consumes this topic.") });
}
