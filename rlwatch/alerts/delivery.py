"""Delivery in the background, for a trainer, ``rlwatch watch`` or the dashboard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from rlwatch.alerts.outbox import Deliverer, DeliveryReport
from rlwatch.alerts.outcomes import Patience
from rlwatch.clock import Clock, SystemClock
from rlwatch.ports import AlertStore, Notifier
from rlwatch.seam import described, say, tireless

IDLE_SHARE = 0.01
"""Of its time the thread spends at most this share on looking at an outbox that has nothing for it."""


class DeliveryThread:
    """Delivers until stopped. A daemon: it does not keep a process alive.

    Parameters
    ----------
    store, notifiers, clock, patience
        As for :class:`rlwatch.alerts.outbox.Deliverer`.
    poll_s
        Seconds between looks at the outbox, more where looking is slow; :meth:`wake` asks for one now.
    failed
        Told of every round that failed.

    Raises
    ------
    MissingExtraError
        As for the Deliverer.
    """

    def __init__(
        self,
        store: AlertStore,
        notifiers: Mapping[str, Notifier],
        *,
        clock: Clock | None = None,
        patience: Patience | None = None,
        poll_s: float = 2.0,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.report = DeliveryReport()
        """All that was delivered so far."""
        self.failures = 0
        """Rounds that ended with an error of the store other than busy."""
        self._clock = clock or SystemClock()
        self._deliverer = Deliverer(store, notifiers, self._clock, patience=patience)
        self._poll_s = poll_s
        self._wakeup = threading.Event()
        self._stop_at: float | None = None
        self._failed = failed
        self._thread = threading.Thread(
            target=tireless, args=(self._work, self._note), name="rlwatch-delivery", daemon=True
        )

    @property
    def errors(self) -> int:
        """How often a notifier raised, which it must not."""
        return self._deliverer.errors

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Look now: there is something new."""
        self._wakeup.set()

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Deliver what is due, for at most ``deadline_s`` seconds, and end; whether it ended in time.

        What is left stays in the outbox for the next process.
        """
        if self._stop_at is None:
            self._stop_at = self._clock.monotonic() + deadline_s
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self._stop_at is None:
            self._wakeup.wait(self._round())
            self._wakeup.clear()
        self._round()

    def _round(self) -> float:
        """Deliver what is due; returns the seconds until the next look."""
        began = self._clock.monotonic()
        try:
            report = self._deliverer.run_once(enough=self._out_of_time)
        except BaseException as error:  # noqa: BLE001  (seam: notifier delivery; a broken store must not end delivery)
            self._note(error)
            return self._poll_s
        self.report += report
        idle = report == DeliveryReport()
        return max(self._poll_s, (self._clock.monotonic() - began) / IDLE_SHARE if idle else 0.0)

    def _note(self, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            say(logging.WARNING, "alert delivery: %s; further ones are only counted", described(error))
        if self._failed is not None:
            self._failed(error)

    def _out_of_time(self) -> bool:
        return self._stop_at is not None and self._clock.monotonic() >= self._stop_at
