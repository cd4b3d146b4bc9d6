"""What delivery loses when receivers and processes fail: real sockets, real files, real processes; time by hand.

Each scenario writes messages to an outbox and lets deliverers run until it is empty. Nothing may be lost, and
what arrives twice must carry the same key.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory

from rlwatch.alerts.outbox import LEASE_S, Deliverer
from rlwatch.clock import ManualClock
from rlwatch.errors import RLWatchError
from rlwatch.notify.webhook import WebhookNotifier
from rlwatch.ports import Store
from rlwatch.records import OutboxMessage, OutboxStatus, RunInfo
from rlwatch.store.url import open_store
from rlwatch.testing.notifier_contract import closed_port
from rlwatch.testing.webhook_receiver import Received, WebhookReceiver, WebhookReply

BEGIN = 1_750_000_000.0
POLL_S = 5.0
"""Between two looks at the outbox."""
LIMIT_S = 0.5
"""Of one try; on this machine answers come at once or never."""
LONGEST_S = 6 * 3600.0
"""After so long a scenario has failed."""


@dataclass(frozen=True, slots=True)
class Toll:
    """What one scenario came to.

    ``lost``: messages that no receiver took. ``again``: requests with a key that had been seen before.
    ``other_keys``: requests whose header and body did not carry the key of their message. ``minutes``: until
    the last one arrived.
    """

    scenario: str
    messages: int
    requests: int
    lost: int
    again: int
    other_keys: int
    minutes: float


def down_for_ten_minutes(messages: int = 20) -> Toll:
    """Nobody listens for 600 s, then the receiver is there."""
    port = closed_port()
    with _outbox(messages) as (_, store):
        clock, url = ManualClock(BEGIN), f"http://127.0.0.1:{port}/hook"
        _run(store, url, clock, until=lambda: clock.now() - BEGIN >= 600.0)
        with WebhookReceiver(port=port, any_path=True) as receiver:
            _run(store, url, clock, until=lambda: _over(store))
        return _toll("receiver down for 10 minutes", messages, receiver, store)


def answers(scenario: str, script: Sequence[WebhookReply | int], messages: int = 20) -> Toll:
    """The receiver answers as the script says, and 204 when that is over."""
    with _outbox(messages) as (_, store), WebhookReceiver(*script, 204) as receiver:
        clock = ManualClock(BEGIN)
        _run(store, receiver.url, clock, until=lambda: _over(store))
        return _toll(scenario, messages, receiver, store)


def troubled(seed: int, length: int = 60) -> list[WebhookReply | int]:
    """A bad hour: errors, rate limits, answers that never come, and now and then a yes."""
    bad: list[WebhookReply | int] = [
        500,
        502,
        503,
        408,
        WebhookReply(429, {"Retry-After": "60"}),
        WebhookReply(hang=True),
        204,
    ]
    return random.Random(seed).choices(bad, weights=(5, 2, 2, 1, 4, 1, 3), k=length)


POINTS = ("leased", "sending", "sent", "settled")
"""Where a deliverer is killed: before it sends, while the receiver works on it, before and after it is put down."""


def killed(point: str, times: int = 2, messages: int = 4) -> Toll:
    """So many deliverers in turn are killed with SIGKILL at ``point``; the next begins when the lease is over."""
    hold = [WebhookReply(hang=True)] * times if point == "sending" else []
    with _outbox(messages) as (place, store), WebhookReceiver(*hold, 204) as receiver:
        clock = ManualClock(BEGIN)
        for _ in range(times):
            _die(point, place, receiver, clock.now())
            clock.advance(LEASE_S + 1.0)
        _run(store, receiver.url, clock, until=lambda: _over(store))
        return _toll(f"killed when {point}", messages, receiver, store)


def scenarios(messages: int = 20, deaths: int = 2) -> dict[str, Callable[[], Toll]]:
    """All of them by name, at this size: so many messages, so many processes killed at each point."""
    failing: dict[str, list[WebhookReply | int]] = {
        "500 for each, five times": [500] * (5 * messages),
        "429, Retry-After 120 s": [WebhookReply(429, {"Retry-After": "120"})] * (2 * messages),
        "answer lost after taking it": [WebhookReply(hang=True)] * deaths,
        "a bad hour": troubled(seed=5, length=3 * messages),
    }
    return {
        "receiver down for 10 minutes": partial(down_for_ten_minutes, messages),
        **{name: partial(answers, name, script, messages) for name, script in failing.items()},
        **{f"killed when {point}": partial(killed, point, deaths, 2 * deaths) for point in POINTS},
    }


@contextmanager
def _outbox(messages: int) -> Iterator[tuple[str, Store]]:
    """A store on disk whose outbox holds so many messages about as many alerts."""
    with TemporaryDirectory(prefix="rlwatch-faults-") as place:
        store = open_store(place)
        writer = store.open_run(RunInfo("run-1"))
        store.put_alerts(
            [],
            [
                OutboxMessage(f"m{n:03}", "run-1", f"a{n}", "webhook", {"event": "firing", "n": n}, created_at=BEGIN)
                for n in range(messages)
            ],
        )
        try:
            yield place, store
        finally:
            writer.close()
            store.close()


def _run(store: Store, url: str, clock: ManualClock, *, until: Callable[[], bool]) -> None:
    deliver = Deliverer(store, {"webhook": WebhookNotifier(url, clock=clock, total_s=LIMIT_S)}, clock)
    began = clock.now()
    while not until():
        deliver.run_once()
        clock.advance(POLL_S)
        if clock.now() - began > LONGEST_S:
            return


def _over(store: Store) -> bool:
    return all(message.status is not OutboxStatus.PENDING for message in store.outbox())


_DELIVERER = """
import os, signal, sys
from rlwatch.alerts.outbox import Deliverer
from rlwatch.clock import ManualClock
from rlwatch.notify.webhook import WebhookNotifier
from rlwatch.store.url import open_store

