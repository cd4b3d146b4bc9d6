"""rlwatch as one of OpenRLHF's loggers: the interface of its ``WandbLogger`` and ``TensorboardLogger``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlwatch.integrations.tee.rows import scalars
from rlwatch.seam import Seam, guarded

if TYPE_CHECKING:
    from rlwatch.run import Run


class RLWatchLogger:
    """Records what OpenRLHF logs, and finishes the run when it closes its loggers.

    Parameters
    ----------
    run
        What is recorded into.
    theirs
        The logger whose place this takes; it is called first, with what it would have been given.
    closing
        What is to be recorded before the run is finished.
    """

    def __init__(self, run: Run, theirs: Any = None, closing: Callable[[], None] | None = None) -> None:
        self.seam = Seam(run)
        self._run = run
        self._theirs = theirs
        self._closing = closing

    def log_train(self, global_step: int, logs_dict: Mapping[str, Any]) -> None:
        """The row of a step."""
        if self._theirs is not None:
            self._theirs.log_train(global_step, logs_dict)
        self._record(global_step, logs_dict)

    def log_eval(self, global_step: int, logs_dict: Mapping[str, Any]) -> None:
        """The row of an evaluation; its names begin with ``eval_``."""
        if self._theirs is not None:
            self._theirs.log_eval(global_step, logs_dict)
        self._record(global_step, logs_dict)

    def close(self) -> None:
        """Training has ended."""
        if self._theirs is not None:
            self._theirs.close()
        self._finish()

    @guarded
    def _record(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log(scalars(row), step=step)

    @guarded
    def _finish(self) -> None:
        if self._closing is not None:
            self._closing()
        self._run.finish()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._theirs is None:
            raise AttributeError(name)
        return getattr(self._theirs, name)
