// A table of any length: the page has the rows that are to be seen, and asks for others as they
// come into sight. Sorting and searching are the server's work.

import { h } from "./dom.js";
import * as f from "./format.js";
import { get } from "./api.js";
import { problem } from "./parts.js";
import { t } from "./words.js";

const HEIGHT = 41;
const CHUNK = 100;

/**
 * `columns`: { label, sort, cell, kind }. `state` has search, filter and sort, and is changed here.
 */
const NARROW = matchMedia("(max-width: 640px)");

export function virtualTable(path, columns, state, { label, changed }) {
  const total = h("span", { class: "total", role: "status" });
  const body = h("tbody");
  const head = h("tr");
  const table = h("table", { class: "virtual", "aria-label": label }, h("thead", null, head), body);
  const trouble = h("div");
  const node = h("div", { "data-own": true }, trouble, table);
  let chunks = new Map();
  let known = 0;
  let asked = new AbortController();

  function drawHead() {
    head.replaceChildren(...columns.map((column) => {
      const order = state.sort.replace(/^-/, "") === column.sort ? (state.sort.startsWith("-") ? "descending" : "ascending") : null;
      const mark = order ? (order === "descending" ? " ↓" : " ↑") : "";
      return h("th", { class: column.kind, scope: "col", "aria-sort": order },
        column.sort ? h("button", { type: "button", onclick: () => sortBy(column) }, column.label, mark) : column.label);
    }));
  }

  function sortBy(column) {
    const isNumber = (column.kind ?? "").split(" ").includes("n");
    const [first, second] = isNumber ? [`-${column.sort}`, column.sort] : [column.sort, `-${column.sort}`];
    state.sort = state.sort === first ? second : first;
    reload();
    changed?.();
  }

  async function fetchChunk(place) {
    const mine = asked;
    const answer = await get(path, { search: state.search, filter: state.filter, sort: state.sort, from: place * CHUNK, count: CHUNK }, mine.signal);
    if (mine !== asked) return;
    chunks.set(place, answer.rows);
    known = answer.total;
    total.textContent = f.plural(known, state.noun);
  }

  function range() {
    const top = body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / HEIGHT) - 10);
    return [first, Math.min(known, first + Math.ceil(innerHeight / HEIGHT) + 20)];
  }

  function draw() {
    const [first, last] = range();
    const rows = [];
    for (let place = first; place < last; place += 1) {
      const row = chunks.get(Math.floor(place / CHUNK))?.[place % CHUNK];
      rows.push(h("tr", { class: "link", "aria-rowindex": place + 2 }, columns.map((column) => h("td", { class: column.kind }, row ? column.cell(row) : "…"))));
    }
    if (!known) rows.push(h("tr", null, h("td", { colspan: inSight(), class: "empty" }, state.search || state.filter ? t("Nothing matches.") : state.empty)));
    table.setAttribute("aria-rowcount", known + 1);
    body.replaceChildren(...space(first), ...rows, ...space(known - last));
  }

  function space(count) {
    return count > 0 ? [h("tr", { class: "space", "aria-hidden": "true" }, h("td", { style: { height: `${count * HEIGHT}px` } }))] : [];
  }

  // A cell that spans more columns than there are adds empty ones, which take their part of the width.
  function inSight() {
    return columns.filter((column) => !NARROW.matches || !/\bopt\b/.test(column.kind)).length;
  }

  async function show() {
    const [first, last] = range();
    const wanted = [];
    for (let place = Math.floor(first / CHUNK); place <= Math.floor(Math.max(first, last - 1) / CHUNK); place += 1) if (!chunks.has(place)) wanted.push(place);
    draw();
    if (!wanted.length) return;
    try {
      await Promise.all(wanted.map(fetchChunk));
      trouble.replaceChildren();
    } catch (error) {
      if (error.name === "AbortError") return;
      trouble.replaceChildren(problem(error));
    }
    draw();
  }

  async function reload() {
    asked.abort();
    asked = new AbortController();
    chunks = new Map();
    drawHead();
    await fetchFirst();
  }

  async function fetchFirst() {
    try {
      await fetchChunk(0);
      trouble.replaceChildren();
    } catch (error) {
      if (error.name === "AbortError") return;
      trouble.replaceChildren(problem(error));
    }
    await show();
  }

  async function refresh() {
    if (node.contains(document.activeElement) && document.activeElement.tagName === "A") return; // somebody is on a row
    const [first, last] = range();
    asked.abort();
    asked = new AbortController();
    const wanted = new Set([Math.floor(first / CHUNK), Math.floor(Math.max(0, last - 1) / CHUNK)]);
    try {
      await Promise.all([...wanted].map(fetchChunk));
      trouble.replaceChildren();
      draw();
    } catch (error) {
      if (error.name !== "AbortError") trouble.replaceChildren(problem(error));
    }
  }

  let waiting = false;
  const scrolled = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; show(); });
  };
  addEventListener("scroll", scrolled, { passive: true });
  addEventListener("resize", scrolled, { passive: true });

  return {
    node, total, reload, refresh,
    leave() {
      removeEventListener("scroll", scrolled);
      removeEventListener("resize", scrolled);
      asked.abort();
    },
  };
}

/** The box to search in and the choices above a table. */
export function toolbar(state, choices, list, changed) {
  const search = h("input", { type: "search", placeholder: t(`Search ${state.noun}s`), "aria-label": t(`Search ${state.noun}s`), value: state.search, autocomplete: "off", spellcheck: "false" });
  let timer = 0;
  search.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.search = search.value; scrollTo(0, 0); list.reload(); changed(); }, 120);
  };
  const chips = h("div", { class: "chips", role: "group", "aria-label": t("Show") }, choices.map(([name, word]) => {
    const chip = h("button", { type: "button", class: "chip", "aria-pressed": String(state.filter === name) }, word);
    chip.onclick = () => {
      state.filter = name;
      for (const each of chips.children) each.setAttribute("aria-pressed", String(each === chip));
      scrollTo(0, 0);
      list.reload();
      changed();
    };
    return chip;
  }));
  return h("div", { class: "toolbar" }, search, chips, list.total);
}
