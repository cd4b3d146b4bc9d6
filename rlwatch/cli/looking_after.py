"""Looking after the runs of a store while a command runs: heartbeats, and what time alone makes due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlwatch.monitor.watchman import Watchman
    from rlwatch.ports import Store
    from rlwatch.run.alerting import Alerting


def watchman(store: Store, alerting: Alerting, run_id: str | None = None) -> Watchman:
    """Who judges from outside whether runs live; of one run or of all."""
    from rlwatch.monitor.watchman import Watchman

    return Watchman(store, alerting.policy, dashboard_url=alerting.dashboard_url, run_id=run_id)


@contextmanager
def looking_after(store: Store, alerting: Alerting, run_id: str | None = None) -> Iterator[None]:
    """Look every ten seconds, in a thread of its own."""
    from rlwatch.monitor.watchman import WatchmanThread

    thread = WatchmanThread(watchman(store, alerting, run_id))
    thread.start()
    try:
        yield
    finally:
        thread.stop()
