// What the pages' scripts keep in the global object: they are loaded one by one, and again after a reload of a part.
import type { Component } from "./shapes.js";

declare global {
  /** Whether page.js has run. */
  var rlwatchPage: boolean | undefined;
  /** The browser's own history.pushState, which page.js replaces. */
  var rlwatchPush: typeof history.pushState | undefined;
  var rlwatchBoards: { draw(component: Component): void; drop(root: Component["parentElement"]): void } | undefined;
  /** Whether Streamlit has drawn the list or the charts of a page. */
  var rlwatchDrawn: boolean | undefined;
  /** Ends the first picture of a page (first.js) and sends what was asked in it. */
  var rlwatchFirst: ((send: (name: string, value: unknown) => void) => void) | undefined;
  /** Components that came before board.js was loaded. */
  var rlwatchWaiting: Map<Component["parentElement"], Component> | undefined;
}
