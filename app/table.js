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

function spark({ points, bad, text }) {
  const x = (u) => PAD + u * (WIDTH - 2 * PAD);
  const y = (v) => HEIGHT - PAD - v * (HEIGHT - 2 * PAD);
  const picture = svg("svg", { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  const band = points.filter((point) => point.length > 2);
  if (band.length > 1) {
    const edge = (place) => band.map((point) => `${x(point[0]).toFixed(1)},${y(point[place]).toFixed(1)}`);
    picture.append(svg("polygon", { points: [...edge(2), ...edge(3).reverse()].join(" "), class: "band" }));
  }
  const line = points.map(([u, v]) => `${x(u).toFixed(1)},${y(v).toFixed(1)}`).join(" ");
  picture.append(svg("polyline", { points: line, class: "line" }));
  for (const u of bad) picture.append(svg("rect", { x: x(u) - 1, y: HEIGHT - 7, width: 2, height: 7, class: "bad" }));
  if (!text) return picture;
  const both = el("span", "labelled");
  both.append(picture, el("span", "", text));
  return both;
}

function tinted(shape, colour) {
  const mark = el("span", "shape");  // decorative: the word next to it has the same meaning
  mark.dataset.shape = shape;
  mark.style.color = colour;
  mark.setAttribute("aria-hidden", "true");
  return mark;
}

function word({ shape, colour, text }) {
  const node = el("span", "word");
  node.append(tinted(shape, colour), el("span", "", text));
  return node;
}

function link({ text, sub, href, title, id, tags, notes, lead }, open) {
  const node = el("a", "link");
  if (sub) node.append(el("span", "before", sub));
  node.append(el("span", "name", lead ? text.slice(0, lead) : text));
  if (lead && lead < text.length) node.append(text.slice(lead));
  node.href = href;
  if (title) node.title = title;
  node.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    event.stopPropagation();
    open(id);
  });
  if (!(tags && tags.length) && !notes) return node;
  const all = el("span", "said");
  all.append(node);
  for (const tag of tags || []) all.append(el("span", "tag", tag));
  if (notes) {
    const mark = el("span", "notes", "✎");
    mark.title = notes;
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", `notes: ${notes}`);
    all.append(mark);
  }
  return all;
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
  if (cell.kind === "group") {
    td.append(el("span", "name", cell.text), el("span", "sub", cell.sub));
    td.title = cell.title;
    return;
  }
  if (cell.kind === "details") return td.append(details(cell, opened));
  td.append(el("span", cell.quiet ? "quiet" : "", cell.text));
  if (cell.sub) td.append(el("span", "sub", cell.sub));
  if (cell.title) td.title = cell.title;
}

function box(data, context) {
  const td = el("td", "box"), input = el("input");
  input.type = "checkbox";
  input.checked = data.picked;
  const link = data.cells.find((cell) => cell.kind === "link" || cell.kind === "group");
  input.setAttribute("aria-label", `Select ${link ? link.text : data.id}`);
  input.addEventListener("change", () => context.pick(data.id, input.checked));
  td.addEventListener("click", (event) => event.stopPropagation());
  td.append(input);
  return td;
}

function row(columns, data, context) {
  const grouped = typeof data.unfolded === "boolean";
  const classes = { faded: data.quiet, chosen: data.chosen, group: grouped, member: data.member };
  const tr = el("tr", Object.keys(classes).filter((name) => classes[name]).join(" "));
  if (typeof data.picked === "boolean") tr.append(box(data, context));
  else if (context.boxed) tr.append(el("td", "box"));
  data.cells.forEach((cell, place) => {
    const td = el("td", columns[place].style);
    td.dataset.label = columns[place].label;
    if (cell.kind === "text" && !cell.text) td.classList.add("blank");
    fill(td, cell, context);
    tr.append(td);
  });
  if (data.id) {
    tr.dataset.id = data.id;
    tr.classList.add("opens");
    tr.addEventListener("click", () => context.open(data.id));
    if (data.cells.some((cell) => cell.kind === "link")) return tr;  // the keyboard reaches a link anyway
    tr.tabIndex = 0;
    if (grouped) tr.setAttribute("aria-expanded", data.unfolded);
    tr.addEventListener("keydown", (event) => event.key === "Enter" && context.open(data.id));
  }
  return tr;
}

