import { get } from "../api.js";
import { h } from "../dom.js";
import * as f from "../format.js";
import { RATES, card, head, table } from "../parts.js";
import { t } from "../words.js";

/** What a broker of ours announces is the release of RocketMQ whose protocol it speaks. */
function version(row) {
  if (!row.version) return row.is_orbitmq ? "OrbitMQ" : "";
  return row.is_orbitmq ? t("OrbitMQ, speaks {}", row.version) : `Apache ${row.version}`;
}

/** Brokers and name servers. */
export async function brokers() {
  const load = () => get("/now");
  let content = await load();
  return {
    title: t("Brokers"),
    draw: () => [
      head(t("Brokers"), { sub: RATES }),
      h("div", { class: "stack" },
        (content.brokers ?? []).flatMap((each) => each.warnings.map((text) => h("div", { class: "note bad" }, h("b", null, each.name), ": ", text))),
        h("section", { class: "card" }, table([
          [t("Broker"), (row) => [row.name, h("div", { class: "faint small" }, row.address)], "name"],
          ["", (row) => (row.is_up ? h("span", { class: "muted" }, row.is_master ? t("master") : t("slave")) : h("span", { class: "tag bad" }, t("down"))), ""],
          [t("Version"), (row) => version(row), "opt"],
          [t("In"), (row) => `${f.rate(row.in_rate)}/s`, "n"],
          [t("Out"), (row) => `${f.rate(row.out_rate)}/s`, "n"],
          [t("Today in"), (row) => f.count(row.in_today), "n opt"],
          [t("Log"), (row) => f.bytes(row.log_bytes), "n opt"],
          [t("Disk"), (row) => h("span", { class: row.disk_used >= 0.85 ? "bad-text" : "" }, f.percent(row.disk_used)), "n opt"],
          [t("Since"), (row) => f.when(row.started_at), "n opt"],
          [t("Oldest message"), (row) => f.when(row.earliest_message_at), "n opt"],
        ], content.brokers ?? [], { label: t("Brokers") })),
        card(t("Name servers"), table([
          [t("Address"), (row) => h("span", { class: "mono" }, row.address), "name"],
          ["", (row) => (row.is_up ? h("span", { class: "muted" }, t("up")) : h("span", { class: "tag bad" }, t("down"))), ""],
          [t("Knows"), (row) => row.problem ?? row.brokers.join(", "), "name"],
        ], content.name_servers ?? []))),
    ],
    refresh: async (fresh) => { content = fresh ?? await load(); },
  };
}
