// @ts-check
// Positions of a run's steps on the other axes, as the server answers them.
import { now } from "./look.js";

/** @typedef {import("./curves.js").Ruler} Ruler */
/** @typedef {import("./shapes.js").Looks} Looks */
/** @typedef {Record<string, Ruler | null>} Rulers  by axis; null: not logged */
/** @typedef {{rulers: Rulers, at: number}} Held */

/** By address of the run's rows; undefined: requested. @type {Map<string, Held | undefined>} */
const RULERS = new Map();

export const RULER_MS = 10000;

/**
 * Return the positions that have arrived.
 * @param {Looks} looks
 */
export function rulersOf({ api }) {
  return api === undefined ? undefined : RULERS.get(api)?.rulers;
}

/**
 * @param {string} api
 * @returns {Promise<Rulers>}
 */
async function fetched(api) {
  const answer = await fetch(`${api}/axes`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

/**
 * Request positions once the charts are drawn; at once where another axis is chosen.
 * @param {Looks} looks
 * @param {(api: string) => void} arrived
 */
export function askRulers({ api }, arrived) {
  if (api === undefined || RULERS.has(api)) return;
  RULERS.set(api, undefined);
  const ask = () => void fetched(api).then((rulers) => {
    RULERS.set(api, { rulers, at: 0 });
    arrived(api);
  }).catch(() => RULERS.delete(api));
  if (now().axis !== "step") ask(); else (globalThis.requestIdleCallback ?? setTimeout)(ask);
}

/**
 * Request positions again for new rows, at most every few seconds.
 * @param {Looks} looks
 * @param {(api: string) => void} arrived
 */
export function askRulersAgain({ api }, arrived) {
  const held = api === undefined ? undefined : RULERS.get(api);
  if (api === undefined || !held || Date.now() - held.at < RULER_MS) return;
  held.at = Date.now();
  fetched(api).then((rulers) => {
    RULERS.set(api, { rulers, at: Date.now() });
    arrived(api);
  }).catch(() => {});
}
