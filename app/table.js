// @ts-check
// One table for every page. Data arrive as JSON and become text nodes: nothing here builds HTML from data. Rows of a long
// table beyond the first block are fetched when they come in sight, and leave the page again when they are far from it.

/**
 * @typedef {object} Cell  made by table.py; the fields depend on its kind
 * @property {string} kind
 * @property {string} text
 * @property {string} [sub]
 * @property {string} [title]
 * @property {boolean} [quiet]
 * @property {string} [shape]
 * @property {string} [colour]
 * @property {string} [href]
 * @property {string} [id]
 * @property {string[]} [tags]
 * @property {string} [notes]
 * @property {number} [lead]
 * @property {boolean} [acts]
 * @property {number[][]} [points]
 * @property {number[]} [bad]
 * @property {string} [key]
 * @property {[string, string][]} [lines]
 */

/** @typedef {{label: string, style: string, sort: string, sorted: string}} Column */
/** @typedef {{id: string, quiet: boolean, chosen: boolean, picked: boolean | null, unfolded: boolean | null, member: boolean, cells: Cell[]}} Row */
/** @typedef {{name: string, few: number, total: number, more: string, block: number, columns: Column[], rows: Row[]}} Table */
/** @typedef {{open: (id: string) => void, pick: (id: string, on: boolean) => void, sort: (id: string) => void, boxed: boolean, opened: Set<string>}} Context */

const SVG = "http://www.w3.org/2000/svg";
const NOTHING = "-", WIDTH = 120, HEIGHT = 24, PAD = 2;

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {string} [className]
 * @param {string | null} [text]
 * @returns {HTMLElementTagNameMap[T]}
 */
function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 */
function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  return node;
}

