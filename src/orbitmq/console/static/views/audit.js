import { get } from "../api.js";
import { h } from "../dom.js";
import * as f from "../format.js";
import { head, table } from "../parts.js";
import { t } from "../words.js";

/** Who changed what through this console. */
export async function audit() {
  let { lines } = await get("/audit");
  return {
    title: t("Audit"),
    draw: () => [head(t("Audit"), { sub: t("What was changed through this console, the newest first.") }), h("section", { class: "card" }, auditTable(lines))],
    refresh: async () => { ({ lines } = await get("/audit")); },
  };
}

export function auditTable(lines) {
  return table([
    [t("When"), (row) => f.when(row.at), "nowrap"],
    [t("Who"), (row) => row.who, "opt"],
    [t("What"), (row) => h("code", null, row.command), "name"],
    [t("Outcome"), (row) => h("span", { class: row.is_done ? "" : "bad-text" }, row.outcome), "name"],
  ], lines, { empty: t("Nothing was changed through this console."), label: t("Audit") });
}
