"""Delivering the outbox: lease, try once, write the outcome back.

A message is a row from the moment its alert fired, so it outlives the process; whoever has its channel may
deliver it. Delivery is at least once: a process that dies between the delivery and its row delivers again,
with the same message id, which receivers can recognise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from threading import current_thread, main_thread

from rlwatch.alerts.backoff import exponential
from rlwatch.alerts.outcomes import Patience, is_first_word, precedes, settled
from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import StoreBusyError
from rlwatch.notify.console import ConsoleNotifier
from rlwatch.ports import AlertStore, Delivery, Notifier
from rlwatch.records import OutboxMessage, OutboxStatus

logger = logging.getLogger("rlwatch")

LEASE_S = 60.0
"""How long a message is ours; longer than any notifier's time limit."""

UNKNOWN_CHANNEL_S = 60.0
"""How long to leave a message alone whose channel this process does not have."""


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """What became of messages. ``waiting`` ones were not tried; ``busy`` counts rounds a busy store ended."""

    sent: int = 0
    retried: int = 0
    dead: int = 0
    waiting: int = 0
    busy: int = 0

    def __add__(self, other: DeliveryReport) -> DeliveryReport:
        return DeliveryReport(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Deliverer:
    """Delivers what is due. Nothing here sleeps: the time of the next try is in the message's row.

    Parameters
    ----------
    store
        Holds the outbox.
    notifiers
        Channel -> notifier. Messages of other channels are left to processes that have them.
    patience
        When to try again and when to give up, loudly.

    Raises
    ------
    MissingExtraError
        If a notifier may have to try again and tenacity is not installed.
    """

    def __init__(
        self,
        store: AlertStore,
        notifiers: Mapping[str, Notifier],
        clock: Clock | None = None,
        *,
        patience: Patience | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self._store = store
        self._notifiers = dict(notifiers)
        self._patience = patience or _default_patience(self._notifiers)
        self._unsettled: dict[str, OutboxMessage] = {}
        self.errors = 0
        """How often a notifier raised, which it must not."""

    def run_once(self, *, enough: Callable[[], bool] = lambda: False) -> DeliveryReport:
        """Try every message that is due, once; take up no more as soon as ``enough()``.

        A busy store ends the round; nothing is lost by it.
        """
        report = self._settle_again()
        tried: set[str] = set()
        try:
            while not enough():
                leased = self._store.lease_messages(
                    self.clock.now(), lease_s=LEASE_S, limit=1, channels=self._present()
                )
                if not leased:
                    break
                if leased[0].message_id in tried:  # due again already: the round was slow
                    self._store.settle_message(leased[0])
                    break
                tried.add(leased[0].message_id)
                report += self._handle(leased[0])
        except StoreBusyError:
            report += DeliveryReport(busy=1)
        return report

    def _present(self) -> list[str]:
        """Channels that can deliver from this process now."""
        return sorted(name for name, notifier in self._notifiers.items() if getattr(notifier, "present", _always)())

    def _settle_again(self) -> DeliveryReport:
        """Outcomes whose rows were busy; one that still is must not hold up the others."""
        report = DeliveryReport()
        for message in list(self._unsettled.values()):
            try:
                report += self._settle(message)
            except StoreBusyError:
                report += DeliveryReport(busy=1)
        return report

    def _handle(self, message: OutboxMessage) -> DeliveryReport:
        done = self._unsettled.get(message.message_id)
        if done is not None:  # its row was busy for longer than our lease: the outcome is known
            return self._settle(replace(done, lease_until=message.lease_until))
        postponed = self._postponed(message)
        if postponed is not None:
            self._store.settle_message(postponed)
            return DeliveryReport(waiting=1)
        outcome = self._outcome(message)
        if outcome.status is OutboxStatus.DEAD:
            logger.error("alert %s never reached %r: %s", outcome.alert_id, outcome.channel, outcome.last_error)
        return self._settle(outcome)

    def _outcome(self, message: OutboxMessage) -> OutboxMessage:
        if self._patience.stale(message, self.clock.now()):
            return replace(message, status=OutboxStatus.DEAD, last_error="nobody could deliver it while it was news")
        return settled(message, self._try(message), self.clock.now(), self._patience)

    def _postponed(self, message: OutboxMessage) -> OutboxMessage | None:
        """The message as it goes back untried, with the reason; None if it is to be tried."""
        now = self.clock.now()
        if message.channel not in self._notifiers:
            reason = f"no channel {message.channel!r} in this process; another may have it"
            return replace(message, next_attempt_at=now + UNKNOWN_CHANNEL_S, last_error=reason)
        others = [] if is_first_word(message) else self._store.outbox(message.run_id)
        earlier = [other.next_attempt_at for other in others if precedes(other, message)]
        if earlier:
            reason = "waits for an earlier message about the same alert"
            return replace(message, next_attempt_at=max(now + 1.0, *earlier), last_error=reason)
        return None

    def _try(self, message: OutboxMessage) -> Delivery:
        try:
            return self._notifiers[message.channel].deliver(message)
        except BaseException as error:  # (seam: notifier delivery; a bad notifier must not stop the others)
            if not isinstance(error, Exception) and current_thread() is main_thread():
                raise  # Ctrl-C at the command line; in a thread of ours it is the notifier's own
            self.errors += 1
            kind = type(error).__name__  # its message could hold an address
            if self.errors == 1:
                logger.warning("notifier %r raised %s; further ones are only counted", message.channel, kind)
            return Delivery(ok=False, reason=f"the notifier raised {kind}")

    def _settle(self, message: OutboxMessage) -> DeliveryReport:
        self._unsettled[message.message_id] = message
        self._store.settle_message(message)
        del self._unsettled[message.message_id]
        return {
            OutboxStatus.SENT: DeliveryReport(sent=1),
            OutboxStatus.DEAD: DeliveryReport(dead=1),
            OutboxStatus.PENDING: DeliveryReport(retried=1),
        }[message.status]


def _always() -> bool:
    return True


def _default_patience(notifiers: Mapping[str, Notifier]) -> Patience:
    """The console never fails: a trainer without the extra ``alerts`` can still use that."""
    remote = any(not isinstance(notifier, ConsoleNotifier) for notifier in notifiers.values())
    return Patience(exponential() if remote else lambda attempts: 60.0 * attempts)
