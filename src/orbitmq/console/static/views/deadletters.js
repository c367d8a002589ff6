import { get, me, post, remove, url } from "../api.js";
import { h, keep, link, path } from "../dom.js";
import * as f from "../format.js";
import { act, card, command, dialog, field, head, problem, readOnlyNote, table, toast } from "../parts.js";
import { messageDialog } from "./message.js";

/** Groups with dead letters. */
export async function deadLetterGroups() {
  const load = () => get("/dead-letters");
  let content = await load();
  return {
    title: "Dead letters",
    draw: () => [
      head("Dead letters", { sub: "Messages that a group gave up: looked at by reason, mended, and sent again." }),
      h("section", { class: "card" }, table([
        ["Group", (row) => link(path("dead-letters", row.name), row.name), "name"],
        ["Last hour", (row) => h("span", { class: row.dead_last_hour ? "warn-text" : "" }, f.exact(row.dead_last_hour)), "n"],
        ["In all", (row) => f.exact(row.dead_letters), "n"],
        ["Topics", (row) => h("span", { class: "muted" }, row.topics.join(", ")), "name opt"],
      ], content.rows, { empty: "No message has died.", label: "Groups with dead letters" })),
    ],
    refresh: async () => { content = await load(); },
  };
}

/** The dead letters of a group, in piles. */
export async function deadLetters({ params }) {
  const group = params.group;
  const load = () => get(path("dead-letters", group));
  let content = await load();
  const running = h("div", { class: "stack" });
  const follow = (replay) => followReplay(running, replay);
  const going = (await get("/replays")).replays.find((each) => each.group === group && each.is_running);
  if (going) follow(going);
  return {
    title: `Dead letters of ${group}`,
    draw: () => drawn(group, content, running, follow),
    // Reading all letters is no small thing: it is done again when the number has changed.
    refresh: async (now) => {
      const row = now?.dying?.find((each) => each.name === group);
      if (!row || row.dead_letters !== content.count) content = await load();
    },
    replayed: (event) => running.replayed?.(event),
  };
}

function drawn(group, content, running, follow) {
  const save = (format) => url(path("dead-letters", group, "export"), { format });
  return [
    head(group, {
      crumb: link("/dead-letters", "Dead letters"),
      sub: [`${f.plural(content.count, "message")} in ${f.plural(content.reasons.length, "pile")}`, content.is_complete ? "" : "; there are more, these are the newest", " · ", link(path("groups", group), "the group")],
      actions: [
        h("a", { class: "button", href: save("jsonl"), download: "" }, "Save as JSON lines"),
        h("a", { class: "button", href: save("parquet"), download: "" }, "Save as Parquet"),
        h("button", { type: "button", onclick: () => notebookDialog(content.notebook) }, "Open in a notebook"),
        content.count > 0 && h("button", { type: "button", class: "primary", onclick: () => replayDialog(group, null, content.count, follow) }, "Replay all"),
      ],
    }),
    h("div", { class: "stack" }, keep("running", running), content.reasons.length
      ? h("section", { class: "card", "aria-label": "Reasons" }, content.reasons.map((pile) => drawnPile(group, pile, follow)))
      : h("section", { class: "card" }, h("p", { class: "empty" }, "This group has no dead letters.")),
      command(content.commands.list)),
  ];
}

function drawnPile(group, pile, follow) {
  const [hour, day, week, older] = pile.ages;
  const topics = Object.entries(pile.topics).sort((a, b) => b[1] - a[1]);
  return h("article", { class: "pile" },
    h("div", { class: "top" }, h("span", { class: "many" }, f.count(pile.count)), h("span", { class: "why" }, pile.name)),
    h("div", { class: "inner" },
      h("div", { class: "ages" },
        [["last hour", hour], ["last day", day], ["last week", week], ["older", older]].filter(([, number]) => number).map(([word, number]) => h("span", null, h("b", null, f.count(number)), ` ${word}`)),
        h("span", null, `last ${f.ago(pile.last_died_at)}`),
        pile.resent > 0 && h("span", { class: "warn-text" }, `${f.count(pile.resent)} were sent again before and died again`),
        h("span", { class: "muted" }, topics.slice(0, 3).map(([topic, number], place) => [place ? ", " : "from ", link(path("topics", topic), topic), topics.length > 1 ? ` (${f.count(number)})` : ""]))),
      pile.sample && h("div", { class: "sample" }, pile.sample.preview),
      h("div", { class: "row" },
        h("button", { type: "button", onclick: () => lettersDialog(group, pile) }, "Look at them"),
        h("button", { type: "button", onclick: () => replayDialog(group, pile, Math.min(10, pile.count), follow, true) }, `Replay ${Math.min(10, pile.count)}`),
        pile.count > 10 && h("button", { type: "button", onclick: () => replayDialog(group, pile, pile.count, follow) }, "Replay the rest"),
        h("button", { type: "button", class: "quiet", onclick: () => notebookDialog(pile.notebook) }, "Open in a notebook"))));
}

