"""Watching OpenRLHF's trainer from within: closures on the instance, in the process that drives the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import rlwatch
from rlwatch.integrations.level import Level
from rlwatch.integrations.openrlhf.commands import Commands
from rlwatch.integrations.openrlhf.describe import init_arguments
from rlwatch.integrations.openrlhf.logger import RLWatchLogger
from rlwatch.integrations.openrlhf.recording import Recording, Step, taken_out
from rlwatch.integrations.openrlhf.settings import Settings
from rlwatch.integrations.ray_crash import record_crash
from rlwatch.integrations.step_tally import Decode
from rlwatch.seam import Seam

logger = logging.getLogger("rlwatch")


class Driver:
    """Records what a ``BasePPOTrainer`` logs and what its policy actors measured; obeys commands; reports its end.

    Making one may raise: a run that was asked for must be recorded. Training comes out the same.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self.run = rlwatch.init(**init_arguments(trainer.args, settings))
        self.seam = Seam(self.run)
        self.step = Step()
        self._last: int | None = None
        self._trainer = trainer
        self._commands = Commands(trainer, self.seam)
        self._recording = Recording(
            self.seam,
            int(trainer.args.rollout.n_samples_per_prompt),
            _decoder(trainer.tokenizer) if settings.text else None,
            tokens=settings.includes(Level.TOKENS),
            full=settings.includes(Level.FULL),
        )

    def attach(self) -> None:
        """Put everything in place."""
        trainer = self._trainer
        trainer.wandb_logger = RLWatchLogger(self.run, trainer.wandb_logger, self._close)
        self._wrap(trainer.experience_maker, "make_experience_batch", self._made)
        self._wrap(trainer, "ppo_train", self._updated)
        self._wrap(trainer, "train_step", self._stepped)
        self._wrap_saving(trainer)
        generator = getattr(trainer, "samples_generator", None)
        if generator is not None:
            self._wrap_generating(generator)
        logger.info("rlwatch records this training as %s", self.run.info.run_id)

    def _wrap(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Let ``look`` see what ``owner.name`` returned and what it was given; what it raises ends the run."""
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = self._reporting(original, *args, **kwargs)
            self.seam.attempt(name, look, result, *args, **kwargs)
            return result

        setattr(owner, name, watched)

    def _wrap_saving(self, trainer: Any) -> None:
        """Between the update and what is saved of it nothing is in flight: the place to obey."""
        original = trainer.save_logs_and_checkpoints

        @wraps(original)
        def save_logs_and_checkpoints(global_step: int, *args: Any, **kwargs: Any) -> Any:
            self.seam.attempt("commands", self._commands.obey, global_step)
            with _saving(trainer.args.ckpt, now=self._commands.saving):
                return self._reporting(original, global_step, *args, **kwargs)

        trainer.save_logs_and_checkpoints = save_logs_and_checkpoints

    def _wrap_generating(self, generator: Any) -> None:
        """A loader that is exhausted is how training ends; ``stop`` says that it is."""
        original = generator.generate_samples

        @wraps(original)
        def generate_samples(*args: Any, **kwargs: Any) -> Any:
            if self._commands.stopping:
                return [], None, 0, True
            return self._reporting(original, *args, **kwargs)

        generator.generate_samples = generate_samples

    def _made(self, experiences: Any, *_args: Any, **_kwargs: Any) -> None:
        self.step.experiences = list(experiences)

    def _updated(self, status: Any, *_args: Any, **_kwargs: Any) -> None:
        self.step.sent = taken_out(status)

    def _stepped(self, result: Any, *_args: Any, **_kwargs: Any) -> None:
        step, self.step = self.step, Step()
        step.numbers = {"policy/kl_coef": float(self._trainer.kl_ctl.value)}
        self._last = int(result[1])
        self._recording.submit(self._last, step)

    def _close(self) -> None:
        self.seam.attempt("last steps", self._recording.close)

    def _reporting(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            self._report(error)
            raise

    def _report(self, error: BaseException) -> None:
        """Only the first time: calls lie within each other."""
        if self.run.active:
            self._close()
            record_crash(self.run, self.seam, error, self._last)


@contextmanager
def _saving(checkpoints: Any, *, now: bool) -> Iterator[None]:
    """While it lasts OpenRLHF's own code saves a checkpoint at whatever step it is, if ``now``."""
    every = checkpoints.save_steps
    try:
        if now:
            checkpoints.save_steps = 1
        yield
    finally:
        checkpoints.save_steps = every


def _decoder(tokenizer: Any) -> Decode:
    return lambda ids: str(tokenizer.decode(list(ids)))
