// @ts-check
// A chart as a file: a picture (PNG), a drawing (SVG) or a table (CSV). Nothing leaves the browser.

/** @typedef {import("./shapes.js").Panel} Panel */

const HEAD_PX = 24, FONT = "11px sans-serif";

/**
 * Save text or bytes under a name.
 * @param {Blob} blob
 * @param {string} name
 */
function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/**
 * Return a file name without characters that a system refuses.
 * @param {string[]} parts
 */
export function fileName(...parts) {
  return parts.filter(Boolean).join("-").replace(/[^\p{L}\p{N}._-]+/gu, "_").slice(0, 120) || "chart";
}

/**
 * Return a cell of a CSV file; a spreadsheet must not take a name for a formula.
 * @param {string | number | null | undefined} value
 */
export function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * Return a table of the drawn points within the range: one column for each line.
 * @param {Panel} panel
 * @param {string} axis
 * @param {[number, number]} view
 * @param {string} origin
 */
export function drawnTable(panel, axis, view, origin) {
  /** @type {Map<number, (number | string | null)[]>} */
  const rows = new Map();
  const put = (/** @type {number} */ x, /** @type {number} */ at, /** @type {number | string} */ value) => {
    if (x < view[0] || x > view[1]) return;
    const row = rows.get(x) ?? panel.lines.map(() => null);
    row[at] = value;
    rows.set(x, row);
  };
  panel.lines.forEach((line, at) => {
    line.x.forEach((x, i) => { const y = line.y[i]; if (y !== null && y !== undefined) put(x, at, y); });
    for (const [x, word, name] of panel.bad) if (name === line.name && !line.smooth) put(x, at, word);
  });
  const first = (/** @type {number} */ x) => (axis === "step" ? String(BigInt(origin) + BigInt(Math.round(x))) : x);
  const head = [axis, ...panel.lines.map((line) => (line.name ? `${line.name}` : panel.title) + (line.smooth ? " (smoothed)" : ""))];
  const body = [...rows].sort(([a], [b]) => a - b).map(([x, values]) => [first(x), ...values]);
  return `${[head, ...body].map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

/**
 * Save every measured row within the range, from the server.
 * @param {string} api
 * @param {Panel} panel
 * @param {[string, string]} steps
 */
export async function saveRows(api, panel, steps) {
  const asked = new URLSearchParams([["metrics", panel.name], ["from", steps[0]], ["to", steps[1]], ["points", "100000"]]);
  const answer = await fetch(`${api}/series?${asked}`);
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const { rows, series } = await answer.json(), one = series[panel.name], { steps: at, attempts } = rows[one.rows];
  const body = one.values.map((/** @type {number | string} */ value, /** @type {number} */ i) => [at[i], attempts[i], value].map(cell).join(","));
  save(new Blob([[["step", "attempt", cell(panel.title)].join(","), ...body].join("\r\n"), "\r\n"], { type: "text/csv" }), `${fileName(panel.title)}.csv`);
}

/**
 * @param {Panel} panel
 * @param {string} axis
 * @param {[number, number]} view
 * @param {string} origin
 */
export function saveDrawn(panel, axis, view, origin) {
  save(new Blob([drawnTable(panel, axis, view, origin)], { type: "text/csv" }), `${fileName(panel.title)}.csv`);
}

/**
 * Save a chart as a picture, with its title and a legend.
 * @param {uPlot} plot
 * @param {Panel} panel
 * @param {{text: string, ground: string}} ink
 * @param {string} words  the title
 */
export function savePicture(plot, panel, ink, words) {
  const from = plot.ctx.canvas, px = devicePixelRatio, picture = document.createElement("canvas");
  picture.width = from.width;
  picture.height = from.height + HEAD_PX * px;
  const ctx = /** @type {CanvasRenderingContext2D} */ (picture.getContext("2d"));
  ctx.fillStyle = ink.ground;
  ctx.fillRect(0, 0, picture.width, picture.height);
  ctx.drawImage(from, 0, HEAD_PX * px);
  ctx.scale(px, px);
  ctx.font = `600 ${FONT}`;
  ctx.fillStyle = ink.text;
  ctx.fillText(words, 4, 15);
  let left = ctx.measureText(words).width + 18;
  ctx.font = FONT;
  for (const { name, colour } of named(panel)) {
    ctx.fillStyle = colour;
    ctx.fillRect(left, 10, 10, 3);
    ctx.fillStyle = ink.text;
    ctx.fillText(name, left + 14, 15);
    left += ctx.measureText(name).width + 26;
  }
  picture.toBlob((blob) => blob && save(blob, `${fileName(panel.title)}.png`));
}

/** @param {Panel} panel */
function named(panel) {
  const seen = new Set(), many = panel.lines.length > 1;
  return panel.lines.filter(({ name, mute }) => many && name && !mute && !seen.has(name) && seen.add(name));
}

/**
 * Return a chart as SVG text: axes, lines, areas and title, in the chart's own size.
 * @param {uPlot} plot
 * @param {Panel} panel
 * @param {{text: string, quiet: string, grid: string, ground: string}} ink
 * @param {string} words  the title
 */
export function drawing(plot, panel, ink, words) {
  const space = "http://www.w3.org/2000/svg", { left, top, width, height } = Object.fromEntries(Object.entries(plot.bbox).map(([name, px]) => [name, Number(px) / devicePixelRatio]));
  const root = document.createElementNS(space, "svg"), wide = plot.width, high = plot.height + HEAD_PX;
  const put = (/** @type {Element} */ into, /** @type {string} */ tag, /** @type {Record<string, string | number>} */ attributes, text = "") => {
    const node = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
    node.textContent = text;
    into.append(node);
    return node;
  };
  for (const [name, value] of Object.entries({ width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, "font-family": "sans-serif", "font-size": 11 })) root.setAttribute(name, String(value));
  put(root, "rect", { width: wide, height: high, fill: ink.ground });
  put(root, "text", { x: 4, y: 15, fill: ink.text, "font-weight": 600 }, words);
  let entry = 18 + 6.2 * words.length;
  for (const { name, colour } of named(panel)) {
    put(root, "rect", { x: entry, y: 9, width: 10, height: 3, fill: colour });
    put(root, "text", { x: entry + 14, y: 15, fill: ink.text }, name);
    entry += 26 + 6.2 * name.length;
  }
  const clip = put(root, "clipPath", { id: "inside" });
  put(clip, "rect", { x: left, y: top + HEAD_PX, width, height });
  const x = (/** @type {number} */ value) => (plot.valToPos(value, "x") + left).toFixed(1), y = (/** @type {number} */ value) => (plot.valToPos(value, "y") + top + HEAD_PX).toFixed(1);
  /** Ticks and labels as the library drew them. @type {(axis: uPlot.Axis & {_splits?: number[] | null, _values?: string[] | null}) => [number, string][]} */
  const labels = (axis) => (axis.show ? (axis._splits ?? []).map((at, i) => [at, axis._values?.[i] ?? ""]) : []);
  for (const [at, label] of labels(plot.axes[1])) {
    put(root, "line", { x1: left, x2: left + width, y1: y(at), y2: y(at), stroke: ink.grid });
    put(root, "text", { x: left - 5, y: Number(y(at)) + 4, fill: ink.quiet, "text-anchor": "end" }, String(label));
  }
  for (const [at, label] of labels(plot.axes[0])) put(root, "text", { x: x(at), y: top + height + HEAD_PX + 15, fill: ink.quiet, "text-anchor": "middle" }, String(label));
  const inside = put(root, "g", { "clip-path": "url(#inside)" });
  for (const line of panel.lines) {
    const { low, high: top_ } = line;
    if (low && top_) {
      const kept = line.x.map((_, i) => i).filter((i) => low[i] !== null && top_[i] !== null);
      const edge = (/** @type {(number | null)[]} */ ends, /** @type {number[]} */ order) => order.map((i) => `${x(line.x[i])},${y(Number(ends[i]))}`);
      put(inside, "polygon", { points: [...edge(top_, kept), ...edge(low, [...kept].reverse())].join(" "), fill: line.colour, "fill-opacity": 0.15 });
    }
    let path = "", pen = "M";
    line.x.forEach((at, i) => {
      const value = line.y[i];
      if (value === null || value === undefined) pen = "M";
      else { path += `${pen}${x(at)} ${y(value)}`; pen = "L"; }
    });
    put(inside, "path", { d: path, fill: "none", stroke: line.colour, "stroke-width": line.width ?? 1.5, "stroke-opacity": line.alpha ?? 1, ...(line.dash ? { "stroke-dasharray": line.dash.join(" ") } : {}) });
  }
  return new XMLSerializer().serializeToString(root);
}

/**
 * @param {uPlot} plot
 * @param {Panel} panel
 * @param {{text: string, quiet: string, grid: string, ground: string}} ink
 * @param {string} words
 */
export function saveDrawing(plot, panel, ink, words) {
  save(new Blob([drawing(plot, panel, ink, words)], { type: "image/svg+xml" }), `${fileName(panel.title)}.svg`);
}
