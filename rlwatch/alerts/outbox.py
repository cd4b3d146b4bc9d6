"""Deliver the outbox: lease a message, try once, write the outcome back.

A message is a row from the moment its alert fired, so it outlives the process; any process that has its channel may
deliver it. Delivery is at least once: if a process dies between a delivery and its row, the message is delivered again
with the same id, which receivers can recognise.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from tempfile import TemporaryDirectory
from threading import current_thread, main_thread

from rlwatch.alerts.matching import alert_ids, quiet_words, silence_of
from rlwatch.clock import Clock, SystemClock
from rlwatch.error_boundary import call_or, described, log_message, run_forever, sheltered
from rlwatch.errors import MissingExtraError, StoreBusyError
from rlwatch.notify.registry import ConsoleNotifier
from rlwatch.ports import AlertStore, Delivery, Notifier
from rlwatch.records import AlertState, OutboxMessage, OutboxStatus, RunInfo
from rlwatch.store.url import open_store

Backoff = Callable[[int], float]
"""``backoff(attempts)``: seconds to wait after so many failed attempts (>= 1)."""


def exponential(*, first_s: float = 5.0, longest_s: float = 900.0, jitter_s: float = 5.0) -> Backoff:
    """Return a function from the number of failed attempts to the seconds until the next one, which double each time.

    They begin with ``first_s``, are at most ``longest_s``, and have a random part below ``jitter_s`` so that many
    senders do not return at once.

    Raises
    ------
    MissingExtraError
        If tenacity is not installed.
    """
    try:
        import tenacity
    except ImportError:
        raise MissingExtraError("tenacity", "alerts", "delivering alerts again after a failure") from None
    wait = tenacity.wait_exponential(multiplier=first_s, max=longest_s)
    chance = random.Random()  # not the process's: the trainer may draw from that

    def backoff(attempts: int) -> float:
        state = tenacity.RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
        state.attempt_number = attempts
        return float(wait(state)) + chance.uniform(0.0, jitter_s)

    return backoff


# The outcome of a delivery attempt: sent, to be repeated, or given up. Pure.

LONGEST_WISH_S = 3600.0
"""Longest delay in seconds that a receiver can request (``Retry-After``)."""

_EVENT_ORDER = {"firing": 0, "escalated": 1, "eased": 1, "repeated": 1, "unacknowledged": 1, "resolved": 2}


@dataclass(frozen=True, slots=True)
class Patience:
    """Delays between attempts to deliver a message, and when to give up.

    A message that waited over a weekend because no process ran still gets an attempt. A webhook that is configured
    today does not get last month's crashes.

    Parameters
    ----------
    backoff
        Seconds between attempts, by the number of failed ones.
    max_attempts, max_age_s
        A message is given up when this attempt fails, or when one fails so many seconds after it was written.
    stale_s
        A message without an attempt for so many seconds is out of date.
    """

    backoff: Backoff
    max_attempts: int = 200
    max_age_s: float = 48 * 3600.0
    stale_s: float = 7 * 24 * 3600.0

    def stale(self, message: OutboxMessage, now: float) -> bool:
        """Return whether a message without an attempt is too old to be delivered. ``now``: Unix seconds."""
        return message.attempts == 0 and 0 < message.created_at < now - self.stale_s


def after_try(message: OutboxMessage, delivery: Delivery, now: float, patience: Patience) -> OutboxMessage:
    """Return the message with the outcome of a delivery attempt that ended at ``now`` (Unix seconds).

    ``delivery``: outcome of the attempt. ``patience``: when to try again and when to give up.
    """
    tried = replace(message, attempts=message.attempts + 1)
    if delivery.ok:
        return replace(tried, status=OutboxStatus.SENT, sent_at=now, last_error="")
    given_up = _why_given_up(tried, delivery, now, patience)
    if given_up:
        return replace(tried, status=OutboxStatus.DEAD, last_error=f"{delivery.reason} ({given_up})")
    wait = max(patience.backoff(tried.attempts), min(delivery.retry_after_s or 0.0, LONGEST_WISH_S))
    return replace(tried, next_attempt_at=now + wait, last_error=delivery.reason)


def _why_given_up(tried: OutboxMessage, delivery: Delivery, now: float, patience: Patience) -> str:
    if not delivery.retryable:
        return "trying again would not help"
    if tried.attempts >= patience.max_attempts:
        return f"given up after {tried.attempts} tries"
    age = now - tried.created_at if tried.created_at > 0 else 0.0  # 0: not known
    return f"given up after {age / 3600:.0f} h" if age > patience.max_age_s else ""


def precedes(first: OutboxMessage, second: OutboxMessage) -> bool:
    """Return whether ``first`` must reach its channel before ``second``: no receiver may read "firing" after
    "resolved".
    """
    return (
        first.status is OutboxStatus.PENDING
        and (first.alert_id, first.channel) == (second.alert_id, second.channel)
        and _place(first) < _place(second)
    )


def is_first(message: OutboxMessage) -> bool:
    """Return whether the message is the first about its alert, so that no other one must be delivered before it."""
    return _place(message)[0] == 0


def _place(message: OutboxMessage) -> tuple[int, float]:
    return (_EVENT_ORDER.get(str(message.payload.get("event")), 0), message.created_at)


logger = logging.getLogger("rlwatch")

LEASE_S = 60.0
"""Seconds for which a message is leased; longer than any channel's time limit."""

