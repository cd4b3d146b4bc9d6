// @ts-check
// Smoothing of measured points, and their positions on another axis.

/**
 * @typedef {object} Ruler  places of steps, both ascending
 * @property {number[]} steps
 * @property {number[]} places
 */

/**
 * Return the position of a step, or (reversed) the step of a position; clamped to the ends.
 * @param {number[]} from
 * @param {number[]} to
 * @param {number} x
 */
export function interpolated(from, to, x) {
  let low = 0, high = from.length - 1;
  if (!(x > from[low])) return to[low];
  if (!(x < from[high])) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= x) low = middle; else high = middle;
  }
  return to[low] + ((to[high] - to[low]) * (x - from[low])) / (from[high] - from[low]);
}

const FAINT = 1e-6;

/**
 * Return values smoothed as in smoothing.py, debiased. Missing values (null: a break of the line) and values outside of
 * ``usual`` are ignored. Each point of a thinned line represents the steps since the one before, so that the result is
 * close to the server's, which uses every row.
 * @param {number[]} steps
 * @param {(number | null)[]} values
 * @param {string} how
 * @param {[number, number] | null} usual
 * @param {number} every  steps from one row to the next
 * @returns {(number | null)[]}
 */
export function smoothed(steps, values, how, usual, every) {
  const held = values.map((value) => (value === null || (usual && (value < usual[0] || value > usual[1])) ? null : value));
  const size = Number(how.split(" ").at(-1));
  if (how.startsWith("EMA")) {
    let sum = 0, share = 0, before = NaN;
    return held.map((value, i) => {
      if (values[i] === null) return null;
      const rows = Number.isNaN(before) ? 1 : Math.max(1, Math.round((steps[i] - before) / every)), past = size ** rows;
      before = steps[i];
      const weight = (1 - past) / (1 - size);
      sum = past * sum + (value === null ? 0 : weight * value);
      share = past * share + (value === null ? 0 : weight);
      return share > FAINT ? sum / share : null;
    });
  }
  let first = 0, sum = 0, count = 0;
  return held.map((value, i) => {
    if (value !== null) { sum += value; count += 1; }
    for (; steps[first] <= steps[i] - size * every; first += 1) {
      const gone = held[first];
      if (gone !== null) { sum -= gone; count -= 1; }
    }
    return values[i] === null ? null : count ? sum / count : null;
  });
}

/**
 * Return the usual distance of two rows.
 * @param {number[]} steps
 */
export function spacing(steps) {
  const gaps = [];
  for (let i = 1; i < steps.length; i += 1) if (steps[i] - steps[i - 1] >= 1) gaps.push(steps[i] - steps[i - 1]);
  return gaps.length ? gaps.sort((a, b) => a - b)[gaps.length >> 1] : 1;
}
