// @ts-check
// Code for all pages, sent with the first script of a page. An element of its own, outside of the pages, would shift
// their contents.
if (!globalThis.rlwatchPage) {
  globalThis.rlwatchPage = true;

  // One history entry for each page. Streamlit sets the next page's query on the address of this one before going there,
  // which leaves an entry for a page that was never shown: the entry of the next page replaces it.
  // Streamlit's script sets each key of the query separately: changes at nearly the same time become one entry.
  // Streamlit does not know the names that the browser keeps in the address (look.js); they are preserved.
  const SOON_MS = 2000, SAME_ACT_MS = 250, OWN = ["axis", "smooth", "log", "clip", "side", "legend", "hide", "base", "setting", "result"];
  /** @type {Record<string, string>} */
  const RUNS = { "/run": "run", "/compare": "runs" };
  const push = history.pushState.bind(history), replace = history.replaceState.bind(history);
  let pushed = { search: "none", path: "", at: 0 };
  globalThis.rlwatchPush = push;
  /** @param {string | URL | null} [address] */
  const kept = (address) => {
    const to = new URL(address ?? location.href, location.href), own = new URLSearchParams(location.search);
    const name = RUNS[to.pathname.slice(to.pathname.lastIndexOf("/"))], runs = (/** @type {URLSearchParams} */ query) => query.getAll(name).join("\n");
    if (to.pathname !== location.pathname || !name || runs(to.searchParams) !== runs(own)) return to;
    for (const choice of OWN) {
      const value = own.get(choice);
      if (value !== null) to.searchParams.set(choice, value);
      else to.searchParams.delete(choice);
    }
    return to;
  };
  history.pushState = (state, unused, address) => {
    const to = kept(address), at = performance.now();
    const between = pushed.search === to.search && to.search && pushed.path !== to.pathname && at - pushed.at < SOON_MS;
    const again = pushed.path === to.pathname && at - pushed.at < SAME_ACT_MS && location.pathname === to.pathname;
    if (again || (between && location.search === pushed.search && location.pathname === pushed.path)) replace(state, unused, to);
    else if (to.href !== location.href) push(state, unused, to);
    pushed = { search: to.search, path: to.pathname, at };
  };
  history.replaceState = (state, unused, address) => replace(state, unused, address === undefined ? undefined : kept(address));

  // If a message of the server was lost (a connection that broke and came back mid-page), the next one has no place on
  // the page, and Streamlit's client removes the whole page. It is then reloaded, at most once in a while, which the tab
  // remembers.
  const NO_PLACE = /delta path/, AGAIN = "rlwatch-loaded-again", AGAIN_MS = 60000, GONE_MS = 100;
  addEventListener("error", (problem) => {
    if (!NO_PLACE.test(problem.message)) return;
    setTimeout(() => {
      if (document.getElementById("root")?.childElementCount) return;
      if (Date.now() - Number(sessionStorage.getItem(AGAIN)) < AGAIN_MS) return;
      sessionStorage.setItem(AGAIN, String(Date.now()));
      location.reload();
    }, GONE_MS);
  });
}
