// @ts-check
// The user's choices for the charts of a run. They are kept in the address, with one history entry for each change, and
// need no request. Streamlit keeps its own copy of the address; page.js restores these names when it writes that copy.

/**
 * @typedef {object} Look
 * @property {string} axis  step, time or tokens
 * @property {string} smooth  off, "EMA 0.9", "mean of 10", ...
 * @property {boolean} log
 * @property {boolean} clip  whether single outliers are cut
 * @property {boolean} side  whether the drawer next to the charts is open
 * @property {boolean} legend
 * @property {string} hide  places of the hidden runs in the legend, as "0,2"
 * @property {string} setting  setting of the comparison's points; empty: the first
 * @property {string} result  metric of the comparison's points; empty: the first
 * @property {string} base  place of the run that the others are compared with; empty: none
 */

/** @type {Look} */
export const USUAL = { axis: "step", smooth: "off", log: false, clip: true, side: true, legend: false, hide: "", base: "", setting: "", result: "" };
export const AXES = ["step", "time", "tokens"];
const SWITCHES = /** @type {const} */ (["log", "clip", "side", "legend"]);

/** @type {Set<(look: Look) => void>} */
const LISTENERS = new Set();

/**
 * Read the choices from an address; invalid values become the defaults.
 * @param {string} search
 * @returns {Look}
 */
export function read(search) {
  const query = new URLSearchParams(search), look = { ...USUAL };
  if (AXES.includes(query.get("axis") ?? "")) look.axis = query.get("axis") ?? "";
  if (/^(EMA 0\.\d+|mean of \d{1,4})$/.test(query.get("smooth") ?? "")) look.smooth = query.get("smooth") ?? "";
  if (/^\d{1,3}(,\d{1,3})*$/.test(query.get("hide") ?? "")) look.hide = query.get("hide") ?? "";
  if (/^\d{1,3}$/.test(query.get("base") ?? "")) look.base = query.get("base") ?? "";
  for (const name of /** @type {const} */ (["setting", "result"])) look[name] = (query.get(name) ?? "").slice(0, 200);
  for (const name of SWITCHES) if (["true", "false"].includes(query.get(name) ?? "")) look[name] = query.get(name) === "true";
  return look;
}

/**
 * Return the query with the choices in it, without default values.
 * @param {string} search
 * @param {Look} look
 */
export function written(search, look) {
  const query = new URLSearchParams(search);
  for (const [name, value] of Object.entries(look)) {
    if (value === USUAL[/** @type {keyof Look} */ (name)]) query.delete(name);
    else query.set(name, String(value));
  }
  const text = query.toString();
  return text ? `?${text}` : "";
}

/** Return the current choices. */
export const now = () => read(location.search);

/**
 * Change choices for all charts at once, with one history entry.
 * @param {Partial<Look>} part
 */
export function change(part) {
  const look = { ...now(), ...part };
  (globalThis.rlwatchPush ?? history.pushState.bind(history))({}, "", location.pathname + written(location.search, look));
  apply();
}

/** Apply the choices of the address, after a change or a step back. */
export function apply() {
  const look = now();
  document.documentElement.dataset.rlSide = look.side ? "open" : "shut";
  for (const listener of LISTENERS) listener(look);
}

/** @param {(look: Look) => void} listener */
export function listen(listener) {
  LISTENERS.add(listener);
  return () => LISTENERS.delete(listener);
}

addEventListener("popstate", apply);
