// @ts-check
// The tooltip: exact values at the position under the mouse, else at the position that was clicked.
import { el } from "./nodes.js";
import { FULL, number, place } from "./numbers.js";

/** @typedef {import("./board.js").Board} Board */
/** @typedef {import("./chart.js").Chart} Chart */
/** @typedef {import("./shapes.js").Value} Value */

export const REACH_PX = 6;
const MOST_MARKS = 4, AWAY_PX = 14;

/**
 * Return one value as a row; one at another position than the tooltip's names it.
 * @param {Board} board
 * @param {Value} row
 * @param {boolean} away
 */
function valueRow({ data }, row, away) {
  const line = el("div", "line"), swatch = el("span", "swatch");
  swatch.style.background = row.colour;
  const elsewhere = away ? ` (${place(data.axis, row.x, data.origin)})` : "";
  const text = row.word ?? number(row.value ?? null, FULL);
  line.append(swatch, el("span", "name", row.name), el("b", row.word && !row.plain ? "bad" : "", text), el("span", "quiet", `${row.note ?? ""}${elsewhere}`));
  return line;
}

/**
 * Draw the tooltip, or hide it.
 * @param {Board} board
 */
export function drawTip(board) {
  const { data, over, tip, host } = board, all = [...board.charts.values()].map((held) => held.chart);
  const first = board.alone() ? all[0] : board.charts.get(`strip-${data.strip?.[0]?.name}`)?.chart;
  const chart = over?.chart.plot ? over.chart : data.at === null ? undefined : first, plot = chart?.plot;
  tip.hidden = true;
  if (!chart || !plot) return;
  const left = over ? over.left : plot.valToPos(data.at ?? 0, "x"), x = over ? plot.posToVal(left, "x") : data.at ?? 0;
  const [low, high] = board.view();
  if (x < low || x > high) return;
  const charts = chart.bare ? all.filter((one) => one.bare) : [chart], y = over ? plot.posToVal(over.top, "y") : 0;
  const at = chart.at(x, y)[0]?.x ?? x;
  const named = (/** @type {string} */ title, /** @type {string} */ name) => (charts.length > 1 && name && name !== title ? `${title}, ${name}` : name || title);
  const rows = charts.flatMap((one) => one.at(x, y).map((row) => ({ ...row, name: named(one.panel.title, row.name) })));
  tip.replaceChildren(el("div", "where", place(data.axis, at, data.origin)), ...rows.map((row) => valueRow(board, row, Math.abs(row.x - at) > (high - low) * 1e-9)));
  const near = (high - low) * (REACH_PX / plot.over.clientWidth);
  for (const mark of data.marks.filter((one) => one.shape && Math.abs(one.x - x) <= near).slice(0, MOST_MARKS)) {
    const line = el("div", "line"), shape = el("span", "shape", mark.shape);
    shape.style.color = mark.colour;
    line.append(shape, el("span", "", mark.text));
    tip.append(line);
  }
  tip.hidden = false;
  const box = plot.over.getBoundingClientRect(), home = host.getBoundingClientRect();
  const middle = box.left - home.left + left, right = middle + AWAY_PX + tip.offsetWidth > home.width;
  tip.style.left = `${Math.max(0, right ? middle - AWAY_PX - tip.offsetWidth : middle + AWAY_PX)}px`;
  tip.style.top = `${box.top - home.top + (chart.bare ? 0 : 8)}px`;
}
