"""A KL coefficient that outlives the process: trainers start with the one of their configuration.

(A lowered learning rate needs no keeping: its scale lies in the optimizer's state, which trainers save.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from rlwatch.integrations.controller import Controller
from rlwatch.integrations.handlers.kl_coef import SetKLCoef
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam

logger = logging.getLogger("rlwatch")
FILE = "rlwatch_control.json"


class KeptSettings:
    """Writes the KL coefficient that was set into checkpoints, and sets it again on a resume. One on every rank."""

    def __init__(self, handler: SetKLCoef, seam: Seam, writes: Callable[[], bool]) -> None:
        self._handler = handler
        self._seam = seam
        self._writes = writes

    def save(self, checkpoint: Path) -> None:
        """Into ``checkpoint``, which has just been written; if it was never set, what an earlier attempt left goes."""
        if not self._writes():
            return
        if self._handler.value is None:
            with contextlib.suppress(OSError):
                (checkpoint / FILE).unlink(missing_ok=True)
            return
        draft = checkpoint / f".{FILE}-{os.getpid()}"
        try:
            draft.write_text(json.dumps({"format": 1, "kl_coef": self._handler.value}), encoding="utf-8")
            draft.replace(checkpoint / FILE)
        except OSError as error:
            logger.warning("rlwatch could not keep the KL coefficient in %s (training goes on): %s", checkpoint, error)

    def restore(self, checkpoint: Path, controller: Controller, step: int) -> None:
        """Set what ``checkpoint`` keeps. Every rank calls it; what rank 0 reads counts."""
        value = _read(checkpoint / FILE)
        command = None if value is None else _order(value, checkpoint)
        result = controller.order(self._handler, command, step)
        if result is None or command is None:
            return
        if result.report is None:
            logger.warning("rlwatch could not set the KL coefficient %s keeps: %s", checkpoint, result.refusal)
        elif self._seam.run is not None:
            body: Mapping[str, JSON] = {"command": command.kind, "args": dict(command.args), "report": result.report}
            self._seam.run.event("command", step, **body, by="rlwatch", why=command.why, id=command.command_id)


def _order(value: float, checkpoint: Path) -> Command:
    why = f"it was set before {checkpoint.name} was saved"
    args = {"value": value}
    return Command(uuid.uuid4().hex[:16], "", SetKLCoef.kind, args, force=True, requested_by="rlwatch", why=why)


def _read(path: Path) -> float | None:
    """The coefficient; None, with a warning, where the file cannot be read, and silently where there is none."""
    try:
        value = float(json.loads(path.read_text(encoding="utf-8"))["kl_coef"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("rlwatch cannot read %s (training goes on with the configured KL coefficient): %s", path, error)
        return None
    return value if math.isfinite(value) and value >= 0 else None
