// @ts-check
// A part of a page: charts on one axis, with their marks, tooltip, zoom and pins.
// Data become text nodes and pixels: nothing here builds HTML from data.
import STYLE from "./style.js";
import { moved } from "./arrange.js";
import { Chart } from "./chart.js";
import { drawChips, drawControls } from "./controls.js";
import { interpolated } from "./curves.js";
import { drawLane } from "./lane.js";
import { appended, follow } from "./live.js";
import { listen, now, apply } from "./look.js";
import { enough, grow, meansOf, meansWithin } from "./means.js";
import { openMenu } from "./menu.js";
import { button, el, within } from "./nodes.js";
import { askRulers, askRulersAgain, RULER_MS, rulersOf } from "./rulers.js";
import { showStudy } from "./study.js";
import { drawTip } from "./tip.js";
import { everyPanel, looked, thinned, unpacked } from "./views.js";

/** @typedef {import("./shapes.js").BoardData} BoardData */
/** @typedef {import("./shapes.js").Component} Component */
/** @typedef {import("./shapes.js").Ends} Ends */
/** @typedef {import("./shapes.js").Looks} Looks */
/** @typedef {import("./shapes.js").Panel} Panel */
/** @typedef {import("./shapes.js").Section} Section */
/** @typedef {import("./shapes.js").SeriesReply} SeriesReply */
/** @typedef {import("./look.js").Look} Look */
/** @typedef {import("./views.js").Curves} Curves */
/** @typedef {{chart: Chart, node: HTMLElement}} Held  a chart and the element that holds it */
/** @typedef {import("./means.js").Means} Means */
/** @typedef {{key: string, how: string, at: number, curves: Curves | undefined, means: Map<string, Means> | undefined}} Exact  lines of the server, for a key */

const WAIT_MS = 260, PATIENCE_MS = 15000, NARROW_PX = 560, FEW = 3, LEFT_MS = 4, MEANS = 240, SOON_MS = 500;

/** @type {Set<Board>} */
const ALL = new Set();

/** @param {string} api  of the run whose positions have arrived */
function relookAll(api) {
  for (const board of ALL) if (board.given.looks?.api === api) board.relook();
}

