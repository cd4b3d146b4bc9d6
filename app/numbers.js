// @ts-check
// Numbers, steps and positions as text.

/**
 * Return a number as people read it: an exponent for tiny and huge ones, thin spaces within long ones.
 * @param {number} value
 * @param {number} [digits]
 */
export function number(value, digits = 7) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.min(digits - 1, 3)).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  const [whole, rest] = String(Number(value.toPrecision(digits))).split(".");
  return (whole.replace(/\B(?=(\d{3})+$)/g, "\u202f") + (rest ? `.${rest}` : "")).replace("-", "−");
}

/**
 * Return the number of digits by which neighbouring labels of an axis differ.
 * @param {number[]} ticks
 * @param {number} step
 */
export function digits(ticks, step) {
  const largest = Math.max(...ticks.map(Math.abs));
  return step > 0 && largest > 0 ? Math.max(3, Math.ceil(Math.log10(largest / step)) + 1) : 3;
}

/**
 * Return a step in full; beyond 2^53 it is text, and positions are counted from an origin there.
 * @param {number | bigint | string} step
 */
export function whole(step) {
  return String(step).replace(/\B(?=(\d{3})+$)/g, "\u202f").replace("-", "−");
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
  if (axis === "crash") return `${number(Math.abs(Math.round(x)))} steps ${x < 0 ? "before" : "after"} the crash`;
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
