"""A reset that outlives the process: the reference is kept in checkpoints and taken up again on a resume.

Trainers rebuild their reference from the model's name when they start, and save none. Without this a resumed run
would silently be anchored to the old reference again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from rlwatch.errors import RLWatchError
from rlwatch.integrations.controller import Controller, Result
from rlwatch.integrations.handlers.reference import Anchored
from rlwatch.integrations.handlers.reference_files import Facts, kept_nearby, read_facts, remove, share
from rlwatch.integrations.handlers.reference_orders import TakeUp, WriteDown
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam

logger = logging.getLogger("rlwatch")
UNREAD = "it could not be read; see the training log"


class KeptReference:
    """Puts the reference into checkpoints once it was reset, and takes it up again. One on every rank.

    Give :meth:`reset_done` to the handler of resets; call :meth:`save` when a checkpoint has been written and
    :meth:`restore` when training begins from one. The first save after a reset writes the weights beside the
    checkpoints (``rlwatch_reference/`` in their parent directory); every checkpoint then shares that file. What a
    disk or a file does wrong becomes one warning and an event, never an exception.

    Parameters
    ----------
    find
        The models as they are now; see :class:`~rlwatch.integrations.handlers.reference.ResetReference`.
    seam
        Where events go.
    writes
        Whether this process writes; the others lend their shards.
    """

    def __init__(self, find: Callable[[], Anchored], seam: Seam, writes: Callable[[], bool]) -> None:
        self._seam = seam
        self._writes = writes
        self._write_down = WriteDown(find, writes)
        self._take_up = TakeUp(find, writes)
        self._facts: Facts | None = None
        self._stored: Facts | None = None

    @property
    def facts(self) -> Facts | None:
        """The reset the reference comes from; None if it is the one the trainer built."""
        return self._facts

    def reset_done(self, command: Command, report: Mapping[str, JSON], step: int) -> None:
        """The reference was reset at ``step``: from now on checkpoints hold it."""
        fingerprint = str(report.get("fingerprint", ""))
        self._facts = Facts(step, command.command_id, fingerprint, command.requested_by, command.why)
        self._stored = None

    def moved(self) -> None:
        """Something else moved the reference: what was written is not it any more."""
        self._stored = None

    def save(self, checkpoint: Path, controller: Controller, step: int) -> None:
        """Put the reference into ``checkpoint``, which has just been written. Every rank calls it.

        What an earlier attempt left there, of steps that were undone since, goes. All ranks know alike whether a reset
        is still to be written, so that usually nobody is asked; where one is, rank 0 says when shards are gathered.
        """
        parent = checkpoint.parent
        new = self._facts if self._stored is None else None
        result = None
        if new is not None:
            result = controller.order(self._write_down, self._write_down.command(parent, new), step)
        if result is not None and result.report is None:
            self._failed("reference_not_kept", checkpoint, step, _reason(result))
        elif result is not None:
            self._stored = self._write_down.written
        if self._writes():
            self._place(checkpoint, step)

    def _place(self, checkpoint: Path, step: int) -> None:
        try:
            if self._stored is not None:
                share(checkpoint, self._stored, checkpoint.parent)
            else:
                remove(checkpoint)
        except OSError as error:
            self._failed("reference_not_kept", checkpoint, step, f"{type(error).__name__}: {error}")

    def restore(self, checkpoint: Path, controller: Controller, step: int) -> None:
        """Take up the reference that ``checkpoint`` holds, if any. Every rank calls it, after the trainer has
        loaded the policy and built its own reference.
        """
        command, problem = None, None
        try:
            facts = read_facts(checkpoint)
            command = None if facts is None else self._take_up.command(checkpoint, facts)
            problem = why_none(kept_nearby(checkpoint), step) if facts is None else None
        except RLWatchError as error:
            problem = str(error)
        result = controller.order(self._take_up, command, step)
        if result is not None and result.report is not None:
            self._facts, self._stored = self._take_up.facts, None
            self._event("reference_restored", step, checkpoint=str(checkpoint), **result.report)
        elif result is not None or problem is not None:
            self._failed("reference_not_restored", checkpoint, step, problem or _reason(result))

    def _failed(self, kind: str, checkpoint: Path, step: int, reason: str) -> None:
        if self._writes():
            words = "keep the reference in" if kind == "reference_not_kept" else "take up a reference from"
            logger.warning("rlwatch did not %s %s (training goes on): %s", words, checkpoint, reason)
        self._event(kind, step, checkpoint=str(checkpoint), reason=reason)

    def _event(self, kind: str, step: int, **body: JSON) -> None:
        if self._seam.run is not None:
            self._seam.run.event(kind, step, **body)


def _reason(result: Result | None) -> str:
    return UNREAD if result is None else result.refusal or UNREAD


def why_none(nearby: Mapping[str, Facts], step: int) -> str | None:
    """What a checkpoint of ``step`` without a kept reference leaves out, by those that checkpoints ``nearby`` hold.

    None if none of them knows of a reset.
    """
    missing = {name: facts for name, facts in nearby.items() if facts.step <= step}
    later = {name: facts for name, facts in nearby.items() if facts.step > step}
    if missing:
        name, facts = max(missing.items(), key=lambda item: item[1].step)
        return (
            f"the reset at step {facts.step}, which {name} holds, is not in this checkpoint: it is lost, and KL is "
            + ("measured to the reference the trainer was started with")
        )
    if later:
        facts = min(later.values(), key=lambda facts: facts.step)
        return f"the reset at step {facts.step} came after this checkpoint and is undone by resuming from it"
    return None
