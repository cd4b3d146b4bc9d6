// One table for every page. Data arrive as JSON and become text nodes: nothing here builds HTML from data.
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120, HEIGHT = 24, PAD = 2;

function el(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function spark({ points, bad }) {
  const x = (u) => PAD + u * (WIDTH - 2 * PAD);
  const y = (v) => HEIGHT - PAD - v * (HEIGHT - 2 * PAD);
  const picture = svg("svg", { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  const line = points.map(([u, v]) => `${x(u).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  picture.append(svg("polyline", { points: line, class: "line" }));
  for (const u of bad) picture.append(svg("rect", { x: x(u) - 1, y: HEIGHT - 7, width: 2, height: 7, class: "bad" }));
  return picture;
}

function tinted(shape, colour) {
  const mark = el("span", "shape", shape);
  mark.style.color = colour;
  return mark;
}

function word({ shape, colour, text }) {
  const node = el("span", "word");
  node.append(tinted(shape, colour), el("span", "", text));
  return node;
}

function link({ text, sub, href, title, id }, open) {
  const node = el("a", "link");
  if (sub) node.append(el("span", "before", sub));
  node.append(el("span", "name", text));
  node.href = href;
  if (title) node.title = title;
  node.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    event.stopPropagation();
    open(id);
  });
  return node;
}

function details({ key, text, lines, shape, colour }, opened) {
  if (!lines.length) return el("span", "", text);
  const node = el("details");
  node.open = opened.has(key);
  const summary = el("summary", "", text);
  // Before it toggles, and at once: the "toggle" event may come after the next data have replaced this node.
  summary.addEventListener("click", () => (node.open ? opened.delete(key) : opened.add(key)));
  if (shape) summary.prepend(tinted(shape, colour));
  node.append(summary);
  const list = el("dl");
  for (const [name, value] of lines) list.append(el("dt", "", name), el("dd", "", value));
  node.append(list);
  return node;
}

function fill(td, cell, { open, opened }) {
  if (cell.kind === "word") return td.append(word(cell));
  if (cell.kind === "spark") return td.append(spark(cell));
  if (cell.kind === "link") return td.append(link(cell, open));
  if (cell.kind === "details") return td.append(details(cell, opened));
  td.append(el("span", cell.quiet ? "quiet" : "", cell.text));
  if (cell.sub) td.append(el("span", "sub", cell.sub));
  if (cell.title) td.title = cell.title;
}

function box(data, context) {
  const td = el("td", "box"), input = el("input");
  input.type = "checkbox";
  input.checked = data.picked;
  const link = data.cells.find((cell) => cell.kind === "link");
  input.setAttribute("aria-label", `Compare ${link ? link.text : data.id}`);
  input.addEventListener("change", () => context.pick(data.id));
  td.addEventListener("click", (event) => event.stopPropagation());
  td.append(input);
  return td;
}

function row(columns, data, context) {
  const tr = el("tr", [data.quiet ? "faded" : "", data.chosen ? "chosen" : ""].join(" ").trim());
  if (typeof data.picked === "boolean") tr.append(box(data, context));
  data.cells.forEach((cell, place) => {
    const td = el("td", columns[place].style);
    td.dataset.label = columns[place].label;
    fill(td, cell, context);
    tr.append(td);
  });
  if (data.id) {
    tr.classList.add("opens");
    tr.addEventListener("click", () => context.open(data.id));
    if (data.cells.some((cell) => cell.kind === "link")) return tr;  // which the keyboard reaches by itself
    tr.tabIndex = 0;
    tr.addEventListener("keydown", (event) => event.key === "Enter" && context.open(data.id));
  }
  return tr;
}

// What stands open, by page and table: kept outside the table's own node, which the page may make anew.
const OPENED = (globalThis.rlwatchOpened ??= new Map());

function openedOf(name) {
  const place = `${location.pathname}|${new URLSearchParams(location.search).get("run")}|${name}`;
  if (!OPENED.has(place)) OPENED.set(place, new Set());
  return OPENED.get(place);
}

export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  let host = parentElement.querySelector(".rlwatch-table");
  if (!host) {
    host = el("div", "rlwatch-table");
    parentElement.append(host);
  }
  const context = {
    open: (id) => setTriggerValue("open", id),
    pick: (id) => setTriggerValue("pick", id),
    opened: openedOf(data.name),
  };
  const table = el("table", data.rows.some((one) => one.chosen) ? "choosing" : "");
  const head = el("tr");
  if (data.rows.some((one) => typeof one.picked === "boolean")) head.append(el("th", "box"));
  for (const column of data.columns) head.append(el("th", column.style, column.label));
  const thead = el("thead");
  thead.append(head);
  const body = el("tbody");
  for (const one of data.rows) body.append(row(data.columns, one, context));
  table.append(thead, body);
  host.replaceChildren(table);
}
