import { get, may, put } from "../api.js";
import { h, path } from "../dom.js";
import { act, dialog, field, problem, readOnlyNote, toast } from "../parts.js";
import { t } from "../words.js";

const WORDS = { auto: t("by itself: JSON or text"), json: "JSON", text: t("text"), avro: "Avro", protobuf: "Protobuf", msgpack: "MessagePack" };

/** How the bodies of a topic are read; gzip is undone in any case. The console remembers it for everybody. */
export async function decoderDialog(topic, done) {
  const body = h("div", { class: "stack" }, h("p", { class: "muted" }, t("Asking.")));
  const opened = dialog(t("How bodies of {} are read", topic), body);
  try {
    const content = await get(path("topics", topic, "decoder"));
    body.replaceChildren(form(topic, content, () => { opened.close(); done(); }));
  } catch (error) {
    body.replaceChildren(problem(error));
  }
}

function form(topic, { decoder, formats }, done) {
  const format = h("select", null, formats.map((each) => h("option", { value: each.name }, WORDS[each.name] + (each.missing ? t(" (not installed)") : ""))));
  format.value = decoder.format;
  const skip = h("input", { type: "number", min: 0, max: 1024, value: String(decoder.skip) });
  const schema = h("textarea", { spellcheck: "false", rows: 6, placeholder: "{\"type\": \"record\", \"name\": \"Order\", \"fields\": [...]}" });
  schema.value = decoder.schema ?? "";
  const file = h("input", { type: "file" });
  const message = h("input", { value: decoder.message ?? "", placeholder: "shop.Order", autocomplete: "off", spellcheck: "false" });
  let descriptor = decoder.descriptor;
  file.onchange = async () => { descriptor = file.files[0] ? base64(new Uint8Array(await file.files[0].arrayBuffer())) : descriptor; };
  const place = h("div", { class: "stack" });
  const trouble = h("div");
  const button = h("button", { class: "primary" }, t("Read so"));
  const lay = () => {
    const missing = formats.find((each) => each.name === format.value)?.missing;
    button.disabled = Boolean(missing) || !may("decoders");
    place.replaceChildren(...[
      missing && h("p", { class: "note warn" }, t("The console's machine lacks a package for this; run there: {}", missing)),
      format.value === "avro" && field(t("Schema (JSON)"), schema),
      format.value === "protobuf" && field(t("Descriptor: a file of protoc --include_imports -o FILE"), file),
      format.value === "protobuf" && descriptor && h("p", { class: "small muted" }, t("A descriptor is there; a file replaces it.")),
      format.value === "protobuf" && field(t("Message type"), message),
      !["auto", "text"].includes(format.value) && field(t("Bytes to skip at the beginning (5 with a schema registry)"), skip),
    ].filter(Boolean));
  };
  format.onchange = lay;
  const node = h("form", { class: "stack" },
    h("p", { class: "muted" }, t("Everybody who looks at this console sees bodies of the topic so. Bodies that begin as gzip are unpacked in any case.")),
    field(t("Format"), format), place, trouble, readOnlyNote("decoders"), h("footer", null, button));
  node.onsubmit = async (event) => {
    event.preventDefault();
    trouble.replaceChildren();
    await act(button, async () => {
      try {
        const isAvro = format.value === "avro", isProtobuf = format.value === "protobuf";
        const answer = await put(path("topics", topic, "decoder"), {
          format: format.value, skip: Number(skip.value) || 0,
          ...(isAvro ? { schema: schema.value } : {}), ...(isProtobuf ? { descriptor: descriptor ?? "", message: message.value.trim() } : {}),
        });
        toast(answer.outcome);
        done();
      } catch (error) {
        trouble.replaceChildren(problem(error));
      }
    });
  };
  lay();
  return node;
}

function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}
