// @ts-check
// Charts of several runs: hidden lines, the difference to one of them, smoothing, and the range of what is left.
import { smoothed, spacing } from "./curves.js";

/** @typedef {import("./shapes.js").Line} Line */
/** @typedef {import("./shapes.js").Panel} Panel */
/** @typedef {import("./shapes.js").Ends} Ends */
/** @typedef {import("./look.js").Look} Look */

const EDGE = 0.02, BEYOND = 2, MARGIN = 0.06, ENOUGH = 20;

/**
 * Return the lowest and highest finite value without outliers, as board.py's usual_range does but for lasting ones.
 * @param {number[]} values
 * @returns {Ends}
 */
export function usual(values) {
  const sorted = [...values].sort((a, b) => a - b), at = (/** @type {number} */ part) => sorted[Math.round(part * (sorted.length - 1))];
  if (!sorted.length) return [0, 1];
  if (sorted.length < ENOUGH) return [sorted[0], sorted[sorted.length - 1]];
  const low = at(EDGE), high = at(1 - EDGE), span = high - low || Math.max(Math.abs(high), 1e-12) * 0.05;
  const kept = sorted.filter((value) => value >= low - BEYOND * span && value <= high + BEYOND * span);
  return [kept[0], kept[kept.length - 1]];
}

/**
 * Return the line's values minus those of another, which are interpolated; null outside of it.
 * @param {Line} line
 * @param {Line} base
 * @returns {Line}
 */
export function minus(line, base) {
  const xs = base.x.filter((_, i) => base.y[i] !== null), ys = /** @type {number[]} */ (base.y.filter((y) => y !== null));
  let at = 0;
  const level = (/** @type {number} */ x) => {
    if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
    while (at + 1 < xs.length && xs[at + 1] < x) at += 1;
    if (at + 1 >= xs.length || xs[at + 1] === xs[at]) return ys[at];
    return ys[at] + ((ys[at + 1] - ys[at]) * (x - xs[at])) / (xs[at + 1] - xs[at]);
  };
  const levels = line.x.map(level), less = (/** @type {(number | null)[] | undefined} */ values) =>
    values?.map((value, i) => { const own = levels[i]; return value === null || own === null ? null : value - own; });
  return { ...line, y: less(line.y) ?? [], low: less(line.low), high: less(line.high), shown: undefined };
}

/**
 * Return the axis of these lines: its ends, and 0 linear, 1 logarithmic or 2 logarithmic both ways.
 * @param {Line[]} lines
 * @param {{log: boolean, clip: boolean}} look
 * @returns {[Ends, number]}
 */
export function ranged(lines, look) {
  const held = lines.map((line) => /** @type {number[]} */ (line.y.filter((y) => y !== null)));
  const areas = lines.flatMap((line) => /** @type {number[]} */ ([...(line.low ?? []), ...(line.high ?? [])].filter((y) => y !== null)));
  const all = [...held.flat(), ...areas];
  if (!all.length) return [[0, 1], 0];
  const positive = all.every((y) => y > 0), log = look.log ? (positive ? 1 : 2) : 0;
  const ends = log || !look.clip ? [] : held.filter((values) => values.length).flatMap(usual);
  const shown = ends.length ? [...ends, ...areas] : all;
  let low = Infinity, high = -Infinity;
  for (const y of shown) { low = Math.min(low, y); high = Math.max(high, y); }
  if (log === 1) { const factor = Math.max((high / low) ** MARGIN, 1.1); return [[low / factor, high * factor], 1]; }
  const margin = MARGIN * (high - low) || 0.05 * Math.abs(high) || 0.5;
  return [[low - margin, high + margin], log];
}

/**
 * Return the lines smoothed in the browser, each above its pale measured one. The server replaces them by its own, which
 * are made from every row.
 * @param {Line[]} lines  measured ones
 * @param {string} how
 * @param {boolean} clip
 * @returns {Line[]}
 */
function preview(lines, how, clip) {
  return lines.flatMap((line) => {
    const cut = clip ? usual(/** @type {number[]} */ (line.y.filter((y) => y !== null))) : null, every = spacing(line.x);
    const of = (/** @type {(number | null)[] | undefined} */ values) => values && smoothed(line.x, values, how, cut, every);
    const smooth = { ...line, y: of(line.y) ?? [], low: of(line.low), high: of(line.high), smooth: true };
    return line.low ? [smooth] : [smooth, { ...line, width: 1, alpha: 0.3 }];
  });
}

/**
 * Return lines, range and scale of a chart of several runs for these choices.
 * @param {Panel} panel
 * @param {Look} look
 * @param {{smooth: string}} sent  the choices that the server drew
 * @param {string} baseName
 * @returns {{lines: Line[], range: Ends, log: number, rules: Panel["rules"], sub?: string}}
 */
export function overlaid(panel, look, sent, baseName) {
  let { lines } = panel, own = look.smooth !== sent.smooth;
  if (own) {
    const rows = lines.filter((line) => !line.smooth || !lines.some((one) => !one.smooth && one.place === line.place));
    const measured = rows.map((line) => ({ ...line, alpha: 1, width: 1.5, smooth: false }));
    lines = look.smooth === "off" ? measured : preview(measured, look.smooth, look.clip);
  }
  const hidden = new Set(look.hide.split(",").filter(Boolean).map(Number)), base = look.base === "" ? NaN : Number(look.base);
  const levels = lines.filter((line) => line.place === base), level = levels.find((line) => line.smooth) ?? levels[0];
  const differs = Boolean(level);
  if (differs) {
    const of = new Map([[true, level], [false, levels.find((line) => !line.smooth) ?? level]]);
    lines = lines.filter((line) => line.place !== base).map((line) => minus(line, /** @type {Line} */ (of.get(Boolean(line.smooth)))));
  }
  const kept = lines.filter((line) => !hidden.has(line.place ?? -1));
  own ||= differs || kept.length < lines.length;
  if (!own && panel.ends) {
    const [low, high, log] = panel.ends[2 * Number(look.log) + Number(!look.clip)];
    return { lines: kept, range: [low, high], log, rules: panel.rules };
  }
  const [range, log] = ranged(kept, look);
  return { lines: kept, range, log, rules: differs ? [[0, ""]] : panel.rules, ...(differs && { sub: [panel.sub, `minus ${baseName}`].filter(Boolean).join(" · ") }) };
}
