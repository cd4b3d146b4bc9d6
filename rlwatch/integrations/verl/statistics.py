"""The statistics of one global step, put together of the batch and of all workers on a thread of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import TYPE_CHECKING

from rlwatch.integrations.controller import Told
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising.recording import decoded
from rlwatch.integrations.step_tally import Decode, StepTally
from rlwatch.integrations.verl.batch import Reading, StepBatch
from rlwatch.integrations.verl.pieces import pieces
from rlwatch.integrations.verl.replies import Reply, accepted
from rlwatch.integrations.verl.settings import Settings
from rlwatch.integrations.verl.texts import Texts
from rlwatch.integrations.verl.workers import Answers
from rlwatch.integrations.whole import together
from rlwatch.records import LOCALISED
from rlwatch.seam import Seam
from rlwatch.tensors.responses import observe_responses

if TYPE_CHECKING:
    from rlwatch.run import Run

WAITING = 2
"""Steps that may wait for their statistics; beyond it a step goes without, and is counted."""
SLOW = "statistics take longer than training steps; a step goes without them"
BEFORE_THE_UPDATE = {"nonfinite/logp": "nonfinite/old_logp"}
"""The batch's log-probs are those of the policy before the update; here is what to call its statistics."""


Read = Callable[[], StepBatch]


class Statistics:
    """Computes and records, in the order of steps."""

    def __init__(self, seam: Seam, settings: Settings) -> None:
        self.reading = Reading()
        self.numbers: dict[str, float] = {}
        self.decode: Decode | None = None
        self.texts: Texts | None = None
        self._seam = seam
        self._full = settings.level.includes(Level.FULL)
        self._errors: dict[int, int] = {}
        self._refused = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlwatch-verl")
        self._waiting: list[Future[None]] = []
        self._awaited: list[tuple[int, Told]] = []
        self._lock = Lock()

    def when_measured(self, step: int, told: Told) -> None:
        """Have ``told`` given the metrics of ``step``, whose statistics come later; none if they never do."""
        with self._lock:
            self._awaited.append((step, told))

    def pass_over(self) -> None:
        """There will be no statistics of the step that ended."""
        if self._awaited:
            self._thread.submit(self._tell, None, {})

    def _tell(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """Tell who waits for ``step``, and for earlier ones, of which nothing will come; all, if it is None."""
        with self._lock:
            due = [each for each in self._awaited if step is None or each[0] <= step]
            self._awaited = [each for each in self._awaited if each not in due]
        for awaited, told in due:
            self._seam.attempt("metrics of a step", told, metrics if awaited == step else {})

    def room(self) -> bool:
        """Whether one more step may be submitted."""
        self._waiting = [future for future in self._waiting if not future.done()]
        run = self._seam.run
        if len(self._waiting) < WAITING or run is None:
            return run is not None and run.active
        run.counters.warn("dropped", SLOW)
        return False

    def submit(self, step: int, read: Read | None, answers: Answers | None) -> None:
        """Compute and record ``step`` of its batch, read on our thread, and of what the workers will answer."""
        self._waiting.append(self._thread.submit(self._guarded, step, read, answers))

    def close(self, deadline_s: float = 30.0) -> None:
        """Wait for what was submitted, ``deadline_s`` seconds at most. What comes later is lost."""
        self._thread.shutdown(wait=False)
        late = wait(self._waiting, deadline_s).not_done
        if late and self._seam.run is not None:
            self._seam.run.counters.warn("dropped", "the statistics of the last steps took too long", len(late))
        self._tell(None, {})
        if self.texts is not None:
            self.texts.close()

    def _guarded(self, step: int, read: Read | None, answers: Answers | None) -> None:
        metrics = self._seam.aside("statistics", self._record, step, read, answers)
        self._tell(step, metrics or {})

    def _record(self, step: int, read: Read | None, answers: Answers | None) -> Mapping[str, float]:
        run = self._seam.run
        if run is None:
            return {}
        replies = [] if answers is None else self._seam.attempt("workers", _gathered, answers) or []
        self._count_errors(replies)
        tally, batch = StepTally(), None if read is None else self._seam.attempt("batch", read)
        if batch is not None:
            self._seam.attempt("batch statistics", self._add_batch, tally, batch)
            self._seam.attempt("text", self._add_text, tally, run, step, batch)
        for name, value in self.numbers.items():
            tally.add_number(name, value)
        parcels = {int(reply["rank"]): reply["parcel"] for reply in replies if "parcel" in reply}
        whole = together(step, tally, parcels, self.decode)
        run.log(whole.metrics, step=step)
        for found in whole.spikes:
            run.log_spikes(found)
        self._seam.attempt("localised spikes", _write_localised, replies, step, run)
        self._seam.attempt("localised spikes", self._count_refused, replies, run)
        return whole.metrics

    def _add_batch(self, tally: StepTally, batch: StepBatch) -> None:
        tokens = batch.token_batch(self.reading)
        if tokens is not None:
            for piece in pieces(tokens, batch.lengths.tolist()):
                tally.add_batch(piece, full=self._full)
            for theirs, ours in BEFORE_THE_UPDATE.items():
                if theirs in tally.stats:
                    tally.stats[ours] = tally.stats.pop(theirs)
        tally.add_stats(observe_responses(batch.response_batch(self.reading)))

    def _add_text(self, tally: StepTally, run: Run, step: int, batch: StepBatch) -> None:
        if self.texts is None:
            return
        for name, value in self.texts.take().items():
            tally.add_number(name, value)
        self.texts.offer(run, step, batch, self.reading)

    def _count_errors(self, replies: Sequence[Reply]) -> None:
        """What the workers' seams swallowed is counted on the run, which they do not have."""
        for reply in replies:
            rank, total = int(reply["rank"]), int(reply.get("errors", 0))
            new = total - self._errors.get(rank, 0)
            self._errors[rank] = total
            if new > 0 and self._seam.run is not None:
                self._seam.run.counters.warn("errors", f"the taps of worker {rank} failed; see its log", new)

    def _count_refused(self, replies: Sequence[Reply], run: Run) -> None:
        """Spikes that the budget of the workers' life did not allow to localise."""
        total = sum(int(reply.get("localisations_refused", 0)) for reply in replies)
        run.counters.add("localisations_refused", max(0, total - self._refused))
        self._refused = total


def _write_localised(replies: Sequence[Reply], step: int, run: Run) -> None:
    """What each worker found of the optimizer steps of ``step``; of each, rank 0 tells the event."""
    for reply in replies:
        for found in reply.get("localised", ()):
            for batch in decoded(found["batches"]):
                run.log_spikes(batch)
            if "event" in found:
                run.event(LOCALISED, step, **found["event"])


def _gathered(answers: Answers) -> Sequence[Reply]:
    return accepted(answers())
