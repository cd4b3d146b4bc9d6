// @ts-check
// Settings of several runs against a result: one point for each run, and one line for each run over all settings.

import { choice, option } from "./controls.js";
import { now } from "./look.js";
import { el, within } from "./nodes.js";
import { number } from "./numbers.js";

/** @typedef {{name: string, values: (number | string | null)[]}} Column */
/** @typedef {{names: string[], places: number[], settings: Column[], results: Column[]}} Study */
/** @typedef {import("./shapes.js").Ink} Ink */
/** @typedef {import("./shapes.js").LegendEntry} LegendEntry */
/** @typedef {{at: (value: number | string | null) => number | null, ticks: [number, string][]}} Scale */

const SPACE = "http://www.w3.org/2000/svg", HIGH = 250, PAD = { left: 58, right: 20, top: 26, bottom: 42 }, MOST_AXES = 12, FAR = 50;

/**
 * @param {Element} into
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {string} [text]
 */
function put(into, tag, attributes, text) {
  const node = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  if (text !== undefined) node.textContent = text;
  into.append(node);
  return node;
}

/** @param {string} text @param {number} most */
function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
}

/**
 * Return positions of a column's values between two ends: by size, by the logarithm where they lie far apart, or by name.
 * @param {Column} column
 * @param {number} low
 * @param {number} high
 * @returns {Scale}
 */
export function scale(column, low, high) {
  const given = column.values.filter((value) => value !== null), numbers = /** @type {number[]} */ (given.filter((value) => typeof value === "number"));
  if (!given.length || numbers.length < given.length) {
    const names = [...new Set(given.map(String))].sort(), place = (/** @type {number} */ i) => (names.length > 1 ? low + ((high - low) * i) / (names.length - 1) : (low + high) / 2);
    return { at: (value) => (value === null ? null : place(names.indexOf(String(value)))), ticks: names.map((name, i) => [place(i), name]) };
  }
  const least = Math.min(...numbers), most = Math.max(...numbers), log = least > 0 && most / least >= FAR;
  const of = log ? Math.log : (/** @type {number} */ value) => value, [a, b] = [of(least), of(most)];
  const at = (/** @type {number} */ value) => (b > a ? low + ((high - low) * (of(value) - a)) / (b - a) : (low + high) / 2);
  const different = [...new Set(numbers)].sort((one, other) => one - other);
  const shown = different.length <= 5 ? different : [least, log ? Math.sqrt(least * most) : (least + most) / 2, most];
  return { at: (value) => (typeof value === "number" ? at(value) : null), ticks: shown.map((value) => [at(value), number(value)]) };
}

/**
 * Return the ticks that fit, the ends first.
 * @param {[number, string][]} ticks
 * @param {number} gap  least distance in pixels
 */
function apart(ticks, gap) {
  /** @type {[number, string][]} */
  const kept = [];
  for (const tick of [ticks[0], ticks[ticks.length - 1], ...ticks.slice(1, -1)]) if (tick && kept.every(([at]) => Math.abs(at - tick[0]) >= gap)) kept.push(tick);
  return kept;
}

/**
 * @param {Study} study
 * @param {LegendEntry[]} legend
 * @param {Set<number>} hidden
 */
function shown(study, legend, hidden) {
  return study.names.map((name, run) => ({ name, run, place: study.places[run], colour: legend[study.places[run]]?.colour ?? "#888" })).filter(({ place }) => !hidden.has(place));
}

/**
 * Draw the part of a page with the two pictures, and the choice of what they show.
 * @param {HTMLElement} host
 * @param {Study} study
 * @param {LegendEntry[]} legend
 * @param {Ink} ink
 */
export function showStudy(host, study, legend, ink) {
  const look = now();
  if (!host.firstChild) {
    const heads = el("div", "chips");
    heads.append(choice("setting", "Setting", []), choice("result", "Result", []));
    host.append(el("h3", "", "Settings against the result"), heads, el("div", "pictures"));
  }
  const choices = /** @type {[string, Column[], string][]} */ ([["setting", study.settings, look.setting], ["result", study.results, look.result]]);
  for (const [name, columns, chosen] of choices) {
    const input = /** @type {HTMLSelectElement} */ (within(host, `select[name=${name}]`)), names = columns.map((column) => column.name);
    if (String([...input.options].map((one) => one.value)) !== String(names)) input.replaceChildren(...names.map((one) => option(one)));
    input.value = names.includes(chosen) ? chosen : names[0];
  }
  drawStudy(within(host, ".pictures"), study, legend, look, ink);
}

