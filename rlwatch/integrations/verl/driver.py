"""rlwatch in verl's driver process: it reads each step's batch, collects measurements of the workers, and executes
commands.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from rlwatch.error_boundary import Contained, ErrorBoundary
from rlwatch.integrations.canaries import CanaryScorer
from rlwatch.integrations.checkpoints import KeptSettings
from rlwatch.integrations.commands import Controller, OnMetrics, SetKLCoef
from rlwatch.integrations.completions import (
    CompletionSampler,
    Lazy,
    SampledText,
    Values,
    prompt_id,
    spread,
)
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import decoded_batches
from rlwatch.integrations.step_tally import BEFORE_THE_UPDATE, Decode, StepTally, StepThread, merge_workers
from rlwatch.integrations.verl.batch import (
    EXTRA,
    PROMPTS,
    RESPONSE_FIELDS,
    TOKEN_FIELDS,
    BatchSettings,
    StepBatch,
    pieces,
)
from rlwatch.integrations.verl.commands import Checkpoints, Coefficient, handlers
from rlwatch.integrations.verl.compat import in_words
from rlwatch.integrations.verl.heartbeat import failing
from rlwatch.integrations.verl.ranks import Answers, Reply, Workers, accepted
from rlwatch.integrations.verl.sampling import MEASURED_SHARE, EveryResponse, SampledRows, SamplingBudget
from rlwatch.integrations.verl.saving import SnapshotLedger, ledger_of, saving_handlers
from rlwatch.integrations.verl.settings import VerlSettings
from rlwatch.records import LOCALISED, CompletionBatch
from rlwatch.rollouts import PART
from rlwatch.tensors.importance import kl_of_responses
from rlwatch.tensors.masked import keep
from rlwatch.tensors.responses import observe_responses
from rlwatch.text import Sample

if TYPE_CHECKING:
    from rlwatch.run import Run


logger = logging.getLogger("rlwatch")


class VerlDriver:
    """Watcher of one ``PPOTrainer`` of verl in its driver process.

    Its methods run in the training thread and raise nothing. ``run`` records; ``settings`` are those of
    ``trainer.rlwatch`` in verl's configuration.
    """

    def __init__(self, trainer: Any, run: Run, settings: VerlSettings, canaries: CanaryScorer | None = None) -> None:
        self.run = run
        self._canaries = canaries
        self.error_boundary = ErrorBoundary(run)
        self.statistics = Statistics(self.error_boundary, settings)
        self.trainer = trainer
        self._settings = settings
        self.attached = False
        self._workers: Workers | None = None
        self.checkpoints: Checkpoints | None = None
        self.controller: Controller | None = None
        self._kept: KeptSettings | None = None
        self.snapshots: SnapshotLedger | None = None

    def attach(self) -> None:
        """Install the hooks in the workers, once they exist. If that fails, only the batch is measured."""
        self.attached = True
        with Contained(self._unattached):
            self._attach()

    def _unattached(self, error: Exception) -> None:
        self.run.counters.add("errors")
        failing(f"workers: {type(error).__name__}: {error}")
        logger.warning("rlwatch sees no updates and obeys no commands (training goes on): %s", error)

    def loaded(self) -> None:
        """Restore what commands changed, after verl has loaded a checkpoint or starts without one.

        Take the first snapshot.
        """
        step = int(self.trainer.global_steps)
        if self.snapshots is not None:
            self.error_boundary.attempt("snapshot", self.snapshots.begin, step)
        if self.checkpoints is None or self._kept is None or self.controller is None or not step:
            return
        self.checkpoints.loaded()
        self.error_boundary.attempt(
            "settings of a checkpoint", self._kept.restore, self.checkpoints.origin, self.controller, step
        )

    def saved(self) -> None:
        """Add the reset reference and changed settings to the checkpoint that verl has just saved."""
        if self.checkpoints is not None and self._kept is not None:
            self.checkpoints.saved()
            self.error_boundary.attempt("settings of a checkpoint", self._kept.save, self.checkpoints.here)

    def obey(self) -> None:
        """Execute commands, while the policy of this step is final and the rollout engine still sleeps."""
        if self.controller is not None:
            step = int(self.trainer.global_steps)
            self.controller.obey(step)
            if self.snapshots is not None:
                self.error_boundary.attempt("snapshot", self.snapshots.look, step)

    def measure(self, meta: Any) -> None:
        """Read the step's batch, described by ``meta`` (a ``KVBatchMeta``), before verl drops it.

        Another thread computes statistics.
        """
        self.error_boundary.attempt("canaries", self._score_canaries, int(self.trainer.global_steps))
        if not self._settings.level.includes(Level.TOKENS):
            self.statistics.pass_over()
            return
        step, answers = int(self.trainer.global_steps), None
        rows = self.error_boundary.attempt("batch", self._rows, meta, step)
        if self._workers is not None:  # asked even if there is no room: what they keep of this step must go
            before = rows is not None and rows.chosen is not None
            answers = self.error_boundary.attempt("workers", self._workers.ask, "collect", step, before)
        if self.statistics.thread.room():
            fetched = None if rows is None else self.error_boundary.attempt("batch", self._fetch, meta, step, rows)
            self.statistics.submit(step, fetched, answers)
        else:
            self.statistics.pass_over()

    def _score_canaries(self, step: int) -> None:
        numbers = {} if self._canaries is None else self._canaries.numbers(step)
        if numbers:
            self.run.log(numbers, step=step)

    def settle(self, deadline_s: float) -> None:
        """Wait for the statistics of the last steps, at most ``deadline_s`` seconds, after training has ended."""
        self.error_boundary.attempt("last steps", self.statistics.close, deadline_s)
        if self.error_boundary.errors:
            failing(f"{self.error_boundary.errors} errors in the driver, see its log")

    def _attach(self) -> None:
        trainer = self.trainer
        reading = self.statistics.reading = BatchSettings.of(trainer.config, trainer.tokenizer)
        workers = Workers(trainer.actor_rollout_wg)
        given = {
            "level": str(self._settings.level),
            "bypass": reading.bypass,
            "truncation": reading.truncation,
            "localise": self._settings.localise,
            "text": self._settings.text,
            "snapshots": self._settings.snapshots,
            "run_id": self.run.info.run_id,
        }
        self._attached(accepted(workers.call("attach", given)))
        self.error_boundary.attempt("tokenizer", self._decode, trainer.tokenizer)
        self._workers = workers
        self.checkpoints = Checkpoints(trainer, workers, self.error_boundary)
        coefficient = Coefficient(trainer, workers)
        set_kl = SetKLCoef(coefficient.read, coefficient.write, self.error_boundary)
        self._kept = KeptSettings([set_kl], self.error_boundary, lambda: True)
        ledger = self.snapshots = ledger_of(self._settings.snapshots, workers, self.error_boundary)
        saving = saving_handlers(ledger, workers, lambda: int(trainer.global_steps), self.statistics.when_measured)
        commands = [*handlers(trainer, workers, self.checkpoints, self.error_boundary), *saving, set_kl]
        self.controller = Controller(self.error_boundary, commands, measured=self.statistics.when_measured)

    def _attached(self, replies: Sequence[Reply]) -> None:
        missing = {part: str(reason) for reply in replies for part, reason in reply["missing"].items()}
        if missing:
            failing(in_words(missing))
            logger.warning("%s", in_words(missing))
        why_not = next((str(reply["not_localised"]) for reply in replies if reply.get("not_localised")), None)
        if why_not is not None:
            logger.warning("rlwatch does not localise gradient spikes: %s", why_not)
        if replies[0]["vocab_size"] is not None:
            self.statistics.numbers["policy/vocab_size"] = float(replies[0]["vocab_size"])

    def _decode(self, tokenizer: Any) -> None:
        texts = self.statistics.texts = Texts(self._settings, tokenizer)
        if self._settings.text:
            self.statistics.decode = texts.decode

    def _rows(self, meta: Any, step: int) -> SampledRows:
        """Return the rows of the step that are responses, and those of them to read."""
        return SampledRows.of(meta.keys, meta.tags, self.statistics.budget, step)

    def _fetch(self, meta: Any, step: int, rows: SampledRows) -> Fetched:
        """Copy the batch out of the queue, which verl empties next; the statistics thread does the other work.

        If a step would cost more than the budget, only some responses are copied, and a few values of the others.
        """
        import transfer_queue as tq

        def fetch(keys: Sequence[str], fields: Sequence[str]) -> Any:
            return tq.kv_batch_get(list(keys), meta.partition_id, select_fields=list(fields))

        texts = self.statistics.texts
        names = [*TOKEN_FIELDS, *RESPONSE_FIELDS, *(() if texts is None else texts.fields)]
        begin, every = time.perf_counter(), None
        if rows.chosen is not None:
            every = EveryResponse.read(rows.keys, rows.lengths, fetch, self.statistics.reading)
        keys, tags = rows.to_read
        data = fetch(keys, names)
        waited_ms = 1e3 * (time.perf_counter() - begin)
        return Fetched(partial(StepBatch.of, keys, tags, data, step), every, waited_ms)


# Statistics of one global step, computed from the batch and all workers' measurements on a background thread.


@dataclass(frozen=True, slots=True)
class Fetched:
    """A step's batch, copied out of verl's queue.

    ``read`` builds the batch. ``every`` has the values of all responses if the batch holds only some. ``waited_ms`` is
    the time that training waited for the queue, in milliseconds.
    """

    read: Callable[[], StepBatch]
    every: EveryResponse | None = None
    waited_ms: float = 0.0


class Statistics:
    """Computation and recording of the statistics of steps, in order, on a background thread.

    ``error_boundary`` is the error boundary that leads to the run, ``settings`` are those of ``trainer.rlwatch``.
    """

    def __init__(self, error_boundary: ErrorBoundary, settings: VerlSettings) -> None:
        self.reading = BatchSettings()
        self.budget = SamplingBudget(settings.budget_ms)
        self.numbers: dict[str, float] = {}
        self.decode: Decode | None = None
        self.texts: Texts | None = None
        self._error_boundary = error_boundary
        self._full = settings.level.includes(Level.FULL)
        self._refused = 0
        self.thread = StepThread(error_boundary, "rlwatch-verl")
        self._awaited: list[tuple[int, OnMetrics]] = []
        self._lock = Lock()

    def when_measured(self, step: int, on_metrics: OnMetrics) -> None:
        """Call ``on_metrics`` with the metrics of ``step`` once they are computed, or with none if they never are."""
        with self._lock:
            self._awaited.append((step, on_metrics))

    def pass_over(self) -> None:
        """Skip the statistics of the step that ended; callbacks that wait for it are called without metrics."""
        if self._awaited:
            self.thread.run(self._hand_over, None, {})

    def _hand_over(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """Call the callbacks for ``step``, and those for earlier steps, which have no metrics; None: all callbacks."""
        with self._lock:
            due = [each for each in self._awaited if step is None or each[0] <= step]
            self._awaited = [each for each in self._awaited if each not in due]
        for awaited, on_metrics in due:
            self._error_boundary.attempt("metrics of a step", on_metrics, metrics if awaited == step else {})

    def submit(self, step: int, fetched: Fetched | None, answers: Answers | None) -> None:
        """Queue the computation of ``step`` from ``fetched``, its batch, and from the workers' ``answers``, of which
        either may be None.
        """
        self.thread.submit(self._guarded, step, fetched, answers)

    def close(self, deadline_s: float = 30.0) -> None:
        """Wait for the queued steps, at most ``deadline_s`` seconds, and stop. Steps that take longer are lost."""
        self.thread.close(deadline_s)
        self._hand_over(None, {})
        if self.texts is not None:
            self.texts.close()

    def _guarded(self, step: int, fetched: Fetched | None, answers: Answers | None) -> None:
        metrics = self._error_boundary.guard_background("statistics", self._record, step, fetched, answers)
        self._hand_over(step, metrics or {})

    def _record(self, step: int, fetched: Fetched | None, answers: Answers | None) -> Mapping[str, float]:
        run = self._error_boundary.run
        if run is None:
            return {}
        replies = [] if answers is None else self._error_boundary.attempt("workers", _gathered, answers) or []
        for reply in replies:
            self.thread.count_errors(f"worker {reply['rank']}", int(reply.get("errors", 0)))
        begin, tokens = time.thread_time(), None
        every = None if fetched is None else fetched.every
        tally, batch = StepTally(), None if fetched is None else self._error_boundary.attempt("batch", fetched.read)
        if batch is not None:
            tokens = self._error_boundary.attempt("batch statistics", self._add_batch, tally, batch, every)
            self._error_boundary.attempt("text", self._add_text, tally, run, step, batch)
        for name, value in self.numbers.items():
            tally.add_number(name, value)
        parcels = {int(reply["rank"]): reply["parcel"] for reply in replies if "parcel" in reply}
        whole = merge_workers(step, tally, parcels, self.decode, sampled=every is not None)
        if fetched is not None and tokens is not None:
            self.budget.spent(tokens, 1e3 * (time.thread_time() - begin) + fetched.waited_ms)
        run.log(whole.metrics, step=step)
        for spikes in whole.spikes:
            run.log_spikes(spikes)
        self._error_boundary.attempt("localised spikes", _write_localised, replies, step, run)
        self._error_boundary.attempt("localised spikes", self._count_refused, replies, run)
        return whole.metrics

    def _add_batch(self, tally: StepTally, batch: StepBatch, every: EveryResponse | None) -> int:
        """Measure the batch into ``tally``; return how many tokens it has."""
        tokens = batch.token_batch(self.reading)
        if tokens is not None:
            for piece in pieces(tokens, batch.lengths.tolist()):
                tally.add_batch(piece, full=self._full)
            for of_the_loss, of_the_batch in BEFORE_THE_UPDATE.items():
                if of_the_loss in tally.stats:
                    tally.stats[of_the_batch] = tally.stats.pop(of_the_loss)
        stats = observe_responses(batch.response_batch(self.reading))
        if every is not None:
            stats |= observe_responses(every.response_batch(self.reading))
            tally.add_number(MEASURED_SHARE, float(batch.lengths.sum() / every.lengths.sum()))
        tally.add_stats(stats)
        return int(batch.lengths.sum())

    def _add_text(self, tally: StepTally, run: Run, step: int, batch: StepBatch) -> None:
        if self.texts is None:
            return
        for name, value in self.texts.take().items():
            tally.add_number(name, value)
        self.texts.offer(run, step, batch, self.reading)

    def _count_refused(self, replies: Sequence[Reply], run: Run) -> None:
        """Count the spikes that workers did not localise because their time budget was used up."""
        total = sum(int(reply.get("localisations_refused", 0)) for reply in replies)
        run.counters.add("localisations_refused", max(0, total - self._refused))
        self._refused = total


def _write_localised(replies: Sequence[Reply], step: int, run: Run) -> None:
    """Record the spikes each worker localised in the optimizer steps of ``step``; the event comes from rank 0."""
    for reply in replies:
        for located in reply.get("localised", ()):
            for batch in decoded_batches(located["batches"]):
                run.log_spikes(batch)
            if "event" in located:
                run.event(LOCALISED, step, **located["event"])


def _gathered(answers: Answers) -> Sequence[Reply]:
    return accepted(answers())


# Generated text: a few completions are kept if the settings request it, and a few are measured.


class Texts(SampledText):
    """Text of verl's generations: a few completions are kept or measured.

    It runs on the statistics thread, with a copy of the tokenizer.
    """

    def __init__(self, settings: VerlSettings, tokenizer: Any) -> None:
        measure = settings.level.includes(Level.FULL)
        super().__init__(settings.completions, measure=measure, tokenizer=tokenizer)
        self.fields = () if settings.completions is None else (PROMPTS, EXTRA)
        self._tokenizer = copy.deepcopy(tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the token ids ``ids``. Call it on the statistics thread only."""
        return str(self._tokenizer.decode(list(ids)))

    def offer(self, run: Run, step: int, batch: StepBatch, reading: BatchSettings) -> None:
        """Keep and measure completions of the generation in ``batch`` for ``step``, if a sample is due, and record them
        in ``run``.

        ``reading`` has the settings by which the batch is read.
        """

        def kept(sampler: CompletionSampler) -> CompletionBatch | None:
            responses = batch.responses
            prompts, completions = Decoded(batch.prompts, self.decode), Decoded(responses, self.decode)
            ids, columns = _prompt_ids(batch), _columns(batch, reading)
            return sampler.sample(
                step, prompts, completions, columns, ids=lambda i: responses[i].tolist(), prompt_ids=ids
            )

        self._offer(run, step, lambda: _prompt_ids(batch), kept, lambda: self._samples(batch))

    def _samples(self, batch: StepBatch) -> list[Sample]:
        """Return evenly spread completions. If a tool answered in between, only the text is given, not the ids."""
        responses, elsewhere = batch.responses, batch.environment()
        chosen = spread(len(responses))
        mixed = [elsewhere is not None and bool(elsewhere[i].any()) for i in chosen]
        return [
            Sample(text=self.decode(responses[i].tolist())) if tools else Sample(ids=responses[i].tolist())
            for i, tools in zip(chosen, mixed, strict=True)
            if len(responses[i])
        ]


