"""How a trainer's ``fit`` ended, when it ended badly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlwatch.integrations.ray_crash import record_crash
from rlwatch.integrations.verl.tracking import Session, session
from rlwatch.seam import Seam


@contextmanager
def fitting(current: Session, trainer: Any) -> Iterator[None]:
    """While a trainer works: its ``Tracking`` finds ``current``, and what it raises is recorded and raised on."""
    token = session.set(current)
    try:
        yield
    except BaseException as error:
        run = current.run
        if run is not None and run.active:
            record_crash(run, Seam(run), error, getattr(trainer, "global_steps", None))
        raise
    finally:
        session.reset(token)
