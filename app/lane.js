// @ts-check
// The strip of marks, and the details that a click on one opens.
import { button, el, focusedWith, within } from "./nodes.js";
import { whole } from "./numbers.js";

/** @typedef {import("./board.js").Board} Board */
/** @typedef {import("./shapes.js").Mark} Mark */
/** @typedef {{left: number, marks: Mark[]}} Group */

const MERGE_PX = 15, NAMED = 4;

/** @typedef {{from: number, to: number, colour: string, rank: number}} Stretch  from an onset until all was resolved */

/**
 * Return the stretches in which alarms that concern a family fired; those that overlap are one, from the first onset.
 * @param {Mark[]} marks
 * @param {string} family  empty: of all
 * @returns {Stretch[]}
 */
export function stretches(marks, family) {
  /** @type {Stretch[]} */
  const found = [];
  const onsets = marks.filter((mark) => mark.dashed && (!family || !mark.families.length || mark.families.includes(family)));
  for (const { x, until, colour, rank } of onsets.sort((a, b) => a.x - b.x)) {
    const last = found.at(-1), to = until ?? Infinity;
    if (!last || x > last.to) found.push({ from: x, to, colour, rank });
    else Object.assign(last, { to: Math.max(last.to, to), ...(rank > last.rank && { colour, rank }) });
  }
  return found;
}

/**
 * Draw one button for each mark above the strip, and one for those that would overlap.
 * @param {Board} board
 */
export function drawLane(board) {
  const { lane } = board, plot = board.charts.get(`strip-${board.data.strip?.[0]?.name}`)?.chart.plot, focused = focusedWith(lane)?.dataset.steps;
  lane.replaceChildren();
  if (!plot) return;
  const base = plot.over.getBoundingClientRect().left - lane.getBoundingClientRect().left, [low, high] = board.view();
  /** @type {Group[]} */
  const groups = [];
  const clickable = board.data.marks.filter((mark) => mark.shape && mark.x >= low && mark.x <= high).sort((a, b) => a.x - b.x);
  for (const mark of clickable) {
    const left = base + plot.valToPos(mark.x, "x"), group = groups.at(-1);
    if (group && left - group.left < MERGE_PX) group.marks.push(mark);
    else groups.push({ left, marks: [mark] });
  }
  for (const { left, marks } of groups) {
    const worst = marks.reduce((a, b) => (b.rank > a.rank ? b : a));
    const label = marks.length === 1 ? `${marks[0].text}, step ${whole(marks[0].step)}` : `${marks.length} marks: ${marks.map((mark) => mark.text).slice(0, NAMED).join(", ")}`;
    const node = button("mark", worst.shape + (marks.length > 1 ? `\u2009${marks.length}` : ""), label, () => open(board, marks, left));
    node.style.left = `${left}px`;
    node.style.setProperty("--mark", worst.colour);
    for (const event of ["mouseenter", "focus"]) node.addEventListener(event, () => board.point(worst.x));
    for (const event of ["mouseleave", "blur"]) node.addEventListener(event, () => board.point(null));
    node.dataset.steps = marks.map((mark) => mark.step).join(" ");
    lane.append(node);
    if (node.dataset.steps === focused) node.focus();
  }
}

/**
 * Follow the link of a mark that has a page of its own; other marks open their details.
 * @param {Board} board
 * @param {Mark[]} marks
 * @param {number} left
 */
function open(board, marks, left) {
  if (marks.length === 1 && marks[0].go) {
    board.ask({ kind: "go", ...marks[0].go });
    return;
  }
  const { note } = board;
  note.replaceChildren(button("close", "×", "Close", () => (note.hidden = true)));
  for (const mark of marks) {
    const item = el("div", "item"), head = el("div", "head"), shape = el("span", "shape", mark.shape), { go } = mark;
    shape.style.color = mark.colour;
    head.append(shape, el("b", "", mark.text), el("span", "quiet", ` step ${whole(mark.step)}`));
    item.append(head);
    if (mark.more) item.append(el("div", "", mark.more));
    for (const [name, value] of mark.lines ?? []) item.append(el("div", "quiet", `${name} ${value}`));
    if (go) item.append(button("more", go.label, "", () => board.ask({ kind: "go", ...go })));
    note.append(item);
  }
  note.hidden = false;
  const most = board.host.clientWidth - note.offsetWidth;
  note.style.left = `${Math.max(0, Math.min(left - 20, most))}px`;
  note.style.top = `${board.strip.offsetTop + 30}px`;
  within(note, "button").focus();
}
