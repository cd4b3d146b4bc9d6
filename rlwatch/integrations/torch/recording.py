"""How what a loop passes ends up in its run: step by step, with what was refused and what is missing."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlwatch.errors import ConfigError
from rlwatch.integrations.cause import cause_of, reason_of
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import Decode
from rlwatch.integrations.torch.gaps import Gaps
from rlwatch.integrations.torch.steps import Steps
from rlwatch.records import RunState
from rlwatch.seam import Seam, say

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

DEADLINE_S = 10.0
"""Longest the end of a run may hold up the process, in seconds."""


class Recording:
    """Base of the watcher: the run, the step under way, and the end.

    Parameters
    ----------
    run
        What is recorded into.
    ours
        Whether the run was made for this recording, and so ends with it.
    level
        How closely the loop is watched.
    strict
        Raise where an input is refused.
    decode
        Token ids -> text, if text may be recorded.
    """

    def __init__(self, run: Run, *, ours: bool, level: Level, strict: bool, decode: Decode | None = None) -> None:
        self.run = run
        self.seam = Seam(run)
        self.latest: dict[str, float] = {}
        self._ours = ours
        self._level = level
        self._strict = strict
        self._gaps = Gaps(level)
        self._steps = Steps(self.seam, self._delivered, decode)
        self._explained = False
        atexit.register(_deliver_at_exit, weakref.ref(self._steps))

    @property
    def unavailable(self) -> dict[str, str]:
        """What was not measured yet, by the beginning of metric names, and why. Empty before the first step ended.

        >>> import torch, rlwatch
        >>> watcher = rlwatch.Watcher(store="memory://unavailable-doctest")
        >>> watcher.step(1, loss=0.5)
        >>> watcher.unavailable["reward/mean"]
        'never given: rollouts(rewards=)'
        """
        return self._gaps.reasons() if self._explained else {}

    def finish(self) -> None:
        """Record the last step, and end the run if it was made here. Idempotent."""
        self.seam.attempt("last steps", self._steps.deliver, wait=True)
        if self._ours:
            self.seam.attempt("finish", self.run.finish)

    def _given(self, **inputs: object) -> None:
        self._gaps.given |= {name for name, value in inputs.items() if value is not None}

    def _refuse(self, call: str, refused: Mapping[str, str]) -> None:
        """Count what was left out; warn of each input once."""
        for name, why in refused.items():
            if self._strict:
                raise ConfigError(f"{call}({name}=): {why}")
            self.run.counters.add("refused")
            if name not in self._gaps.refused:
                say(logging.WARNING, "rlwatch leaves out %s= of %s (training goes on): %s", name, call, why)
        self._gaps.refused.update(refused)

    def _delivered(self, step: int, measured: dict[str, float]) -> None:
        """With several ranks ``measured`` is filled once all shares of the step have come: look at it again later."""
        self._gaps.note(self.latest)
        self._gaps.note(measured)
        self.latest = measured
        if self._gaps.measured and not self._explained:
            self._explained = True
            reasons = self.unavailable
            if reasons:
                self.run.event("not_available", step, reasons=reasons)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.seam.attempt("exception", self._crashed, error)
        self.finish()

    def _crashed(self, error: BaseException) -> None:
        """What was measured of the step training died in is kept; then the cause."""
        done = self._steps.last
        if not self._steps.tally.empty:
            self.seam.attempt("unfinished step", self._steps.seal, done + 1)
        self.seam.attempt("last steps", self._steps.deliver, wait=True)
        self.run.event("exception", done, **cause_of(error))
        if self._ours:
            self.run.finish(RunState.CRASHED, reason_of(error), DEADLINE_S)


def _deliver_at_exit(reference: weakref.ref[Steps]) -> None:
    """Without :meth:`Recording.finish` the last step may still be on its way when the process exits."""
    steps = reference()
    if steps is not None:
        steps.seam.attempt("last steps", steps.deliver, wait=True)
