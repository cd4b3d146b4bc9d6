// @ts-check
// One chart: uPlot draws the lines, this module the rest of the pixels, and it finds the values at a position.
import uPlot from "./uplot.js";
import { stretches } from "./lane.js";
import { digits, label, nearest, number } from "./numbers.js";
import { REACH_PX } from "./tip.js";
import { unpacked } from "./views.js";

const AXIS_PX = 52, LETTER_PX = 6.2;

/**
 * Return the width of an axis of values in pixels: the usual one, or more for long labels. The library passes none at first.
 * @param {uPlot} u
 * @param {string[] | null} labels
 */
const wide = (u, labels) => Math.max(AXIS_PX, Math.ceil(12 + LETTER_PX * Math.max(0, ...(labels ?? []).map((label) => label?.length ?? 0))));

/** @typedef {import("./board.js").Board} Board */
/** @typedef {import("./shapes.js").Line} Line */
/** @typedef {import("./shapes.js").Panel} Panel */
/** @typedef {import("./shapes.js").Value} Value */

// Colours of a map: below its row's usual level, above it, and what was not finite.
const BELOW = "#0072b2", ABOVE = "#d55e00", BROKEN = "#cc79a7", FULL = 10;

/**
 * @param {string} from
 * @param {string} to
 * @param {number} part
 */
