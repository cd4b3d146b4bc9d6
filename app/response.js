// @ts-check
// A response, token by token. Data arrive as JSON and become text nodes: nothing here builds HTML from data.
const DEEPEST = 62;  // per cent of the colour at the end of the scale: text stays readable on it

/** @typedef {[number, number]} Gap  tokens that are not drawn, and tokens that were not recorded */
/** @typedef {{key: string, culprit: boolean, level: number | string | null, text: [string, boolean][], title: string, values: string[]}} Token */
/** @typedef {{version: string, below: string, above: string, names: string[], tokens: Token[], gaps: Gap[], ids: boolean, chosen: string}} Response */

/** What is drawn in a frame, and what to call for a click. @typedef {{names: string[], tokens: Map<string, Token>, pick: (key: string) => void}} Shown */
/** @type {WeakMap<HTMLElement, Shown>} */
const FRAMES = new WeakMap();

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
 * @param {number} level
 * @param {{below: string, above: string}} colours
 */
function background(level, { below, above }) {
  const share = (Math.abs(level) * DEEPEST).toFixed(0);
  return `color-mix(in srgb, ${level < 0 ? below : above} ${share}%, transparent)`;
}

/**
 * @param {Token} one
 * @param {Response} data
 */
function token(one, data) {
  const node = el("span", one.culprit ? "token culprit" : "token");
  node.dataset.key = one.key;
  if (typeof one.level === "number") node.style.background = background(one.level, data);
  else node.classList.add(one.level === null ? "missing" : one.level === "nan" ? "nan" : "inf");
  for (const [text, mark] of one.text) node.append(mark ? el("i", "", text) : document.createTextNode(text));
  return node;
}

/** @param {Gap} tokens */
function gap([leftOut, unrecorded]) {
  const count = (/** @type {number} */ n) => n.toLocaleString("en").replaceAll(",", "\u202f") + (n === 1 ? " token" : " tokens");
  const words = [leftOut && `${count(leftOut)} not drawn`, unrecorded && `${count(unrecorded)} not recorded`];
  return el("span", "gap", `… ${words.filter(Boolean).join(", ")} …`);
}

// Lines may break before a token that begins with a space, and after one that ends a line.
/** @param {Response} data */
function flow(data) {
  /** @type {Node[]} */
  const nodes = [];
  data.tokens.forEach((one, place) => {
    if (data.gaps[place].some(Boolean)) nodes.push(gap(data.gaps[place]));
    if (data.ids || "·⇥".includes(one.text[0][0][0])) nodes.push(el("wbr"));
    nodes.push(token(one, data));
    const [last, mark] = one.text[one.text.length - 1];
    if (mark && last.endsWith("↵")) nodes.push(el("br"));
  });
  const after = data.gaps[data.gaps.length - 1];
  if (after.some(Boolean)) nodes.push(gap(after));
  return nodes;
}

/**
 * @param {HTMLElement} tip
 * @param {Token} one
 * @param {string[]} names
 */
function fillTip(tip, one, names) {
  const list = el("dl");
  names.forEach((name, place) => list.append(el("dt", "", name), el("dd", "", one.values[place])));
  tip.replaceChildren(el("div", "title", one.title), list);
}

// Next to the token, inside the frame: to its right if there is room, above it if there is none below.
/**
 * @param {HTMLElement} frame
 * @param {HTMLElement} tip
 * @param {HTMLElement} node
 */
function placeTip(frame, tip, node) {
  const around = frame.getBoundingClientRect(), box = node.getBoundingClientRect();
  tip.hidden = false;
  const left = Math.min(box.left - around.left, around.width - tip.offsetWidth - 4);
  const below = box.bottom + tip.offsetHeight + 6 < window.innerHeight;
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${below ? box.bottom - around.top + 4 : box.top - around.top - tip.offsetHeight - 4}px`;
}

/** @param {HTMLElement} parent */
function build(parent) {
  const frame = el("div", "rlwatch-response"), text = el("div", "text"), tip = el("div", "tip");
  const at = (/** @type {Event} */ event) => /** @type {HTMLElement | null} */ (event.target instanceof Element ? event.target.closest(".token") : null);
  tip.hidden = true;
  text.addEventListener("mouseover", (event) => {
    const node = at(event), shown = FRAMES.get(frame), one = shown?.tokens.get(node?.dataset.key ?? "");
    if (!node || !shown || !one) return void (tip.hidden = true);
    fillTip(tip, one, shown.names);
    placeTip(frame, tip, node);
  });
  text.addEventListener("mouseleave", () => (tip.hidden = true));
  text.addEventListener("scroll", () => (tip.hidden = true));
  text.addEventListener("click", (event) => {
    const node = at(event);
    if (!node || getSelection()?.toString()) return;  // selecting text for a copy does not choose a token
    const key = node.dataset.key ?? "";
    choose(frame, key);
    FRAMES.get(frame)?.pick(key);
  });
  frame.append(text, tip);
  parent.append(frame);
  return frame;
}

/**
 * @param {HTMLElement} frame
 * @param {string} key
 */
function choose(frame, key) {
  for (const node of frame.querySelectorAll(".chosen")) node.classList.remove("chosen");
  const node = /** @type {HTMLElement[]} */ ([...frame.querySelectorAll(".token")]).find((one) => one.dataset.key === key);
  node?.classList.add("chosen");
  return node;
}

/**
 * @param {HTMLElement} text
 * @param {HTMLElement} node
 */
function intoView(text, node) {
  const around = text.getBoundingClientRect(), box = node.getBoundingClientRect();
  if (box.top >= around.top && box.bottom <= around.bottom) return;
  text.scrollTop += box.top - around.top - around.height / 3;
}

/** @param {{data: Response, parentElement: HTMLElement, setTriggerValue: (name: string, value: unknown) => void}} component */
export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  const frame = /** @type {HTMLElement} */ (parentElement.querySelector(".rlwatch-response") ?? build(parentElement));
  const text = /** @type {HTMLElement} */ (frame.querySelector(".text"));
  FRAMES.set(frame, { names: data.names, tokens: FRAMES.get(frame)?.tokens ?? new Map(), pick: (key) => setTriggerValue("pick", key) });
  const look = `${data.version} ${data.below} ${data.above}`;
  if (frame.dataset.look !== look) {
    frame.dataset.look = look;
    const shown = FRAMES.get(frame);
    if (shown) shown.tokens = new Map(data.tokens.map((one) => [one.key, one]));
    text.classList.toggle("ids", data.ids);
    text.replaceChildren(...flow(data));
    frame.dataset.chosen = "";
  }
  if (frame.dataset.chosen === data.chosen) return;
  frame.dataset.chosen = data.chosen;
  const node = choose(frame, data.chosen);
  if (node) intoView(text, node);
}
