"""What ended a training whose driver steers Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlwatch.integrations.cause import cause_of, reason_of
from rlwatch.records import RunState

if TYPE_CHECKING:
    from rlwatch.run import Run
    from rlwatch.seam import Seam

DEADLINE_S = 10.0
"""Longest an exception is held up on its way out, in seconds."""


def record_crash(run: Run, seam: Seam, error: BaseException, step: int | None) -> None:
    """Record ``error`` as the end of ``run``, after ``step``.

    What a worker raised reaches the driver wrapped by Ray: the error is the one inside, the traceback is of both.
    """
    inside = seam.attempt("cause of an error", getattr, error, "cause", None)
    cause = inside if isinstance(inside, BaseException) else error
    body = {**cause_of(error), "error": reason_of(cause), "type": type(cause).__name__}
    seam.attempt("exception", run.event, "exception", step, **body)
    seam.attempt("finish", run.finish, RunState.CRASHED, reason_of(cause), DEADLINE_S)
