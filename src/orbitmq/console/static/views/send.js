import { get, may, post } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, commandPreview, facts, field, head, readOnlyNote, suggestions, table, toast } from "../parts.js";
import { messageDialog, tracked } from "./message.js";

/** The latest messages of a topic that are offered as models. */
const MODELS = 6;

/** A test message: where it landed, and who consumed it. */
export async function send({ query }) {
  const text = (props) => h("input", { autocomplete: "off", spellcheck: "false", ...props });
  const topic = text({ list: "send-topics", required: true, value: query.get("topic") ?? "" });
  const body = h("textarea", { class: "tall", spellcheck: "false", placeholder: "{\"order\": 17}" });
  const tags = text({ placeholder: "paid" });
  const keys = text({ placeholder: "order-17" });
  const delay = h("input", { type: "number", min: 0, step: "any", placeholder: "at once" });
  const properties = h("textarea", { spellcheck: "false", placeholder: "name=value, one on each line", rows: 3, class: "short" });
  const shown = h("div");
  const button = h("button", { class: "primary", disabled: !may("send") }, "Send");
  const result = h("div", { class: "stack" });
  const models = h("div");
  const draft = () => ({
    topic: topic.value.trim(), body: body.value, tags: tags.value.trim() || null, keys: keys.value.split(/\s+/).filter(Boolean),
    properties: Object.fromEntries(properties.value.split("\n").filter((line) => line.includes("=")).map((line) => [line.slice(0, line.indexOf("=")).trim(), line.slice(line.indexOf("=") + 1).trim()])),
    delay: delay.value ? Number(delay.value) : null,
  });
  const showCommand = commandPreview(shown, () => topic.value.trim() && body.value && post("/send", { ...draft(), dry_run: true }));
  let timer = 0;
  const preview = () => {
    clearTimeout(timer);
    timer = setTimeout(showCommand, 150);
  };
  const form = h("form", { class: "card" }, h("div", { class: "body stack" },
    h("div", { class: "form" }, field("Topic", topic), suggestions("send-topics", topic, "/topics", { filter: "own" }), field("Tag", tags), field("Keys", keys), field("Delay in seconds", delay), field("Body", body, "wide"), field("Properties", properties, "wide")),
    shown, readOnlyNote("send"), h("div", null, button)));
  form.oninput = preview;
  form.onsubmit = async (event) => {
    event.preventDefault();
    await act(button, async () => landed(await post("/send", draft())));
    button.disabled = !may("send");
  };

  let modelled = null;
  /** What lies in the topic already, to begin with. */
  async function offer() {
    const name = topic.value.trim();
    if (name === modelled) return;
    modelled = name;
    let rows = [];
    try { if (name) ({ rows } = await get("/messages", { topic: name, newest: 1, count: MODELS })); } catch { /* no such topic yet: it may be made by sending */ }
    if (name !== modelled) return;
    models.replaceChildren(card(name ? `The latest of ${name}` : "The latest messages", table([
      ["Stored", (row) => h("button", { type: "button", class: "quiet nowrap", onclick: () => messageDialog(row.id, row.topic, row.offset_id) }, f.instant(row.stored_at)), ""],
      ["Body", (row) => row.preview, "preview"],
      ["", (row) => h("button", { type: "button", class: "quiet", onclick: () => take(row) }, "Use"), "n"],
    ], rows, { empty: name ? "It has no messages yet." : "Choose a topic, and its latest messages are offered here as models.", label: "Models" })));
  }

  async function take(row) {
    const found = await get("/messages/one", { id: row.offset_id });
    if (found.is_masked) toast("Masked fields of it would be sent as ***");
    body.value = found.forms.json ?? found.forms.text ?? "";
    tags.value = found.tags ?? "";
    keys.value = found.keys.join(" ");
    preview();
    body.focus();
  }

  let following = 0;
  function landed(sent) {
    const who = h("div", null, h("p", { class: "empty" }, "Looking who consumes it."));
    result.replaceChildren(card("Stored", h("div", { class: "body stack" }, facts([
      ["Status", sent.status.replaceAll("_", " ")], ["Topic", link(path("topics", sent.topic), sent.topic)], ["Queue", h("span", { class: "mono" }, `${sent.broker}:${sent.queue}`)], ["Offset", f.exact(sent.offset)],
      ["Id", h("button", { type: "button", class: "quiet mono", onclick: () => messageDialog(sent.id, sent.topic, sent.offset_id) }, sent.id)],
    ]))), card("Who consumed it", who));
    following += 1;
    follow(following, sent, who, 0);
  }

  async function follow(mine, sent, who, tries) {
    if (mine !== following || !who.isConnected || tries > 40) return;
    try {
      const { tracks } = await get("/messages/track", { id: sent.offset_id });
      who.replaceChildren(tracked(tracks));
      if (tracks.length && tracks.every((each) => each.fate !== "waiting")) return;
    } catch {
      // A delayed message is not there yet.
    }
    setTimeout(() => follow(mine, sent, who, tries + 1), 1500);
  }

  topic.addEventListener("change", offer);
  preview();
  await offer();
  const page = [head("Send a message", { sub: "A test message: where it is stored, and who consumes it." }), h("div", { class: "split sides", "data-own": true }, form, h("div", { class: "stack" }, result, models))];
  return { title: "Send", still: true, draw: () => page, leave: () => { following += 1; } };
}