class Decoded(Sequence[str]):
    """Sequence of the texts of ``rows`` of token ids, each decoded only when it is accessed, because few are."""

    def __init__(self, rows: Sequence[Tensor], decode: Decode) -> None:
        self._rows = rows
        self._decode = decode

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._decode(ids.tolist()) for ids in self._rows[row]]
        return self._decode(self._rows[row].tolist())


def _prompt_ids(batch: StepBatch) -> list[str]:
    """Return ids of the prompts, hashed from their token ids, because few prompts are decoded."""
    return [prompt_id(ids.numpy().tobytes()) for ids in batch.prompts]


def _columns(batch: StepBatch, reading: BatchSettings) -> Mapping[str, Values | Lazy]:
    """Return the columns that are recorded with the text."""
    columns: dict[str, Values | Lazy] = {"length": batch.lengths.tolist()}
    if batch.rewards is not None:
        columns["reward"] = batch.rewards.tolist()
    columns |= {f"{PART}{name}": values for name, values in batch.reward_parts.items()}
    if "uid" in batch.named:
        numbers: dict[Any, int] = {}
        columns["group"] = [numbers.setdefault(uid, len(numbers)) for uid in batch.named["uid"]]
    if "data_source" in batch.named:
        columns["task"] = [str(task) for task in batch.named["data_source"]]
    tokens = batch.token_batch(reading)
    if tokens is not None and tokens.advantages is not None:
        a, mask = tokens.advantages, tokens.mask
        columns["advantage"] = lambda rows: _means(a[list(rows)], mask[list(rows)])
    if tokens is not None and tokens.ref_logp is not None:
        parts = (tokens.logp, tokens.ref_logp, tokens.mask)
        columns["kl"] = lambda rows: kl_of_responses(*(part[list(rows)] for part in parts)).tolist()
    return columns


def _means(x: Tensor, mask: Tensor) -> list[float]:
    """Return the means (B,) of ``x`` (B, T) over the tokens of each response; 0 for one without."""
    means: list[float] = (keep(x, mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
    return means