function mixed(from, to, part) {
  const channel = (/** @type {number} */ i) => {
    const [a, b] = [from, to].map((colour) => parseInt(colour.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * part).toString(16).padStart(2, "0");
  };
  return `#${channel(1)}${channel(3)}${channel(5)}`;
}

/** @param {string} colour @param {number} alpha */
function dimmed(colour, alpha) {
  return alpha >= 1 ? colour : colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

/** @param {number} log */
const distribution = (log) => /** @type {uPlot.Scale.Distr} */ (log === 2 ? 4 : log ? 3 : 1);

export class Chart {
  /**
   * @param {Board} board
   * @param {HTMLElement} host
   * @param {Panel} panel
   * @param {number} height
   * @param {boolean} bare  a row of the strip
   */
  constructor(board, host, panel, height, bare) {
    this.board = board;
    this.host = host;
    this.panel = panel;
    this.height = height;
    this.bare = bare;
    this.full = false;
    this.shape = "";
    /** @type {uPlot | null} */
    this.plot = null;
    /** @type {(() => void) | undefined} */
    this.pending = undefined;
    host.addEventListener("mouseleave", () => board.leave(this));
  }

  /**
   * Draw a panel; a chart that is out of sight is drawn when the browser has nothing else to do.
   * @param {Panel} panel
   * @param {boolean} last  whether it has the labels of the axis below it
   */
  update(panel, last) {
    this.pending = undefined;
    if (!this.plot || this.board.sees(this)) return this.draw(panel, last);
    this.pending = () => this.draw(panel, last);
    this.board.later(this);
  }

  /** @param {Panel} panel @param {boolean} last */
  draw(panel, last) {
    this.pending = undefined;
    unpacked(panel);
    const shape = JSON.stringify([panel.lines.map((line) => [line.colour, line.width, line.alpha, line.dash, line.fill, line.dots, !line.low]), panel.log, last, this.height, panel.cells?.names, panel.shades?.ticks, panel.right?.log, panel.right?.colour, this.board.data.ink, this.board.data.axis]);
    if (this.plot && this.shape !== shape && this.board.holding) {
      this.pending = () => this.draw(panel, last); // another drawing in its place would end the drag, and lose the zoom
      return;
    }
    this.panel = panel;
    const tables = /** @type {uPlot.AlignedData[]} */ (panel.cells ? [[panel.cells.starts, panel.cells.starts.map(() => null)]] : panel.lines.map((line) => (line.low ? [line.x, line.y, line.high, line.low] : [line.x, line.y])));
    // A place that another line has and this one has not is passed over (undefined); null is a break.
    const data = tables.length ? uPlot.join(tables) : /** @type {uPlot.AlignedData} */ ([[]]);
    if (!this.plot || this.shape !== shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.options(last), data, this.host);
    } else {
      this.plot.setData(data, false);
    }
    this.rescale();
  }

  rescale() {
    this.pending?.();
    const { plot } = this, { range, right } = this.panel, [min, max] = this.board.view(), [low, high] = range;
    plot?.batch(() => {
      plot.setScale("x", { min, max });
      plot.setScale("y", { min: low, max: high });
      if (right) plot.setScale("right", { min: right.range[0], max: right.range[1] });
    });
  }

  // Lines as the library draws them: behind one with a shaded area its two ends, which are not drawn themselves.
  series() {
    const unseen = { width: 0, points: { show: false } }, side = (/** @type {Line} */ line) => (line.right ? { scale: "right" } : {});
    return this.panel.lines.flatMap((line) => [
      {
        stroke: dimmed(line.colour, line.alpha ?? 1),
        width: line.dots ? 0 : line.width ?? 1.5,
        dash: line.dash,
        ...side(line),
        fill: line.fill,
        spanGaps: false,
        points: { show: Boolean(line.dots) || line.x.length <= 2, size: line.dots || 5, stroke: line.colour, fill: line.colour },
      },
      ...(line.low ? [unseen, unseen] : []),
    ]);
  }

  areas() {
    let at = 0;
    const pair = (/** @type {number} */ high, /** @type {number} */ low) => /** @type {[number, number]} */ ([high, low]);
    return this.panel.lines.flatMap((line) => {
      at += line.low ? 3 : 1;
      return line.low ? [{ series: pair(at - 1, at), fill: dimmed(line.colour, 0.15) }] : [];
    });
  }

  /**
   * Names of a map's rows, as many as fit.
   * @param {string[]} names
   */
  rowLabels(names) {
    const every = Math.ceil((13 * names.length) / this.height);
    const size = Math.min(190, Math.max(90, this.host.clientWidth * 0.2)), letters = Math.floor(size / 6.2);
    const short = (/** @type {string} */ name) => (name.length > letters ? `…${name.slice(1 - letters)}` : name);
    return {
      size,
      splits: () => names.map((_, i) => i + 0.5),
      values: () => names.map((name, i) => (i % every ? "" : short(name))),
      grid: { show: false },
    };
  }

  /**
   * Levels of a map of shades, which lie where its rows do.
   * @param {[number, string][]} ticks
   */
  levelLabels(ticks) {
    return { splits: () => ticks.map(([at]) => at), values: () => ticks.map(([, words]) => words), grid: { show: false } };
  }

  /**
   * @param {boolean} last
   * @returns {uPlot.Options}
   */
  options(last) {
    const { board, panel } = this, ink = board.data.ink, names = panel.cells?.names;
    const labels = (/** @type {number[]} */ ticks, /** @type {number} */ step) => ticks.map((tick) => (tick === null ? "" : label(tick, digits(ticks, step))));
    const axis = { stroke: ink.quiet, grid: { stroke: ink.grid, width: 1 }, ticks: { show: false }, font: "11px sans-serif" };
    return {
      width: this.host.clientWidth || 300,
      height: this.height + (last ? 24 : 0),
      padding: [7, 20, last ? 0 : 4, 0], // half of the highest tick's label extends above the axis
      legend: { show: false },
      focus: { alpha: 0.15 },
      cursor: {
        y: false,
        sync: { key: board.data.key },
        drag: { x: true, y: false, setScale: false },
        points: { show: true, size: 5, width: 1 },
        bind: { dblclick: () => () => (board.zoom(null), null) },
      },
      scales: {
        x: { time: false, auto: false, range: (u, min, max) => [min, max] },
        y: { auto: false, dir: names ? -1 : 1, distr: distribution(panel.log), range: (u, min, max) => [min, max] },
        ...(panel.right && { right: { auto: false, distr: distribution(panel.right.log), range: (u, min, max) => [min, max] } }),
      },
      axes: [
        { ...axis, show: last, size: 24, grid: { ...axis.grid, show: false }, values: (u, ticks, i, space, step) => labels(ticks, step).map((tick) => (board.data.origin === "0" ? "" : "+") + tick), space: 70 },
        { ...axis, size: this.bare ? AXIS_PX : wide, space: this.bare ? 22 : 30, values: (u, ticks, i, space, step) => labels(ticks, step), ...(names && this.rowLabels(names)), ...(panel.shades && this.levelLabels(panel.shades.ticks)), ...(panel.right && { stroke: panel.lines[0].colour }) },
        ...(panel.right ? [/** @type {uPlot.Axis} */ ({ ...axis, scale: "right", side: 1, stroke: panel.right.colour, size: wide, space: 30, grid: { show: false }, values: (u, ticks, i, space, step) => labels(ticks, step) })] : []),
      ],
      series: [{}, ...(names ? [{ show: false }] : this.series())],
      bands: names ? [] : this.areas(),
      hooks: {
        drawClear: [(u) => this.under(u)],
        draw: [(u) => this.over(u)],
        setCursor: [(u) => board.hover(this, u)],
        setSelect: [(u) => this.selected(u)],
        ready: [(u) => this.clicks(u)],
      },
    };
  }

  /** @param {uPlot} u */
  clicks(u) {
    /** @type {number | null} */
    let from = null;
    u.over.addEventListener("mousedown", (event) => {
      from = event.clientX;
      this.board.dragged = this;
      this.board.hold();
    });
    u.over.addEventListener("click", (event) => {
      if (from === null || Math.abs(event.clientX - from) > 3) return;
      this.board.pinAt(u.posToVal(event.offsetX, "x"), event.detail);
    });
  }

  /** @param {uPlot} u */
  selected(u) {
    const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x"), wide = u.select.width >= 4;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (!wide || this.board.dragged !== this) return; // charts that are joined hear of it, too
    this.board.dragged = undefined;
    this.board.zoom([low, high], this);
  }

  /**
   * Below the lines: where alarms fired, the healthy range, the run's own level, and limits.
   * @param {uPlot} u
   */
  under(u) {
    const { panel } = this, { ctx } = u, { left, top, width, height } = u.bbox, ink = this.board.data.ink;
    const y = (/** @type {number} */ value) => Math.min(Math.max(u.valToPos(value, "y", true), top), top + height);
    ctx.save();
    for (const { from, to, colour } of panel.cells || panel.shades ? [] : stretches(this.board.data.marks, panel.family ?? "")) {
      const [first, last] = [from, Math.min(to, u.scales.x.max ?? to)].map((x) => Math.min(Math.max(u.valToPos(x, "x", true), left), left + width));
      ctx.fillStyle = dimmed(colour, 0.07);
      ctx.fillRect(first, top, Math.max(last - first, 0), height);
    }
    if (panel.cells) this.map(u);
    if (panel.shades) this.shade(u);
    if (panel.band) {
      ctx.fillStyle = dimmed(ink.band, 0.1);
      const high = y(panel.band[1]);
      ctx.fillRect(left, high, width, Math.max(y(panel.band[0]) - high, 1));
    }
    for (const [value, label, colour] of panel.rules ?? []) {
      const at = u.valToPos(value, "y", true);
      if (!(at >= top && at <= top + height)) continue;
      ctx.strokeStyle = colour ?? ink.quiet;
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(left, at);
      ctx.lineTo(left + width, at);
      ctx.stroke();
      ctx.fillStyle = ink.quiet;
      ctx.font = `${10 * devicePixelRatio}px sans-serif`;
      ctx.textAlign = "right";
      ctx.fillText(label, left + width - 2, at - 3 * devicePixelRatio);
    }
    ctx.restore();
  }

  /**
   * A heat map: the largest value of each range of steps divided by the usual value of its row.
   * @param {uPlot} u
   */
  map(u) {
    const { cells } = this.panel, { ctx } = u;
    if (!cells) return;
    const { left, top, width, height } = u.bbox, ink = this.board.data.ink;
    const columns = cells.starts.length - 1, bad = new Set(cells.bad);
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    cells.values.forEach((value, i) => {
      const row = Math.floor(i / columns), column = i % columns, usual = cells.usual[row];
      if (bad.has(i)) ctx.fillStyle = BROKEN;
      else if (value === null || !usual) return;
      else {
        const far = Math.max(-1, Math.min(1, Math.log(value / usual) / Math.log(FULL)));
        ctx.fillStyle = mixed(ink.grid, far < 0 ? BELOW : ABOVE, Math.abs(far));
      }
      const x = u.valToPos(cells.starts[column], "x", true), y = u.valToPos(row, "y", true);
      ctx.fillRect(x, y, Math.ceil(u.valToPos(cells.starts[column + 1], "x", true) - x), Math.ceil(u.valToPos(row + 1, "y", true) - y));
    });
  }

  /**
   * A density map: the darker a cell, the larger its share of the column.
   * @param {uPlot} u
   */
  shade(u) {
    const { shades } = this.panel, { ctx } = u, { left, top, width, height } = u.bbox;
    if (!shades) return;
    const { starts, cells } = shades, rows = shades.ends.length - 1;
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    cells.forEach((value, i) => {
      if (!value) return;
      const column = Math.floor(i / rows), row = i % rows;
      const x = Math.round(u.valToPos(starts[column], "x", true)), y = Math.round(u.valToPos(row + 1, "y", true));
      ctx.fillStyle = dimmed(this.board.data.ink.line, Math.min(0.06 + 0.0085 * value, 0.999));
      ctx.fillRect(x, y, Math.max(1, Math.round(u.valToPos(starts[column + 1], "x", true)) - x), Math.round(u.valToPos(row, "y", true)) - y);
    });
  }

  /**
   * Above the lines: the onsets of alarms, values that were not finite, and values beyond the range.
   * @param {uPlot} u
   */
  over(u) {
    const { panel, board } = this, { ctx } = u, { left, top, width, height } = u.bbox, ink = board.data.ink, px = devicePixelRatio;
    const line = (/** @type {number} */ x, /** @type {string} */ colour, /** @type {boolean} */ dashed, /** @type {number} */ alpha) => {
      const at = Math.round(u.valToPos(x, "x", true)) + 0.5;
      if (!(at >= left && at <= left + width)) return;
      ctx.globalAlpha = alpha;
      ctx.strokeStyle = colour;
      ctx.lineWidth = px;
      ctx.setLineDash(dashed ? [4 * px, 3 * px] : []);
      ctx.beginPath();
      ctx.moveTo(at, top);
      ctx.lineTo(at, top + height);
      ctx.stroke();
    };
    ctx.save();
    for (const { from, colour } of stretches(board.data.marks, panel.family ?? "")) line(from, colour, true, 0.75);
    if (board.pointed !== null) line(board.pointed, ink.text, false, 0.6);
    if (board.data.at !== null) line(board.data.at, ink.text, false, 0.6);
    ctx.globalAlpha = 1;
    ctx.fillStyle = ink.bad;
    for (const [x] of panel.bad) {
      const at = u.valToPos(x, "x", true);
      if (at >= left && at <= left + width) ctx.fillRect(Math.round(at - px), top + height - 12 * px, 2 * px, 12 * px);
    }
    const [low, high] = panel.range;
    ctx.fillStyle = ink.text;
    for (const [x, value] of panel.beyond) {
      const at = u.valToPos(x, "x", true);
      if (!(at >= left && at <= left + width)) continue;
      const edge = value > high ? top : top + height, way = value > high ? 1 : -1;
      ctx.beginPath();
      ctx.moveTo(at, edge);
      ctx.lineTo(at - 4 * px, edge + way * 7 * px);
      ctx.lineTo(at + 4 * px, edge + way * 7 * px);
      ctx.fill();
    }
    ctx.restore();
  }

  /**
   * Values of the panel at a position: for each line the nearest measured point, and whether it was finite.
   * @param {number} x
   * @param {number} y
   * @returns {Value[]}
   */
  at(x, y) {
    const { cells, shades } = this.panel, { plot } = this;
    if (cells) return this.cell(cells, x, y);
    if (!plot) return [];
    const reach = plot.posToVal(REACH_PX, "x") - plot.posToVal(0, "x"), column = shades?.starts.findLastIndex((start) => start <= x) ?? -1;
    /** @type {Value[]} */
    const found = [];
    if (shades) { // a map reports one column, not two near ones
      if (column < 0 || !this.panel.lines.some((line) => line.x.includes(shades.starts[column]))) return [];
      x = shades.starts[column];
    }
    for (const line of this.panel.lines) {
      if (line.mute || !line.x.length) continue;
      const i = this.present(line, nearest(line.x, x));
      if (i !== null) found.push({ name: line.name || this.panel.title, x: line.x[i], value: (line.shown ?? line.y)[i], colour: line.colour });
    }
    if (shades) found.reverse().push(...this.share(shades, column, y)); // the highest quantile first, as they are drawn
    for (const [place_, value, name, colour] of this.panel.beyond) {
      if (Math.abs(place_ - x) <= reach) found.unshift({ name: name || this.panel.title, x: place_, value, colour: name ? colour : this.board.data.ink.text });
    }
    const own = found.length ? Math.abs(found[0].x - x) : Infinity;
    const bad = this.panel.bad.filter(([x_]) => Math.abs(x_ - x) <= Math.max(Math.min(own, reach), 1e-9));
    for (const [x_, word, name] of bad.reverse()) found.unshift({ name: name || this.panel.title, x: x_, word, colour: this.board.data.ink.bad });
    const seen = new Set();
    return found.filter(({ name }) => !seen.has(name) && seen.add(name));
  }

  /**
   * @param {import("./shapes.js").Cells} cells
   * @param {number} x
   * @param {number} y
   * @returns {Value[]}
   */
  cell({ names, starts, values, usual, bad }, x, y) {
    const row = Math.floor(y);
    const column = starts.findLastIndex((start) => start <= x), i = row * (starts.length - 1) + column;
    if (!names[row] || column < 0 || column >= starts.length - 1) return [];
    const found = { name: names[row], x: starts[column], colour: this.board.data.ink.text };
    if (bad.includes(i)) return [{ ...found, word: "NaN or Inf", colour: this.board.data.ink.bad }];
    const value = values[i], level = usual[row];
    return value === null ? [] : [{ ...found, value, note: level ? ` ${number(value / level, 3)} × baseline` : "" }];
  }

  /**
   * @param {import("./shapes.js").Shades} shades
   * @param {number} column
   * @param {number} y
   * @returns {Value[]}
   */
  share({ starts, cells, most, ends }, column, y) {
    const row = Math.floor(y), rows = ends.length - 1;
    if (!this.board.over || row < 0 || row >= rows || column >= starts.length - 1) return [];
    const part = most * (cells[column * rows + row] / 100) ** 2;
    return [{ name: `${number(ends[row], 5)} to ${number(ends[row + 1], 5)}`, x: starts[column], colour: "transparent", word: `${part ? "≈ " : ""}${number(100 * part, 2)} %`, plain: true }];
  }

  /**
   * Return the nearest index with a value.
   * @param {Line} line
   * @param {number} i
   */
  present(line, i) {
    if (line.y[i] !== null) return i;
    for (const near of [i - 1, i + 1]) if (line.y[near] !== null && line.y[near] !== undefined) return near;
    return null;
  }

  /**
   * Draw the lines of the other runs pale; null: all as usual.
   * @param {number | null} place
   */
  highlight(place) {
    if (!this.plot || this.panel.cells) return;
    let series = 1, found = null;
    for (const line of this.panel.lines) {
      if (found === null && line.place === place) found = series;
      series += line.low ? 3 : 1;
    }
    this.plot.setSeries(place === null ? null : found, { focus: true });
  }

  resize() {
    const width = this.host.clientWidth, height = this.full ? Math.max(200, innerHeight - 110) : this.plot?.height ?? 0;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}
