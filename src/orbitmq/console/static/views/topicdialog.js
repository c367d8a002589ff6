import { may, patch, post } from "../api.js";
import { h, path } from "../dom.js";
import { act, commandPreview, dialog, field, readOnlyNote, toast } from "../parts.js";
import { t } from "../words.js";

/** Make a topic, or change one (`topic` has what it is now). */
export function topicDialog({ topic, done }) {
  const isNew = !topic;
  const name = h("input", { required: true, maxlength: 127, pattern: "[%\\|a-zA-Z0-9_\\-]+", value: topic?.name ?? "", disabled: !isNew, autocomplete: "off", spellcheck: "false" });
  const most = (which) => Math.max(...(topic?.brokers ?? []).map((each) => each[which]), 0) || 8;
  const write = h("input", { type: "number", min: 1, max: 65536, value: String(most("write_queues")) });
  const read = h("input", { type: "number", min: 1, max: 65536, value: String(most("read_queues")) });
  const permission = h("select", null, [["rw", t("read and write")], ["r", t("read only")], ["w", t("write only")]].map(([value, word]) => h("option", { value }, word)));
  permission.value = topic?.permission ?? "rw";
  const ordered = h("input", { type: "checkbox", checked: topic?.is_ordered ?? false });
  const shown = h("div");
  const apply = h("button", { class: "primary", disabled: !may("topics") }, isNew ? t("Create") : t("Change"));

  const wish = () => ({
    ...(isNew ? { name: name.value.trim() } : {}),
    ...(write.value === read.value ? { queues: Number(write.value) } : { write_queues: Number(write.value), read_queues: Number(read.value) }),
    permission: permission.value,
    // What stays as it is needs no word in the command.
    ...(ordered.checked === (topic?.is_ordered ?? false) ? {} : { ordered: ordered.checked }),
  });
  const ask = (extra) => (isNew ? post("/topics", { ...wish(), ...extra }) : patch(path("topics", topic.name), { ...wish(), ...extra }));

  const preview = commandPreview(shown, () => name.value.trim() && ask({ dry_run: true }));

  const form = h("form", { class: "stack" },
    h("div", { class: "form" }, field(t("Name"), name, "wide"), field(t("Queues to write, each broker"), write), field(t("Queues to read, each broker"), read), field(t("Permission"), permission),
      h("label", { class: "check" }, ordered, t("keep the order of queues"))),
    !isNew && h("p", { class: "note" }, t("To take queues away without losing what is in them: fewer to write first, and fewer to read once they have been consumed.")),
    shown, readOnlyNote("topics"), h("footer", null, apply));
  form.oninput = preview;
  form.onsubmit = async (event) => {
    event.preventDefault();
    await act(apply, async () => {
      const answer = await ask({});
      toast(`${isNew ? t("Created") : t("Changed")}: ${answer.outcome}`);
      opened.close();
      done(isNew ? name.value.trim() : topic.name);
    });
    apply.disabled = !may("topics");
  };
  const opened = dialog(isNew ? t("New topic") : t("Change {}", topic.name), form);
  preview();
}