/**
 * Draw both pictures.
 * @param {HTMLElement} host
 * @param {Study} study
 * @param {LegendEntry[]} legend
 * @param {{hide: string, setting: string, result: string}} look
 * @param {{grid: string, quiet: string, text: string}} ink
 */
export function drawStudy(host, study, legend, look, ink) {
  const hidden = new Set(look.hide.split(",").filter(Boolean).map(Number)), runs = shown(study, legend, hidden);
  const setting = study.settings.find(({ name }) => name === look.setting) ?? study.settings[0], result = study.results.find(({ name }) => name === look.result) ?? study.results[0];
  const svg = (/** @type {number} */ width, /** @type {string} */ label) => {
    const node = document.createElementNS(SPACE, "svg");
    for (const [name, value] of Object.entries({ width, height: HIGH, viewBox: `0 0 ${width} ${HIGH}`, role: "img", "aria-label": label, "font-size": 11 })) node.setAttribute(name, String(value));
    return node;
  };
  const whole = Math.max(host.clientWidth, 280), narrow = whole < 700, first = narrow ? whole : Math.min(380, whole * 0.35), second = narrow ? whole : whole - first - 24;
  const scatter = svg(first, `${result.name} by ${setting.name}`), x = scale(setting, PAD.left + 14, first - PAD.right - 14), y = scale(result, HIGH - PAD.bottom - 8, PAD.top + 8);
  for (const [at, text] of apart(y.ticks, 13)) {
    put(scatter, "line", { x1: PAD.left, x2: first - PAD.right, y1: at, y2: at, stroke: ink.grid });
    put(scatter, "text", { x: PAD.left - 6, y: at + 4, fill: ink.quiet, "text-anchor": "end" }, text);
  }
  for (const [at, text] of apart(x.ticks, 60)) put(scatter, "text", { x: at, y: HIGH - PAD.bottom + 18, fill: ink.quiet, "text-anchor": "middle" }, cut(text, 14));
  put(scatter, "text", { x: PAD.left, y: 13, fill: ink.text }, cut(`${result.name}, end of the run`, Math.floor(first / 7)));
  put(scatter, "text", { x: first - PAD.right, y: HIGH - 6, fill: ink.text, "text-anchor": "end" }, cut(setting.name, Math.floor(first / 7)));
  for (const { name, run, colour } of runs) {
    const [at, high] = [x.at(setting.values[run]), y.at(result.values[run])];
    if (at === null || high === null) continue;
    const dot = put(scatter, "circle", { cx: at, cy: high, r: 5, fill: colour, "fill-opacity": 0.75, stroke: colour });
    put(dot, "title", {}, `${name}: ${setting.name} ${setting.values[run]}, ${result.name} ${result.values[run]}`);
  }
  const columns = [...study.settings.slice(0, MOST_AXES), result], lines = svg(second, `${columns.length - 1} settings and ${result.name} of each run`);
  const place = (/** @type {number} */ i) => 40 + ((second - 100) * i) / Math.max(columns.length - 1, 1);
  const scales = columns.map((column) => scale(column, HIGH - PAD.bottom, PAD.top + 8));
  columns.forEach((column, i) => {
    put(lines, "line", { x1: place(i), x2: place(i), y1: PAD.top, y2: HIGH - PAD.bottom + 8, stroke: ink.quiet, "stroke-width": i === columns.length - 1 ? 2 : 1 });
    const label = put(lines, "text", { x: place(i), y: i % 2 ? HIGH - 6 : HIGH - 20, fill: ink.text, "text-anchor": "middle" }, cut(column.name, 22));
    put(label, "title", {}, column.name);
  });
  for (const { name, run, colour } of runs) {
    const points = columns.map((column, i) => [place(i), scales[i].at(column.values[run])]);
    let path = "", pen = "M";
    for (const [at, high] of points) {
      if (high === null) pen = "M";
      else { path += `${pen}${at} ${high}`; pen = "L"; }
    }
    const line = put(lines, "path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-opacity": 0.75 });
    put(line, "title", {}, `${name}: ${columns.map((column) => `${column.name} ${column.values[run] ?? "none"}`).join(", ")}`);
  }
  columns.forEach((_, i) => {
    for (const [at, text] of apart(scales[i].ticks, 13)) put(lines, "text", { x: place(i) + 5, y: at + 4, fill: ink.quiet, class: "tick" }, cut(text, 14));
  });
  host.replaceChildren(scatter, lines);
}
