"""The scalars of the log, through the callback interface alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

import rlwatch
from rlwatch.integrations.distributed import begin_together
from rlwatch.integrations.transformers.describe import init_arguments
from rlwatch.records import RunState
from rlwatch.seam import Contained, Seam, guarded

if TYPE_CHECKING:
    from rlwatch.run import Run

logger = logging.getLogger("rlwatch")

DEADLINE_S = 10.0
"""Longest the end of a run holds up the trainer, or an exception on its way out."""
FILTERED = (
    "logging_nan_inf_filter is on: the logged loss hides NaN and Inf; pass logging_nan_inf_filter=False, or use "
    "watch(trainer), which reads the raw loss"
)


class RLWatchCallback(TrainerCallback):  # type: ignore[misc]
    """Records everything the trainer logs, training and evaluation alike, at its global step.

    Parameters
    ----------
    run
        A run to record into; whoever made it ends it. By default one is made when training begins and
        finished when training ends.
    link
        With several ranks, where rank 0 listens for the others: ``HOST:PORT``, ``HOST`` or ``:PORT``; by default as
        :func:`rlwatch.run.joining.join` says.
    init_kwargs
        Arguments of :func:`rlwatch.init` for the run made here; source, configuration, output directory and rank come
        from the trainer unless given.
    """

    def __init__(self, run: Run | None = None, *, link: str | None = None, **init_kwargs: Any) -> None:
        self.run = run
        self._link = link
        self.seam = Seam(run)
        self._given = init_kwargs
        self._ours = run is None
        self._over = False
        self._linked = False
        self._watched = False

    def begin(self, args: TrainingArguments, model: Any, *, watched: bool = False) -> Run:
        """The run, made now if there is none that lives. Raises what :func:`rlwatch.init` raises."""
        self._watched = self._watched or watched
        if self.run is None or (self._ours and self._over):
            self._over, self._linked = False, True
            self.run = begin_together(lambda: rlwatch.init(**init_arguments(args, model, self._given)), link=self._link)
        elif not self._linked:
            self._linked, given = True, self.run
            begin_together(lambda: given, link=self._link)
        self.seam.run = self.run
        return self.run

    def end(self, state: RunState = RunState.FINISHED, reason: str = "") -> None:
        """Finish the run, if it was made here; training again begins its next attempt."""
        if self.run is not None and self._ours:
            self._over = True
            self.run.finish(state, reason, DEADLINE_S)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the run: what is configured wrongly stops training here, before it starts."""
        self.begin(args, kwargs.get("model"))
        if args.logging_nan_inf_filter and not self._watched:
            logger.warning("%s", FILTERED)

    @override
    @guarded
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the row, except the summary at the end of training."""
        if self.run is not None and logs and "train_runtime" not in logs:
            row = scalars(logs)
            if getattr(kwargs.get("optimizer"), "scaler", None) is not None:
                row = without_overflow(row)
            self.run.log(row, step=state.global_step)

    @override
    @guarded
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish the run that was made here."""
        self.end()


def without_overflow(row: dict[str, float]) -> dict[str, float]:
    """A float16 loss scaler finds its scale by overflowing: a non-finite norm is then no measurement."""
    return {name: value for name, value in row.items() if name != "grad_norm" or math.isfinite(value)}


def scalars(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log row. TRL writes None where every value was NaN, so None reads as NaN."""
    row = {}
    for name, value in logs.items():
        with Contained(lambda _error: None):  # somebody's callback may have put anything into the log
            if value is None or hasattr(value, "__float__"):
                row[name] = math.nan if value is None else float(value)
    return row
