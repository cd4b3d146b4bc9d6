"""The cause of a training's end, as the body of an ``exception`` event, and the crash of a run over Ray."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from rlwatch.error_boundary import Contained, described
from rlwatch.records import RunState

if TYPE_CHECKING:
    from rlwatch.error_boundary import ErrorBoundary
    from rlwatch.run import Run


_LINES = 30


def cause_of(error: BaseException) -> dict[str, str]:
    """Return the error, its location and the end of its traceback, as far as available. Raises nothing."""
    cause = {"error": reason_of(error), "type": type(error).__name__, "where": "", "traceback": ""}
    with Contained(lambda _error: None):  # its attributes and sources may be user code that raises
        frames = traceback.extract_tb(error.__traceback__)
        cause["where"] = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        lines = "".join(traceback.format_exception(error)).splitlines()[-_LINES:]
        cause["traceback"] = "\n".join(lines)
    return cause


def reason_of(error: BaseException) -> str:
    """Return the error in one line."""
    return described(error, 500)


# A training whose driver steers Ray actors.

DEADLINE_S = 10.0
"""Longest delay of a propagating exception, in seconds."""


def record_crash(run: Run, seam: ErrorBoundary, error: BaseException, step: int | None) -> None:
    """Record ``error`` as the end of ``run``, after ``step``.

    Ray wraps errors of workers: the wrapped error is recorded, with the traceback of both.
    """
    inside = seam.attempt("cause of an error", getattr, error, "cause", None)
    cause = inside if isinstance(inside, BaseException) else error
    body = {**cause_of(error), "error": reason_of(cause), "type": type(cause).__name__}
    seam.attempt("exception", run.event, "exception", step, **body)
    seam.attempt("finish", run.finish, RunState.CRASHED, reason_of(cause), DEADLINE_S)
