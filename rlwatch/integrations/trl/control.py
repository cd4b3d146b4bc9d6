"""Commands, obeyed in the training thread where nothing in flight depends on the old state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlwatch.control.mailbox import PendingCommand
from rlwatch.errors import RLWatchError
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.trl.reset import ResetReference
from rlwatch.ports import CommandHandler

FAILED = "it failed inside the trainer; see the training log"


class Control:
    """Takes the run's commands at generation boundaries and answers every one of them.

    Between boundaries TRL still trains on rollouts whose reference log-probs are buffered: a reset there would
    mix two references or throw the rollouts away.
    """

    def __init__(self, trainer: Any, seam: Seam, latest: Callable[[], Mapping[str, float]]) -> None:
        self._trainer = trainer
        self._seam = seam
        self._latest = latest
        self._handlers: dict[str, CommandHandler] = {ResetReference.kind: ResetReference(trainer, seam)}

    def obey(self, step: int) -> None:
        """Carry out what waits, if ``step`` ended at a boundary. Costs the pop of a deque."""
        run = self._seam.run
        if run is None or not self.at_boundary():
            return
        for command in run.commands():
            self._seam.attempt("commands", self._carry_out, command, step)
            if not command.answered:
                command.reject(FAILED, step=step)

    def at_boundary(self) -> bool:
        """Whether the next micro-batch will generate new rollouts."""
        trainer = self._trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        return bool(trainer._step % every == 0)  # noqa: SLF001

    def _carry_out(self, pending: PendingCommand, step: int) -> None:
        handler = self._handlers.get(pending.kind)
        if handler is None:
            pending.reject(f"this trainer cannot do {pending.kind!r} yet", step=step)
            return
        try:
            report = handler(pending.command)
        except RLWatchError as refusal:
            pending.reject(str(refusal), step=step)
            return
        pending.done(self._words(report), step=step)
        run = self._seam.run
        if run is not None:
            who = {"by": pending.command.requested_by, "why": pending.command.why}
            run.event("reference_reset", step, **who, kl_before=self._kl(), **report)

    def _words(self, report: Mapping[str, Any]) -> str:
        kl = self._kl()
        before = "" if kl is None else f"KL {kl:.4g} -> 0, "
        return f"{before}reference = policy ({report['tensors']} tensors, {report['fingerprint']}), " + (
            f"optimizer state of {report['cleared']} parameters cleared"
            if report["optimizer"] == "clear"
            else "optimizer state kept"
        )

    def _kl(self) -> float | None:
        """k3 to the reference as last measured, nats per token."""
        return self._latest().get("policy/kl_ref_k3")
