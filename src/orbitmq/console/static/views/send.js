import { get, may, post } from "../api.js";
import { h, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, commandPreview, facts, field, head, readOnlyNote, suggestions, table, toast } from "../parts.js";
import { messageDialog, tracked } from "./message.js";
import { t } from "../words.js";

/** The latest messages of a topic that are offered as models. */
const MODELS = 6;

/** A test message: where it landed, and who consumed it. */
export async function send({ query }) {
  const text = (props) => h("input", { autocomplete: "off", spellcheck: "false", ...props });
  const topic = text({ list: "send-topics", required: true, value: query.get("topic") ?? "" });
  const body = h("textarea", { class: "tall", spellcheck: "false", placeholder: "{\"order\": 17}" });
  const tags = text({ placeholder: "paid" });
  const keys = text({ placeholder: "order-17" });
  const delay = h("input", { type: "number", min: 0, step: "any", placeholder: t("at once") });
  const properties = h("textarea", { spellcheck: "false", placeholder: t("name=value, one on each line"), rows: 3, class: "short" });
  const shown = h("div");
  const button = h("button", { class: "primary", disabled: !may("send") }, t("Send"));
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
    h("div", { class: "form" }, field(t("Topic"), topic), suggestions("send-topics", topic, "/topics", { filter: "own" }), field(t("Tag"), tags), field(t("Keys"), keys), field(t("Delay in seconds"), delay), field(t("Body"), body, "wide"), field(t("Properties"), properties, "wide")),
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
    models.replaceChildren(card(name ? t("The latest of {}", name) : t("The latest messages"), table([
      [t("Stored"), (row) => h("button", { type: "button", class: "quiet nowrap", onclick: () => messageDialog(row.id, row.topic, row.offset_id) }, f.instant(row.stored_at)), ""],
      [t("Body"), (row) => row.preview, "preview"],
      ["", (row) => h("button", { type: "button", class: "quiet", onclick: () => take(row) }, t("Use")), "n"],
    ], rows, { empty: name ? t("It has no messages yet.") : t("Choose a topic, and its latest messages are offered here as models."), label: t("Models") })));
  }

  async function take(row) {
    const found = await get("/messages/one", { id: row.offset_id });
    if (found.is_masked) toast(t("Masked fields of it would be sent as ***"));
    body.value = found.forms.json ?? found.forms.text ?? "";
    tags.value = found.tags ?? "";
    keys.value = found.keys.join(" ");
    preview();
    body.focus();
  }

  let following = 0;
  function landed(sent) {
    const who = h("div", null, h("p", { class: "empty" }, t("Looking who consumes it.")));
    result.replaceChildren(card(t("Stored"), h("div", { class: "body stack" }, facts([
      [t("Status"), sent.status.replaceAll("_", " ")], [t("Topic"), link(path("topics", sent.topic), sent.topic)], [t("Queue"), h("span", { class: "mono" }, `${sent.broker}:${sent.queue}`)], [t("Offset"), f.exact(sent.offset)],
      [t("Id"), h("button", { type: "button", class: "quiet mono", onclick: () => messageDialog(sent.id, sent.topic, sent.offset_id) }, sent.id)],
    ]))), card(t("Who consumed it"), who));
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
  const page = [head(t("Send a message"), { sub: t("A test message: where it is stored, and who consumes it.") }), h("div", { class: "split sides", "data-own": true }, form, h("div", { class: "stack" }, result, models))];
  return { title: t("Send"), still: true, draw: () => page, leave: () => { following += 1; } };
}