function heading(column, context) {
  if (!column.label && !column.sort) return el("td", column.style);  // the column is self-explanatory
  const th = el("th", column.style, column.sort ? undefined : column.label);
  if (!column.sort) return th;
  const button = el("button", "", column.label + ({ ascending: " ↑", descending: " ↓" }[column.sorted] || ""));
  if (column.sorted) th.setAttribute("aria-sort", column.sorted);
  button.type = "button";
  button.addEventListener("click", () => context.sort(column.sort));
  th.append(button);
  return th;
}

// On a phone the rows beyond the first few are cards behind a button.
const ALL_ROWS = "all rows";

function more(rest, { opened }) {
  const button = el("button", "more", `${rest.length} more`);
  button.type = "button";
  button.addEventListener("click", () => {
    opened.add(ALL_ROWS);
    for (const tr of rest) tr.classList.remove("over");
    rest[0].querySelector(REACHED)?.focus();
    button.remove();
  });
  return button;
}

// Unfolded rows, by page and table: kept outside the table's own node, which the page may replace.
const OPENED = (globalThis.rlwatchOpened ??= new Map());

function openedOf(name) {
  const place = `${location.pathname}|${new URLSearchParams(location.search).get("run")}|${name}`;
  if (!OPENED.has(place)) OPENED.set(place, new Set());
  return OPENED.get(place);
}

// Keyboard focus keeps its place when new data replace the table.
const REACHED = "a, button, input, summary, tr[tabindex]";

function placeOf(host, node) {
  if (!node || !host.contains(node)) return null;
  const tr = node.closest("tr"), within = [...tr.querySelectorAll(REACHED)].indexOf(node);
  return { id: tr.dataset.id, head: Boolean(tr.closest("thead")), within };
}

function at(host, { id, head, within }) {
  const rows = [...host.querySelectorAll(head ? "thead tr" : "tbody tr")];
  const tr = head ? rows[0] : rows.find((one) => one.dataset.id && one.dataset.id === id);
  return within < 0 ? tr : tr?.querySelectorAll(REACHED)[within];
}

export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  let host = parentElement.querySelector(".rlwatch-table");
  if (!host) {
    host = el("div", "rlwatch-table");
    parentElement.append(host);
  }
  // Of two quick clicks only the last message may arrive, so each message has all boxes changed since the last data.
  const changed = {};
  const pick = (id, checked) => {
    changed[id] = checked;
    setTriggerValue("pick", { ...changed });
  };
  const context = {
    open: (id) => setTriggerValue("open", id),
    pick,
    sort: (id) => setTriggerValue("sort", id),
    boxed: data.rows.some((one) => typeof one.picked === "boolean"),
    opened: openedOf(data.name),
  };
  const table = el("table", data.rows.some((one) => one.chosen) ? "choosing" : "");
  const head = el("tr");
  if (context.boxed) head.append(el("td", "box"));
  for (const column of data.columns) head.append(heading(column, context));
  const thead = el("thead");
  thead.append(head);
  const body = el("tbody");
  for (const one of data.rows) body.append(row(data.columns, one, context));
  table.append(thead, body);
  const rest = data.few && !context.opened.has(ALL_ROWS) ? [...body.children].slice(data.few) : [];
  for (const tr of rest) tr.classList.add("over");
  const focused = placeOf(host, host.getRootNode().activeElement);
  host.replaceChildren(table, ...(rest.length ? [more(rest, context)] : []));
  if (focused) at(host, focused)?.focus({ preventScroll: true });
}
