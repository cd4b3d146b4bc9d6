// @ts-check
// New rows of a live run. The server sends events, the rows are fetched separately and appended to the charts. A hidden
// page sends no requests and catches up when it is visible again; a lost connection is opened again.
import { number } from "./numbers.js";

/** @typedef {import("./shapes.js").Panel} Panel */
/** @typedef {import("./shapes.js").SeriesReply} SeriesReply */

/**
 * @typedef {object} Watcher  a board that shows the run
 * @property {() => string[]} names  the metrics that it draws
 * @property {() => string} after  the sequence number up to which it has rows
 * @property {(reply: SeriesReply) => void} take  new rows
 */

const AGAIN_MS = 10000, MOST_AT_ONCE = 200;

/** @type {Map<string, Feed>} */
const FEEDS = new Map();

class Feed {
  /** @param {string} api */
  constructor(api) {
    this.api = api;
    /** @type {Set<Watcher>} */
    this.watchers = new Set();
    /** @type {EventSource | undefined} */
    this.source = undefined;
    /** @type {Promise<void> | undefined} */
    this.asking = undefined;
    this.missed = false;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.again = undefined;
    this.turn = () => this.listen();
    document.addEventListener("visibilitychange", this.turn);
  }

  listen() {
    clearTimeout(this.again);
    if (document.hidden || !this.watchers.size) {
      this.source?.close();
      this.source = undefined;
      return;
    }
    if (this.source) return;
    const [base, run] = this.api.split(/\/runs\/(?=[^/]*$)/);
    this.source = new EventSource(`${base}/events?run=${run}`);
    this.source.addEventListener("changed", () => this.ask());
    this.source.addEventListener("over", () => this.stop());
    this.source.addEventListener("error", () => {
      if (this.source?.readyState !== EventSource.CLOSED) return; // it tries by itself
      this.stop();
      this.again = setTimeout(() => this.listen(), AGAIN_MS);
    });
  }

  stop() {
    this.source?.close();
    this.source = undefined;
  }

  ask() {
    if (this.asking) return void (this.missed = true);
    this.asking = this.fetched().catch(() => {}).then(() => {
      this.asking = undefined;
      if (this.missed) { this.missed = false; this.ask(); }
    });
  }

  async fetched() {
    const watchers = [...this.watchers], names = [...new Set(watchers.flatMap((one) => one.names()))];
    if (!names.length || document.hidden) return;
    const places = watchers.map((one) => BigInt(one.after())), after = String(places.reduce((a, b) => (b < a ? b : a)));
    for (let first = 0; first < names.length; first += MOST_AT_ONCE) {
      const asked = new URLSearchParams(names.slice(first, first + MOST_AT_ONCE).map((name) => ["metrics", name]));
      asked.set("after", after);
      const answer = await fetch(`${this.api}/series?${asked}`);
      if (!answer.ok) return;
      const reply = { ...(await answer.json()), all: first + MOST_AT_ONCE >= names.length };
      for (const one of watchers) if (this.watchers.has(one)) one.take(reply);
    }
  }
}

/**
 * Subscribe to new rows; returns a function that unsubscribes.
 * @param {string} api
 * @param {Watcher} watcher
 */
export function follow(api, watcher) {
  const feed = FEEDS.get(api) ?? new Feed(api);
  FEEDS.set(api, feed);
  feed.watchers.add(watcher);
  feed.listen();
  return () => {
    feed.watchers.delete(watcher);
    feed.listen();
  };
}

const WORDS = new Map([["NaN", "NaN"], ["Infinity", "Inf"], ["-Infinity", "-Inf"]]);

/**
 * Append new rows to a chart's first line; returns true if there were any.
 * @param {Panel} panel
 * @param {SeriesReply} reply
 * @param {bigint} origin
 */
export function appended(panel, reply, origin) {
  const one = reply.series[panel.name], [line] = panel.lines, every = panel.ends;
  if (!one || !line || !every) return false;
  const { steps } = reply.rows[one.rows];
  let grew = false;
  one.values.forEach((value, i) => { // there is one for each row: only a mean may have none
    const last = line.x.at(-1), bad = panel.bad.at(-1)?.[0] ?? -Infinity, x = Number(BigInt(steps[i]) - origin);
    if (x <= Math.max(last ?? -Infinity, bad)) return; // rows that are drawn already
    grew = true;
    const word = WORDS.get(String(value));
    if (word) {
      panel.bad.push([x, word, line.name]);
      if (last !== undefined && line.y.at(-1) !== null) { line.x.push((last + x) / 2); line.y.push(null); }
    } else {
      const y = Number(value);
      line.x.push(x);
      line.y.push(y);
      for (const ends of every) {
        const margin = ends[2] === 1 ? 0 : 0.06 * (ends[1] - ends[0]);
        if (y > ends[1]) ends[1] = y + margin;
        if (y < ends[0] && !(ends[2] === 1 && y <= 0)) ends[0] = ends[2] === 1 ? y / 1.1 : y - margin;
      }
    }
    panel.last = word ?? number(Number(value)) + (panel.unit ?? "");
    panel.lastBad = Boolean(word);
  });
  return grew;
}
