// What holds on every page. Sent with whatever script comes first: an element of its own, outside of the pages, would
// shift what is in them.
if (!globalThis.rlwatchPage) {
  globalThis.rlwatchPage = true;

  // One page, one step back. Streamlit tells the next page's query on the address of this one before it goes there, which
  // leaves an entry of the history that nobody was at: the next page takes its place.
  const SOON_MS = 2000;
  const push = history.pushState.bind(history);
  let pushed = { search: null, path: "", at: 0 };
  history.pushState = (state, unused, address) => {
    const to = new URL(address ?? location.href, location.href), at = performance.now();
    const between = pushed.search === to.search && to.search && pushed.path !== to.pathname && at - pushed.at < SOON_MS;
    if (between && location.search === to.search && location.pathname === pushed.path) history.replaceState(state, unused, address);
    else push(state, unused, address);
    pushed = { search: to.search, path: to.pathname, at };
  };

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
