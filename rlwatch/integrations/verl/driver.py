"""What the driver of a watched run does: reads each step's batch, gathers from the workers, obeys commands."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlwatch.integrations.controller import Controller
from rlwatch.integrations.handlers.kept_settings import KeptSettings
from rlwatch.integrations.handlers.kl_coef import SetKLCoef
from rlwatch.integrations.level import Level
from rlwatch.integrations.verl.batch import RESPONSE_FIELDS, TOKEN_FIELDS, Reading, StepBatch
from rlwatch.integrations.verl.checkpoints import Checkpoints
from rlwatch.integrations.verl.commands import Coefficient, handlers
from rlwatch.integrations.verl.compat import in_words
from rlwatch.integrations.verl.plugin import failing
from rlwatch.integrations.verl.replies import Reply, accepted
from rlwatch.integrations.verl.settings import Settings
from rlwatch.integrations.verl.statistics import Read, Statistics
from rlwatch.integrations.verl.texts import Texts
from rlwatch.integrations.verl.workers import Workers
from rlwatch.seam import Contained, Seam

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")


class Driver:
    """Watches one ``PPOTrainer`` of verl. All its methods are called in the training thread and raise nothing."""

    def __init__(self, trainer: Any, run: Run, settings: Settings) -> None:
        self.run = run
        self.seam = Seam(run)
        self.statistics = Statistics(self.seam, settings)
        self._trainer = trainer
        self._settings = settings
        self.attached = False
        self._workers: Workers | None = None
        self._checkpoints: Checkpoints | None = None
        self._controller: Controller | None = None
        self._kept: KeptSettings | None = None

    def attach(self) -> None:
        """The workers are there: put their taps in place. Without them only the batch is measured."""
        self.attached = True
        with Contained(self._unattached):
            self._attach()

    def _unattached(self, error: Exception) -> None:
        self.run.counters.add("errors")
        failing(f"workers: {type(error).__name__}: {error}")
        logger.warning("rlwatch sees no updates and obeys no commands (training goes on): %s", error)

    def loaded(self) -> None:
        """A checkpoint was loaded, or none was found."""
        step = int(self._trainer.global_steps)
        if self._checkpoints is None or self._kept is None or self._controller is None or not step:
            return
        self._checkpoints.loaded()
        self.seam.attempt(
            "settings of a checkpoint", self._kept.restore, self._checkpoints.origin, self._controller, step
        )

    def saved(self) -> None:
        """A checkpoint was saved."""
        if self._checkpoints is not None and self._kept is not None:
            self._checkpoints.saved()
            self.seam.attempt("settings of a checkpoint", self._kept.save, self._checkpoints.here)

    def obey(self) -> None:
        """The policy of this step is final and the rollout engine still sleeps: carry out commands."""
        if self._controller is not None:
            self._controller.obey(int(self._trainer.global_steps))

    def measure(self, meta: Any) -> None:
        """Read the step's batch ``meta`` (a ``KVBatchMeta``) before verl drops it; compute on another thread."""
        if not self._settings.level.includes(Level.TOKENS):
            self.statistics.pass_over()
            return
        step, answers = int(self._trainer.global_steps), None
        if self._workers is not None:  # asked even if there is no room: what they keep of this step must go
            answers = self.seam.attempt("workers", self._workers.ask, "collect", step)
        if self.statistics.room():
            self.statistics.submit(step, self.seam.attempt("batch", self._fetch, meta, step), answers)
        else:
            self.statistics.pass_over()

    def settle(self, deadline_s: float) -> None:
        """Training has ended: wait for the statistics of the last steps."""
        self.seam.attempt("last steps", self.statistics.close, deadline_s)
        if self.seam.errors:
            failing(f"{self.seam.errors} errors in the driver, see its log")

    def _attach(self) -> None:
        trainer = self._trainer
        reading = self.statistics.reading = Reading.of(trainer.config, trainer.tokenizer)
        workers = Workers(trainer.actor_rollout_wg)
        given = {
            "level": str(self._settings.level),
            "bypass": reading.bypass,
            "localise": self._settings.localise,
            "text": self._settings.text,
        }
        self._attached(accepted(workers.call("attach", given)))
        self.seam.attempt("tokenizer", self._decode, trainer.tokenizer)
        self._workers = workers
        self._checkpoints = Checkpoints(trainer, workers, self.seam)
        coefficient = Coefficient(trainer, workers)
        set_kl = SetKLCoef(coefficient.read, coefficient.write, self.seam)
        self._kept = KeptSettings(set_kl, self.seam, lambda: True)
        commands = [*handlers(trainer, workers, self._checkpoints, self.seam), set_kl]
        self._controller = Controller(self.seam, commands, measured=self.statistics.when_measured)

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

    def _fetch(self, meta: Any, step: int) -> Read:
        """Copies out of the queue, which verl empties next; the rest is for the thread of the statistics."""
        import transfer_queue as tq

        texts = self.statistics.texts
        names = [*TOKEN_FIELDS, *RESPONSE_FIELDS, *(() if texts is None else texts.fields)]
        data = tq.kv_batch_get(meta.keys, meta.partition_id, select_fields=names)
        return partial(StepBatch.of, tuple(meta.keys), [dict(tag) for tag in meta.tags], data, step)
