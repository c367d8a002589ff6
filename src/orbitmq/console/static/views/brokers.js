import { get } from "../api.js";
import { h } from "../dom.js";
import * as f from "../format.js";
import { RATES, card, head, table } from "../parts.js";

/** What a broker of ours announces is the release of RocketMQ whose protocol it speaks. */
function version(row) {
  if (!row.version) return row.is_orbitmq ? "OrbitMQ" : "";
  return row.is_orbitmq ? `OrbitMQ, speaks ${row.version}` : `Apache ${row.version}`;
}

/** Brokers and name servers. */
export async function brokers() {
  const load = () => get("/now");
  let content = await load();
  return {
    title: "Brokers",
    draw: () => [
      head("Brokers", { sub: RATES }),
      h("div", { class: "stack" },
        (content.brokers ?? []).flatMap((each) => each.warnings.map((text) => h("div", { class: "note bad" }, h("b", null, each.name), ": ", text))),
        h("section", { class: "card" }, table([
          ["Broker", (row) => [row.name, h("div", { class: "faint small" }, row.address)], "name"],
          ["", (row) => (row.is_up ? h("span", { class: "muted" }, row.is_master ? "master" : "slave") : h("span", { class: "tag bad" }, "down")), ""],
          ["Version", (row) => version(row), "opt"],
          ["In", (row) => `${f.rate(row.in_rate)}/s`, "n"],
          ["Out", (row) => `${f.rate(row.out_rate)}/s`, "n"],
          ["Today in", (row) => f.count(row.in_today), "n opt"],
          ["Log", (row) => f.bytes(row.log_bytes), "n opt"],
          ["Disk", (row) => h("span", { class: row.disk_used >= 0.85 ? "bad-text" : "" }, f.percent(row.disk_used)), "n opt"],
          ["Since", (row) => f.when(row.started_at), "n opt"],
          ["Oldest message", (row) => f.when(row.earliest_message_at), "n opt"],
        ], content.brokers ?? [], { label: "Brokers" })),
        card("Name servers", table([
          ["Address", (row) => h("span", { class: "mono" }, row.address), "name"],
          ["", (row) => (row.is_up ? h("span", { class: "muted" }, "up") : h("span", { class: "tag bad" }, "down")), ""],
          ["Knows", (row) => row.problem ?? row.brokers.join(", "), "name"],
        ], content.name_servers ?? []))),
    ],
    refresh: async (fresh) => { content = fresh ?? await load(); },
  };
}
