// @ts-check
// Means of a long metric over ranges of steps, as the server made them from every row, and grown by new rows.

/** @typedef {import("./shapes.js").Line} Line */
/** @typedef {import("./shapes.js").SeriesReply} SeriesReply */

/**
 * @typedef {object} Means  a curve: the middle of each range, and its mean
 * @property {number[]} x
 * @property {(number | null)[]} y
 * @property {number[]} counts  finite values of each range
 * @property {number} width  steps of a range
 * @property {number} base  position of the first step of some range
 * @property {number} through  position of the last row in it
 */

/**
 * Read the means of a reply, by metric; their positions are counted from ``origin``.
 * @param {SeriesReply} reply
 * @param {bigint} origin
 * @returns {Map<string, Means>}
 */
export function meansOf(reply, origin) {
  return new Map(Object.entries(reply.series).map(([name, one]) => {
    const { steps, width = 1, through = 0 } = reply.rows[one.rows], middle = (Number(width) - 1) / 2;
    return [name, {
      x: steps.map((step) => Number(BigInt(step) - origin) + middle),
      y: one.values.map((value) => (typeof value === "number" ? value : null)),
      counts: [...(one.counts ?? [])],
      width: Number(width),
      base: -Number(origin % BigInt(width)),
      through: Number(BigInt(through) - origin),
    }];
  }));
}

/**
 * Return the means of a line that holds every row, over about ``count`` ranges of the steps in sight.
 * @param {Line} line
 * @param {[number, number]} view
 * @param {bigint} origin
 * @param {number} count
 * @returns {Means}
 */
export function meansWithin({ x, y }, [low, high], origin, count) {
  const width = Math.max(1, Math.ceil((high - low + 1) / count)), base = -Number(origin % BigInt(width));
  /** @type {Means} */
  const means = { x: [], y: [], counts: [], width, base, through: low };
  for (let i = 0; i < x.length; i += 1) if (x[i] >= low && x[i] < high + 1) add(means, x[i], y[i]);
  return means;
}

/**
 * @param {Means} means
 * @param {number} at
 * @param {number | null} value
 */
function add(means, at, value) {
  if (value === null) return;
  const { width, base } = means, x = Math.floor((at - base) / width) * width + base + (width - 1) / 2, last = means.x.length - 1;
  if (last < 0 || means.x[last] < x) {
    means.x.push(x);
    means.y.push(value);
    means.counts.push(1);
  } else {
    means.counts[last] += 1;
    means.y[last] = (means.y[last] ?? 0) + (value - (means.y[last] ?? 0)) / means.counts[last];
  }
  means.through = Math.floor(at);
}

const ENOUGH = 4;

/**
 * Return whether there are enough rows for each mean: of fewer, the rows are the better picture.
 * @param {Means} means
 */
export function enough({ counts }) {
  return counts.reduce((sum, count) => sum + count, 0) >= ENOUGH * counts.length;
}

/**
 * Add the rows of a line, by steps, that are newer than its means: the browser has these one by one. Rows of one step lie
 * a little apart.
 * @param {Means} means
 * @param {Line} line
 */
export function grow(means, line) {
  let first = line.x.length;
  while (first > 0 && Math.floor(line.x[first - 1]) > means.through) first -= 1;
  for (let i = first; i < line.x.length; i += 1) add(means, line.x[i], line.y[i]);
}
