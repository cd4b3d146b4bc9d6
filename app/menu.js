// @ts-check
// What can be done with one chart: the list behind its menu button.
import { choices } from "./arrange.js";
import { button, el, focusedWith, within } from "./nodes.js";
import { saveDrawing, saveDrawn, savePicture, saveRows } from "./save.js";

/** @typedef {import("./board.js").Board} Board */
/** @typedef {import("./chart.js").Chart} Chart */

/**
 * Open the list.
 * @param {Board} board
 * @param {HTMLElement} node  the figure of the chart
 * @param {Chart} chart
 */
export function openMenu(board, node, chart) {
  const { panel, plot } = chart;
  if (node.querySelector(".list") || !plot) return;
  const list = el("div", "list");
  const ink = { ...board.data.ink, ground: getComputedStyle(board.host).getPropertyValue("--st-background-color").trim() || "#ffffff" };
  const words = [panel.title, panel.sub].filter(Boolean).join(", "), origin = board.data.origin ?? "0", view = board.view();
  const shut = () => { // its removal takes the focus from it, which would remove it once more
    const inside = list.contains(focusedWith(list));
    list.inert = true;
    if (inside) within(node, ".menu").focus();
    queueMicrotask(() => list.remove());
  };
  const put = (/** @type {string} */ label, /** @type {() => unknown} */ act) => list.append(button("act", label, "", () => { shut(); act(); }));
  put(chart.full ? "Leave full screen" : "Full screen", () => board.fill(node));
  for (const [label, pins] of panel.pin ? choices(board.data.pins ?? [], panel.pin) : []) put(label, () => board.ask({ kind: "arrange", names: pins }));
  put("Save as PNG", () => savePicture(plot, panel, ink, words));
  if (!panel.cells && !panel.shades) {
    put("Save as SVG", () => saveDrawing(plot, panel, ink, words));
    const api = panel.ends && !panel.made ? board.given.looks?.api : undefined, drawn = () => saveDrawn(panel, board.data.axis, view, origin);
    const [low, high] = board.steps(view).map((step) => String(BigInt(origin) + BigInt(Math.round(step))));
    put("Save as CSV", () => (api ? saveRows(api, panel, [low, high]).catch(drawn) : drawn()));
  }
  list.addEventListener("keydown", (event) => {
    const acts = /** @type {HTMLElement[]} */ ([...list.children]), at = acts.findIndex((act) => act === focusedWith(list));
    const way = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (way) { event.preventDefault(); acts[(at + way + acts.length) % acts.length].focus(); }
    if (event.key === "Escape") { event.stopPropagation(); shut(); }
  });
  list.addEventListener("focusout", (event) => { if (!(event.relatedTarget instanceof Node && list.contains(event.relatedTarget))) shut(); });
  node.append(list);
  within(list, "button").focus();
}
