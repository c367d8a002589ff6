import { get, may, post, remove, url } from "../api.js";
import { h, keep, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, commandPreview, dialog, field, head, problem, readOnlyNote, table, toast, writing } from "../parts.js";
import { messageDialog } from "./message.js";
import { t } from "../words.js";

/** Letters of a pile that are looked at together. */
const SAMPLE = 100;

/** Groups with dead letters. */
export async function deadLetterGroups() {
  const load = () => get("/dead-letters");
  let content = await load();
  return {
    title: t("Dead letters"),
    draw: () => [
      head(t("Dead letters"), { sub: t("Messages that a group gave up: looked at by reason, mended, and resent.") }),
      h("section", { class: "card" }, table([
        [t("Group"), (row) => link(path("dead-letters", row.name), row.name), "name"],
        [t("Open"), (row) => h("b", { class: row.open_last_hour ? "warn-text" : "" }, f.exact(row.open_letters)), "n"],
        [t("Last hour"), (row) => f.exact(row.open_last_hour), "n"],
        [t("Resent"), (row) => f.exact(row.resent), "n opt"],
        [t("In all"), (row) => f.exact(row.dead_letters), "n opt"],
        [t("Topics"), (row) => h("span", { class: "muted" }, row.topics.join(", ")), "name opt"],
      ], content.rows, { empty: t("No message has died."), label: t("Groups with dead letters") })),
    ],
    refresh: async () => { content = await load(); },
  };
}

/** The dead letters of a group, in piles; those that the filter chooses. */
export async function deadLetters({ params, query, remember }) {
  const group = params.group;
  const filter = filterForm(query, async () => {
    remember(filter.kept());
    try { await view.refresh(); trouble.replaceChildren(); } catch (error) { trouble.replaceChildren(problem(error)); }
    dispatchEvent(new Event("console:redraw"));
  });
  const trouble = h("div");
  const load = () => get(path("dead-letters", group), filter.chosen());
  let content = await load();
  let known = null;
  const running = h("div", { class: "stack" });
  const follow = (replay) => followReplay(running, replay);
  const going = (await get("/replays")).replays.find((each) => each.group === group && each.is_running);
  if (going) follow(going);
  const view = {
    title: t("Dead letters of {}", group),
    draw: () => drawn({ group, content, filter, trouble, running, follow }),
    // Reading all letters is no small thing: it is done again when the number has changed.
    refresh: async (now) => {
      const row = now?.dying?.find((each) => each.name === group);
      const count = row ? `${row.dead_letters} ${row.open_letters}` : null;
      if (now && count !== null && count === known) return;
      known = count;
      content = await load();
    },
    replayed: (event) => running.replayed?.(event),
  };
  return view;
}

/** Which letters: by key, topic, reason, time and attempts. */
function filterForm(query, changed) {
  const input = (name, props) => h("input", { name, value: query.get(name) ?? "", autocomplete: "off", spellcheck: "false", ...props });
  const fields = {
    key: input("key", { placeholder: "order-17" }), topic: input("topic"), reason: input("reason", { placeholder: t("a part of it") }),
    since: input("since", { type: "datetime-local", step: 1 }), until: input("until", { type: "datetime-local", step: 1 }),
    min_attempts: input("min_attempts", { type: "number", min: 0 }), max_attempts: input("max_attempts", { type: "number", min: 0 }),
  };
  const kept = () => Object.fromEntries(Object.entries(fields).map(([name, each]) => [name, each.value.trim()]));
  const chosen = () => {
    const moment = (text) => (text ? new Date(text).getTime() / 1000 : "");
    return { ...kept(), since: moment(fields.since.value), until: moment(fields.until.value) };
  };
  const isOn = () => Object.values(kept()).some(Boolean);
  const clear = h("button", { type: "button", class: "quiet", onclick: () => { for (const each of Object.values(fields)) each.value = ""; changed(); } }, t("Clear"));
  const form = h("form", { class: "body form" }, field(t("Key"), fields.key), field(t("Sent to topic"), fields.topic), field(t("Reason"), fields.reason), field(t("Died since"), fields.since), field(t("Died before"), fields.until),
    field(t("Tried at least"), fields.min_attempts), field(t("Tried at most"), fields.max_attempts), h("div", { class: "row" }, h("button", { class: "primary" }, t("Filter")), clear));
  form.onsubmit = (event) => { event.preventDefault(); changed(); };
  const node = h("details", { class: "card filter", open: isOn() }, h("summary", null, t("Filter by key, topic, reason, time, attempts")), form);
  return { node, kept, chosen, isOn };
}

/** What a replay is told: no text where nothing was filled in. */
function wished(chosen) {
  const numbers = ["since", "until", "min_attempts", "max_attempts"];
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== "").map(([name, value]) => [name, numbers.includes(name) ? Number(value) : value]));
}