/** @param {Cell} cell */
function spark({ points = [], bad = [], text }) {
  const x = (/** @type {number} */ u) => PAD + u * (WIDTH - 2 * PAD);
  const y = (/** @type {number} */ v) => HEIGHT - PAD - v * (HEIGHT - 2 * PAD);
  const picture = svg("svg", { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  const band = points.filter((point) => point.length > 2);
  if (band.length > 1) {
    const edge = (/** @type {number} */ place) => band.map((point) => `${x(point[0]).toFixed(1)},${y(point[place]).toFixed(1)}`);
    picture.append(svg("polygon", { points: [...edge(2), ...edge(3).reverse()].join(" "), class: "band" }));
  }
  const line = points.map(([u, v]) => `${x(u).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  picture.append(svg("polyline", { points: line, class: "line" }));
  for (const u of bad) picture.append(svg("rect", { x: x(u) - 1, y: HEIGHT - 7, width: 2, height: 7, class: "bad" }));
  if (!text) return picture;
  const both = el("span", "labelled");
  both.append(picture, el("span", "", text));
  return both;
}

/**
 * @param {string} shape
 * @param {string} colour
 */
function tinted(shape, colour) {
  const mark = el("span", "shape");  // decorative: the word next to it has the same meaning
  mark.dataset.shape = shape;
  mark.style.color = colour;
  mark.setAttribute("aria-hidden", "true");
  return mark;
}

/** @param {Cell} cell */
function word({ shape = "", colour = "", text }) {
  const node = el("span", "word");
  node.append(tinted(shape, colour), el("span", "", text));
  return node;
}

/**
 * @param {Cell} cell
 * @param {(id: string) => void} open
 */
function link({ text, sub, href = "", title, id = "", tags, notes, lead, acts }, open) {
  const node = el("a", acts ? "link acts" : "link");
  if (sub) node.append(el("span", "before", sub));
  node.append(el("span", "name", lead ? text.slice(0, lead) : text));
  if (lead && lead < text.length) node.append(text.slice(lead));
  node.href = href;
  if (title) node.title = title;
  node.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    event.stopPropagation();
    open(id);
  });
  if (!(tags && tags.length) && !notes) return node;
  const all = el("span", "tagged");
  all.append(node);
  for (const tag of tags || []) all.append(el("span", "tag", tag));
  if (notes) {
    const mark = el("span", "notes", "✎");
    mark.title = notes;
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", `notes: ${notes}`);
    all.append(mark);
  }
  return all;
}

/**
 * @param {Cell} cell
 * @param {Set<string>} opened
 */
function details({ key = "", text, lines = [], shape, colour = "" }, opened) {
  if (!lines.length) return el("span", "", text);
  const node = el("details");
  node.open = opened.has(key);
  const summary = el("summary", "", text);
  // Before it toggles, and at once: the "toggle" event may come after the next data have replaced this node.
  summary.addEventListener("click", () => (node.open ? opened.delete(key) : opened.add(key)));
  if (shape) summary.prepend(tinted(shape, colour));
  node.append(summary);
  const list = el("dl");
  for (const [name, value] of lines) list.append(el("dt", "", name), el("dd", "", value));
  node.append(list);
  return node;
}

/**
 * @param {HTMLElement} td
 * @param {Cell} cell
 * @param {Context} context
 */
function fill(td, cell, { open, opened }) {
  if (cell.kind === "word") return td.append(word(cell));
  if (cell.kind === "spark") return td.append(spark(cell));
  if (cell.kind === "link") return td.append(link(cell, open));
  if (cell.kind === "group") {
    td.append(el("span", "name", cell.text), el("span", "sub", cell.sub));
    td.title = cell.title ?? "";
    return;
  }
  if (cell.kind === "details") return td.append(details(cell, opened));
  td.append(el("span", cell.quiet ? "quiet" : "", cell.text));
  if (cell.sub) td.append(el("span", "sub", cell.sub));
  if (cell.title) td.title = cell.title;
}

/**
 * @param {Row} data
 * @param {Context} context
 */
function box(data, context) {
  const td = el("td", "box"), input = el("input");
  input.type = "checkbox";
  input.checked = Boolean(data.picked);
  const link = data.cells.find((cell) => cell.kind === "link" || cell.kind === "group");
  input.setAttribute("aria-label", `Select ${link ? link.text : data.id}`);
  input.addEventListener("change", () => context.pick(data.id, input.checked));
  td.addEventListener("click", (event) => event.stopPropagation());
  td.append(input);
  return td;
}

/**
 * @param {Column[]} columns
 * @param {Row} data
 * @param {Context} context
 */
function row(columns, data, context) {
  const grouped = typeof data.unfolded === "boolean";
  const classes = { faded: data.quiet, chosen: data.chosen, group: grouped, member: data.member };
  const tr = el("tr", Object.entries(classes).flatMap(([name, on]) => (on ? [name] : [])).join(" "));
  if (typeof data.picked === "boolean") tr.append(box(data, context));
  else if (context.boxed) tr.append(el("td", "box"));
  data.cells.forEach((cell, place) => {
    const td = el("td", columns[place].style);
    td.dataset.label = columns[place].label;
    if (cell.kind === "text" && (!cell.text || cell.text === NOTHING)) td.classList.add("blank");
    fill(td, cell, context);
    tr.append(td);
  });
  if (data.id) {
    tr.dataset.id = data.id;
    tr.classList.add("opens");
    tr.addEventListener("click", () => context.open(data.id));
    if (data.cells.some((cell) => cell.kind === "link")) return tr;  // the keyboard reaches a link anyway
    tr.tabIndex = 0;
    if (grouped) tr.setAttribute("aria-expanded", String(data.unfolded));
    tr.addEventListener("keydown", (event) => event.key === "Enter" && context.open(data.id));
  }
  return tr;
}

/**
 * @param {Column} column
 * @param {Context} context
 */
function heading(column, context) {
  if (!column.label && !column.sort) return el("td", column.style);  // the column is self-explanatory
  const th = el("th", column.style, column.sort ? undefined : column.label);
  if (!column.sort) return th;
  const button = el("button", "", column.label + ({ ascending: " ↑", descending: " ↓" }[/** @type {"ascending" | "descending"} */ (column.sorted)] || ""));
  if (column.sorted) th.setAttribute("aria-sort", column.sorted);
  button.type = "button";
  button.addEventListener("click", () => context.sort(column.sort));
  th.append(button);
  return th;
}

// On a phone the rows beyond the first few are cards behind a button.
const ALL_ROWS = "all rows";

/**
 * @param {Element[]} rest
 * @param {Context} context
 */
function more(rest, { opened }) {
  const button = el("button", "more", `${rest.length} more`);
  button.type = "button";
  button.addEventListener("click", () => {
    opened.add(ALL_ROWS);
    for (const tr of rest) tr.classList.remove("over");
    /** @type {HTMLElement | null} */ (rest[0].querySelector(REACHED))?.focus();
    button.remove();
  });
  return button;
}

/** Unfolded rows, by page and table: kept outside the table's own node, which the page may replace. */
const KEPT = /** @type {{rlwatchOpened?: Map<string, Set<string>>}} */ (globalThis), OPENED = (KEPT.rlwatchOpened ??= new Map());

/** @param {string} name */
function openedOf(name) {
  const place = `${location.pathname}|${new URLSearchParams(location.search).get("run")}|${name}`, known = OPENED.get(place) ?? new Set();
  OPENED.set(place, known);
  return known;
}

// Rows that are not drawn take the room that they had, or that of a usual row.
const ROW_PX = 34, NEAR_PX = "800px", AGAIN_MS = 1500;

/** The rows of a long table beyond the first block, each block in a body of its own. */
class Blocks {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
    this.address = "";
    /** @type {Map<number, Row[]>} */
    this.rows = new Map();
    /** @type {Map<number, number>} */
    this.heights = new Map();
    /** @type {Map<HTMLElement, number>} */
    this.firsts = new Map();
    this.seen = new IntersectionObserver((all) => all.forEach((one) => this.turned(/** @type {HTMLElement} */ (one.target), one.isIntersecting)), { rootMargin: `${NEAR_PX} 0px` });
  }

  /**
   * Append a body for each block to the table.
   * @param {HTMLTableElement} table
   * @param {Table} data
   * @param {Context} context
   */
  append(table, data, context) {
    if (data.more !== this.address) this.rows.clear();
    Object.assign(this, { address: data.more });
    this.data = data;
    this.context = context;
    this.seen.disconnect();
    this.firsts.clear();
    for (let first = data.rows.length; first < data.total; first += data.block) {
      const body = el("tbody", "block");
      this.firsts.set(body, first);
      if (this.rows.has(first)) this.draw(body, first); else this.empty(body, first);
      table.append(body);
      this.seen.observe(body);
    }
  }

  /**
   * @param {HTMLElement} body
   * @param {boolean} near
   */
  turned(body, near) {
    const first = this.firsts.get(body);
    if (first === undefined) return;
    if (!near) {
      if (!body.classList.contains("unseen")) { this.heights.set(first, body.offsetHeight); this.empty(body, first); }
      return;
    }
    if (this.rows.has(first)) this.draw(body, first);
    this.fetched(body, first).catch(() => setTimeout(() => this.firsts.has(body) && this.turned(body, true), AGAIN_MS));
  }

  /**
   * @param {HTMLElement} body
   * @param {number} first
   */
  async fetched(body, first) {
    const { address, data } = this;
    if (!data) return;
    const answer = await fetch(`${address}&first=${first}&count=${data.block}`);
    if (!answer.ok) throw new Error(String(answer.status));
    const { rows } = await answer.json();
    if (address !== this.address) return;
    this.rows.set(first, rows);
    if (this.firsts.has(body)) this.draw(body, first);
  }

  /**
   * @param {HTMLElement} body
   * @param {number} first
   */
  empty(body, first) {
    const { data } = this;
    if (!data) return;
    const tr = el("tr"), td = el("td"), count = Math.min(data.block, data.total - first);
    td.colSpan = data.columns.length + 1;
    td.style.height = `${this.heights.get(first) ?? count * ROW_PX}px`;
    tr.append(td);
    tr.setAttribute("aria-hidden", "true");
    body.classList.add("unseen");
    body.replaceChildren(tr);
  }

  /**
   * @param {HTMLElement} body
   * @param {number} first
   */
  draw(body, first) {
    const { data, context } = this, rows = this.rows.get(first);
    if (!data || !context || !rows) return;
    const held = placeOf(body, focusedIn(this.host));
    body.classList.remove("unseen");
    body.replaceChildren(...rows.map((one) => row(data.columns, one, context)));
    if (held) at(body, held)?.focus({ preventScroll: true });
  }
}

/** @type {WeakMap<HTMLElement, Blocks>} */
const BLOCKS = new WeakMap();

/** @param {HTMLElement} host */
function focusedIn(host) {
  return /** @type {ShadowRoot | Document} */ (host.getRootNode()).activeElement;
}

// Keyboard focus keeps its place when new data replace the table.
const REACHED = "a, button, input, summary, tr[tabindex]";

/** @typedef {{id: string | undefined, head: boolean, within: number}} Place */

/**
 * @param {HTMLElement} host
 * @param {Element | null} node
 * @returns {Place | null}
 */
function placeOf(host, node) {
  const tr = node?.closest("tr");
  if (!node || !tr || !host.contains(node)) return null;
  const within = [...tr.querySelectorAll(REACHED)].indexOf(node);
  return { id: tr.dataset.id, head: Boolean(tr.closest("thead")), within };
}

/**
 * @param {HTMLElement} host
 * @param {Place} place
 * @returns {HTMLElement | null | undefined}
 */
function at(host, { id, head, within }) {
  /** @type {HTMLElement[]} */
  const rows = [...host.querySelectorAll(/** @type {"tr"} */ (head ? "thead tr" : "tbody tr, tr"))];
  const tr = head ? rows[0] : rows.find((one) => one.dataset.id && one.dataset.id === id);
  return within < 0 ? tr : /** @type {HTMLElement | undefined} */ (tr?.querySelectorAll(REACHED)[within]);
}

/** @typedef {{data: Table, parentElement: HTMLElement | ShadowRoot, setTriggerValue: (name: string, value: unknown) => void, first?: boolean}} Component  first: of the page's first picture (first.js) */

/** @param {Component} component */
export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  let host = /** @type {HTMLElement | null} */ (parentElement.querySelector(".rlwatch-table"));
  if (!host) {
    host = el("div", "rlwatch-table");
    parentElement.append(host);
  }
  // Of two quick clicks only the last message may arrive, so each message has all boxes changed since the last data.
  /** @type {Record<string, boolean>} */
  const changed = {};
  const pick = (/** @type {string} */ id, /** @type {boolean} */ checked) => {
    changed[id] = checked;
    setTriggerValue("pick", { ...changed });
  };
  /** @type {Context} */
  const context = {
    open: (id) => setTriggerValue("open", id),
    pick,
    sort: (id) => setTriggerValue("sort", id),
    boxed: data.rows.some((one) => typeof one.picked === "boolean"),
    opened: openedOf(data.name),
  };
  const table = el("table", data.rows.some((one) => one.chosen) ? "choosing" : "");
  const head = el("tr");
  if (context.boxed) head.append(el("td", "box"));
  for (const column of data.columns) head.append(heading(column, context));
  const thead = el("thead");
  thead.append(head);
  const body = el("tbody");
  for (const one of data.rows) body.append(row(data.columns, one, context));
  table.append(thead, body);
  const rest = data.few && !context.opened.has(ALL_ROWS) ? [...body.children].slice(data.few) : [];
  for (const tr of rest) tr.classList.add("over");
  const focused = placeOf(host, focusedIn(host)), blocks = BLOCKS.get(host) ?? new Blocks(host);
  BLOCKS.set(host, blocks);
  blocks.append(table, data, context);
  host.replaceChildren(table, ...(rest.length ? [more(rest, context)] : []));
  if (focused) at(host, focused)?.focus({ preventScroll: true });
  if (component.first || data.name !== "runs") return;
  globalThis.rlwatchDrawn = true;
  globalThis.rlwatchFirst?.(setTriggerValue);
}
