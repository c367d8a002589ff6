import { get } from "../api.js";
import { h } from "../dom.js";
import * as f from "../format.js";
import { head, table } from "../parts.js";

/** Who changed what through this console. */
export async function audit() {
  let { lines } = await get("/audit");
  return {
    title: "Audit",
    draw: () => [head("Audit", { sub: "What was changed through this console, the newest first." }), h("section", { class: "card" }, auditTable(lines))],
    refresh: async () => { ({ lines } = await get("/audit")); },
  };
}

export function auditTable(lines) {
  return table([
    ["When", (row) => f.when(row.at), "nowrap"],
    ["Who", (row) => row.who, "opt"],
    ["What", (row) => h("code", null, row.command), "name"],
    ["Outcome", (row) => h("span", { class: row.is_done ? "" : "bad-text" }, row.outcome), "name"],
  ], lines, { empty: "Nothing was changed through this console.", label: "Audit" });
}
