import { get, may, post, url } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, command, dialog, facts, groupLink, problem, readOnlyNote, table, toast, writing } from "../parts.js";

/**
 * One message beside the page. `offsetId` says where the copy lies that is meant; `step(by)` answers
 * the row that many places further in the list that it was opened from.
 */
export function messageDialog(id, topic, offsetId, step) {
  const body = h("div", { class: "stack" }, h("p", { class: "muted" }, "Asking the broker."));
  const move = (by, word) => h("button", { type: "button", class: "quiet", "aria-label": word, title: word, onclick: () => go(by) }, by < 0 ? "↑" : "↓");
  const opened = dialog("Message", body, { panel: true, extra: step && [move(-1, "The message above"), move(1, "The message below")] });
  const show = (row) => { opened.node.querySelector("h2").textContent = `Message ${row.id}`; load(body, row.offset_id ?? row.id, row.offset_id ? undefined : row.topic); };
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
  const where = h("button", { type: "button", onclick: () => follow(where, tracks, content) }, "Where is it now?");
  return [
    forms(content),
    h("div", { class: "row" }, where,
      writing("send", "Resend", () => resendDialog(content), { does: `orbitmq produce ${content.decoded_for}` }),
      content.is_readable && h("a", { class: "button", href: url("/messages/body", { id: content.offset_id }), download: "" }, "Save the body")),
    tracks,
    h("h3", null, "Message"),
    facts([
      ["Topic", link(path("topics", content.topic), content.topic)], ["Queue", h("span", { class: "mono" }, `${content.broker}:${content.queue}`)], ["Offset", f.exact(content.offset)],
      ["Original", !content.origin_id || content.origin_id === content.offset_id ? null : h("button", { type: "button", class: "quiet mono", onclick: () => messageDialog(content.origin_id, undefined, content.origin_id) }, content.origin_id)],
      ["Stored", f.precise(content.stored_at)], ["Sent", f.precise(content.born_at)], ["From", h("span", { class: "mono" }, content.born_host)],
      ["Tag", content.tags], ["Keys", content.keys.join(" ")], ["Attempts", content.attempts ? `${content.attempts} before this` : "none before this"],
      ["Size", `${f.bytes(content.body_size)} body, ${f.bytes(content.size)} stored`], ["Id", h("span", { class: "mono" }, content.id)], ["Offset id", h("span", { class: "mono" }, content.offset_id)],
    ]),
    h("h3", null, "Properties"),
    table([["Name", (row) => h("span", { class: "mono" }, row[0]), "name"], ["Value", (row) => h("span", { class: "mono" }, row[1]), "name"]], Object.entries(content.properties).sort(), { empty: "It has none.", label: "Properties" }),
    command(content.command),
  ];
}

const FORMS = { json: "JSON", text: "Text", hex: "Hex" };
const DECODED = { avro: "decoded from Avro", protobuf: "decoded from Protobuf", msgpack: "decoded from MessagePack" };

function forms(content) {
  const names = Object.keys(content.forms);
  if (!names.length) return h("p", { class: "note bad" }, content.problem ?? "The body cannot be shown.");
  const text = h("pre", { class: "code wrap", tabindex: 0 });
  const bar = h("div", { class: "tabs", role: "tablist" });
  const choose = (name) => {
    text.textContent = content.forms[name] || "(empty)";
    text.classList.toggle("wrap", name !== "hex");
    for (const each of bar.children) each.setAttribute("aria-selected", String(each.dataset.name === name));
  };
  bar.append(...names.map((name) => h("button", { type: "button", role: "tab", "data-name": name, onclick: () => choose(name) }, FORMS[name])));
  const isStructured = content.form === "json" || content.form in DECODED;
  choose(isStructured && content.forms.json ? "json" : content.forms.text !== undefined ? "text" : "hex");
  return h("div", { class: "stack" }, bar, text,
    content.form in DECODED && h("p", { class: "small muted" }, DECODED[content.form]),
    content.is_masked && h("p", { class: "note" }, "Fields shown as *** are masked in this console."),
    content.problem && h("p", { class: "note warn" }, `As its topic's decoder says, it cannot be read: ${content.problem}`),
    content.is_cut && h("p", { class: "note" }, "Only the beginning is shown; save the body to see all of it."));
}

/** A copy of a message, for its topic or another one. */
function resendDialog(content) {
  const to = h("input", { value: content.decoded_for, required: true, autocomplete: "off", spellcheck: "false" });
  const shownCommand = h("div");
  const button = h("button", { class: "primary", disabled: !may("send") }, "Resend");
  const wish = () => ({ id: content.offset_id, to: to.value.trim() });
  const preview = async () => {
    try { shownCommand.replaceChildren(command((await post("/messages/resend", { ...wish(), dry_run: true })).command)); } catch (error) { shownCommand.replaceChildren(problem(error)); }
  };
  const form = h("form", { class: "stack" },
    h("p", null, "A copy with the same body, tag, keys and properties. Every group of the topic receives it."),
    h("label", { class: "field" }, "To topic", to), shownCommand, readOnlyNote("send"), h("footer", null, button));
  to.onchange = preview;
  form.onsubmit = async (event) => {
    event.preventDefault();
    await act(button, async () => {
      const sent = await post("/messages/resend", wish());
      toast(`Sent to ${sent.to} as ${sent.id}`);
      opened.close();
    });
  };
  const opened = dialog("Resend the message", form);
  preview();
}

async function follow(button, place, content) {
  button.disabled = true;
  try {
    const answer = await get("/messages/track", { id: content.offset_id });
    place.replaceChildren(h("div", { class: "stack" }, tracked(answer.tracks), h("h3", null, "Its path"), path_(answer), command(answer.command)));
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
    ["When", (row) => h("span", { class: "nowrap", title: f.precise(row.at) }, row === first ? f.instant(row.at) : `+${f.fine(row.at - first.at)}`), "nowrap"],
    ["What", (row) => h("span", { class: row.is_bad ? "bad-text" : "" }, row.what), "name"],
    ["Group", (row) => (row.group ? groupLink(row.group) : ""), "opt"],
    ["Where", (row) => h("span", { class: "mono" }, row.where), "name opt"],
    ["Took", (row) => (row.took === null ? "" : f.fine(row.took)), "n"],
  ], steps, { label: "Path" }), trace && h("p", { class: "muted small" }, "OpenTelemetry trace ", h("span", { class: "mono" }, trace.split("-")[1] ?? trace)));
}

export function tracked(tracks) {
  return table([
    ["Group", (row) => groupLink(row.group), "name"],
    ["", (row) => h("span", { class: row.fate === "dead" ? "bad-text" : row.failures ? "warn-text" : "" }, row.text)],
    ["Failed", (row) => (row.failures ? `${row.failures}×` : ""), "n"],
    ["Copy", (row) => (row.copy ? h("button", { type: "button", class: "quiet", onclick: () => messageDialog(row.copy.id, row.copy.topic, row.copy.offset_id) }, f.instant(row.copy.stored_at)) : ""), ""],
  ], tracks, { empty: "No group consumes this topic." });
}