function drawn({ group, content, filter, trouble, running, follow }) {
  const chosen = filter.chosen();
  const save = (format) => url(path("dead-letters", group, "export"), { ...chosen, format });
  const which = filter.isOn() ? t("that the filter chooses") : "";
  return [
    head(group, {
      crumb: link("/dead-letters", t("Dead letters")),
      sub: [h("b", null, f.exact(content.open)), t(" open in {} {}", f.plural(content.reasons.length, "pile"), which), content.count > content.open ? t(", {} were resent", f.exact(content.count - content.open)) : "", content.is_complete ? "" : t("; there are more, these are the newest"), " · ", link(path("groups", group), t("see the group"))],
      actions: [
        h("a", { class: "button", href: save("jsonl"), download: "" }, t("Save as JSON lines")),
        h("a", { class: "button", href: save("parquet"), download: "" }, t("Save as Parquet")),
        h("button", { type: "button", onclick: () => notebookDialog(content.notebook, content.commands.list) }, t("Open in a notebook")),
        content.count > 0 && writing("resend", t("Resend all"), () => replayDialog(group, { which: chosen, most: content.count, follow, about: t("All dead letters of the group {}, the oldest first.", which) }), { kind: "primary", does: content.commands.resend, harmless: t("Dry run") }),
      ],
    }),
    h("div", { class: "stack" }, keep("running", running), keep("filter", filter.node), keep("trouble", trouble), content.reasons.length
      ? h("section", { class: "card", "aria-label": t("Reasons") }, content.reasons.map((pile) => drawnPile(group, pile, chosen, follow)))
      : h("section", { class: "card" }, h("p", { class: "empty" }, filter.isOn() ? t("No dead letter matches.") : t("This group has no dead letters."))),
      command(content.commands.list), command(content.commands.export)),
  ];
}

function drawnPile(group, pile, chosen, follow) {
  const which = { ...chosen, pile: pile.name };
  const [hour, day, week, older] = pile.ages;
  const topics = Object.entries(pile.topics).sort((a, b) => b[1] - a[1]);
  return h("article", { class: "pile" },
    h("div", { class: "top" }, h("span", { class: "many", title: t("open") }, f.exact(pile.open)), h("span", { class: "why" }, pile.name)),
    h("div", { class: "inner" },
      h("div", { class: "ages" },
        [[t("last hour"), hour], [t("last day"), day], [t("last week"), week], [t("older"), older]].filter(([, number]) => number).map(([word, number]) => h("span", null, h("b", null, f.count(number)), ` ${word}`)),
        h("span", null, t("the last one {}", f.ago(pile.last_died_at))),
        pile.count > pile.open && h("span", null, h("b", null, f.exact(pile.count - pile.open)), t(" resent")),
        pile.resent > 0 && h("span", { class: "warn-text" }, t("{} were resent before and died again", f.count(pile.resent))),
        h("span", { class: "muted" }, topics.slice(0, 3).map(([topic, number], place) => [place ? ", " : t("from "), link(path("topics", topic), topic), topics.length > 1 ? ` (${f.count(number)})` : ""]))),
      pile.sample && h("div", { class: "sample" }, pile.sample.preview),
      h("div", { class: "row" },
        h("button", { type: "button", onclick: () => lettersDialog(group, which, pile.count, follow) }, t("Look at them")),
        writing("resend", t("Resend {}", Math.min(10, pile.count)), () => replayDialog(group, { which, most: Math.min(10, pile.count), follow, about: pile.name, isSample: true }), { does: pile.commands.sample, harmless: t("Dry run") }),
        pile.count > 10 && writing("resend", t("Resend the rest"), () => replayDialog(group, { which, most: pile.count, follow, about: pile.name }), { does: pile.commands.resend, harmless: t("Dry run") }),
        h("button", { type: "button", class: "quiet", onclick: () => notebookDialog(pile.notebook, pile.command) }, t("Open in a notebook")))));
}

async function lettersDialog(group, which, all, follow) {
  const body = h("div", { class: "stack" }, h("p", { class: "muted" }, t("Asking the broker.")));
  const ids = new Set();
  const some = h("button", { type: "button", class: "primary", disabled: true, onclick: () => { opened.close(); replayDialog(group, { which: { ids: [...ids] }, most: ids.size, follow, about: t("{} that you chose", f.plural(ids.size, "letter")), isSample: true }); } }, t("Resend the chosen"));
  const opened = dialog(which.pile, body, { wide: true, footer: () => some });
  const choose = (row) => h("input", { type: "checkbox", "aria-label": t("Choose {}", row.keys.join(" ") || row.id), onchange: (event) => { if (event.target.checked) ids.add(row.letter); else ids.delete(row.letter); some.disabled = !ids.size; } });
  try {
    const { rows, command: text } = await get(path("dead-letters", group, "letters"), { ...which, count: SAMPLE });
    const more = all > rows.length ? [h("p", { class: "muted" }, t("The newest {} of {}; a filter finds the others, and so does the command with another --limit.", f.exact(rows.length), f.exact(all)))] : [];
    body.replaceChildren(...more, table([
      ["", choose, ""],
      [t("Died"), (row) => h("button", { type: "button", class: "quiet nowrap", onclick: () => messageDialog(row.id, row.topic, row.offset_id) }, f.instant(row.died_at)), ""],
      [t("Topic"), (row) => row.origin_topic ?? "", "opt"],
      [t("Keys"), (row) => row.keys.join(" "), "opt"],
      [t("Tried"), (row) => `${row.tried}×`, "n"],
      [t("Resent"), (row) => (row.resent_at === null ? t("no") : f.when(row.resent_at)), "opt nowrap"],
      [t("Body"), (row) => row.preview, "preview"],
      [t("Reason"), (row) => h("span", { class: "small muted" }, row.reason), "name opt"],
    ], rows, { label: t("Dead letters") }), command(text));
  } catch (error) {
    body.replaceChildren(problem(error));
  }
}

