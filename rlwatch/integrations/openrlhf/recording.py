"""Recording a step of OpenRLHF's: put together and recorded on a thread of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from rlwatch.integrations.openrlhf.responses import response_stats
from rlwatch.integrations.openrlhf.taps import PARCEL
from rlwatch.integrations.step_tally import Decode, StepTally
from rlwatch.integrations.whole import together
from rlwatch.seam import Seam

WAITING = 2
"""Steps that may wait for their statistics; beyond it a step goes without, and is counted."""
DEADLINE_S = 30.0
"""Longest the end of training waits for those of the last steps, in seconds."""
SLOW = "statistics take longer than training steps; a step goes without them"


@dataclass(slots=True)
class Step:
    """What is known of a step when it has ended: its experiences, what policy actors sent, numbers."""

    experiences: Sequence[Any] = ()
    sent: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


class Recording:
    """Computes and records, in the order of steps. ``latest`` are the metrics of the step recorded last."""

    def __init__(self, seam: Seam, group_size: int, decode: Decode | None, *, tokens: bool, full: bool) -> None:
        self.latest: Mapping[str, float] = {}
        self._seam = seam
        self._group_size = group_size
        self._decode = decode
        self._tokens = tokens
        self._full = full
        self._errors: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlwatch-openrlhf")
        self._waiting: list[Future[None]] = []

    def submit(self, step: int, measured: Step) -> None:
        """Compute and record ``step``; returns at once."""
        run = self._seam.run
        self._waiting = [future for future in self._waiting if not future.done()]
        if run is None or not run.active:
            return
        if len(self._waiting) < WAITING:
            self._waiting.append(self._thread.submit(self._guarded, step, measured))
        else:
            run.counters.warn("dropped", SLOW)

    def close(self) -> None:
        """Wait for what was submitted, but not for ever: what comes later is lost, and counted."""
        self._thread.shutdown(wait=False)
        late = wait(self._waiting, DEADLINE_S).not_done
        if late and self._seam.run is not None:
            self._seam.run.counters.warn("dropped", "the statistics of the last steps took too long", len(late))

    def _guarded(self, step: int, measured: Step) -> None:
        self._seam.aside("statistics", self._record, step, measured)

    def _record(self, step: int, measured: Step) -> None:
        run, tally = self._seam.run, StepTally()
        if run is None:
            return
        if self._tokens and measured.experiences:
            found = self._seam.attempt(
                "responses", response_stats, measured.experiences, self._group_size, full=self._full
            )
            tally.add_stats(found or {})
        self._count_errors(measured.sent)
        for numbers in (measured.numbers, *(sent["numbers"] for sent in measured.sent.values())):
            for name, value in numbers.items():
                tally.add_number(name, value)
        whole = together(step, tally, {rank: sent["parcel"] for rank, sent in measured.sent.items()}, self._decode)
        self.latest = whole.metrics
        run.log(whole.metrics, step=step)
        for spikes in whole.spikes:
            run.log_spikes(spikes)

    def _count_errors(self, sent: Mapping[int, Mapping[str, Any]]) -> None:
        """What the policy actors' seams swallowed is counted on the run, which they do not have."""
        for rank, what in sent.items():
            new = int(what["errors"]) - self._errors.get(rank, 0)
            self._errors[rank] = int(what["errors"])
            if new > 0 and self._seam.run is not None:
                self._seam.run.counters.warn("errors", f"the taps of policy actor {rank} failed; see its log", new)


def taken_out(status: Any) -> dict[int, Any]:
    """Rank -> what its policy actor sent, removed from ``status``: nobody else is to see it."""
    if not isinstance(status, dict):
        return {}
    keys = [key for key in status if isinstance(key, str) and key.startswith(PARCEL)]
    return {int(key.removeprefix(PARCEL)): status.pop(key) for key in keys}
