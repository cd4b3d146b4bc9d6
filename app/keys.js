// @ts-check
// Keys of all pages: / searches, j and k go to the next and the previous chart or row, ? lists the keys.

/** @typedef {{key: string, words: string}} KeyHelp */

/** @type {KeyHelp[]} */
const HELP = [
  { key: "/", words: "search" },
  { key: "j", words: "next chart, or next row of a list" },
  { key: "k", words: "previous chart, or previous row" },
  { key: "Enter", words: "open the row" },
  { key: "x", words: "select the row" },
  { key: "z", words: "show all steps again" },
  { key: "f", words: "full screen of the chart, and back" },
  { key: "Esc", words: "close what is open, let go of a step" },
  { key: "?", words: "this list" },
];
const SEARCHES = 'input[aria-label="Search metrics"], input[aria-label="Search"], input[aria-label="Search settings"]';

/** @param {string} selector */
function everywhere(selector) {
  /** @type {ParentNode[]} */
  const roots = [document, ...[...document.querySelectorAll("*")].flatMap((node) => (node.shadowRoot ? [node.shadowRoot] : []))];
  const nodes = /** @type {HTMLElement[]} */ (roots.flatMap((root) => [...root.querySelectorAll(selector)]));
  return nodes.filter((node) => node.offsetParent !== null);
}

/** @returns {Element | null} */
function focused() {
  let node = document.activeElement;
  while (node?.shadowRoot?.activeElement) node = node.shadowRoot.activeElement;
  return node;
}

/** @param {1 | -1} way */
function walk(way) {
  const charts = everywhere("figure.panel"), rows = everywhere("tr.opens"), all = charts.length ? charts : rows;
  if (!all.length) return;
  const now = focused(), at = all.findIndex((node) => node === now || node.contains(now));
  const next = all[at < 0 ? (way > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + way, 0), all.length - 1)];
  const target = /** @type {HTMLElement | null} */ (next.matches("tr") ? next.querySelector("a.link") ?? next : next);
  target?.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function tick() {
  const box = focused()?.closest("tr")?.querySelector("input[type=checkbox]");
  if (box instanceof HTMLElement) box.click();
}

/** @param {string} what */
function boards(what) {
  document.dispatchEvent(new CustomEvent("rlwatch-key", { detail: { what, at: focused() } }));
}

function help() {
  const box = document.createElement("dialog");
  box.setAttribute("aria-label", "Keys");
  box.className = "rl-keys";
  const list = document.createElement("dl");
  for (const { key, words } of HELP) {
    const term = document.createElement("dt"), text = document.createElement("dd"), cap = document.createElement("kbd");
    cap.textContent = key;
    term.append(cap);
    text.textContent = words;
    list.append(term, text);
  }
  const shut = document.createElement("button");
  shut.textContent = "Close";
  shut.addEventListener("click", () => box.close());
  box.addEventListener("close", () => box.remove());
  box.append(list, shut);
  document.body.append(box);
  box.showModal();
}

/** @type {Record<string, () => void>} */
const ACTS = {
  "/": () => everywhere(SEARCHES)[0]?.focus(),
  j: () => walk(1),
  k: () => walk(-1),
  x: tick,
  z: () => boards("whole"),
  f: () => boards("full"),
  Escape: () => boards("close"),
  "?": help,
};

/** @param {KeyboardEvent} event */
function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const at = focused(), typing = at?.matches("input:not([type=checkbox]), textarea, select, [contenteditable=true], [role=combobox]");
  if (typing || document.querySelector("dialog[open], [role=dialog]")) return;
  const act = Object.hasOwn(ACTS, event.key) ? ACTS[event.key] : undefined;
  if (!act) return;
  if (event.key !== "Escape") event.preventDefault();
  act();
}

document.addEventListener("keydown", pressed);
