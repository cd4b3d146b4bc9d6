// @ts-check
// The switches above the charts, and the legend of a comparison.
import { AXES, change, now } from "./look.js";
import { button, el, focusedWith } from "./nodes.js";
import { rulersOf } from "./rulers.js";

/** @typedef {import("./shapes.js").LegendEntry} LegendEntry */
/** @typedef {import("./shapes.js").Looks} Looks */

/**
 * Return an input and its label; for a choice, whose options would be part of its name, the label is its name only.
 * @param {HTMLSelectElement | HTMLInputElement} input
 * @param {string} words
 */
function labelled(input, words) {
  if (input.type !== "checkbox") {
    const both = el("span", "choice"), label = el("span", "", words);
    input.setAttribute("aria-label", words);
    label.setAttribute("aria-hidden", "true");
    both.append(label, input);
    return both;
  }
  const label = el("label");
  label.append(input, words);
  return label;
}

/** @param {string} value @param {string} [words] */
export function option(value, words = value) {
  const node = el("option", "", words);
  node.value = value;
  return node;
}

/**
 * Return a choice of one of several values, which a change writes to the address.
 * @param {string} name
 * @param {string} words
 * @param {HTMLOptionElement[]} options
 * @param {string} [value]
 */
export function choice(name, words, options, value) {
  const input = el("select");
  input.name = name;
  input.append(...options);
  if (value !== undefined) input.value = value;
  input.addEventListener("change", () => change({ [name]: input.value }));
  return labelled(input, words);
}

/** @param {string} name @param {string} words */
function turn(name, words) {
  const input = el("input");
  input.type = "checkbox";
  input.name = name;
  input.addEventListener("change", () => change({ [name]: input.checked }));
  return labelled(input, words);
}

/** @param {Looks} looks */
function made(looks) {
  const options = (/** @type {string[]} */ values) => values.map((value) => option(value));
  const scales = [choice("smooth", "Smooth", options(looks.smooths)), turn("log", "Log"), turn("clip", "Clip outliers")];
  return looks.api ? [choice("axis", "Axis", options(AXES)), ...scales, turn("legend", "Legend"), turn("side", "Details")] : scales;
}

/**
 * Draw the switches, where the browser draws by itself.
 * @param {HTMLElement} host
 * @param {Looks} looks
 */
export function drawControls(host, looks) {
  if (!host.firstChild) host.append(...made(looks));
  const rulers = rulersOf(looks), look = /** @type {Record<string, string | boolean>} */ ({ ...now() });
  for (const input of host.querySelectorAll("select, input")) {
    if (input instanceof HTMLInputElement) input.checked = Boolean(look[input.name]);
    if (!(input instanceof HTMLSelectElement)) continue;
    input.value = String(look[input.name]);
    for (const one of input.name === "axis" ? input.options : []) {
      one.disabled = one.value !== "step" && rulers?.[one.value] === null;
      one.textContent = one.disabled ? `${one.value} (not logged)` : one.value;
    }
  }
}

/**
 * Draw the runs of a comparison: a click hides one or shows it again, "only" hides the others, and pointing at one makes
 * the others pale.
 * @param {HTMLElement} host
 * @param {LegendEntry[]} legend
 * @param {(place: number | null) => void} highlight
 */
export function drawChips(host, legend, highlight) {
  const { hide, base } = now(), hidden = new Set(hide.split(",").filter(Boolean).map(Number));
  const focused = focusedWith(host)?.dataset.at, put = (/** @type {number[]} */ places) => change({ hide: places.sort((a, b) => a - b).join(",") });
  const chip = (/** @type {LegendEntry} */ entry, /** @type {number} */ at) => {
    const node = el("span", "chip"), swatch = el("span", "swatch"), others = legend.map((_, i) => i).filter((i) => i !== at);
    swatch.style.border = `2px ${entry.style} ${entry.colour}`;
    if (!entry.hollow) swatch.style.background = entry.colour;
    const shown = button("turn", "", `${hidden.has(at) ? "Show" : "Hide"} ${entry.name}`, () => put(hidden.has(at) ? [...hidden].filter((i) => i !== at) : [...hidden, at]));
    shown.append(swatch, el("span", "name", entry.name), ...(entry.note ? [el("span", "quiet", entry.note)] : []));
    shown.setAttribute("aria-pressed", String(!hidden.has(at)));
    shown.dataset.at = `turn-${at}`;
    const alone = !hidden.has(at) && others.every((i) => hidden.has(i));
    const only = button("only", alone ? "all" : "only", alone ? "Show all runs" : `Show only ${entry.name}`, () => put(alone ? [] : others));
    only.dataset.at = `only-${at}`;
    for (const event of ["mouseenter", "focusin"]) node.addEventListener(event, () => highlight(at));
    for (const event of ["mouseleave", "focusout"]) node.addEventListener(event, () => highlight(null));
    node.append(shown, ...(legend.length > 1 ? [only] : []));
    return node;
  };
  const bases = [option("", "none"), ...legend.map((entry, at) => option(String(at), entry.name))];
  host.replaceChildren(...legend.map(chip), ...(legend.length > 1 ? [choice("base", "Baseline", bases, Number(base) < legend.length ? base : "")] : []));
  if (focused) /** @type {HTMLElement | null} */ (host.querySelector(`[data-at="${focused}"]`))?.focus();
}
