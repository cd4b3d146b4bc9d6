// What the pages' scripts keep in the global object: they are loaded one by one, and again after a reload of a part.
import type { Component } from "./shapes.js";

declare global {
  /** Whether page.js has run. */
  var rlwatchPage: boolean | undefined;
  /** The browser's own history.pushState, which page.js replaces. */
  var rlwatchPush: typeof history.pushState | undefined;
  var rlwatchBoards: { draw(component: Component): void; drop(root: Component["parentElement"]): void } | undefined;
  /** Components that came before board.js was loaded. */
  var rlwatchWaiting: Map<Component["parentElement"], Component> | undefined;
}
