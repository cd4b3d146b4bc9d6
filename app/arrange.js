// @ts-check
// The order, size and combination of pinned charts. A pin is the text of one chart: "reward", "reward + kl" (two metrics
// on one chart), "reward ÷ kl" (their ratio), each with " @2" or " @3" for its width in columns.

const WIDE = / @([23])$/, SIGNS = [" + ", " \u00f7 "];

/** @param {string} pin */
export function width(pin) {
  return Number(WIDE.exec(pin)?.[1] ?? 1);
}

/** @param {string} pin */
export function body(pin) {
  return pin.replace(WIDE, "");
}

/** @param {string} pin */
export function parts(pin) {
  const sign = SIGNS.find((one) => body(pin).split(one).length === 2);
  return sign ? body(pin).split(sign) : [body(pin)];
}

/**
 * @param {string[]} pins
 * @param {number} from
 * @param {number} to
 */
export function moved(pins, from, to) {
  const rest = pins.filter((_, at) => at !== from);
  rest.splice(Math.min(Math.max(to, 0), rest.length), 0, pins[from]);
  return rest;
}

/**
 * @param {string[]} pins
 * @param {number} at
 * @param {number} by
 */
export function widened(pins, at, by) {
  const wide = Math.min(Math.max(width(pins[at]) + by, 1), 3);
  return pins.map((pin, i) => (i === at ? body(pin) + (wide > 1 ? ` @${wide}` : "") : pin));
}

/**
 * Return the pins with one and the next as one chart.
 * @param {string[]} pins
 * @param {number} at
 * @param {0 | 1} sign  0: both on one chart, 1: their ratio
 */
export function combined(pins, at, sign) {
  const both = body(pins[at]) + SIGNS[sign] + body(pins[at + 1]), wide = WIDE.exec(pins[at])?.[0] ?? "";
  return [...pins.slice(0, at), both + wide, ...pins.slice(at + 2)];
}

/**
 * @param {string[]} pins
 * @param {number} at
 */
export function separated(pins, at) {
  return [...pins.slice(0, at), ...parts(pins[at]), ...pins.slice(at + 1)];
}

/**
 * Return what can be done with a pinned chart: labels, and the pins afterwards.
 * @param {string[]} pins
 * @param {string} pin
 * @returns {[string, string[]][]}
 */
export function choices(pins, pin) {
  const at = pins.indexOf(pin), single = (/** @type {number} */ i) => i < pins.length && parts(pins[i]).length === 1;
  if (at < 0) return [];
  /** @type {[string, string[]][]} */
  const found = [];
  if (at > 0) found.push(["Move back", moved(pins, at, at - 1)]);
  if (at < pins.length - 1) found.push(["Move forward", moved(pins, at, at + 1)]);
  if (width(pin) < 3) found.push(["Wider", widened(pins, at, 1)]);
  if (width(pin) > 1) found.push(["Narrower", widened(pins, at, -1)]);
  if (single(at) && single(at + 1)) {
    found.push([`On one chart with ${body(pins[at + 1])}`, combined(pins, at, 0)], [`Divide by ${body(pins[at + 1])}`, combined(pins, at, 1)]);
  }
  if (!single(at)) found.push(["Separate", separated(pins, at)]);
  return found;
}
