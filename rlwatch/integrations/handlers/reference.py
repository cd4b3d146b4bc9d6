"""Hard reset of the reference policy: the policy becomes its own anchor.

Two published meanings: ProRL (arXiv 2505.24864) also clears the optimizer's state; ProRL v2 keeps it. The
learning rate is not touched: after a clear the first update is about lr per element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.control.policy import veto_reset_reference
from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.optimizer import clear_state, clearable
from rlwatch.integrations.handlers.unwrapping import unwrapped
from rlwatch.integrations.handlers.weights import (
    Pair,
    adapter_of,
    adapter_pairs,
    copy_all,
    fingerprint,
    model_pairs,
)
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam

CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class Anchored:
    """A policy and what it is anchored to: a whole model, or (``reference`` None) PEFT's frozen adapter ``ref``."""

    policy: nn.Module
    reference: nn.Module | None
    optimizers: Sequence[Any] = field(default=())

    @property
    def adapted(self) -> bool:
        """Whether the policy is an adapter on a base model, and so is its reference."""
        return self.reference is None and bool(getattr(unwrapped(self.policy), "peft_config", None))

    def check(self) -> None:
        """Raise ``RLWatchError`` if there is nothing to reset, or it cannot be."""
        if self.reference is not None:
            model_pairs(self.policy, self.reference)
        elif self.adapted:
            adapter_of(unwrapped(self.policy))
        else:
            raise RLWatchError("there is no reference model")

    def pairs(self) -> list[Pair]:
        """Policy and reference tensor by tensor; makes the adapter ``ref`` if it is not there yet."""
        if self.reference is not None:
            return model_pairs(self.policy, self.reference)
        return adapter_pairs(unwrapped(self.policy))


class ResetReference:
    """Handles ``reset-reference`` with ``{"optimizer": "clear" | "keep"}`` (default ``clear``).

    Carry it out only where no rollouts are in flight whose reference log-probs were computed already. Nothing
    changes unless everything can. Every rank calls it.

    Parameters
    ----------
    find
        The models and optimizers as they are now: trainers wrap them late. May raise ``RLWatchError`` with the
        reason why this trainer's reference cannot be reset.
    seam
        Where the run's health is asked, for the veto during a collapse.
    done
        Told the command and the report, for instance to keep the new reference in checkpoints.
    """

    kind: str = "reset-reference"

    def __init__(
        self,
        find: Callable[[], Anchored],
        seam: Seam,
        done: Callable[[Command, Mapping[str, JSON]], None] | None = None,
    ) -> None:
        self._find = find
        self._seam = seam
        self._done = done

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason to refuse."""
        args = COMMAND_KINDS[self.kind].read(command.args)
        anchored = self._find()
        self._refuse_if_collapsing(force=command.force)
        if args["optimizer"] == CLEAR:
            clearable(anchored.optimizers)
        anchored.check()

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Reset; returns what was done."""
        optimizer = COMMAND_KINDS[self.kind].read(command.args)["optimizer"]
        anchored = self._find()
        pairs = anchored.pairs()
        copy_all(pairs)
        copied = _compared(pairs)
        cleared = clear_state(anchored.optimizers) if optimizer == CLEAR else 0
        kept = f"optimizer state of {cleared} parameters cleared" if optimizer == CLEAR else "optimizer state kept"
        summary = f"reference = policy ({copied['tensors']} tensors, {copied['fingerprint']}), {kept}"
        report = {**copied, "optimizer": optimizer, "cleared": cleared, "forced": command.force, "summary": summary}
        if self._done is not None:
            self._done(command, report)
        return report

    def _refuse_if_collapsing(self, *, force: bool) -> None:
        run = self._seam.run
        veto = None if run is None else veto_reset_reference(run.health(), force=force)
        if veto is not None:
            raise RLWatchError(veto)


def _compared(pairs: Sequence[Pair]) -> dict[str, JSON]:
    """How many tensors there are, the reference's fingerprint, and whether the policy has the same.

    Where the reference is of a coarser dtype, "the same" means: once rounded to it.
    """
    ours = fingerprint(_as_reference(pair) for pair in pairs)
    theirs = fingerprint(pair.theirs for pair in pairs)
    return {"tensors": len(pairs), "fingerprint": theirs, "exact": ours == theirs}


def _as_reference(pair: Pair) -> Tensor:
    return pair.ours.detach().to(pair.theirs.dtype)
