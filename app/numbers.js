// @ts-check
// Numbers, steps and positions as text.

const THIN = "\u202f", SMALLEST = -4, LETTERS = /** @type {[number, number, string][]} */ ([[3, 6, "k"], [6, 9, "M"]]), BILLION = 9, EXACT = 60;

/** Digits of a number in a tooltip. */
export const FULL = 7;

/**
 * Return the first digits of a number, rounded half to even, and the power of ten of the first one.
 * @param {number} size
 * @param {number} digits
 * @returns {[string, number]}
 */
function rounded(size, digits) {
  let [shown, power] = size.toExponential(digits - 1).split("e");
  const exact = size.toExponential(EXACT).replace(".", "");
  if (/^50*e/.test(exact.slice(digits)) && Number(exact[digits - 1]) % 2 === 0) { // the browser rounds halves up
    [shown, power] = [exact.slice(0, digits), exact.split("e")[1]];
  }
  return [shown.replace(".", ""), Number(power)];
}

/**
 * Return digits, the first at the place of 10 to the power, without zeros at the end of a fraction.
 * @param {string} shown
 * @param {number} power
 */
function plain(shown, power) {
  if (power < 0) return `0.${"0".repeat(-power - 1)}${shown.replace(/0+$/, "") || "0"}`;
  const whole = shown.slice(0, power + 1).padEnd(power + 1, "0"), fraction = shown.slice(power + 1).replace(/0+$/, "");
  return (whole.length > 4 ? thousands(whole) : whole) + (fraction && `.${fraction}`);
}

/** @param {string} whole */
function thousands(whole) {
  return whole.replace(/\B(?=(\d{3})+$)/g, THIN);
}

/**
 * Return a number as rlwatch/wording.py's number does, which is the rule: a test compares both.
 * @param {number | null} value
 * @param {number} [digits]
 */
export function number(value, digits = 3) {
  if (value === null) return "-";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Inf" : "-Inf";
  const sign = value < 0 || Object.is(value, -0) ? "-" : "", size = Math.abs(value);
  let [shown, power] = rounded(size, digits + 1);
  if (power !== digits) {
    [shown, power] = rounded(size, digits);
    for (const [first, end, letter] of LETTERS) if (Math.max(first, digits + 1) <= power && power < end) return sign + plain(shown, power - first) + letter;
  }
  if (SMALLEST <= power && power < BILLION) return sign + plain(shown, power);
  return `${sign}${plain(shown, 0)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

/**
 * Return the label of a position of an axis; the library has ticks of minus zero.
 * @param {number} tick
 * @param {number} digits
 */
export const label = (tick, digits) => number(tick + 0, digits);

/**
 * Return the number of digits by which neighbouring labels of an axis differ.
 * @param {number[]} ticks
 * @param {number} step
 */
export function digits(ticks, step) {
  const largest = Math.max(...ticks.map(Math.abs)), quarters = /^2\.5/.test(step.toExponential(3)); // 25, 50, 75: one digit more
  return step > 0 && largest > 0 ? Math.max(3, Math.ceil(Math.log10(largest / step)) + (quarters ? 2 : 1)) : 3;
}

/**
 * Return a step in full; beyond 2^53 it is text, and positions are counted from an origin there.
 * @param {number | bigint | string} step
 */
export function whole(step) {
  return thousands(String(step));
}

/**
 * Return a position on an axis as text.
 * @param {string} axis
 * @param {number} x
 * @param {string} [origin]
 */
export function place(axis, x, origin = "0") {
  if (axis === "time") return x < 1 ? `${number(x * 60, 3)} min` : `${number(x, 4)} h`;
  if (axis === "tokens") return `${number(x, 4)} M tokens`;
  if (axis === "chance") return `${number(x, 3)} % predicted`;
  if (axis === "crash") return `${whole(Math.abs(Math.round(x)))} steps ${x < 0 ? "before" : "after"} the crash`;
  return `step ${whole(BigInt(origin) + BigInt(Math.round(x)))}`;
}

/**
 * Return the index of the nearest of ascending positions.
 * @param {number[]} xs
 * @param {number} x
 */
export function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(xs[low - 1] - x) <= Math.abs(xs[low] - x) ? low - 1 : low;
}
