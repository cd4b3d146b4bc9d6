// One page, one step back. Streamlit tells the next page's query on the address of this one before it goes there, which
// leaves an entry of the history that nobody was at: the next page takes its place.
// Sent with whatever script comes first: an element of its own, outside of the pages, would shift what is in them.
if (!globalThis.rlwatchHistory) {
  globalThis.rlwatchHistory = true;
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
}
