"""Delivering the outbox of a store while a command runs: also for runs whose trainer is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