async function lettersDialog(group, pile) {
  const body = h("div", null, h("p", { class: "muted" }, "Asking the broker."));
  dialog(pile.name, body, { wide: true });
  try {
    const { rows } = await get(path("dead-letters", group, "letters"), { reason: pile.name, count: 100 });
    body.replaceChildren(table([
      ["Died", (row) => h("button", { type: "button", class: "quiet nowrap", onclick: () => messageDialog(row.id, row.topic, row.offset_id) }, f.when(row.died_at)), ""],
      ["Topic", (row) => row.origin_topic ?? "", "opt"],
      ["Keys", (row) => row.keys.join(" "), "opt"],
      ["Tried", (row) => `${row.tried}×`, "n"],
      ["Body", (row) => row.preview, "preview"],
      ["Reason", (row) => h("span", { class: "small muted" }, row.reason), "name opt"],
    ], rows, { label: "Dead letters" }));
  } catch (error) {
    body.replaceChildren(problem(error));
  }
}

function notebookDialog(snippet) {
  const button = h("button", { type: "button", class: "primary" }, "Copy");
  button.onclick = async () => {
    try { await navigator.clipboard.writeText(snippet); button.textContent = "Copied"; } catch { button.textContent = "Select it and copy"; }
  };
  dialog("Open in a notebook", [h("p", { class: "muted" }, "PySpark, with the filter filled in; needs pip install 'orbitmq[spark]'."), h("pre", { class: "code", tabindex: 0 }, snippet)], { wide: true, footer: () => button });
}

function replayDialog(group, pile, most, follow, isSample = false) {
  const count = h("input", { type: "number", min: 1, value: String(most) });
  const rate = h("input", { type: "number", min: 0.1, step: "any", value: isSample ? "" : "50", placeholder: "no limit" });
  const to = h("select", null, h("option", { value: "retry" }, "this group only"), h("option", { value: "origin" }, "the topic, for every group"));
  const again = h("input", { type: "checkbox" });
  const shown = h("div");
  const test = h("button", { type: "button" }, "Dry run");
  const start = h("button", { class: "primary", disabled: !me.write }, "Replay");
  const wish = () => ({ reason: pile?.name ?? null, count: count.value ? Number(count.value) : null, rate: rate.value ? Number(rate.value) : null, to: to.value, again: again.checked });
  const text = () => {
    const wanted = wish();
    const quoted = (value) => (/^[\w./:@%+=-]+$/.test(value) ? value : `'${value.replaceAll("'", `'"'"'`)}'`);
    return ["orbitmq dlq resend", quoted(group), wanted.reason && `--reason ${quoted(wanted.reason)}`, wanted.count && `--limit ${wanted.count}`, wanted.rate && `--rate ${wanted.rate}`, `--to ${wanted.to}`, wanted.again && "--again"].filter(Boolean).join(" ");
  };
  const preview = () => shown.replaceChildren(command(text()));
  const begin = async (dryRun) => {
    const replay = await post(path("dead-letters", group, "replay"), { ...wish(), dry_run: dryRun });
    opened.close();
    follow(replay);
  };
  const form = h("form", { class: "stack" },
    h("p", null, pile ? h("span", { class: "mono" }, pile.name) : "All dead letters of the group, the oldest first."),
    h("div", { class: "form" }, field("How many", count), field("At most per second", rate), field("Send to", to), h("label", { class: "check wide" }, again, "also those that were sent again before")),
    shown, readOnlyNote(), h("footer", null, test, start));
  form.oninput = preview;
  test.onclick = () => act(test, () => begin(true));
  form.onsubmit = async (event) => { event.preventDefault(); await act(start, () => begin(false)); start.disabled = !me.write; };
  const opened = dialog(isSample ? "Replay a few" : "Replay", form);
  preview();
}

/** How a replay goes on, with the outcome of each message. */
function followReplay(place, first) {
  let replay = { ...first, outcomes: first.outcomes ?? [] };
  const stop = h("button", { type: "button", class: "danger", onclick: () => act(stop, async () => { await remove(path("replays", replay.id)); await look(); }) }, "Stop");
  const draw = () => place.replaceChildren(card(replay.is_running ? "Replaying" : replay.is_dry_run ? "Dry run: nothing was sent" : "Replayed",
    h("div", null,
      h("div", { class: "body stack" }, h("div", { role: "status", "data-replay": replay.is_running ? "running" : "over" }, replay.summary), command(replay.command)),
      table([
        ["Message", (row) => h("span", { class: "mono" }, row.keys.join(" ") || row.id), "name"],
        ["", (row) => h("span", { class: row.result === "failed" ? "bad-text" : "" }, row.result), ""],
        ["To", (row) => row.topic ?? "", "opt"],
        ["", (row) => row.problem ?? "", "name opt"],
      ], replay.outcomes.slice(-200).reverse(), { empty: "No letter so far.", label: "Outcomes" })),
    replay.is_running ? stop : h("button", { type: "button", class: "quiet", onclick: () => place.replaceChildren() }, "Close")));
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
