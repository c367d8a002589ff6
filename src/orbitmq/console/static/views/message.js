import { get, url } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { command, dialog, facts, groupLink, problem, table } from "../parts.js";

/** One message in front of the page. `offsetId` says where the copy lies that is meant. */
export function messageDialog(id, topic, offsetId) {
  const body = h("div", { class: "stack" }, h("p", { class: "muted" }, "Asking the broker."));
  dialog(`Message ${id}`, body, { wide: true });
  load(body, offsetId ?? id, offsetId ? undefined : topic);
}

async function load(body, id, topic) {
  try {
    const content = await get("/messages/one", { id, topic });
    body.replaceChildren(...shown(content));
  } catch (error) {
    body.replaceChildren(problem(error));
  }
}

function shown(content) {
  const tracks = h("div");
  const where = h("button", { type: "button", onclick: () => follow(where, tracks, content) }, "Where is it now?");
  return [
    forms(content),
    h("div", { class: "row" }, where, content.is_readable && h("a", { class: "button", href: url("/messages/body", { id: content.offset_id }), download: "" }, "Save the body")),
    tracks,
    facts([
      ["Topic", link(path("topics", content.topic), content.topic)], ["Queue", h("span", { class: "mono" }, `${content.broker}:${content.queue}`)], ["Offset", f.exact(content.offset)],
      ["Original", !content.origin_id || content.origin_id === content.offset_id ? null : h("button", { type: "button", class: "quiet mono", onclick: () => messageDialog(content.origin_id, undefined, content.origin_id) }, content.origin_id)],
      ["Stored", f.precise(content.stored_at)], ["Sent", f.precise(content.born_at)], ["From", h("span", { class: "mono" }, content.born_host)],
      ["Tag", content.tags], ["Keys", content.keys.join(" ")], ["Attempts", content.attempts ? `${content.attempts} before this` : "none before this"],
      ["Size", `${f.bytes(content.body_size)} body, ${f.bytes(content.size)} stored`], ["Id", h("span", { class: "mono" }, content.id)], ["Offset id", h("span", { class: "mono" }, content.offset_id)],
    ]),
    h("h3", null, "Properties"),
    table([["Name", (row) => h("span", { class: "mono" }, row[0]), "name"], ["Value", (row) => h("span", { class: "mono" }, row[1]), "name"]], Object.entries(content.properties).sort(), { empty: "It has none." }),
    command(content.command),
  ];
}

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
  bar.append(...names.map((name) => h("button", { type: "button", role: "tab", "data-name": name, onclick: () => choose(name) }, { json: "JSON", text: "Text", hex: "Hex" }[name])));
  choose(/^\s*[{[]/.test(content.forms.text ?? "") && content.forms.json ? "json" : content.forms.text !== undefined ? "text" : "hex");
  return h("div", { class: "stack" }, bar, text, content.is_cut && h("p", { class: "note" }, "Only the beginning is shown; save the body to see all of it."));
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
    ["When", (row) => h("span", { class: "nowrap", title: f.precise(row.at) }, row === first ? f.precise(row.at) : `+${f.fine(row.at - first.at)}`), "nowrap"],
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
    ["Copy", (row) => (row.copy ? h("button", { type: "button", class: "quiet", onclick: () => messageDialog(row.copy.id, row.copy.topic, row.copy.offset_id) }, f.when(row.copy.stored_at)) : ""), ""],
  ], tracks, { empty: "No group consumes this topic." });
}
