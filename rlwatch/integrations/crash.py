"""Facts about the exception that ended a training, for an ``exception`` event, and the recording of a crash under
Ray.
"""

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
    """Return text on ``error``: its message, its type, its location and the last lines of its traceback.

    Raises nothing; a part that cannot be read is empty.
    """
    cause = {"error": reason_of(error), "type": type(error).__name__, "where": "", "traceback": ""}
    with Contained(lambda _error: None):  # its attributes and sources may be user code that raises
        frames = traceback.extract_tb(error.__traceback__)
        cause["where"] = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        lines = "".join(traceback.format_exception(error)).splitlines()[-_LINES:]
        cause["traceback"] = "\n".join(lines)
    return cause


def reason_of(error: BaseException) -> str:
    """Return ``error`` as one line of text, at most 500 characters."""
    return described(error, 500)


# A training whose driver steers Ray actors.

DEADLINE_S = 10.0
"""Longest delay of a propagating exception, in seconds."""


def record_crash(run: Run, error_boundary: ErrorBoundary, error: BaseException, step: int | None) -> None:
    """Record ``error`` as the end of ``run``, after ``step``, and finish the run as crashed.

    Ray wraps errors of workers. The wrapped error is recorded, with the traceback of both. ``error_boundary`` is the
    error boundary that contains errors of the recording itself.
    """
    inside = error_boundary.attempt("cause of an error", getattr, error, "cause", None)
    cause = inside if isinstance(inside, BaseException) else error
    body = {**cause_of(error), "error": reason_of(cause), "type": type(cause).__name__}
    error_boundary.attempt("exception", run.event, "exception", step, **body)
    error_boundary.attempt("finish", run.finish, RunState.CRASHED, reason_of(cause), DEADLINE_S)
