// What holds on every page. Sent with whatever script comes first: an element of its own, outside of the pages, would
// shift what is in them.
if (!globalThis.rlwatchPage) {
  globalThis.rlwatchPage = true;

  // One page, one step back. Streamlit tells the next page's query on the address of this one before it goes there, which
  // leaves an entry of the history that nobody was at: the next page takes its place.
  // Its script says each key of the query by itself: what comes within the same moment is one act, and one entry.
  // And it knows nothing of what the browser keeps there by itself (look.js): that stays as it is.
  const SOON_MS = 2000, SAME_ACT_MS = 250, OWN = ["axis", "smooth", "log", "clip", "side", "legend"];
  const push = history.pushState.bind(history), replace = history.replaceState.bind(history);
  let pushed = { search: null, path: "", at: 0 };
  globalThis.rlwatchPush = push;
  function kept(address) {
    const to = new URL(address ?? location.href, location.href), said = new URLSearchParams(location.search);
    if (to.pathname !== location.pathname || !to.pathname.endsWith("/run") || to.searchParams.get("run") !== said.get("run")) return to;
    for (const name of OWN) {
      if (said.has(name)) to.searchParams.set(name, said.get(name));
      else to.searchParams.delete(name);
    }
    return to;
  }
  history.pushState = (state, unused, address) => {
    const to = kept(address), at = performance.now();
    const between = pushed.search === to.search && to.search && pushed.path !== to.pathname && at - pushed.at < SOON_MS;
    const again = pushed.path === to.pathname && at - pushed.at < SAME_ACT_MS && location.pathname === to.pathname;
    if (again || (between && location.search === pushed.search && location.pathname === pushed.path)) replace(state, unused, to);
    else if (to.href !== location.href) push(state, unused, to);
    pushed = { search: to.search, path: to.pathname, at };
  };
  history.replaceState = (state, unused, address) => replace(state, unused, address === undefined ? undefined : kept(address));

  // Where a message of the server was lost (its connection broke off and came back in mid-page), the next one has no place
  // on the page, and Streamlit's client takes down all of it, for good. It is loaded anew, where that does not happen again
  // and again: once in a while, as the tab remembers.
  const NO_PLACE = /delta path/, AGAIN = "rlwatch-loaded-again", AGAIN_MS = 60000, GONE_MS = 100;
  addEventListener("error", (problem) => {
    if (!NO_PLACE.test(problem.message)) return;
    setTimeout(() => {
      if (document.getElementById("root")?.childElementCount) return;
      if (Date.now() - Number(sessionStorage.getItem(AGAIN)) < AGAIN_MS) return;
      sessionStorage.setItem(AGAIN, Date.now());
      location.reload();
    }, GONE_MS);
  });
}
