"""Background work of a long-running command: deliver alert messages, check that runs are alive, stop on a signal."""

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
    """Deliver alert messages of ``store`` in a background thread while the block runs.

    A slow receiver does not slow the command. When the block ends, the thread gets ``LAST_ROUND_S`` seconds to stop.
    """
    thread = alerting.start(store)
    try:
        yield
    finally:
        if thread is not None:
            thread.stop(LAST_ROUND_S)


def deliver_once(store: Store, alerting: Alerting) -> str:
    """Try to send every due alert message of ``store`` once, within about 20 s.

    Return the counts in words, for example ``2 delivered``; "" if there were no messages or no channels are configured.
    """
    if not alerting.notifiers:
        return ""
    from rlwatch.alerts.outbox import Deliverer

    end = time.monotonic() + ONCE_S
    report = Deliverer(store, alerting.notifiers).run_once(enough=lambda: time.monotonic() >= end)
    counts = {"delivered": report.sent, "to be tried again": report.retried, "given up": report.dead}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


# Watching the runs of a store while a command runs: heartbeats, and messages due by time.


def watchman(store: Store, alerting: Alerting, run_id: str | None = None) -> Watchman:
    """Return a watchman for ``store``, which checks whether the trainers of its runs are alive.

    It checks only the run ``run_id``, or all runs if that is None.
    """
    from rlwatch.monitor.watchman import Watchman

    return Watchman(store, alerting.policy, dashboard_url=alerting.dashboard_url, run_id=run_id)


@contextmanager
def background_services(store: Store, alerting: Alerting, run_id: str | None = None) -> Iterator[None]:
    """Check every ten seconds, in a background thread, whether the trainers of a store's runs are alive.

    The thread stops when the block ends. ``run_id``: the only run to check; None checks all.
    """
    from rlwatch.monitor.watchman import WatchmanThread

    thread = WatchmanThread(watchman(store, alerting, run_id))
    thread.start()
    try:
        yield
    finally:
        thread.stop()


# Ending a command that runs until it is stopped.


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM (from a service manager or ``kill``) like Ctrl-C within the block, so that the command stops
    cleanly.

    Outside the main thread, signals are not changed.
    """
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
    """Delay Ctrl-C and SIGTERM until the block has ended, so that files and records it has open stay consistent.

    Outside the main thread, signals are not changed.
    """
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