function notebookDialog(snippet, text) {
  const button = h("button", { type: "button", class: "primary" }, t("Copy"));
  button.onclick = async () => {
    try { await navigator.clipboard.writeText(snippet); button.textContent = t("Copied"); } catch { button.textContent = t("Select it and copy"); }
  };
  dialog(t("Open in a notebook"), [h("p", { class: "muted" }, t("PySpark, with the filter filled in; needs pip install 'orbitmq[spark]'.")), h("pre", { class: "code", tabindex: 0 }, snippet), h("p", { class: "muted" }, t("The same letters without Spark:")), command(text)], { wide: true, footer: () => button });
}

function replayDialog(group, { which, most, follow, about, isSample = false }) {
  const count = h("input", { type: "number", min: 1, value: String(most) });
  const rate = h("input", { type: "number", min: 0.1, step: "any", value: isSample ? "" : "50", placeholder: t("no limit") });
  const to = h("select", null, h("option", { value: "retry" }, t("this group only")), h("option", { value: "origin" }, t("the topic, for every group")));
  const again = h("input", { type: "checkbox" });
  const shown = h("div");
  const test = h("button", { type: "button" }, t("Dry run"));
  const start = h("button", { class: "primary", disabled: !may("resend") }, t("Resend"));
  const wish = () => ({ ...wished(which), count: count.value ? Number(count.value) : null, rate: rate.value ? Number(rate.value) : null, to: to.value, again: again.checked });
  const preview = commandPreview(shown, () => post(path("dead-letters", group, "replay", "command"), wish()));
  const begin = async (dryRun) => {
    const replay = await post(path("dead-letters", group, "replay"), { ...wish(), dry_run: dryRun });
    opened.close();
    follow(replay);
  };
  const form = h("form", { class: "stack" },
    h("p", { class: "mono" }, about),
    h("div", { class: "form" }, field(t("How many"), count), field(t("At most per second"), rate), field(t("Send to"), to), h("label", { class: "check wide" }, again, t("also those that were sent again before"))),
    shown, readOnlyNote("resend"), h("footer", null, test, start));
  form.oninput = preview;
  test.onclick = () => act(test, () => begin(true));
  form.onsubmit = async (event) => { event.preventDefault(); await act(start, () => begin(false)); start.disabled = !may("resend"); };
  const opened = dialog(isSample ? t("Resend a few") : t("Resend"), form);
  preview();
}

/** How a replay goes on, with the outcome of each message. */
function followReplay(place, first) {
  let replay = { ...first, outcomes: first.outcomes ?? [] };
  const stop = h("button", { type: "button", class: "danger", title: t("The command below is stopped with Ctrl-C"), disabled: !may("resend") && !replay.is_dry_run, onclick: () => act(stop, async () => { await remove(path("replays", replay.id)); await look(); }) }, t("Stop"));
  const draw = () => place.replaceChildren(card(replay.is_running ? t("Resending") : replay.is_dry_run ? t("Dry run: nothing was sent") : t("Resent"),
    h("div", null,
      h("div", { class: "body stack" }, h("div", { role: "status", "data-replay": replay.is_running ? "running" : "over" }, replay.summary), command(replay.command)),
      table([
        [t("Message"), (row) => h("span", { class: "mono" }, row.keys.join(" ") || row.id), "name"],
        ["", (row) => h("span", { class: row.result === "failed" ? "bad-text" : "" }, row.result), ""],
        [t("To"), (row) => row.topic ?? "", "opt"],
        ["", (row) => row.problem ?? "", "name opt"],
      ], replay.outcomes.slice(-200).reverse(), { empty: t("No letter so far."), label: t("Outcomes") })),
    replay.is_running ? stop : h("button", { type: "button", class: "quiet", onclick: () => place.replaceChildren() }, t("Close"))));
  let isLooking = false;
  const look = async () => {
    if (isLooking) return;
    isLooking = true;
    try {
      const fresh = await get(path("replays", replay.id), { from: replay.outcomes.length });
      replay = { ...fresh, outcomes: replay.outcomes.concat(fresh.outcomes) };
      draw();
      if (!replay.is_running && replay.problem) toast(replay.problem, true);
    } catch (error) {
      toast(error.message, true);
    } finally {
      isLooking = false;
    }
    if (replay.is_running) setTimeout(() => place.isConnected && look(), 400);
  };
  place.replayed = (event) => { if (event.id === replay.id) look(); };
  draw();
  look();
}
