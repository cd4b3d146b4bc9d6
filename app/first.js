// @ts-check
// The first picture of a page: its list or its charts, drawn before Streamlit has a session. It lies above Streamlit's
// page until that draws the same list or charts; charts are handed over as they are, with what was chosen in them.
import { el } from "./nodes.js";
import sheetOfBoards, { FIRST, TABLE } from "./style.js";

/** @typedef {import("./shapes.js").BoardData} BoardData */
/** @typedef {import("./table.js").Table} Table */
/** @typedef {{title?: string, project?: string, headline?: string, table?: Table, boards?: Record<string, BoardData>}} First */

const PATIENCE_MS = 30000;

/** @param {"shown" | "over" | "none"} state */
function mark(state) {
  document.documentElement.dataset.rlFirst = state;
}

/** @param {string} text */
function sheet(text) {
  const made = new CSSStyleSheet();
  made.replaceSync(text);
  return made;
}

/** What a click asked of the server that is not there yet: the last of each kind. @type {Map<string, unknown>} */
const asked = new Map();

/**
 * @param {HTMLElement} parent
 * @param {string} css
 */
function rooted(parent, css) {
  const root = parent.appendChild(el("div")).attachShadow({ mode: "open" });
  root.adoptedStyleSheets = [sheet(css)];
  return root;
}

/** @param {First} first */
async function show(first) {
  const table = first.table && (await import("./table.js")).default;
  if (first.boards) await import("./board.js");
  if (globalThis.rlwatchDrawn) return mark("none"); // Streamlit was faster
  const page = el("div"), head = el("div", "head");
  page.id = "rl-first";
  page.classList.toggle("charted", Boolean(first.boards));
  page.setAttribute("aria-busy", "true");
  if (first.project) head.append(el("span", "project", `${first.project} / `));
  head.append(first.title ?? "");
  page.append(head);
  if (first.headline) page.append(el("div", "headline", first.headline));
  document.adoptedStyleSheets.push(sheet(FIRST));
  document.body.append(page);
  mark("shown");
  if (table && first.table) {
    const setTriggerValue = (/** @type {string} */ name, /** @type {unknown} */ value) => {
      if (name === "open") location.assign(`run?${new URLSearchParams({ run: String(value) })}`);
      else asked.set(name, value);
    };
    table({ data: first.table, parentElement: rooted(page, TABLE), setTriggerValue, first: true });
  }
  const boards = page.appendChild(el("div", "boards")), roots = Object.values(first.boards ?? {}).map((data) => {
    const root = rooted(boards, sheetOfBoards);
    globalThis.rlwatchBoards?.draw({ data, parentElement: root, setTriggerValue: (name, value) => asked.set(name, value), first: true });
    return root;
  });
  const leave = () => {
    mark("over");
    const main = document.querySelector('[data-testid="stMain"]'), scrolled = page.scrollTop;
    globalThis.rlwatchFirst = undefined;
    page.remove();
    if (main && scrolled) main.scrollTop = scrolled;
  };
  globalThis.rlwatchFirst = (send) => {
    leave();
    for (const [name, value] of asked) send(name, value);
  };
  setTimeout(() => { // what was not taken over: the server shows something else, such as an error
    if (globalThis.rlwatchFirst) leave();
    for (const root of roots) globalThis.rlwatchBoards?.drop(root);
  }, PATIENCE_MS);
}

async function begin() {
  const links = /** @type {HTMLLinkElement[]} */ ([...document.querySelectorAll("link[data-rl-first]")]);
  const link = links.find((one) => matchMedia(one.media).matches), answer = link && (await fetch(link.href));
  const first = answer?.ok ? await answer.json() : {};
  if (first.table || first.boards) await show(first);
  else mark("none");
}

begin().catch(() => { // Streamlit draws the page in any case, and a part of a picture must not cover it
  document.getElementById("rl-first")?.remove();
  mark("none");
});