export class Board {
  /**
   * @param {HTMLElement} host
   * @param {Component} component
   */
  constructor(host, component) {
    this.host = host;
    this.ask = asking(component);
    /** As the server sent it. */
    this.given = component.data;
    /** As it is drawn. */
    this.data = component.data;
    /** @type {Map<string, Held>} */
    this.charts = new Map();
    /** Those of the sections that a narrow page folds. @type {Set<string>} */
    this.opened = new Set();
    /** The chart under the mouse. @type {{chart: Chart, left: number, top: number} | undefined} */
    this.over = undefined;
    /** The chart on which a drag began. @type {Chart | undefined} */
    this.dragged = undefined;
    /** Whether the mouse is down on a chart. */
    this.holding = false;
    /** The position of the mark that is pointed at. @type {number | null} */
    this.pointed = null;
    /** The range just chosen, null for all steps. @type {Ends | null | undefined} */
    this.wanted = undefined;
    /** The range that was sent to the server. @type {Ends | null | undefined} */
    this.sent = undefined;
    this.since = 0;
    /** The choices for which the server was asked to draw again. */
    this.anew = "";
    /** @type {Exact | undefined} */
    this.exactly = undefined;
    /** What the server drew: the last row and the range. */
    this.drawn = "";
    /** The pin that is dragged. @type {string | undefined} */
    this.carried = undefined;
    /** The chart on the full screen. @type {Held | undefined} */
    this.filled = undefined;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.clicked = undefined;
    /** @type {unknown} */
    this.idle = undefined;
    /** @type {(() => void) | undefined} */
    this.unfollow = undefined;
    this.narrow = false;
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
    this.controls = el("div", "controls");
    this.chips = el("div", "chips");
    host.append(this.controls, this.chips, this.strip, this.rest, this.study, this.tip, this.note);
    host.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.note.hidden) return;
      event.stopPropagation(); // it lets go of no step as well
      this.note.hidden = true;
    });
    this.onKey = (/** @type {Event} */ event) => { if (event instanceof CustomEvent) this.key(event.detail); };
    this.onScreen = () => this.screened();
    document.addEventListener("rlwatch-key", this.onKey);
    document.addEventListener("fullscreenchange", this.onScreen);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(host);
    /** @type {Set<Element>} */
    this.seen = new Set();
    this.watcher = new IntersectionObserver((all) => {
      for (const { target, isIntersecting } of all) {
        if (isIntersecting) this.seen.add(target); else this.seen.delete(target);
        if (isIntersecting) [...this.charts.values()].find(({ chart }) => chart.host === target)?.chart.pending?.();
      }
    }, { rootMargin: "200px" });
    /** @type {Set<Chart>} */
    this.waiting = new Set();
    this.unlisten = listen(() => { if (this.given.looks) this.relook(); });
  }

  /** @param {Chart} chart */
  sees(chart) { return this.seen.has(chart.host); }

  /**
   * Draw a chart when the browser has nothing else to do.
   * @param {Chart} chart
   */
  later(chart) {
    this.waiting.add(chart);
    const draw = (/** @type {IdleDeadline | void} */ left) => {
      this.idle = undefined;
      for (const one of this.waiting) {
        this.waiting.delete(one);
        one.pending?.();
        const [next] = this.waiting;
        if (next && left && left.timeRemaining() < LEFT_MS) return void this.later(next);
      }
    };
    this.idle ??= (globalThis.requestIdleCallback ?? setTimeout)(draw);
  }

  /**
   * Fetch new rows of a live run, on the axis of steps.
   * @param {Looks | undefined} looks
   */
  followed(looks) {
    this.unfollow?.();
    this.unfollow = undefined;
    if (!looks?.live || !looks.api || this.given.axis !== "step") return;
    const panels = () => everyPanel(this.given);
    let after = looks.after ?? "0";
    this.unfollow = follow(looks.api, {
      names: () => panels().filter((panel) => panel.ends && !panel.made).map((panel) => panel.name),
      after: () => after,
      take: (reply) => {
        if (reply.attempt !== looks.attempt) return void this.ask({ kind: "anew" });
        const { given } = this, origin = BigInt(given.origin ?? "0"), last = Number(BigInt(reply.last_step ?? given.origin) - origin);
        if (reply.all) after = String(reply.next);
        let grew = false;
        for (const panel of panels()) grew = appended(unpacked(panel), reply, origin) || grew;
        if (!grew) return;
        if (given.window[1] >= given.whole[1]) given.window = [given.window[0], Math.max(last, given.window[1])];
        given.whole = [given.whole[0], Math.max(last, given.whole[1])];
        if (now().axis !== "step") askRulersAgain(looks, relookAll);
        for (const panel of panels()) { // means grow by themselves, smoothed lines are fetched again
          const means = this.exactly?.means?.get(panel.name);
          if (means) grow(means, panel.lines[0]);
        }
        if (this.exactly && !this.exactly.means && Date.now() - this.exactly.at > RULER_MS) this.exactly.key = "";
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
    if (!looks || looks.api || this.anew === wanted || (smooth === looks.smooth && (smooth === "off" || clip === looks.clip))) return;
    this.anew = wanted;
    this.ask({ kind: "anew" });
  }

  // The drawn lines, from the data and the choices.
  derive() {
    const { given } = this;
    this.data = given.looks ? looked(given, given.looks, now(), (wanted) => this.exact(wanted)) : given;
  }

  /** Whether the lines hold every row in their range, so that means are made here. */
  hasAll() { return Boolean(this.given.looks?.whole) && this.given.axis === "step" && now().axis === "step"; }

  /**
   * Return lines that the server made from every row, smoothed ones or the means of stretches; undefined until it answers.
   * @param {Look} look
   */
  exact({ smooth, clip }) {
    const { looks, window, axis } = this.given, api = looks?.api, mean = smooth === "off";
    if (!api) return undefined;
    if (mean && this.hasAll()) {
      const origin = BigInt(this.given.origin ?? "0"), panels = everyPanel(this.given).filter(thinned);
      const made = panels.map((panel) => /** @type {const} */ ([panel.name, meansWithin(unpacked(panel).lines[0], this.view(), origin, MEANS)]));
      return new Map(made.filter(([, means]) => enough(means)));
    }
    const names = [...new Set(everyPanel(this.given).filter(thinned).map(({ name }) => name))].sort();
    const how = mean ? "mean" : `${smooth} ${clip}`, key = JSON.stringify([how, mean ? this.drawn : window[0], names]);
    if (!names.length || this.exactly?.key === key) return this.exactly?.curves;
    /** @type {Exact} */
    const mine = { key, how, at: Date.now(), curves: this.exactly?.how === how ? this.exactly.curves : undefined, means: undefined };
    const origin = BigInt(this.given.origin ?? "0"), asked = new URLSearchParams(names.map((name) => ["metrics", name]));
    this.exactly = mine;
    for (const [name, value] of mean ? [["mean", "true"], ["points", String(MEANS)]] : [["smooth", smooth], ["clip", String(clip)]]) asked.set(name, value);
    if (axis === "step") {
      asked.set("from", String(origin + BigInt(Math.round(window[0]))));
      asked.set("to", String(origin + BigInt(Math.round(window[1]))));
    }
    const ask = () => fetch(`${api}/series?${asked}`).then((answer) => (answer.ok ? answer.json() : null)).then((/** @type {SeriesReply | null} */ reply) => {
      if (!reply || this.exactly !== mine) return;
      const found = meansOf(reply, origin);
      if (mean) this.grown(mine, found);
      else mine.curves = found;
      this.relook();
    }).catch(() => { this.exactly = undefined; });
    if (mean) (globalThis.requestIdleCallback ?? setTimeout)(() => void ask(), { timeout: SOON_MS }); // the charts come first
    else void ask();
    return mine.curves;
  }

  /**
   * Keep means, with the rows that came while they were on their way.
   * @param {Exact} mine
   * @param {Map<string, Means>} found
   */
  grown(mine, found) {
    for (const panel of this.given.axis === "step" ? everyPanel(this.given) : []) {
      const means = found.get(panel.name);
      if (means) grow(means, panel.lines[0]);
    }
    mine.means = mine.curves = new Map([...found].filter(([, means]) => enough(means)));
  }

  /** @param {Component} component */
  update(component) {
    this.ask = asking(component);
    this.given = component.data;
    this.given.marks = this.given.marks ?? [];
    this.drawn = JSON.stringify([component.data.looks?.after, component.data.window]);
    const { looks } = this.given;
    if (looks) askRulers(looks, relookAll);
    this.followed(looks);
    this.derive();
    if (this.sent !== undefined && String(this.sent) === String(this.data.asked)) this.wanted = this.sent = undefined;
    if (this.wanted && (String(this.wanted) === String(this.data.asked) || Date.now() - this.since > PATIENCE_MS)) this.wanted = undefined;
    this.paint();
  }

  paint() {
    this.host.dataset.view = JSON.stringify(this.view());
    this.narrow = this.host.clientWidth < NARROW_PX;
    const { looks, legend, study, ink } = this.given, { strip, sections } = this.data;
    this.controls.hidden = !looks || Boolean(looks.api && !strip?.length && sections?.length);
    if (looks && !this.controls.hidden) drawControls(this.controls, looks);
    this.chips.hidden = !legend;
    if (legend) drawChips(this.chips, legend, (place) => { for (const { chart } of this.charts.values()) chart.highlight(place); });
    /** @type {Set<string>} */
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
    drawLane(this);
    drawTip(this);
    this.study.hidden = !study;
    if (study && legend) showStudy(this.study, study, legend, ink);
  }

  // The range shown: a range just chosen until the server has it, else the server's.
  view() {
    return this.wanted === undefined ? this.data.window : this.wanted ?? this.data.whole;
  }

  /**
   * Show a range, null for all steps. All boards of a run show it at once, before the server responds.
   * @param {Ends | null} range
   * @param {Chart} [dragged]
   */
  zoom(range, dragged) {
    /** @type {Ends | null} */
    const asked = this.data.axis === "step" && range ? [Math.floor(range[0]), Math.max(Math.ceil(range[1]), Math.floor(range[0]) + 1)] : range;
    clearTimeout(this.clicked);
    this.sent = asked && this.steps(asked);
    for (const board of ALL) if (board.data.key === this.data.key) board.show(asked, dragged?.board === board ? dragged : undefined);
    this.ask({ kind: "zoom", range: this.sent, ...(this.given.looks && { steps: true }) });
  }

  /**
   * Return the step of a position, for the server, which does not know the chosen axis.
   * @param {number} x
   */
  step(x) {
    const { looks } = this.given, ruler = looks && this.data.axis !== "step" ? rulersOf(looks)?.[this.data.axis] : undefined;
    return ruler ? Math.round(interpolated(ruler.places, ruler.steps, x)) : x;
  }

  /**
   * @param {Ends} ends
   * @returns {Ends}
   */
  steps([low, high]) {
    return [this.step(low), this.step(high)];
  }

  /**
   * Draw a line at a mark in every chart in sight, or none.
   * @param {number | null} x
   */
  point(x) {
    if (x === this.pointed) return;
    this.pointed = x;
    for (const board of ALL) {
      if (board.data.key !== this.data.key) continue;
      board.pointed = x;
      for (const { chart } of board.charts.values()) if (board.sees(chart)) chart.plot?.redraw(false);
    }
  }

  /** Keep every chart of the run as it is until the mouse is let go: the drag is one for all. */
  hold() {
    const boards = [...ALL].filter((board) => board.data.key === this.data.key);
    for (const board of boards) board.holding = true;
    addEventListener("mouseup", () => {
      for (const board of boards) board.holding = false;
      for (const board of boards) for (const { chart } of board.charts.values()) if (board.sees(chart)) chart.pending?.();
    }, { once: true }); // after the library's own, which is the document's
  }

  /**
   * Show a range: the chart that was dragged at once, the others once that is on the screen.
   * @param {Ends | null} range
   * @param {Chart} [dragged]
   */
  show(range, dragged) {
    this.wanted = range;
    this.since = Date.now();
    this.host.dataset.view = JSON.stringify(this.view());
    dragged?.rescale();
    requestAnimationFrame(() => setTimeout(() => {
      if (this.hasAll()) this.relook(); // each range has means of its own
      for (const { chart } of this.charts.values()) {
        if (!chart.plot) continue;
        if (!this.hasAll() && chart !== dragged) chart.rescale();
        if (chart !== this.over?.chart) chart.plot.setCursor({ left: -10, top: -10 }, false); // it points elsewhere now
      }
      drawLane(this);
      drawTip(this);
    }));
  }

  /**
   * Keep the tooltip at a clicked position, or let go of it; the second click of two is a zoom out.
   * @param {number} x
   * @param {number} count
   */
  pinAt(x, count) {
    clearTimeout(this.clicked);
    if (count > 1) return;
    this.clicked = setTimeout(() => {
      const [low, high] = this.view(), close = this.data.at !== null && Math.abs(this.data.at - x) < (high - low) / 100;
      this.data.at = close ? null : x;
      for (const { chart } of this.charts.values()) chart.plot?.redraw(false);
      drawTip(this);
      const step = this.data.at === null ? null : this.step(this.data.at);
      if (this.given.looks) this.given.at = step;
      this.ask({ kind: "at", x: step, ...(this.given.looks && { steps: true }) });
    }, WAIT_MS);
  }

  /**
   * Return the chart of a key and its element, which are made the first time.
   * @param {string} key
   * @param {Panel} panel
   * @param {number} height
   * @param {boolean} bare
   * @param {HTMLElement} parent
   * @param {() => HTMLElement} make
   * @param {Set<string>} kept
   */
  holder(key, panel, height, bare, parent, make, kept) {
    kept.add(key);
    let held = this.charts.get(key);
    if (!held) {
      const node = make(), host = within(node, ".chart");
      held = { node, chart: new Chart(this, host, panel, height, bare) };
      this.watcher.observe(host);
      this.charts.set(key, held);
    }
    if (held.node.parentNode !== parent) parent.append(held.node);
    return held;
  }

  /** @param {Set<string>} kept */
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
      const { node, chart } = this.holder(`strip-${panel.name}`, panel, narrow ? 76 : 62, true, this.strip, make, kept);
      this.strip.append(node);
      within(node, ".title").textContent = panel.title;
      within(node, ".label").title = [panel.sub, panel.about].filter(Boolean).join(": ");
      within(node, ".value").textContent = panel.last ?? "";
      within(node, ".value").className = panel.lastBad ? "value bad" : "value";
      node.setAttribute("role", "img");
      node.setAttribute("aria-label", `${panel.title} by ${this.data.axis}, last ${panel.last ?? "not recorded"}`);
      chart.update(panel, i === many.length - 1);
    });
  }

  /**
   * Whether only the name of a section shows: on a phone, with many sections, but for what was starred or searched for.
   * @param {Section} section
   */
  folds(section) {
    return this.host.clientWidth < NARROW_PX && (this.data.sections ?? []).length > FEW && !["pinned", "found"].includes(section.key);
  }

  /**
   * @param {HTMLElement} node
   * @param {Section} section
   * @param {boolean} folds
   * @param {boolean} open
   */
  heading(node, section, folds, open) {
    const head = within(node, "h3");
    head.hidden = !section.title;
    if (!folds) return void (head.textContent = section.title);
    if (head.firstElementChild?.textContent !== section.title) {
      head.replaceChildren(button("fold", section.title, "", () => {
        if (!this.opened.delete(section.key)) this.opened.add(section.key);
        this.paint();
      }));
    }
    head.firstElementChild?.setAttribute("aria-expanded", String(open));
  }

  /** @param {Set<string>} kept */
  drawSections(kept) {
    const nodes = (this.data.sections ?? []).map((section) => this.drawSection(section, kept));
    for (const node of [...this.rest.children]) if (!nodes.some((one) => one === node)) node.remove();
    nodes.forEach((node, i) => this.rest.children[i] !== node && this.rest.insertBefore(node, this.rest.children[i]));
  }

  /**
   * @param {Section} section
   * @param {Set<string>} kept
   */
  drawSection(section, kept) {
    const id = `section-${section.key}`;
    let node = /** @type {HTMLElement | null} */ (this.rest.querySelector(`:scope > [data-section="${CSS.escape(id)}"]`));
    if (!node) {
      node = el("section");
      node.dataset.section = id;
      node.append(el("h3"), el("div", "grid"), el("div", "foot"));
      this.rest.append(node);
    }
    const folds = this.folds(section), open = !folds || this.opened.has(section.key);
    this.heading(node, section, folds, open);
    const grid = within(node, ".grid"), columns = Math.min(Math.max(section.panels.reduce((sum, panel) => sum + (panel.columns ?? 1), 0), 1), 3);
    node.style.setProperty("--columns", String(columns));
    node.style.setProperty("--span", String(section.span || columns));
    if (open) for (const panel of section.panels) this.drawPanel(section, panel, grid, kept);
    const foot = within(node, ".foot");
    foot.replaceChildren();
    if (!open) return node;
    if (section.more) {
      const label = section.open ? `hide ${section.more}` : `${section.more} more`;
      const more = button("more", label, `${label} charts of ${section.title}`, () => this.ask({ kind: "more", section: section.key }));
      more.setAttribute("aria-expanded", String(Boolean(section.open)));
      foot.append(more);
    }
    if (section.note) foot.append(el("span", "quiet", section.note));
    return node;
  }

  /**
   * @param {Section} section
   * @param {Panel} panel
   * @param {HTMLElement} grid
   * @param {Set<string>} kept
   */
  drawPanel(section, panel, grid, kept) {
    const make = () => {
      const node = el("figure", "panel"), head = el("figcaption"), words = el("span", "words"), acts = el("span", "acts");
      words.append(el("span", "title"), el("span", "sub"));
      node.tabIndex = -1;
      acts.append(button("menu", "⋯", "", () => openMenu(this, node, this.of(node).chart)));
      if (this.data.pins && !panel.cells) acts.append(button("pin", "", "", () => this.ask({ kind: "pin", name: node.dataset.pin || node.dataset.metric })));
      head.append(words, acts);
      node.append(head, el("div", "chart"), el("div", "legend"));
      return node;
    };
    const { node, chart } = this.holder(`${section.key}-${panel.pin ?? panel.name}`, panel, panel.height, false, grid, make, kept);
    chart.height = panel.height;
    grid.append(node);
    node.dataset.metric = panel.name;
    if (panel.pin && !node.dataset.pin) this.movable(node);
    if (panel.pin) node.dataset.pin = panel.pin;
    node.style.setProperty("--wide", String(panel.columns ?? 1));
    node.dataset.drawn = [...new Set(panel.lines.map((line) => line.place))].join(" ");
    within(node, ".title").textContent = panel.title;
    within(node, ".words").title = [panel.title, panel.about].filter(Boolean).join(": ");
    within(node, ".sub").textContent = [panel.sub, panel.scale].filter(Boolean).join(" · ");
    const menu = within(node, ".menu"), pin = node.querySelector(".pin");
    menu.title = `More of ${panel.title}`;
    menu.setAttribute("aria-label", menu.title);
    if (pin instanceof HTMLElement) {
      const label = `${panel.pinned ? "Unpin" : "Pin"} ${panel.title}`;
      pin.textContent = panel.pinned ? "★" : "☆";
      pin.title = label;
      pin.setAttribute("aria-label", label);
      pin.setAttribute("aria-pressed", String(Boolean(panel.pinned)));
    }
    const legend = within(node, ".legend"), named = this.data.look?.legend || panel.right ? panel.lines.filter((line) => !line.mute || line.name) : [];
    legend.replaceChildren(...named.map((line) => {
      const entry = el("span", ""), swatch = el("span", "swatch");
      swatch.style.background = line.colour;
      swatch.style.opacity = String(line.alpha ?? 1);
      entry.append(swatch, line.name || "measured");
      return entry;
    }));
    chart.update(panel, true);
  }

  /**
   * Return the chart of an element.
   * @param {HTMLElement} node
   */
  of(node) {
    return /** @type {Held} */ ([...this.charts.values()].find((held) => held.node === node));
  }

  /**
   * Let a pinned chart be dragged by its head to the place of another.
   * @param {HTMLElement} node
   */
  movable(node) {
    const head = within(node, "figcaption"), pins = () => this.data.pins ?? [];
    head.draggable = true;
    head.addEventListener("dragstart", (event) => {
      this.carried = node.dataset.pin;
      if (!event.dataTransfer) return;
      event.dataTransfer.effectAllowed = "move";
      event.dataTransfer.setData("text/plain", node.dataset.pin ?? "");
    });
    head.addEventListener("dragend", () => { this.carried = undefined; });
    const over = (/** @type {DragEvent} */ event) => { if (this.carried !== undefined && this.carried !== node.dataset.pin) event.preventDefault(); };
    node.addEventListener("dragenter", over);
    node.addEventListener("dragover", over);
    node.addEventListener("drop", (event) => {
      const from = pins().indexOf(this.carried ?? ""), to = pins().indexOf(node.dataset.pin ?? "");
      if (from < 0 || to < 0) return;
      event.preventDefault();
      this.ask({ kind: "arrange", names: moved(pins(), from, to) });
    });
  }

  /**
   * Show one chart on the whole screen, drawn in its size, or leave it.
   * @param {HTMLElement} node
   */
  fill(node) {
    if (document.fullscreenElement) return void document.exitFullscreen();
    this.filled = this.of(node);
    node.requestFullscreen().catch(() => {});
  }

  screened() {
    if (!this.filled) return;
    const { chart, node } = this.filled, root = node.getRootNode();
    chart.full = ((root instanceof ShadowRoot && root.fullscreenElement) || document.fullscreenElement) === node;
    if (!chart.full) {
      this.filled = undefined;
      chart.plot?.setSize({ width: chart.host.clientWidth, height: chart.height + 24 });
    } else chart.resize();
  }

  /**
   * Do what a key asks of the charts: all steps, full screen, or to close what is open.
   * @param {{what: string, at: Element | null}} detail
   */
  key({ what, at }) {
    const figure = at && this.host.contains(at) ? at.closest("figure") : null;
    if (what === "whole" && [...ALL].find((board) => board.data.key === this.data.key) === this) this.zoom(null);
    if (what === "full" && figure) this.fill(figure);
    if (what !== "close") return;
    this.note.hidden = true;
    for (const list of this.host.querySelectorAll(".list")) list.remove();
    if (this.data.at !== null && (this.alone() || this.data.strip?.length)) this.pinAt(this.data.at, 1);
  }

  /**
   * @param {Chart} chart
   * @param {import("./uplot.js").default} u
   */
  hover(chart, u) {
    const { event, left, top } = u.cursor;
    if (event === undefined || left === undefined || left === null || left < 0) return;
    if (!chart.host.matches(":hover")) return;
    this.over = { chart, left, top: top ?? 0 };
    drawTip(this);
  }

  // Whether no strip of the same page shows the values at the clicked position.
  alone() {
    return ![...ALL].some((board) => board.data.key === this.data.key && board.data.strip?.length);
  }

  /** @param {Chart} chart */
  leave(chart) {
    if (this.over?.chart === chart) this.over = undefined;
    drawTip(this);
  }

  resize() {
    if (this.host.clientWidth && this.narrow !== this.host.clientWidth < NARROW_PX) this.paint(); // it was turned
    for (const { chart } of this.charts.values()) {
      if (this.sees(chart)) chart.resize();
      else { // when it comes in sight, or there is nothing else to do
        const drawn = chart.pending;
        chart.pending = () => { chart.pending = undefined; chart.resize(); drawn?.(); };
        this.later(chart);
      }
    }
    drawLane(this);
    drawTip(this);
    if (this.given.study && this.given.legend) showStudy(this.study, this.given.study, this.given.legend, this.given.ink);
  }

  destroy() {
    ALL.delete(this);
    document.removeEventListener("rlwatch-key", this.onKey);
    document.removeEventListener("fullscreenchange", this.onScreen);
    this.unlisten();
    this.unfollow?.();
    this.watcher.disconnect();
    this.observer.disconnect();
    for (const { chart } of this.charts.values()) chart.destroy();
  }
}

