// Charts of a run on one axis: uPlot draws the lines, this module marks, tooltip, zoom and pins.
// Data become text nodes and pixels: nothing here builds HTML from data.
import uPlot from "./uplot.js";
import STYLE from "./style.js";
import { AXES, change, listen, now, tell } from "./look.js";
import { choices, moved } from "./arrange.js";
import { interpolated, smoothed, spacing } from "./curves.js";
import { appended, follow } from "./live.js";
import { overlaid } from "./overlay.js";
import { drawStudy } from "./study.js";
import { saveDrawing, saveDrawn, savePicture, saveRows } from "./save.js";

const AXIS_PX = 52, MERGE_PX = 15, REACH_PX = 6, WAIT_MS = 260, PATIENCE_MS = 15000, NARROW_PX = 560, FEW = 3;

function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function button(className, text, label, act) {
  const node = el("button", className, text);
  node.type = "button";
  if (label) { node.title = label; node.setAttribute("aria-label", label); }
  node.addEventListener("click", act);
  return node;
}

// Numbers as people read them: an exponent for tiny and huge ones, thin spaces within long ones.
function number(value, digits = 7) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.min(digits - 1, 3)).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  const [whole, rest] = String(Number(value.toPrecision(digits))).split(".");
  return (whole.replace(/\B(?=(\d{3})+$)/g, "\u202f") + (rest ? `.${rest}` : "")).replace("-", "−");
}

// Digits by which neighbouring labels of an axis differ.
function digits(ticks, step) {
  const largest = Math.max(...ticks.map(Math.abs));
  return step > 0 && largest > 0 ? Math.max(3, Math.ceil(Math.log10(largest / step)) + 1) : 3;
}

// A step in full; beyond 2^53 as text, and places are counted from an origin there.
function whole(step) {
  return String(step).replace(/\B(?=(\d{3})+$)/g, "\u202f").replace("-", "−");
}

function place(axis, x, origin = "0") {
  if (axis === "time") return x < 1 ? `${number(x * 60, 3)} min` : `${number(x, 4)} h`;
  if (axis === "tokens") return `${number(x, 4)} M tokens`;
  if (axis === "chance") return `${number(x, 3)} % predicted`;
  if (axis === "crash") return `${number(Math.abs(Math.round(x)))} steps ${x < 0 ? "before" : "after"} the crash`;
  return `step ${whole(BigInt(origin) + BigInt(Math.round(x)))}`;
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(xs[low - 1] - x) <= Math.abs(xs[low] - x) ? low - 1 : low;
}

// Colours of a map: below its row's usual level, above it, and what was not finite.
const BELOW = "#0072b2", ABOVE = "#d55e00", BROKEN = "#cc79a7", FULL = 10;

