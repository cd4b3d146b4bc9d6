// @ts-check
// Elements of the page. Data become text nodes: nothing here builds HTML from data.

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {string} [className]
 * @param {string | null} [text]
 * @returns {HTMLElementTagNameMap[T]}
 */
export function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

/**
 * @param {string} className
 * @param {string | null} text
 * @param {string} label  its name and tooltip, where the text does not name it
 * @param {() => void} act
 */
export function button(className, text, label, act) {
  const node = el("button", className, text);
  node.type = "button";
  if (label) { node.title = label; node.setAttribute("aria-label", label); }
  node.addEventListener("click", act);
  return node;
}

/**
 * Return the element that a selector names within a parent that is known to hold it.
 * @param {ParentNode} parent
 * @param {string} selector
 */
export function within(parent, selector) {
  return /** @type {HTMLElement} */ (parent.querySelector(selector));
}

/**
 * Return the focused element of the tree that a node is in.
 * @param {Node} node
 */
export function focusedWith(node) {
  const root = node.getRootNode();
  return root instanceof Document || root instanceof ShadowRoot ? /** @type {HTMLElement | null} */ (root.activeElement) : null;
}