/** @type {WeakMap<Component["parentElement"], Board>} */
const BOARDS = new WeakMap();

/**
 * Return the function that sends a request of a component to the server.
 * @param {Component} component
 * @returns {(what: Record<string, unknown>) => void}
 */
function asking(component) {
  return (what) => component.setTriggerValue("ask", { ...what, nonce: Date.now() });
}

/** Boards of the page's first picture (first.js), which Streamlit's components take over. @type {Map<string, {root: Component["parentElement"], board: Board}>} */
const FIRST = new Map();

/** @param {Component} component */
function draw(component) {
  const { parentElement, data, first } = component, part = `${data.key} ${data.pins ? "all" : "strip"}`;
  let board = BOARDS.get(parentElement);
  if (!board) {
    const sheet = new CSSStyleSheet(), held = first ? undefined : FIRST.get(part);
    sheet.replaceSync(STYLE);
    if (parentElement instanceof ShadowRoot) parentElement.adoptedStyleSheets = [sheet];
    if (held) {
      FIRST.delete(part);
      BOARDS.delete(held.root);
      parentElement.append(held.board.host);
    }
    board = held?.board ?? new Board(parentElement.appendChild(el("div", "board")), component);
    BOARDS.set(parentElement, board);
    ALL.add(board);
    if (first) FIRST.set(part, { root: parentElement, board });
  }
  board.update(component);
  if (first) return;
  globalThis.rlwatchDrawn = true;
  globalThis.rlwatchFirst?.(component.setTriggerValue);
}

/** @param {Component["parentElement"]} root */
function drop(root) {
  BOARDS.get(root)?.destroy();
  BOARDS.delete(root);
  for (const [part, held] of FIRST) if (held.root === root) FIRST.delete(part); // whatever comes later draws its own
}

globalThis.rlwatchBoards = { draw, drop };
for (const [, component] of globalThis.rlwatchWaiting ?? []) draw(component);
globalThis.rlwatchWaiting = new Map();
apply();
