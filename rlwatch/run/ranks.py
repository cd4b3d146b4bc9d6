"""Connection of the ranks of a run: they connect once, at set-up; then rank 0 gathers, and the others
send and listen.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlwatch import codec
from rlwatch.error_boundary import described, log_message, sheltered
from rlwatch.link.hub import Hub
from rlwatch.link.rounds import Chair
from rlwatch.link.spoke import HOPE_S, NobodyError, WorkerClient
from rlwatch.link.wire import LOOPBACK, HubAddress, LinkError, ListenAddress, StepKey, StepKeyCounter
from rlwatch.ports import Meeting, PendingRecord
from rlwatch.recorder.intake import FULL, Awaited, BoundedQueue
from rlwatch.recorder.losses import Counters
from rlwatch.records import STALL_OVER, STALLED, Command
from rlwatch.redaction import plain
from rlwatch.run.machine import WithMachines, packed
from rlwatch.run.run import Run, watch_over
from rlwatch.run.stages import StageClock, StallWatch

logger = logging.getLogger("rlwatch")
ADDRESS, FAR = "address", "far"
"""Names in the shared storage of the ranks: the address of rank 0, and the request of a rank on another machine."""


def join(run: Run, meeting: Meeting, *, link: str | None = None, hope_s: float = HOPE_S) -> None:
    """Connect the ranks of ``run``. Every rank calls it at set-up, with its own run and the same ``meeting``.

    It returns at once; the ranks connect in background threads, even if one starts much later. From then on a step that
    every rank :meth:`sends <rlwatch.run.run.Run.send>` is recorded for the whole batch, and commands reach every rank.
    A rank that cannot be connected logs a warning and measures nothing.

    Parameters
    ----------
    run
        The run that :func:`rlwatch.init` returned on this rank.
    meeting
        Key-value store shared by the ranks, in which rank 0 publishes its address.
    link
        Address on which rank 0 listens: ``HOST:PORT``, ``HOST`` or ``:PORT``; by default ``RLWATCH_LINK_HOST`` and
        ``RLWATCH_LINK_PORT``. Without a host it listens on the loopback interface, until a rank of another machine
        looks for it, then on every interface; without a port, on a free one.
    hope_s
        Seconds after which a rank that has not found rank 0 stops measuring; it continues to look, and measures once it
        has found rank 0.

    Raises
    ------
    ConfigError
        If the address to listen on is malformed, or the secret is too short.
    LinkError
        If an address was given and rank 0 cannot listen on it.
    """
    if run.world_size < 2 or run.linked:
        return
    place = ListenAddress.of(link)
    if run.rank == 0:
        _host(run, meeting, place)
    else:
        other = OtherRank(
            run.rank, _finder(meeting), run.counters, hope_s=hope_s, found=run.machine_found, stages=run.stages
        )
        run.link(other)
        watch_over(run, sigterm=False)


def _host(run: Run, meeting: Meeting, place: ListenAddress) -> None:
    if not run.active:
        return meeting.put(ADDRESS, "")
    try:
        hub = Hub(run.world_size, place)
    except LinkError as error:
        meeting.put(ADDRESS, "")
        if place != ListenAddress():
            raise
        return logger.warning("the ranks are not linked: only rank 0's share of the batch is measured (%s)", error)
    hub.start()
    meeting.put(ADDRESS, hub.address.to_text())
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(run.world_size)
    seek = None if alone or place.host else _lookout(meeting)
    return run.link(FirstRank(hub, run.offer, run.has_commands, seek, run.tell_stall))


def _lookout(meeting: Meeting) -> Callable[[Hub], bool]:
    """Return a function that makes the hub reachable for a waiting rank of another machine.

    It returns whether to call it again.
    """

    def look(hub: Hub) -> bool:
        if meeting.get(FAR) is None:
            return True
        hub.open_up()
        meeting.put(ADDRESS, hub.address.to_text())
        return hub.address.hosts == (LOOPBACK,)

    return look


def _finder(meeting: Meeting) -> Callable[[], HubAddress | None]:
    def find() -> HubAddress | None:
        address_text = meeting.get(ADDRESS)
        if address_text is None:
            return None
        if not address_text:
            raise NobodyError("rank 0 does not record")
        address = HubAddress.from_text(address_text)
        if address.within_reach:
            return address
        meeting.put(FAR, "1")
        return None

    return find


QUEUE_SIZE = 64
"""Largest number of steps that wait to be sent to rank 0."""
BATCH = 8
LOOKOUT_S = 0.05
"""Seconds between two checks of rank 0 for commands."""
SEEK_S = (0.05, 1.0)
"""Seconds between two checks of rank 0 for ranks of other machines: at first, and at most."""


class FirstRank:
    """Rank 0's connection to the other ranks: it merges their measurements and leads the votes on commands.

    A background thread checks whether there are commands, and then calls all ranks together.

    Parameters
    ----------
    hub
        Server to which the other ranks connect.
    offer
        Queues the measurements of a step for the writer thread.
    wanted
        Returns whether there are commands.
    seek
        Makes the server reachable for ranks of other machines; called until every rank is connected or it returns
        False. None: not needed.
    on_event
        Called with the kind, the step and the body of each event that another rank sends about itself.
    """

    live = True

    def __init__(
        self,
        hub: Hub,
        offer: Callable[[Awaited], object],
        wanted: Callable[[], bool],
        seek: Callable[[Hub], bool] | None = None,
        on_event: Callable[[str, int | None, Mapping[str, Any]], object] = lambda *_: None,
    ) -> None:
        self._on_event = on_event
        self.hub = hub
        self._offer = offer
        self._wanted = wanted
        self._seek = seek
        self.chair = Chair(hub)
        self.latest: dict[str, float] = {}
        self._measured = StepKeyCounter()
        self._ended = False
        self._seek_at, self._pause_s = 0.0, SEEK_S[0]
        threading.Thread(target=self._look_out, name="rlwatch-lookout", daemon=True).start()

    @property
    def seeks(self) -> bool:
        """True while rank 0 still looks for ranks of other machines, to let them connect over the network."""
        return self._seek is not None

    def settled(self, deadline_s: float) -> bool:  # noqa: ARG002  (rank 0 need not look for itself)
        """Return True at once: rank 0 need not connect to itself."""
        return True

    def send(self, parcel: PendingRecord) -> None:
        """Queue rank 0's measurements of a step for the writer thread, which waits for those of the other ranks.

        ``parcel``: the measurements, which may still be on their way from a device.
        """
        moment = self._measured.next(parcel.step)
        self._offer(Awaited(WithMachines(parcel), self.hub.inbox, moment, time.time(), self.latest.update))

    def meets(self, step: int, *, wanted: bool, staying: bool) -> bool:
        """Return whether all ranks meet at this boundary (a point of training at which commands may be executed) at
        ``step``.

        ``wanted``: there are commands, so ask the other ranks which boundary they have reached. ``staying``: this rank
        remains here (it is paused).
        """
        return self.chair.meets(step, wanted=wanted, staying=staying)

    def share(self, commands: Sequence[Command]) -> list[Command]:
        """Send the users' commands to the other ranks, at a point of training where all ranks meet, and return them."""
        self.chair.offer(_packed(commands))
        return list(commands)

    def order(self, commands: Sequence[Command]) -> list[Command]:
        """Send the users' commands to the other ranks, at a point of training that every rank passes, and return them;
        usually there are none.
        """
        self.chair.order(_packed(commands) if commands else b"")
        return list(commands)

    def agree(self, refusal: str | None) -> str | None:
        """Collect the votes on a command, send the verdict to all ranks and return it: None, or the reason for the
        refusal.

        ``refusal``: reason why rank 0 itself refuses; None: it agrees.
        """
        return self.chair.decide(refusal)

    def over(self) -> None:
        """End the round of votes on commands: release the ranks that still wait for a verdict."""
        self.chair.over()

    def leave(self) -> None:
        """Note that this rank leaves the boundary (the point at which commands may be executed)."""
        self.chair.leave()

    def close(self, deadline_s: float) -> bool:
        """Close the connections to the other ranks, within ``deadline_s`` seconds; return True."""
        self._ended = True
        self.hub.close(min(1.0, deadline_s))
        return True

    def forked(self) -> None:
        """In a forked child process, close the copies of the connections, without any effect on the parent's."""
        self._ended = True
        self.hub.forked()

    def _look_out(self) -> None:
        while not self._ended:
            sheltered(self._look, self._blind)
            time.sleep(LOOKOUT_S)

    def _look(self) -> None:
        while self.hub.notes:
            self._hear(*self.hub.notes.popleft())
        if self._wanted():
            self.chair.call()
        if self._seek is not None and time.monotonic() >= self._seek_at:
            missing = len(self.hub.linked()) < self.hub.world_size - 1
            self._seek = self._seek if missing and self._seek(self.hub) else None
            self._seek_at = time.monotonic() + self._pause_s
            self._pause_s = min(2.0 * self._pause_s, SEEK_S[1])

    def _hear(self, rank: int, note: bytes) -> None:
        try:
            kind, step, body = json.loads(note)
            heard = {**body, "rank": rank}
        except (ValueError, TypeError, RecursionError):
            return
        if kind in (STALLED, STALL_OVER):
            self._on_event(kind, step if isinstance(step, int) else None, heard)

    def _blind(self, error: BaseException) -> None:
        log_message(logging.WARNING, "rank 0 no longer sees whether other ranks look for it: %s", described(error))
        self._seek = None