SILENCE_S = 60.0
"""Seconds before a silenced message is checked again: a silence may be ended early."""
SILENCED = "kept back: "
"""Beginning of the last error of a message that is, or was, silenced."""

EARLIER_S = 60.0
"""Most seconds before a message that waits for an earlier one is checked again: a clock that goes back changes when the
earlier one is due.
"""
UNKNOWN_CHANNEL_S = 60.0
"""Seconds before a message of a channel that this process lacks is checked again."""


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """Numbers of messages by outcome of a delivery.

    ``waiting``: put back without an attempt. ``busy``: number of rounds that a busy store ended.
    """

    sent: int = 0
    retried: int = 0
    dead: int = 0
    waiting: int = 0
    busy: int = 0

    def __add__(self, other: DeliveryReport) -> DeliveryReport:
        return DeliveryReport(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Deliverer:
    """Delivers the messages of a store's outbox that are due, through the channels of this process.

    It never sleeps: the time of the next attempt is in the message's row.

    Parameters
    ----------
    store
        Store with the outbox.
    notifiers
        Name -> channel. Messages of other channels are left to processes that have them.
    clock
        Clock; None: the machine's.
    patience
        When to try again and when to give up; None: defaults.

    Raises
    ------
    MissingExtraError
        If a channel may have to retry and tenacity is not installed.
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
        """Number of exceptions raised by notifiers, which must not raise."""

    def run_once(self, *, enough: Callable[[], bool] = lambda: False) -> DeliveryReport:
        """Try every due message once and return the outcomes; begin no further one after ``enough()`` returns True.

        A busy store ends the round without losing a message.
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
        """Return the channels that can deliver from this process now."""
        return sorted(name for name, notifier in self._notifiers.items() if getattr(notifier, "present", _always)())

    def _settle_again(self) -> DeliveryReport:
        """Store outcomes whose rows were busy; one that still is must not delay the others."""
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
        if outcome.status is OutboxStatus.DEAD and not message.last_error.startswith(SILENCED):
            logger.error("alert %s never reached %r: %s", outcome.alert_id, outcome.channel, outcome.last_error)
        return self._settle(outcome)

    def _outcome(self, message: OutboxMessage) -> OutboxMessage:
        if self._patience.stale(message, self.clock.now()):
            return replace(message, status=OutboxStatus.DEAD, last_error="not delivered before it became obsolete")
        if message.last_error.startswith(SILENCED) and self._is_over(message):
            why = f"resolved before it could be sent ({message.last_error})"
            return replace(message, status=OutboxStatus.DEAD, last_error=why)
        return after_try(message, self._try(message), self.clock.now(), self._patience)

    def _is_over(self, message: OutboxMessage) -> bool:
        """Return whether a message reports firing alerts of which none fires any more."""
        if message.payload.get("event") == "resolved":
            return False
        states = {alert.alert_id: alert.state for alert in self._store.alerts(message.run_id)}
        return all(states.get(each) is AlertState.RESOLVED for each in alert_ids(message))

    def _postponed(self, message: OutboxMessage) -> OutboxMessage | None:
        """Return the message to put back without an attempt, with the reason; None if it is to be tried."""
        now = self.clock.now()
        if message.channel not in self._notifiers:
            reason = f"no channel {message.channel!r} in this process; another may have it"
            return replace(message, next_attempt_at=now + UNKNOWN_CHANNEL_S, last_error=reason)
        silences = self._store.silences() if message.payload.get("event") in _EVENT_ORDER else []
        silence = silence_of(message, silences, now)
        if silence is not None:
            until = min(silence.until, now + SILENCE_S)
            return replace(message, next_attempt_at=until, last_error=SILENCED + quiet_words(silence))
        others = [] if is_first(message) else self._store.outbox(message.run_id)
        earlier = [other.next_attempt_at for other in others if precedes(other, message)]
        if earlier:
            reason = "waits for an earlier message about the same alert"
            again = min(max(now + 1.0, *earlier), now + EARLIER_S)
            return replace(message, next_attempt_at=again, last_error=reason)
        return None

    def _try(self, message: OutboxMessage) -> Delivery:
        """Deliver the message; an exception of its notifier must not stop the others."""

        def deliver() -> Delivery:
            return self._notifiers[message.channel].deliver(message)

        def failed(error: BaseException) -> Delivery:
            self.errors += 1
            kind = type(error).__name__  # its message could hold an address
            if self.errors == 1:
                logger.warning("notifier %r raised %s; further ones are only counted", message.channel, kind)
            return Delivery(ok=False, reason=f"the notifier raised {kind}")

        # Ctrl-C at the command line passes; in a thread of ours it is the notifier's own
        return call_or(deliver, failed) if current_thread() is main_thread() else sheltered(deliver, failed)

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
    """Return the patience; the console never fails, so a trainer without the extra ``alerts`` can still use it."""
    remote = any(not isinstance(notifier, ConsoleNotifier) for notifier in notifiers.values())
    return Patience(exponential() if remote else lambda attempts: 60.0 * attempts)


# Delivery in the background, for a trainer, ``rlwatch watch`` or the dashboard.

IDLE_SHARE = 0.01
"""Largest share of its time that the thread spends reading an empty outbox, but"""
LONGEST_POLL_S = 30.0
"""it reads again after so many seconds at the latest: a message may be due, and one slow read is no slow store."""


class DeliveryThread:
    """Daemon thread that delivers the messages of a store's outbox until it is stopped.

    Parameters
    ----------
    store, notifiers, clock, patience
        As for :class:`rlwatch.alerts.outbox.Deliverer`.
    poll_s
        Seconds between reads of the outbox, more where reading is slow; :meth:`wake` requests one now.
    failed
        Called with the error of every failed round.

    Raises
    ------
    MissingExtraError
        If a channel may have to retry and tenacity is not installed.
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
        """Everything delivered so far."""
        self.failures = 0
        """Rounds that ended with an error of the store other than busy."""
        self._clock = clock or SystemClock()
        self._deliverer = Deliverer(store, notifiers, self._clock, patience=patience)
        self._poll_s = poll_s
        self._wakeup = threading.Event()
        self._stop_at: float | None = None
        self._failed = failed
        self._thread = threading.Thread(
            target=run_forever, args=(self._work, self._note), name="rlwatch-delivery", daemon=True
        )

    @property
    def alive(self) -> bool:
        """True while the thread that delivers messages runs."""
        return self._thread.is_alive()

    @property
    def errors(self) -> int:
        """Number of exceptions raised by channels, which must not raise."""
        return self._deliverer.errors

    def start(self) -> None:
        """Start the thread that delivers messages."""
        self._thread.start()

    def wake(self) -> None:
        """Read the outbox now, because there is a new message."""
        self._wakeup.set()

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Deliver due messages for at most ``deadline_s`` seconds and end the thread; return whether it ended in time.

        Undelivered messages remain in the outbox for the next process.
        """
        if self._stop_at is None:
            self._stop_at = self._clock.monotonic() + deadline_s
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self._stop_at is None:
            self._wakeup.wait(self.look())
            self._wakeup.clear()
        self.look()

    def look(self) -> float:
        """Deliver due messages; return the seconds until the next read of the outbox."""
        began = self._clock.monotonic()
        report = sheltered(lambda: self._deliverer.run_once(enough=self._out_of_time), self._note)
        if report is None:  # a broken store must not end delivery
            return self._poll_s
        self.report += report
        idle = report == DeliveryReport()
        rest = min((self._clock.monotonic() - began) / IDLE_SHARE, LONGEST_POLL_S) if idle else 0.0
        return max(self._poll_s, rest)

    def _note(self, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            log_message(logging.WARNING, "alert delivery: %s; further ones are only counted", described(error))
        if self._failed is not None:
            self._failed(error)

    def _out_of_time(self) -> bool:
        return self._stop_at is not None and self._clock.monotonic() >= self._stop_at


# A trial message takes the real path: a row of an outbox, leased, delivered by the channel's notifier, stored.

ABSENT = Delivery(ok=False, reason="cannot be tried from here: only the trainer's own process has this channel")


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of one test message: the channel, the id of the message, and the result of its delivery."""

    channel: str
    message_id: str
    delivery: Delivery


class _Overheard:
    """Wrapper of a channel that keeps its last outcome: rows keep no reason for a success."""

    def __init__(self, notifier: Notifier) -> None:
        self.name, self.outcome = notifier.name, ABSENT
        self.present = getattr(notifier, "present", lambda: True)
        self._notifier = notifier

    def deliver(self, message: OutboxMessage) -> Delivery:
        self.outcome = self._notifier.deliver(message)
        return self.outcome


def try_channels(
    notifiers: Mapping[str, Notifier], *, dashboard_url: str = "", clock: Clock | None = None
) -> list[Trial]:
    """Send one test message to each channel, once, and return the answers of the receivers.

    ``dashboard_url``: address for the links in messages; empty: none. It uses its own outbox in a temporary directory:
    no run's alerts are touched. ``notifiers``: name -> channel.
    """
    from rlwatch.alerts.messages import trial_message  # with all of diagnosis, which a trainer delivers without

    clock = clock or SystemClock()
    overheard = {channel: _Overheard(notifier) for channel, notifier in notifiers.items()}
    messages = {channel: trial_message(channel, dashboard_url, clock.now()) for channel in notifiers}
    with TemporaryDirectory(prefix="rlwatch-trial-") as place:
        store = open_store(place)
        writer = store.open_run(RunInfo("trial", project="rlwatch", name="trial"))
        store.put_alerts([], list(messages.values()))
        Deliverer(store, overheard, clock).run_once()
        writer.close()
        store.close()
    return [Trial(channel, messages[channel].message_id, each.outcome) for channel, each in overheard.items()]
