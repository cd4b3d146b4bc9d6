// @ts-check
// The drawn lines, from the data and the choices of the address.
import { interpolated, smoothed, spacing } from "./curves.js";
import { overlaid } from "./overlay.js";
import { rulersOf } from "./rulers.js";

/** @typedef {import("./shapes.js").BoardData} BoardData */
/** @typedef {import("./shapes.js").Ends} Ends */
/** @typedef {import("./shapes.js").Ink} Ink */
/** @typedef {import("./shapes.js").Line} Line */
/** @typedef {import("./shapes.js").Panel} Panel */
/** @typedef {import("./look.js").Look} Look */
/** @typedef {Map<string, {x: number[], y: (number | null)[]}>} Curves  lines that the server made from every row, by metric */

const MANY = 240, MADE = ["smoothed", "mean"], SCALES = ["", "log scale", "log scale, both ways"];

/**
 * Give each line its positions, which are sent as distances.
 * @param {Panel} panel
 */
export function unpacked(panel) {
  for (const line of panel.lines) {
    let x = 0;
    line.x ??= (line.dx ?? []).map((step) => (x += step));
  }
  return panel;
}

/**
 * Return whether a line may hold fewer points than there are rows: the server draws two of each stretch at most.
 * @param {Panel} panel
 */
export function thinned(panel) {
  return Boolean(panel.ends) && !panel.made && panel.lines[0]?.y.length > MANY;
}

/**
 * Return all charts as the server sent them; two in one are two.
 * @param {BoardData} given
 */
export function everyPanel(given) {
  return [...(given.strip ?? []), ...(given.sections ?? []).flatMap((section) => section.panels)].flatMap((panel) => panel.pair ?? [panel]);
}

// Two metrics on one chart: the second has its axis on the right.
const SECOND = { light: "#B34700", dark: "#F0824A" };

/**
 * @param {Panel} panel
 * @param {Panel[]} pair
 * @param {Ink} ink
 * @returns {Panel}
 */
function paired(panel, [left, right], ink) {
  const colour = parseInt(ink.text.slice(1, 3), 16) > 127 ? SECOND.dark : SECOND.light;
  const own = (/** @type {Panel} */ one, /** @type {Partial<Line>} */ more) =>
    one.lines.map((line) => ({ ...line, ...more, name: MADE.includes(line.name) ? `${one.title}, ${line.name}` : line.mute ? line.name : one.title }));
  return {
    ...panel, lines: [...own(left, {}), ...own(right, { colour, right: true })], range: left.range, log: left.log, beyond: left.beyond,
    bad: [left, right].flatMap((one) => one.bad.map(([x, word]) => /** @type {[number, string, string]} */ ([x, word, one.title]))), band: null, rules: [],
    scale: [left.scale, right.scale].filter(Boolean).join(", "), right: { range: right.range, log: right.log, colour },
  };
}

/**
 * Return the drawn points outside of an axis.
 * @param {Line[]} lines
 * @param {Ends} range
 */
function outside(lines, [low, high]) {
  /** @type {Panel["beyond"]} */
  const found = [];
  for (const { x, y, name, colour } of lines) {
    y.forEach((value, i) => { if (value !== null && (value < low || value > high)) found.push([x[i], value, name, colour]); });
  }
  return found;
}

/**
 * Return a chart of several runs.
 * @param {Panel} panel
 * @param {BoardData} given
 * @param {Look} look
 * @returns {Panel}
 */
function ofRuns(panel, given, look) {
  const sent = given.looks ?? { smooth: "off" }, made = overlaid(panel, look, sent, given.legend?.[Number(look.base)]?.name ?? "");
  const drawn = new Set(made.lines.map(({ name }) => name));
  return { ...panel, ...made, beyond: outside(made.lines, made.range), bad: panel.bad.filter(([, , name]) => drawn.has(name)), scale: SCALES[made.log] };
}

/**
 * Return the board for these choices; ``exact`` returns lines that the server made from every row.
 * @param {BoardData} given
 * @param {import("./shapes.js").Looks} looks
 * @param {Look} look
 * @param {(look: Look) => Curves | undefined} exact
 * @returns {BoardData}
 */
export function looked(given, looks, look, exact) {
  const rulers = rulersOf(looks), own = given.axis === "step" ? null : rulers?.[given.axis];
  const axis = rulers?.[look.axis] ? look.axis : own || given.axis === "step" ? "step" : given.axis;
  const ruler = axis === "step" ? null : rulers?.[axis];
  const step = (/** @type {number} */ x) => (own ? interpolated(own.places, own.steps, x) : x);
  /** @type {(x: number) => number} */
  const at = axis === given.axis ? (x) => x : ruler ? (x) => interpolated(ruler.steps, ruler.places, step(x)) : (x) => Math.round(step(x));
  const curves = exact(look);

  /** The measured line, pale below a smoothed one or the means of a long one. @type {(panel: Panel, first: Line) => Line[]} */
  const over = (panel, first) => {
    const steps = first.x.map(step), served = curves?.get(panel.name), off = look.smooth === "off";
    if (off && !served) return [{ ...first, width: 1.5, alpha: 1 }];
    const curve = served ? { x: served.x.map((x) => (own ? interpolated(own.steps, own.places, x) : x)), y: served.y }
      : { x: first.x, y: smoothed(steps, first.y, look.smooth, (look.clip && panel.usual) || null, spacing(steps)) };
    return [{ ...first, width: 1, alpha: 0.35 }, { ...first, ...curve, name: off ? "mean" : "smoothed", width: 1.8, alpha: 1 }];
  };

  /** @type {(panel: Panel) => Panel} */
  const panelOf = (panel) => {
    if (panel.pair) return paired(panel, panel.pair.map(panelOf), given.ink);
    const lines = unpacked(panel).lines, [first, ...others] = lines;
    if (given.legend && first) return ofRuns(panel, given, look);
    let drawn = lines, { range, log } = panel;
    if (panel.ends && first) {
      const [low, high, scale] = panel.ends[2 * Number(look.log) + Number(!look.clip)], old = others.filter((line) => line.name !== "smoothed");
      [range, log] = [[low, high], scale];
      drawn = [...over(panel, first), ...old];
    }
    if (axis !== given.axis) drawn = drawn.map((line) => ({ ...line, x: line.x.map(at) }));
    return {
      ...panel, lines: drawn, range, log,
      beyond: panel.ends ? outside(drawn.filter((line) => !line.mute), range) : panel.beyond.map(([x, ...rest]) => [at(x), ...rest]),
      scale: SCALES[log] ?? "",
      bad: panel.bad.map(([x, ...rest]) => [at(x), ...rest]),
      ...(panel.cells && { cells: { ...panel.cells, starts: panel.cells.starts.map(at) } }),
      ...(panel.shades && { shades: { ...panel.shades, starts: panel.shades.starts.map(at) } }),
    };
  };

  /** @type {(pair: Ends) => Ends} */
  const ends = (pair) => { const [low, high] = pair.map(at); return [low, high > low ? high : low + 1]; };
  return {
    ...given, axis, look,
    window: ends(given.window), whole: ends(given.whole), at: given.at === null ? null : at(given.at),
    marks: given.marks.map((mark) => ({ ...mark, x: at(mark.x), until: mark.until === null ? null : at(mark.until) })),
    strip: given.strip?.map(panelOf),
    sections: given.sections?.map((section) => ({ ...section, panels: section.panels.map(panelOf) })),
  };
}
