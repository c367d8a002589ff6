// Elements out of values. Texts become text nodes and nothing else: what is in a message is shown,
// never run. `morph` changes what is there into what should be there, so that a refresh keeps the
// focus, the selection and the place on the page.

import { here } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element[name] = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value") element.value = value;
    else if (name === "checked") element.checked = value;
    else element.setAttribute(name, value === true ? "" : name === "href" ? here(String(value)) : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit", "onkeydown", "onpointermove", "onpointerleave", "ontoggle"];

/** Make `old` look and behave like `wanted`. */
export function morph(old, wanted) {
  if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName || old.dataset?.key !== wanted.dataset?.key) {
    old.replaceWith(wanted);
    return wanted;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return old;
  }
  if (old.hasAttribute("data-own")) return old; // it looks after itself
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  // A style that is set as an attribute is refused by the page's policy; it is taken over below.
  for (const { name, value } of wanted.attributes) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const name of HANDLERS) old[name] = wanted[name];
  if (old.style && wanted.style && old.style.cssText !== wanted.style.cssText) old.style.cssText = wanted.style.cssText;
  morphChildren(old, [...wanted.childNodes]);
  return old;
}

/** The same for all children. Nodes with a key are found wherever they were; others by their place. */
export function morphChildren(parent, wanted) {
  const keyed = new Map([...parent.childNodes].filter((node) => node.dataset?.key).map((node) => [node.dataset.key, node]));
  const placed = new Set();
  let cursor = parent.firstChild;
  for (const node of wanted) {
    const key = node.dataset?.key;
    while (cursor && (placed.has(cursor) || (!key && cursor.dataset?.key))) cursor = cursor.nextSibling;
    const old = key ? keyed.get(key) : cursor;
    if (!old) {
      parent.insertBefore(node, cursor);
      placed.add(node);
    } else if (old === cursor) {
      cursor = cursor.nextSibling;
      placed.add(morph(old, node));
    } else {
      parent.insertBefore(old, cursor);
      placed.add(morph(old, node));
    }
  }
  for (const node of [...parent.childNodes]) if (!placed.has(node)) node.remove();
}

/**
 * A place for a node that is made once and lives through all refreshes: what it shows and what
 * people do with it is its own.
 */
export function keep(key, node) {
  return h("div", { "data-key": key, "data-own": true, class: "keep" }, node.isConnected ? null : node);
}

/** A link inside the console. */
export function link(href, ...children) {
  return h("a", { href }, ...children);
}

/** The path of a name, whatever is in it. */
export function path(...parts) {
  return "/" + parts.map(encodeURIComponent).join("/");
}