class OtherRank:
    """Another rank's connection to rank 0: it sends measurements and takes part in votes on commands.

    Parameters
    ----------
    rank
        This rank.
    find
        Returns the address of rank 0, once it is known.
    counters
        Counts steps that could not be sent.
    hope_s
        Seconds after which a rank that has not found rank 0 stops measuring.
    found
        Returns new metrics of this rank's machine; called on the sending thread.
    stages
        Stages of this process; its stalls are reported to rank 0.
    """

    def __init__(
        self,
        rank: int,
        find: Callable[[], HubAddress | None],
        counters: Counters,
        *,
        hope_s: float = HOPE_S,
        found: Callable[[], Mapping[str, float]] = dict,
        stages: StageClock | None = None,
    ) -> None:
        self._notes: deque[bytes] = deque(maxlen=QUEUE_SIZE)
        self._watch = StallWatch(stages or StageClock(), rank, self._note)
        self._counters = counters
        self._found = found
        self._queue: BoundedQueue[tuple[StepKey, Callable[[], bytes]]] = BoundedQueue(QUEUE_SIZE)
        self._measured = StepKeyCounter()
        self.spoke = WorkerClient(
            rank,
            find,
            lambda: self._queue.drain(BATCH),
            lambda n: counters.add("dropped", n),
            self._measured.join,
            hope_s=hope_s,
            notes=self._taken_notes,
        )
        self.latest: dict[str, float] = {}
        self.spoke.start()

    def _note(self, kind: str, step: int | None, body: Mapping[str, Any]) -> None:
        self._notes.append(json.dumps([kind, step, plain(body)]).encode())

    def _taken_notes(self) -> list[bytes]:
        self._watch.look()
        notes = list(self._notes)
        self._notes.clear()
        return notes

    @property
    def live(self) -> bool:
        """True while rank 0 receives this rank's measurements, or is still looked for."""
        return self.spoke.live

    def settled(self, deadline_s: float) -> bool:
        """Wait up to ``deadline_s`` seconds until it is known whether rank 0 can be reached; return whether it is
        connected.
        """
        return self.spoke.settled(deadline_s)

    def send(self, parcel: PendingRecord) -> None:
        """Queue this rank's measurements of a step for the sending thread; count them as dropped if the queue is full.

        ``parcel``: the measurements, which may still be on their way from a device.
        """
        if not self._queue.offer((self._measured.next(parcel.step), lambda: packed(self._found(), parcel.encode()))):
            self._counters.warn("dropped", FULL)

    def meets(self, step: int, *, wanted: bool, staying: bool) -> bool:
        """Return whether rank 0 has called all ranks together at this boundary, or is about to.

        A boundary is a point at which commands may be executed. ``step``: the optimizer step. ``wanted``: something is
        due here on every rank. ``staying``: this rank remains here (it is paused).
        """
        return self.spoke.member.meets(step, wanted=wanted, staying=staying)

    def share(self, commands: Sequence[Command]) -> list[Command]:  # noqa: ARG002  (only rank 0 has any)
        """Return the users' commands that rank 0 sends at a point of training where all ranks meet; the argument is not
        used.
        """
        return _unpacked(self.spoke.member.offered())

    def order(self, commands: Sequence[Command]) -> list[Command]:  # noqa: ARG002  (only rank 0 has any)
        """Return the users' commands that rank 0 sends at a point of training that every rank passes; the argument is
        not used.
        """
        return _unpacked(self.spoke.member.ordered())

    def agree(self, refusal: str | None) -> str | None:
        """Send rank 0 the vote of this rank, and return the verdict: None, or the reason for the refusal.

        ``refusal``: reason why this rank refuses; None: it agrees.
        """
        return self.spoke.member.vote(refusal)

    def over(self) -> None:
        """End the round of votes on commands: answer no further message of it."""
        self.spoke.member.over()

    def leave(self) -> None:
        """Note that this rank leaves the boundary (the point at which commands may be executed)."""
        self.spoke.member.leave()

    def close(self, deadline_s: float) -> bool:
        """Send the waiting steps and disconnect; return False if ``deadline_s`` seconds were not enough."""
        return self.spoke.close(deadline_s)

    def forked(self) -> None:
        """In a forked child process, close the copies of the connections, without any effect on the parent's."""
        self.spoke.forked()


def _packed(commands: Sequence[Command]) -> bytes:
    return json.dumps([codec.encoded(command) for command in commands], default=codec.nearest).encode()


def _unpacked(body: bytes) -> list[Command]:
    return [codec.decoded(Command, row) for row in json.loads(body)] if body else []