function mixed(from, to, part) {
  const channel = (i) => {
    const [a, b] = [from, to].map((colour) => parseInt(colour.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * part).toString(16).padStart(2, "0");
  };
  return `#${channel(1)}${channel(3)}${channel(5)}`;
}

function dimmed(colour, alpha) {
  return alpha >= 1 ? colour : colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

// Steps are sent as distances.
function unpacked(panel) {
  for (const line of panel.lines) {
    let x = 0;
    line.x ??= line.dx.map((step) => (x += step));
  }
  return panel;
}

// One chart.

class Chart {
  constructor(board, host, height, bare) {
    Object.assign(this, { board, host, height, bare });
    host.addEventListener("mouseleave", () => board.leave(this));
  }

  // A chart that is out of sight is drawn when the browser has nothing else to do.
  update(panel, last) {
    this.pending = undefined;
    if (!this.plot || this.board.sees(this)) return this.draw(panel, last);
    this.pending = () => this.draw(panel, last);
    this.board.later(this);
  }

  draw(panel, last) {
    this.pending = undefined;
    unpacked(panel);
    const shape = JSON.stringify([panel.lines.map((line) => [line.colour, line.width, line.alpha, line.dash, line.fill, line.dots, !line.low]), panel.log, last, this.height, panel.cells?.names, panel.shades?.ticks, panel.right?.log, panel.right?.colour, this.board.data.ink, this.board.data.axis]);
    this.panel = panel;
    const tables = panel.cells ? [[panel.cells.starts, panel.cells.starts.map(() => null)]] : panel.lines.map((line) => (line.low ? [line.x, line.y, line.high, line.low] : [line.x, line.y]));
    // A place that another line has and this one has not is passed over (undefined); null is a break.
    const data = tables.length ? uPlot.join(tables) : [[]];
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
    const [min, max] = this.board.view(), [low, high] = this.panel.range;
    this.plot.batch(() => {
      this.plot.setScale("x", { min, max });
      this.plot.setScale("y", { min: low, max: high });
      if (this.panel.right) this.plot.setScale("right", { min: this.panel.right.range[0], max: this.panel.right.range[1] });
    });
  }

  // Lines as the library draws them: behind one with a shaded area its two ends, which are not drawn themselves.
  series() {
    const unseen = { width: 0, points: { show: false } }, side = (line) => (line.right ? { scale: "right" } : {});
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
    return this.panel.lines.flatMap((line) => {
      at += line.low ? 3 : 1;
      return line.low ? [{ series: [at - 1, at], fill: dimmed(line.colour, 0.15) }] : [];
    });
  }

  // Names of a map's rows, as many as there is room for.
  rows(names) {
    const every = Math.ceil((13 * names.length) / this.height);
    const size = Math.min(190, Math.max(90, this.host.clientWidth * 0.2)), letters = Math.floor(size / 6.2);
    const short = (name) => (name.length > letters ? `…${name.slice(1 - letters)}` : name);
    return {
      size,
      splits: () => names.map((_, i) => i + 0.5),
      values: () => names.map((name, i) => (i % every ? "" : short(name))),
      grid: { show: false },
    };
  }

  // Levels of a map of shades, which lie where its rows do.
  levels(ticks) {
    return { splits: () => ticks.map(([at]) => at), values: () => ticks.map(([, words]) => words), grid: { show: false } };
  }

  options(last) {
    const { board, panel } = this, ink = board.data.ink, names = panel.cells?.names;
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
        y: { auto: false, dir: names ? -1 : 1, distr: panel.log === 2 ? 4 : panel.log ? 3 : 1, range: (u, min, max) => [min, max] },
        ...(panel.right && { right: { auto: false, distr: panel.right.log === 2 ? 4 : panel.right.log ? 3 : 1, range: (u, min, max) => [min, max] } }),
      },
      axes: [
        { ...axis, show: last, size: 24, grid: { ...axis.grid, show: false }, values: (u, ticks) => ticks.map((tick) => (board.data.origin === "0" ? "" : "+") + number(tick, 4)), space: 70 },
        { ...axis, size: AXIS_PX, space: this.bare ? 22 : 30, values: (u, ticks, i, space, step) => ticks.map((tick) => (tick === null ? "" : number(tick, digits(ticks, step)))), ...(names && this.rows(names)), ...(panel.shades && this.levels(panel.shades.ticks)), ...(panel.right && { stroke: panel.lines[0].colour }) },
        ...(panel.right ? [{ ...axis, scale: "right", side: 1, stroke: panel.right.colour, size: AXIS_PX, space: 30, grid: { show: false }, values: (u, ticks, i, space, step) => ticks.map((tick) => (tick === null ? "" : number(tick, digits(ticks, step)))) }] : []),
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

  clicks(u) {
    let from = null;
    u.over.addEventListener("mousedown", (event) => { from = event.clientX; this.board.dragged = this; });
    u.over.addEventListener("click", (event) => {
      if (from === null || Math.abs(event.clientX - from) > 3) return;
      this.board.pinAt(u.posToVal(event.offsetX, "x"), event.detail);
    });
  }

  selected(u) {
    const low = u.posToVal(u.select.left, "x"), high = u.posToVal(u.select.left + u.select.width, "x"), wide = u.select.width >= 4;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (!wide || this.board.dragged !== this) return; // charts that are joined hear of it, too
    this.board.dragged = undefined;
    this.board.zoom([low, high]);
  }

  // Below the lines: the healthy range, the run's own level, and limits.
  under(u) {
    const { panel } = this, { ctx } = u, { left, top, width, height } = u.bbox, ink = this.board.data.ink;
    const y = (value) => Math.min(Math.max(u.valToPos(value, "y", true), top), top + height);
    ctx.save();
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

  // A heat map: the largest value of each range of steps divided by the usual value of its row.
  map(u) {
    const { cells } = this.panel, { ctx } = u, { left, top, width, height } = u.bbox, ink = this.board.data.ink;
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

  // A density map: the darker a cell, the larger its share of the column.
  shade(u) {
    const { starts, cells } = this.panel.shades, { ctx } = u, { left, top, width, height } = u.bbox;
    const rows = this.panel.shades.ends.length - 1;
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

  // Above the lines: marks at their steps, values that were not finite, and values beyond the range.
  over(u) {
    const { panel, board } = this, { ctx } = u, { left, top, width, height } = u.bbox, ink = board.data.ink, px = devicePixelRatio;
    const line = (x, colour, dashed, alpha) => {
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
    for (const mark of board.data.marks) {
      const concerned = !panel.family || !mark.families.length || mark.families.includes(panel.family);
      if (!mark.faint || concerned) line(mark.x, mark.colour, mark.dashed, concerned ? 0.75 : 0.2);
    }
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

  // Values of the panel at x: for each line the nearest measured point, and whether it was finite.
  at(x, y) {
    if (this.panel.cells) return this.cell(x, y);
    const reach = this.plot.posToVal(REACH_PX, "x") - this.plot.posToVal(0, "x");
    const found = [], column = this.panel.shades?.starts.findLastIndex((start) => start <= x) ?? -1;
    if (this.panel.shades) { // a map reports one column, not two near ones
      if (column < 0 || !this.panel.lines.some((line) => line.x.includes(this.panel.shades.starts[column]))) return [];
      x = this.panel.shades.starts[column];
    }
    for (const line of this.panel.lines) {
      if (line.mute || !line.x.length) continue;
      const i = this.present(line, nearest(line.x, x));
      if (i !== null) found.push({ name: line.name || this.panel.title, x: line.x[i], value: (line.told ?? line.y)[i], colour: line.colour });
    }
    if (this.panel.shades) found.reverse().push(...this.share(column, y)); // the highest quantile first, as they are drawn
    for (const [place_, value, name, colour] of this.panel.beyond) {
      if (Math.abs(place_ - x) <= reach) found.unshift({ name: name || this.panel.title, x: place_, value, colour: name ? colour : this.board.data.ink.text });
    }
    const own = found.length ? Math.abs(found[0].x - x) : Infinity;
    const bad = this.panel.bad.filter(([x_]) => Math.abs(x_ - x) <= Math.max(Math.min(own, reach), 1e-9));
    for (const [x_, word, name] of bad.reverse()) found.unshift({ name: name || this.panel.title, x: x_, word, colour: this.board.data.ink.bad });
    const seen = new Set();
    return found.filter(({ name }) => !seen.has(name) && seen.add(name));
  }

  cell(x, y) {
    const { names, starts, values, usual, bad } = this.panel.cells, row = Math.floor(y);
    const column = starts.findLastIndex((start) => start <= x), i = row * (starts.length - 1) + column;
    if (!names[row] || column < 0 || column >= starts.length - 1) return [];
    const found = { name: names[row], x: starts[column], colour: this.board.data.ink.text };
    if (bad.includes(i)) return [{ ...found, word: "NaN or Inf", colour: this.board.data.ink.bad }];
    if (values[i] === null) return [];
    return [{ ...found, value: values[i], note: usual[row] ? ` ${number(values[i] / usual[row], 3)} × usual` : "" }];
  }

  share(column, y) {
    const { starts, cells, most, ends } = this.panel.shades, row = Math.floor(y), rows = ends.length - 1;
    if (!this.board.over || row < 0 || row >= rows || column >= starts.length - 1) return [];
    const part = most * (cells[column * rows + row] / 100) ** 2;
    return [{ name: `${number(ends[row], 5)} to ${number(ends[row + 1], 5)}`, x: starts[column], colour: "transparent", word: `${part ? "≈ " : ""}${number(100 * part, 2)} %`, plain: true }];
  }

  present(line, i) {
    if (line.y[i] !== null) return i;
    for (const near of [i - 1, i + 1]) if (line.y[near] !== null && line.y[near] !== undefined) return near;
    return null;
  }

  // Draw the lines of the other runs pale; null: all as usual.
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
    const width = this.host.clientWidth, height = this.full ? Math.max(200, innerHeight - 110) : this.plot?.height;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}

// All charts of a page part.

class Board {
  constructor(host) {
    this.host = host;
    this.charts = new Map();
    this.opened = new Set(); // of the sections that a narrow page folds
    this.strip = el("div", "strip");
    this.lane = el("div", "lane");
    this.rest = el("div", "rest");
    this.tip = el("div", "tip");
    this.tip.hidden = true;
    this.note = el("div", "note");
    this.note.hidden = true;
    this.note.setAttribute("role", "dialog");
    this.strip.append(this.lane);
    this.study = el("div", "study");
    host.append(this.strip, this.rest, this.study, this.tip, this.note);
    host.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.note.hidden) return;
      event.stopPropagation(); // it lets go of no step as well
      this.note.hidden = true;
    });
    this.controls = el("div", "controls");
    this.chips = el("div", "chips");
    host.prepend(this.controls, this.chips);
    this.heard = (event) => this.key(event.detail);
    this.screen = () => this.screened();
    document.addEventListener("rlwatch-key", this.heard);
    document.addEventListener("fullscreenchange", this.screen);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(host);
    this.seen = new Set();
    this.watcher = new IntersectionObserver((all) => {
      for (const { target, isIntersecting } of all) {
        if (isIntersecting) this.seen.add(target); else this.seen.delete(target);
        if (isIntersecting) [...this.charts.values()].find(({ chart }) => chart.host === target)?.chart.pending?.();
      }
    }, { rootMargin: "200px" });
    this.waiting = new Set();
    this.unlisten = listen(() => this.given?.looks && this.relook());
  }

  sees(chart) { return this.seen.has(chart.host); }

  later(chart) {
    this.waiting.add(chart);
    this.idle ??= (globalThis.requestIdleCallback ?? setTimeout)((left) => {
      this.idle = undefined;
      for (const one of this.waiting) {
        this.waiting.delete(one);
        one.pending?.();
        if (this.waiting.size && left?.timeRemaining && left.timeRemaining() < 4) return void this.later(this.waiting.values().next().value);
      }
    });
  }

  // New rows of a live run are fetched by the browser, on the axis of steps.
  followed(looks) {
    this.unfollow?.();
    this.unfollow = undefined;
    if (!looks?.live || !looks.api || this.given.axis !== "step") return;
    const panels = () => everyPanel(this.given);
    let after = looks.after;
    this.unfollow = follow(looks.api, {
      names: () => panels().filter((panel) => panel.ends && !panel.made).map((panel) => panel.name),
      after: () => after,
      take: (reply) => {
        if (reply.attempt !== looks.attempt) return void this.ask({ kind: "anew" });
        const { given } = this, origin = BigInt(given.origin ?? "0"), last = Number(BigInt(reply.last_step ?? given.origin) - origin);
        if (reply.all) after = String(reply.next);
        let grew = false;
        for (const panel of panels()) grew = appended(unpacked(panel), reply, origin, (value) => number(value, 3)) || grew;
        if (!grew) return;
        if (given.window[1] >= given.whole[1]) given.window = [given.window[0], Math.max(last, given.window[1])];
        given.whole = [given.whole[0], Math.max(last, given.whole[1])];
        if (now().axis !== "step") rulersAgain(looks);
        if (this.exactly && Date.now() - this.exactly.at > RULER_MS) this.exactly.key = "";
        this.relook();
      },
    });
  }

  // Another view of the same numbers, drawn without the server.
  relook() {
    this.derive();
    this.paint();
    this.exactAgain();
  }

  // Smoothed lines of several runs are previews until the server has made them from every row.
  exactAgain() {
    const { looks } = this.given, { smooth, clip } = now(), wanted = `${smooth} ${clip}`;
    if (looks.api || this.anew === wanted || (smooth === looks.smooth && (smooth === "off" || clip === looks.clip))) return;
    this.anew = wanted;
    this.ask({ kind: "anew" });
  }

  // The drawn lines, from the data and the choices.
  derive() {
    const { given } = this;
    this.data = given.looks ? looked(given, now(), (wanted) => this.exact(wanted)) : given;
  }

  // Thinned lines are smoothed here at once and by the server, from every row, as soon as it answers.
  exact({ smooth, clip }) {
    const { looks, window } = this.given;
    if (!looks.api) return undefined;
    const names = everyPanel(this.given).filter(thinned).map(({ name }) => name);
    const key = JSON.stringify([smooth, clip, window[0], [...new Set(names)].sort()]), how = `${smooth} ${clip}`;
    if (!names.length || this.exactly?.key === key) return this.exactly?.curves;
    this.exactly = { key, how, at: Date.now(), curves: this.exactly?.how === how ? this.exactly.curves : undefined };
    const mine = this.exactly, origin = BigInt(this.given.origin ?? "0");
    const asked = new URLSearchParams([...new Set(names)].map((name) => ["metrics", name]));
    asked.set("smooth", smooth);
    asked.set("clip", String(clip));
    if (this.given.axis === "step") { asked.set("from", String(origin + BigInt(Math.round(window[0])))); asked.set("to", String(origin + BigInt(Math.round(window[1])))); }
    fetch(`${looks.api}/series?${asked}`).then((answer) => (answer.ok ? answer.json() : null)).then((reply) => {
      if (!reply || this.exactly !== mine) return;
      mine.curves = new Map(Object.entries(reply.series).map(([name, one]) => [name, { x: reply.rows[one.rows].steps.map((step) => Number(BigInt(step) - origin)), y: one.values.map((value) => (typeof value === "number" ? value : null)) }]));
      this.relook();
    }).catch(() => { this.exactly = undefined; });
    return mine.curves;
  }

  update(component) {
    this.ask = (what) => component.setTriggerValue("ask", { ...what, nonce: Date.now() });
    this.given = component.data;
    this.given.marks = this.given.marks ?? [];
    const { looks } = this.given;
    if (looks?.api) rulersOf(looks);
    this.followed(looks);
    this.derive();
    if (this.sent !== undefined && String(this.sent) === String(this.data.asked)) this.wanted = this.sent = undefined;
    if (this.wanted && (String(this.wanted) === String(this.data.asked) || Date.now() - this.since > PATIENCE_MS)) this.wanted = undefined;
    this.paint();
  }

  paint() {
    this.host.dataset.view = JSON.stringify(this.view());
    this.narrow = this.host.clientWidth < NARROW_PX;
    this.drawControls();
    this.drawChips();
    const kept = new Set();
    this.drawStrip(kept);
    this.drawSections(kept);
    for (const [key, { chart, node }] of this.charts) {
      if (kept.has(key)) continue;
      this.watcher.unobserve(chart.host);
      this.seen.delete(chart.host);
      this.waiting.delete(chart);
      chart.destroy();
      node.remove();
      this.charts.delete(key);
    }
    this.drawLane();
    this.tell();
    this.drawStudy();
  }

  // Settings against a result.
  drawStudy() {
    const { study, legend } = this.given, look = now();
    this.study.hidden = !study;
    if (!study) return;
    if (!this.study.firstChild) {
      const pick = (name, words) => {
        const both = el("span", "choice"), input = el("select"), label = el("span", "", words);
        input.name = name;
        input.setAttribute("aria-label", words);
        label.setAttribute("aria-hidden", "true");
        input.addEventListener("change", () => change({ [name]: input.value }));
        both.append(label, input);
        return both;
      };
      const heads = el("div", "chips");
      heads.append(pick("setting", "Setting"), pick("result", "Result"));
      this.study.append(el("h3", "", "Settings against the result"), heads, el("div", "pictures"));
    }
    for (const [name, columns] of [["setting", study.settings], ["result", study.results]]) {
      const input = this.study.querySelector(`select[name=${name}]`), names = columns.map((column) => column.name);
      if (String([...input.options].map((option) => option.value)) !== String(names)) {
        input.replaceChildren(...names.map((one) => { const option = el("option", "", one); option.value = one; return option; }));
      }
      input.value = names.includes(look[name]) ? look[name] : names[0];
    }
    drawStudy(this.study.querySelector(".pictures"), study, legend, look, this.given.ink);
  }

  // The range shown: a range just chosen until the server has it, else the server's.
  view() {
    return this.wanted === undefined ? this.data.window : this.wanted ?? this.data.whole;
  }

  // All boards of a run show the same range at once, before the server responds.
  zoom(range) {
    const asked = this.data.axis === "step" && range ? [Math.floor(range[0]), Math.max(Math.ceil(range[1]), Math.floor(range[0]) + 1)] : range;
    clearTimeout(this.clicked);
    this.sent = this.steps(asked);
    for (const board of ALL) if (board.data.key === this.data.key) board.show(asked);
    this.ask({ kind: "zoom", range: this.sent, ...(this.given.looks && { steps: true }) });
  }

  // Steps of positions, for the server, which does not know the chosen axis.
  steps(places) {
    const { looks } = this.given;
    if (!looks || this.data.axis === "step" || places === null) return places;
    const ruler = RULERS.get(looks.run)[this.data.axis], at = (x) => Math.round(interpolated(ruler.places, ruler.steps, x));
    return Array.isArray(places) ? places.map(at) : at(places);
  }

  show(range) {
    this.wanted = range;
    this.since = Date.now();
    this.host.dataset.view = JSON.stringify(this.view());
    for (const { chart } of this.charts.values()) {
      if (!chart.plot) continue;
      chart.rescale();
      if (chart !== this.over?.chart) chart.plot.setCursor({ left: -10, top: -10 }, false); // it points elsewhere now
    }
    this.drawLane();
    this.tell();
  }

  // A click keeps the tooltip at a place, another one there lets go; the second click of two is a zoom out.
  pinAt(x, count) {
    clearTimeout(this.clicked);
    if (count > 1) return;
    this.clicked = setTimeout(() => {
      const [low, high] = this.view(), close = this.data.at !== null && Math.abs(this.data.at - x) < (high - low) / 100;
      this.data.at = close ? null : x;
      for (const { chart } of this.charts.values()) chart.plot?.redraw(false);
      this.tell();
      if (this.given.looks) this.given.at = this.steps(this.data.at);
      this.ask({ kind: "at", x: this.steps(this.data.at), ...(this.given.looks && { steps: true }) });
    }, WAIT_MS);
  }

  holder(key, height, bare, parent, make, kept) {
    kept.add(key);
    let held = this.charts.get(key);
    if (!held) {
      const node = make(), host = node.querySelector(".chart");
      held = { node, chart: new Chart(this, host, height, bare) };
      this.watcher.observe(host);
      this.charts.set(key, held);
    }
    if (held.node.parentNode !== parent) parent.append(held.node);
    return held;
  }

  drawStrip(kept) {
    const narrow = this.host.clientWidth < NARROW_PX, many = this.data.strip ?? [];
    this.strip.hidden = !many.length;
    many.forEach((panel, i) => {
      const make = () => {
        const row = el("div", "row"), label = el("div", "label");
        label.append(el("span", "title"), el("span", "value"));
        row.append(label, el("div", "chart"));
        return row;
      };
      const { node, chart } = this.holder(`strip-${panel.name}`, narrow ? 76 : 62, true, this.strip, make, kept);
      this.strip.append(node);
      node.querySelector(".title").textContent = panel.title;
      node.querySelector(".label").title = [panel.sub, panel.about].filter(Boolean).join(": ");
      node.querySelector(".value").textContent = panel.last ?? "";
      node.querySelector(".value").className = panel.lastBad ? "value bad" : "value";
      node.setAttribute("role", "img");
      node.setAttribute("aria-label", `${panel.title} by ${this.data.axis}, last ${panel.last ?? "not recorded"}`);
      chart.update(panel, i === many.length - 1);
    });
  }

  // On a phone a page of many sections is a list of their names, but for what was starred or searched for.
  folds(section) {
    return this.host.clientWidth < NARROW_PX && this.data.sections.length > FEW && !["pinned", "found"].includes(section.key);
  }

  heading(node, section, folds, open) {
    const head = node.querySelector("h3");
    head.hidden = !section.title;
    if (!folds) return void (head.textContent = section.title);
    if (head.firstElementChild?.textContent !== section.title) {
      head.replaceChildren(button("fold", section.title, "", () => {
        if (!this.opened.delete(section.key)) this.opened.add(section.key);
        this.paint();
      }));
    }
    head.firstElementChild.setAttribute("aria-expanded", String(open));
  }

  drawSections(kept) {
    const nodes = (this.data.sections ?? []).map((section) => {
      const id = `section-${section.key}`;
      let node = this.rest.querySelector(`:scope > [data-section="${CSS.escape(id)}"]`);
      if (!node) {
        node = el("section");
        node.dataset.section = id;
        node.append(el("h3"), el("div", "grid"), el("div", "foot"));
        this.rest.append(node);
      }
      const folds = this.folds(section), open = !folds || this.opened.has(section.key);
      this.heading(node, section, folds, open);
      const grid = node.querySelector(".grid");
      const wide = section.panels.reduce((sum, panel) => sum + (panel.columns ?? 1), 0);
      node.style.setProperty("--columns", Math.min(Math.max(wide, 1), 3));
      node.style.setProperty("--span", section.span || Math.min(Math.max(wide, 1), 3));
      if (open) for (const panel of section.panels) this.drawPanel(section, panel, grid, kept);
      const foot = node.querySelector(".foot");
      foot.replaceChildren();
      if (!open) return node;
      if (section.more) {
        const label = section.open ? `hide ${section.more}` : `${section.more} more`;
        const open = button("more", label, `${label} charts of ${section.title}`, () => this.ask({ kind: "more", section: section.key }));
        open.setAttribute("aria-expanded", String(Boolean(section.open)));
        foot.append(open);
      }
      if (section.note) foot.append(el("span", "quiet", section.note));
      return node;
    });
    for (const node of [...this.rest.children]) if (!nodes.includes(node)) node.remove();
    nodes.forEach((node, i) => this.rest.children[i] !== node && this.rest.insertBefore(node, this.rest.children[i]));
  }

  drawPanel(section, panel, grid, kept) {
    const make = () => {
      const node = el("figure", "panel"), head = el("figcaption"), words = el("span", "words"), acts = el("span", "acts");
      words.append(el("span", "title"), el("span", "sub"));
      node.tabIndex = -1;
      acts.append(button("menu", "⋯", "", () => this.menu(node)));
      if (this.data.pins && !panel.cells) acts.append(button("pin", "", "", () => this.ask({ kind: "pin", name: node.dataset.pin || node.dataset.metric })));
      head.append(words, acts);
      node.append(head, el("div", "chart"), el("div", "legend"));
      return node;
    };
    const { node, chart } = this.holder(`${section.key}-${panel.pin ?? panel.name}`, panel.height, false, grid, make, kept);
    chart.height = panel.height;
    grid.append(node);
    node.dataset.metric = panel.name;
    if (panel.pin && !node.dataset.pin) this.movable(node);
    if (panel.pin) node.dataset.pin = panel.pin;
    node.style.gridColumn = panel.columns > 1 ? `span min(${panel.columns}, var(--columns))` : "";
    node.dataset.drawn = [...new Set(panel.lines.map((line) => line.place))].join(" ");
    node.querySelector(".title").textContent = panel.title;
    node.querySelector(".words").title = [panel.title, panel.about].filter(Boolean).join(": ");
    node.querySelector(".sub").textContent = [panel.sub, panel.scale].filter(Boolean).join(" · ");
    const menu = node.querySelector(".menu"), pin = node.querySelector(".pin");
    menu.title = `More of ${panel.title}`;
    menu.setAttribute("aria-label", menu.title);
    if (pin) {
      const label = `${panel.pinned ? "Unpin" : "Pin"} ${panel.title}`;
      pin.textContent = panel.pinned ? "★" : "☆";
      pin.title = label;
      pin.setAttribute("aria-label", label);
      pin.setAttribute("aria-pressed", String(Boolean(panel.pinned)));
    }
    const legend = node.querySelector(".legend"), named = this.data.look?.legend || panel.right ? panel.lines.filter((line) => !line.mute || line.name) : [];
    legend.replaceChildren(...named.map((line) => {
      const entry = el("span", ""), swatch = el("span", "swatch");
      swatch.style.background = line.colour;
      swatch.style.opacity = line.alpha ?? 1;
      entry.append(swatch, line.name || "measured");
      return entry;
    }));
    chart.update(panel, true);
  }

  // The switches, where the browser draws by itself.
  drawControls() {
    const { looks } = this.given, look = now();
    this.controls.hidden = !looks || Boolean(looks.api && !this.data.strip?.length && this.data.sections?.length);
    if (this.controls.hidden) return;
    if (!this.controls.firstChild) this.controls.append(...this.makeControls(looks));
    const rulers = RULERS.get(looks.run);
    for (const input of this.controls.querySelectorAll("select, input")) {
      if (input.type === "checkbox") input.checked = look[input.name];
      else input.value = look[input.name];
      for (const option of input.name === "axis" ? input.options : []) {
        option.disabled = option.value !== "step" && rulers?.[option.value] === null;
        option.textContent = option.disabled ? `${option.value} (not logged)` : option.value;
      }
    }
  }

  makeControls(looks) {
    const labelled = (input, words) => {
      if (input.type !== "checkbox") { // whose options would be part of its name
        const both = el("span", "choice");
        input.setAttribute("aria-label", words);
        both.append(el("span", "", words), input);
        both.firstChild.setAttribute("aria-hidden", "true");
        return both;
      }
      const label = el("label");
      label.append(input, words);
      return label;
    };
    const choice = (name, words, values) => {
      const input = el("select");
      input.name = name;
      input.append(...values.map((value) => { const option = el("option", "", value); option.value = value; return option; }));
      input.addEventListener("change", () => change({ [name]: input.value }));
      return labelled(input, words);
    };
    const turn = (name, words) => {
      const input = el("input");
      input.type = "checkbox";
      input.name = name;
      input.addEventListener("change", () => change({ [name]: input.checked }));
      return labelled(input, words);
    };
    const [axis, legend, side] = looks.api ? [choice("axis", "Axis", AXES), turn("legend", "Legend"), turn("side", "Details")] : [];
    return [axis, choice("smooth", "Smooth", looks.smooths), turn("log", "Log"), turn("clip", "Clip outliers"), legend, side].filter(Boolean);
  }

  // Runs of a comparison: a click hides one or shows it again, "only" hides the others, pointing at one makes the others pale.
  drawChips() {
    const { legend } = this.given, { hide, base } = now(), hidden = new Set(hide.split(",").filter(Boolean).map(Number));
    this.chips.hidden = !legend;
    if (!legend) return;
    const focused = this.chips.getRootNode().activeElement?.dataset?.at, put = (places) => change({ hide: places.sort((a, b) => a - b).join(",") });
    this.chips.replaceChildren(...legend.map((entry, at) => {
      const node = el("span", "chip"), swatch = el("span", "swatch"), others = legend.map((_, i) => i).filter((i) => i !== at);
      swatch.style.border = `2px ${entry.style} ${entry.colour}`;
      if (!entry.hollow) swatch.style.background = entry.colour;
      const turn = button("turn", "", `${hidden.has(at) ? "Show" : "Hide"} ${entry.name}`, () => put(hidden.has(at) ? [...hidden].filter((i) => i !== at) : [...hidden, at]));
      turn.append(swatch, el("span", "name", entry.name), ...(entry.note ? [el("span", "quiet", entry.note)] : []));
      turn.setAttribute("aria-pressed", String(!hidden.has(at)));
      turn.dataset.at = `turn-${at}`;
      const alone = !hidden.has(at) && others.every((i) => hidden.has(i));
      const only = button("only", alone ? "all" : "only", alone ? "Show all runs" : `Show only ${entry.name}`, () => put(alone ? [] : others));
      only.dataset.at = `only-${at}`;
      const light = (place) => () => { for (const { chart } of this.charts.values()) chart.highlight(place); };
      for (const event of ["mouseenter", "focusin"]) node.addEventListener(event, light(at));
      for (const event of ["mouseleave", "focusout"]) node.addEventListener(event, light(null));
      node.append(turn, ...(legend.length > 1 ? [only] : []));
      return node;
    }), ...(legend.length > 1 ? [this.baseChoice(legend, base)] : []));
    if (focused) this.chips.querySelector(`[data-at="${focused}"]`)?.focus();
  }

  baseChoice(legend, base) {
    const both = el("span", "choice"), input = el("select");
    input.name = "base";
    input.setAttribute("aria-label", "Difference to");
    for (const [value, words] of [["", "no difference"], ...legend.map((entry, at) => [String(at), entry.name])]) {
      const option = el("option", "", words);
      option.value = value;
      input.append(option);
    }
    input.value = Number(base) < legend.length ? base : "";
    input.addEventListener("change", () => change({ base: input.value }));
    const words = el("span", "", "Difference to");
    words.setAttribute("aria-hidden", "true");
    both.append(words, input);
    return both;
  }

  // What can be done with one chart.
  menu(node) {
    if (node.querySelector(".list")) return;
    const { chart } = [...this.charts.values()].find((held) => held.node === node), list = el("div", "list"), panel = chart.panel;
    const ink = { ...this.data.ink, ground: getComputedStyle(this.host).getPropertyValue("--st-background-color").trim() || "#ffffff" };
    const words = [panel.title, panel.sub].filter(Boolean).join(", "), origin = this.data.origin ?? "0", [low, high] = this.view();
    const shut = () => { // its removal takes the focus from it, which would remove it once more
      const within = list.contains(list.getRootNode().activeElement);
      list.inert = true;
      if (within) node.querySelector(".menu").focus();
      queueMicrotask(() => list.remove());
    };
    const put = (label, act) => list.append(button("act", label, "", () => { shut(); act(); }));
    put(chart.full ? "Leave full screen" : "Full screen", () => this.fill(node));
    put("Save as PNG", () => savePicture(chart.plot, panel, ink, words));
    for (const [label, pins] of panel.pin ? choices(this.data.pins, panel.pin) : []) put(label, () => this.ask({ kind: "arrange", names: pins }));
    if (!panel.cells && !panel.shades) {
      put("Save as SVG", () => saveDrawing(chart.plot, panel, ink, words));
      const api = this.given.looks?.api, rows = api && panel.ends && !panel.made;
      const steps = this.steps([low, high]).map((step) => String(BigInt(origin) + BigInt(Math.round(step))));
      put("Save as CSV", () => (rows ? saveRows(api, panel, steps).catch(() => saveDrawn(panel, this.data.axis, [low, high], origin)) : saveDrawn(panel, this.data.axis, [low, high], origin)));
    }
    list.addEventListener("keydown", (event) => {
      const acts = [...list.children], at = acts.indexOf(list.getRootNode().activeElement), way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (way) { event.preventDefault(); acts[(at + way + acts.length) % acts.length].focus(); }
      if (event.key === "Escape") { event.stopPropagation(); shut(); }
    });
    list.addEventListener("focusout", (event) => !list.contains(event.relatedTarget) && shut());
    node.append(list);
    list.firstChild.focus();
  }

  // A pinned chart is dragged by its head to the place of another.
  movable(node) {
    const head = node.querySelector("figcaption"), pins = () => this.data.pins ?? [];
    head.draggable = true;
    head.addEventListener("dragstart", (event) => { this.carried = node.dataset.pin; event.dataTransfer.effectAllowed = "move"; event.dataTransfer.setData("text/plain", node.dataset.pin); });
    head.addEventListener("dragend", () => { this.carried = undefined; });
    const over = (event) => { if (this.carried !== undefined && this.carried !== node.dataset.pin) event.preventDefault(); };
    node.addEventListener("dragenter", over);
    node.addEventListener("dragover", over);
    node.addEventListener("drop", (event) => {
      const from = pins().indexOf(this.carried), to = pins().indexOf(node.dataset.pin);
      if (from < 0 || to < 0) return;
      event.preventDefault();
      this.ask({ kind: "arrange", names: moved(pins(), from, to) });
    });
  }

  // One chart over the whole screen, drawn in its size.
  fill(node) {
    if (document.fullscreenElement) return void document.exitFullscreen();
    this.filled = [...this.charts.values()].find((held) => held.node === node);
    node.requestFullscreen().catch(() => {});
  }

  screened() {
    if (!this.filled) return;
    const { chart, node } = this.filled, root = node.getRootNode();
    chart.full = (root.fullscreenElement ?? document.fullscreenElement) === node;
    if (!chart.full) {
      this.filled = undefined;
      chart.plot?.setSize({ width: chart.host.clientWidth, height: chart.height + 24 });
    } else chart.resize();
  }

  // What a key asks of the charts: all steps, full screen, or to close what is open.
  key({ what, at }) {
    const mine = at && this.host.contains(at), figure = mine ? at.closest("figure") : null;
    if (what === "whole" && [...ALL].find((board) => board.data?.key === this.data?.key) === this) this.zoom(null);
    if (what === "full" && figure) this.fill(figure);
    if (what !== "close") return;
    this.note.hidden = true;
    for (const list of this.host.querySelectorAll(".list")) list.remove();
    if (this.data?.at !== null && this.data?.at !== undefined && (this.alone() || this.data.strip?.length)) this.pinAt(this.data.at, 1);
  }

  // Marks above the strip: one button each, those that would overlap under one.
  drawLane() {
    const first = this.charts.get(`strip-${this.data.strip?.[0]?.name}`)?.chart;
    const focused = this.lane.getRootNode().activeElement?.dataset?.steps;
    this.lane.replaceChildren();
    if (!first?.plot) return;
    const base = first.plot.over.getBoundingClientRect().left - this.lane.getBoundingClientRect().left;
    const [low, high] = this.view(), groups = [];
    const clickable = this.data.marks.filter((mark) => mark.shape && mark.x >= low && mark.x <= high).sort((a, b) => a.x - b.x);
    for (const mark of clickable) {
      const left = base + first.plot.valToPos(mark.x, "x"), group = groups.at(-1);
      if (group && left - group.left < MERGE_PX) group.marks.push(mark);
      else groups.push({ left, marks: [mark] });
    }
    for (const { left, marks } of groups) {
      const worst = marks.reduce((a, b) => (b.rank > a.rank ? b : a));
      const label = marks.length === 1 ? `${marks[0].text}, step ${whole(marks[0].step)}` : `${marks.length} marks: ${marks.map((mark) => mark.text).slice(0, 4).join(", ")}`;
      const node = button("mark", worst.shape + (marks.length > 1 ? `\u2009${marks.length}` : ""), label, () => this.follow(marks, left));
      node.style.left = `${left}px`;
      node.style.setProperty("--mark", worst.colour);
      node.dataset.steps = marks.map((mark) => mark.step).join(" ");
      this.lane.append(node);
      if (node.dataset.steps === focused) node.focus();
    }
  }

  // A mark with a page of its own links to it; other marks open their details.
  follow(marks, left) {
    if (marks.length === 1 && marks[0].go) {
      this.ask({ kind: "go", ...marks[0].go });
      return;
    }
    this.note.replaceChildren(button("close", "×", "Close", () => (this.note.hidden = true)));
    for (const mark of marks) {
      const item = el("div", "item"), head = el("div", "head");
      const shape = el("span", "shape", mark.shape);
      shape.style.color = mark.colour;
      head.append(shape, el("b", "", mark.text), el("span", "quiet", ` step ${whole(mark.step)}`));
      item.append(head);
      if (mark.more) item.append(el("div", "", mark.more));
      for (const [name, value] of mark.lines ?? []) item.append(el("div", "quiet", `${name} ${value}`));
      if (mark.go) item.append(button("more", mark.go.label, "", () => this.ask({ kind: "go", ...mark.go })));
      this.note.append(item);
    }
    this.note.hidden = false;
    const room = this.host.clientWidth - this.note.offsetWidth;
    this.note.style.left = `${Math.max(0, Math.min(left - 20, room))}px`;
    this.note.style.top = `${this.strip.offsetTop + 30}px`;
    this.note.querySelector("button").focus();
  }

  // The tooltip: exact values at the place under the mouse, else at the place that was clicked.
  hover(chart, u) {
    if (u.cursor.event === undefined || u.cursor.left < 0 || u.cursor.left === null) return;
    if (!chart.host.matches(":hover")) return;
    this.over = { chart, left: u.cursor.left, top: u.cursor.top };
    this.tell();
  }

  // Whether no strip of the same page shows the values at the clicked position.
  alone() {
    return ![...ALL].some((board) => board.data?.key === this.data.key && board.data.strip?.length);
  }

  leave(chart) {
    if (this.over?.chart === chart) this.over = undefined;
    this.tell();
  }

  tell() {
    const inStrip = (chart) => chart.bare;
    const first = this.alone() ? this.charts.values().next().value?.chart : this.charts.get(`strip-${this.data.strip?.[0]?.name}`)?.chart;
    const chart = this.over?.chart.plot ? this.over.chart : this.data.at === null ? undefined : first;
    if (!chart?.plot) return void (this.tip.hidden = true);
    const left = this.over ? this.over.left : chart.plot.valToPos(this.data.at, "x");
    const x = this.over ? chart.plot.posToVal(left, "x") : this.data.at;
    const [low, high] = this.view();
    if (x < low || x > high) return void (this.tip.hidden = true);
    const charts = inStrip(chart) ? [...this.charts.values()].map((held) => held.chart).filter(inStrip) : [chart];
    const y = this.over ? chart.plot.posToVal(this.over.top, "y") : 0;
    const at = chart.at(x, y)[0]?.x ?? x;
    const rows = charts.flatMap((one) => one.at(x, y).map((row) => ({ ...row, name: row.name || one.panel.title })));
    this.tip.replaceChildren(el("div", "where", place(this.data.axis, at, this.data.origin)));
    for (const row of rows) {
      const line = el("div", "line"), swatch = el("span", "swatch");
      swatch.style.background = row.colour;
      const away = Math.abs(row.x - at) > (high - low) * 1e-9 ? ` (${place(this.data.axis, row.x, this.data.origin)})` : "";
      line.append(swatch, el("span", "name", row.name), el("b", row.word && !row.plain ? "bad" : "", row.word ?? number(row.value)), el("span", "quiet", `${row.note ?? ""}${away}`));
      this.tip.append(line);
    }
    const near = (high - low) * (REACH_PX / chart.plot.over.clientWidth);
    for (const mark of this.data.marks.filter((one) => one.shape && Math.abs(one.x - x) <= near).slice(0, 4)) {
      const line = el("div", "line", ""), shape = el("span", "shape", mark.shape);
      shape.style.color = mark.colour;
      line.append(shape, el("span", "", mark.text));
      this.tip.append(line);
    }
    this.tip.hidden = false;
    const box = chart.plot.over.getBoundingClientRect(), home = this.host.getBoundingClientRect();
    const middle = box.left - home.left + left, right = middle + 14 + this.tip.offsetWidth > home.width;
    this.tip.style.left = `${Math.max(0, right ? middle - 14 - this.tip.offsetWidth : middle + 14)}px`;
    this.tip.style.top = `${box.top - home.top + (inStrip(chart) ? 0 : 8)}px`;
  }

  resize() {
    if (this.data && this.host.clientWidth && this.narrow !== this.host.clientWidth < NARROW_PX) this.paint(); // it was turned
    for (const { chart } of this.charts.values()) {
      if (this.sees(chart)) chart.resize();
      else { // when it comes in sight, or there is nothing else to do
        const drawn = chart.pending;
        chart.pending = () => { chart.pending = undefined; chart.resize(); drawn?.(); };
        this.later(chart);
      }
    }
    if (this.data) { this.drawLane(); this.tell(); this.drawStudy(); }
  }

  destroy() {
    ALL.delete(this);
    document.removeEventListener("rlwatch-key", this.heard);
    document.removeEventListener("fullscreenchange", this.screen);
    this.unlisten();
    this.unfollow?.();
    this.watcher.disconnect();
    this.observer.disconnect();
    for (const { chart } of this.charts.values()) chart.destroy();
  }
}

// Redraw with other choices.

const RULERS = new Map();

// Positions on the other axes are requested once the charts are drawn, and again once the run is a tenth longer.
function rulersOf(looks) {
  const held = RULERS.get(looks.run);
  if (held) return;
  RULERS.set(looks.run, undefined);
  const wanted = now().axis !== "step", ask = () => fetch(`${looks.api}/axes`).then((answer) => (answer.ok ? answer.json() : Promise.reject(answer.status))).then((reply) => {
    RULERS.set(looks.run, reply);
    for (const board of ALL) if (board.given?.looks?.run === looks.run) board.relook();
  }).catch(() => RULERS.delete(looks.run));
  if (wanted) ask(); else (globalThis.requestIdleCallback ?? setTimeout)(ask);
}

// On another axis new rows have positions once these are fetched again, at most every few seconds.
const RULER_MS = 10000;
function rulersAgain(looks) {
  const held = RULERS.get(looks.run);
  if (!held || Date.now() - (held.at ?? 0) < RULER_MS) return;
  held.at = Date.now();
  fetch(`${looks.api}/axes`).then((answer) => (answer.ok ? answer.json() : Promise.reject(answer.status))).then((reply) => {
    RULERS.set(looks.run, { ...reply, at: Date.now() });
    for (const board of ALL) if (board.given?.looks?.run === looks.run) board.relook();
  }).catch(() => {});
}

// Whether a line may hold fewer points than there are rows: the server draws two of each stretch at most.
function thinned(panel) {
  return Boolean(panel.ends) && !panel.made && panel.lines[0]?.y?.length > 240;
}

// All charts as the server sent them; two in one are two.
function everyPanel(given) {
  return [...(given.strip ?? []), ...(given.sections ?? []).flatMap((section) => section.panels)].flatMap((panel) => panel.pair ?? [panel]);
}

// Two metrics on one chart: the second has its axis on the right.
const SECOND = { light: "#B34700", dark: "#F0824A" };

function paired(panel, [left, right], ink) {
  const colour = parseInt(ink.text.slice(1, 3), 16) > 127 ? SECOND.dark : SECOND.light;
  const own = (one, more) => one.lines.map((line) => ({ ...line, ...more, name: line.name === "smoothed" ? `${one.title}, smoothed` : line.mute ? line.name : one.title }));
  const bad = [left, right].flatMap((one) => one.bad.map(([x, word]) => [x, word, one.title]));
  return {
    ...panel, lines: [...own(left, {}), ...own(right, { colour, right: true })], range: left.range, log: left.log, beyond: left.beyond, bad, band: null, rules: [],
    scale: [left.scale, right.scale].filter(Boolean).join(", "), right: { range: right.range, log: right.log, colour },
  };
}

const SCALES = ["", "log scale", "log scale, both ways"];

function looked(given, look, exact) {
  const rulers = RULERS.get(given.looks.run), own = given.axis === "step" ? null : rulers?.[given.axis];
  const axis = rulers?.[look.axis] ? look.axis : own || given.axis === "step" ? "step" : given.axis;
  const ruler = axis === "step" ? null : rulers[axis];
  const step = (x) => (own ? interpolated(own.places, own.steps, x) : x);
  const at = axis === given.axis ? (x) => x : ruler ? (x) => interpolated(ruler.steps, ruler.places, step(x)) : (x) => Math.round(step(x));
  const curves = look.smooth === "off" ? undefined : exact(look);
  const panelOf = (panel) => {
    if (panel.pair) return paired(panel, panel.pair.map(panelOf), given.ink);
    const lines = unpacked(panel).lines, [first, ...others] = lines;
    if (given.legend && first) {
      const made = overlaid(panel, look, given.looks, given.legend[Number(look.base)]?.name ?? ""), [low, high] = made.range;
      const beyond = made.lines.flatMap((line) => line.x.flatMap((x, i) => (line.y[i] !== null && (line.y[i] < low || line.y[i] > high) ? [[x, line.y[i], line.name, line.colour]] : [])));
      const drawn = new Set(made.lines.map(({ name }) => name));
      return { ...panel, ...made, beyond, bad: panel.bad.filter(([, , name]) => drawn.has(name)), scale: SCALES[made.log] };
    }
    let drawn = lines, range = panel.range, log = panel.log;
    if (panel.ends && first) {
      const [low, high, scale] = panel.ends[2 * look.log + !look.clip], old = others.filter((line) => line.name !== "smoothed");
      [range, log] = [[low, high], scale];
      if (look.smooth === "off") drawn = [{ ...first, width: 1.5, alpha: 1 }, ...old];
      else {
        const steps = first.x.map(step), served = curves?.get(panel.name);
        const curve = served ? { x: served.x.map((x) => (own ? interpolated(own.steps, own.places, x) : x)), y: served.y }
          : { x: first.x, y: smoothed(steps, first.y, look.smooth, look.clip ? panel.usual : null, spacing(steps)) };
        drawn = [{ ...first, width: 1, alpha: 0.35 }, { ...first, ...curve, name: "smoothed", width: 1.8, alpha: 1 }, ...old];
      }
    }
    if (axis !== given.axis) drawn = drawn.map((line) => ({ ...line, x: line.x.map(at) }));
    const [low, high] = range;
    const beyond = !panel.ends ? panel.beyond.map(([x, ...rest]) => [at(x), ...rest])
      : drawn.flatMap((line) => (line.mute ? [] : line.x.flatMap((x, i) => (line.y[i] !== null && (line.y[i] < low || line.y[i] > high) ? [[x, line.y[i], line.name, line.colour]] : []))));
    return {
      ...panel, lines: drawn, range, log, beyond,
      scale: SCALES[log] ?? "",
      bad: panel.bad.map(([x, ...rest]) => [at(x), ...rest]),
      ...(panel.cells && { cells: { ...panel.cells, starts: panel.cells.starts.map(at) } }),
      ...(panel.shades && { shades: { ...panel.shades, starts: panel.shades.starts.map(at) } }),
    };
  };
  const ends = (pair) => { const [low, high] = pair.map(at); return [low, high > low ? high : low + 1]; };
  return {
    ...given, axis, look,
    window: ends(given.window), whole: ends(given.whole), at: given.at === null ? null : at(given.at),
    marks: given.marks.map((mark) => ({ ...mark, x: at(mark.x) })),
    strip: given.strip?.map(panelOf),
    sections: given.sections?.map((section) => ({ ...section, panels: section.panels.map(panelOf) })),
  };
}

const BOARDS = new WeakMap(), ALL = new Set();

function draw(component) {
  const { parentElement } = component;
  let board = BOARDS.get(parentElement);
  if (!board) {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(STYLE);
    parentElement.adoptedStyleSheets = [sheet];
    const host = el("div", "board");
    parentElement.append(host);
    board = new Board(host);
    BOARDS.set(parentElement, board);
    ALL.add(board);
  }
  board.update(component);
}

globalThis.rlwatchBoards = { draw, drop: (root) => (BOARDS.get(root)?.destroy(), BOARDS.delete(root)) };
for (const [, component] of globalThis.rlwatchWaiting ?? []) draw(component);
globalThis.rlwatchWaiting = new Map();
tell();

