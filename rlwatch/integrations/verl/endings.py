"""How a trainer's ``fit`` ended, when it ended badly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlwatch.integrations.cause import cause_of, reason_of
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.verl.tracking import Session, session
from rlwatch.records import RunState

if TYPE_CHECKING:
    from rlwatch.run import Run

DEADLINE_S = 10.0
"""Longest an exception is held up on its way out, in seconds."""


@contextmanager
def fitting(current: Session, trainer: Any) -> Iterator[None]:
    """While a trainer works: its ``Tracking`` finds ``current``, and what it raises is recorded and raised on."""
    token = session.set(current)
    try:
        yield
    except BaseException as error:
        if current.run is not None:
            report(current.run, error, step=getattr(trainer, "global_steps", None))
        raise
    finally:
        session.reset(token)


def report(run: Run, error: BaseException, step: int | None) -> None:
    """Record ``error`` as the end of ``run``. What a worker raised reaches the driver wrapped by Ray: look inside."""
    if not run.active:
        return
    seam, inside = Seam(run), getattr(error, "cause", None)
    cause = inside if isinstance(inside, BaseException) else error
    body = {**cause_of(error), "error": reason_of(cause), "type": type(cause).__name__}
    seam.attempt("exception", run.event, "exception", step, **body)
    seam.attempt("finish", run.finish, RunState.CRASHED, reason_of(cause), DEADLINE_S)