place, url, point, now = sys.argv[1:]
store, notifier = open_store(place), WebhookNotifier(url, total_s=60.0, read_s=60.0)

def dying(do, before=False):
    def wrapped(*args):
        if not before:
            do(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    return wrapped

if point in ("leased", "sent"):
    notifier.deliver = dying(notifier.deliver, before=point == "leased")
if point == "settled":
    store.settle_message = dying(store.settle_message)
Deliverer(store, {"webhook": notifier}, ManualClock(float(now))).run_once()
"""


def _die(point: str, place: str, receiver: WebhookReceiver, now: float) -> None:
    """A process that delivers until it is killed: by itself, or by us while the receiver keeps it waiting."""
    seen = len(receiver.received)
    program = subprocess.Popen([sys.executable, "-c", _DELIVERER, place, receiver.url, point, str(now)])
    if point == "sending":
        receiver.wait_for(seen + 1, timeout_s=30.0)
        program.kill()
    if program.wait(60.0) != -signal.SIGKILL:
        raise RLWatchError(f"the deliverer was not killed at {point!r} but ended with {program.returncode}")


def _toll(scenario: str, messages: int, receiver: WebhookReceiver, store: Store) -> Toll:
    rows = store.outbox()
    taken = {message.message_id for message in rows if message.status is OutboxStatus.SENT}
    requests = receiver.received
    arrived = {request.message_id for request in requests}
    return Toll(
        scenario,
        messages,
        len(requests),
        lost=messages - len(taken & arrived),
        again=len(requests) - len(arrived),
        other_keys=sum(not _keyed(request) for request in requests),
        minutes=max((message.sent_at or BEGIN) - BEGIN for message in rows) / 60.0,
    )


def _keyed(request: Received) -> bool:
    """Whether header and body carry one key, that of this message."""
    return request.message_id == request.payload.get("message_id") == f"m{request.payload.get('n'):03}"


def table(tolls: Sequence[Toll]) -> str:
    """For people."""
    head = f"{'scenario':<32}{'messages':>9}{'requests':>9}{'lost':>6}{'again':>7}{'other key':>11}{'minutes':>9}"
    lines = [
        f"{t.scenario:<32}{t.messages:>9}{t.requests:>9}{t.lost:>6}{t.again:>7}{t.other_keys:>11}{t.minutes:>9.1f}"
        for t in tolls
    ]
    return "\n".join([head, *lines])
