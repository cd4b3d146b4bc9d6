"""Work beside a command that goes on: delivering the outbox, looking after runs, ending in good order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlwatch.monitor.watchman import Watchman
    from rlwatch.ports import Store
    from rlwatch.run.alerting import Alerting


LAST_ROUND_S = 5.0
ONCE_S = 20.0


@contextmanager
def delivering(store: Store, alerting: Alerting) -> Iterator[None]:
    """Deliver in a thread of its own, so that a slow receiver slows nothing here."""
    thread = alerting.start(store)
    try:
        yield
    finally:
        if thread is not None:
            thread.stop(LAST_ROUND_S)


def deliver_once(store: Store, alerting: Alerting) -> str:
    """Try every due message once, for at most about 20 s; what came of it in words ("" if there was nothing)."""
    if not alerting.notifiers:
        return ""
    from rlwatch.alerts.outbox import Deliverer

    end = time.monotonic() + ONCE_S
    report = Deliverer(store, alerting.notifiers).run_once(enough=lambda: time.monotonic() >= end)
    counts = {"delivered": report.sent, "to be tried again": report.retried, "given up": report.dead}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


# Looking after the runs of a store while a command runs: heartbeats, and what time alone makes due.


def watchman(store: Store, alerting: Alerting, run_id: str | None = None) -> Watchman:
    """The watchman that judges from outside whether runs live; of one run or of all."""
    from rlwatch.monitor.watchman import Watchman

    return Watchman(store, alerting.policy, dashboard_url=alerting.dashboard_url, run_id=run_id)


@contextmanager
def background_services(store: Store, alerting: Alerting, run_id: str | None = None) -> Iterator[None]:
    """Look every ten seconds, in a thread of its own."""
    from rlwatch.monitor.watchman import WatchmanThread

    thread = WatchmanThread(watchman(store, alerting, run_id))
    thread.start()
    try:
        yield
    finally:
        thread.stop()


# Ending a command that would go on for ever.


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within it SIGTERM (a service manager, ``kill``) ends as tidily as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unbroken() -> Iterator[None]:
    """Put Ctrl-C off until the block has ended: what it begins must not be lost before somebody holds it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in before:
        signal.signal(name, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    if arrived:
        signal.raise_signal(arrived[0])
