"""Hard reset of the reference policy: the reference model of the KL term becomes a copy of the current policy.

Two published meanings: ProRL (arXiv 2505.24864) also clears the optimizer's state; ProRL v2 keeps it. The
learning rate is not touched: after a clear the first update is about lr per element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.control.policy import veto_reset_reference
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations import megatron
from rlwatch.integrations.weights import (
    TensorPair,
    adapter_of,
    adapter_pairs,
    copy_all,
    fingerprint,
    inner_optimizer,
    model_pairs,
    unwrapped,
)
from rlwatch.records import JSON, Command
from rlwatch.tensors.megatron import divided

CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class Anchored:
    """A policy, the reference model of its KL term, and the policy's optimizers.

    ``reference`` is a whole model, or None if the reference is PEFT's frozen adapter ``ref`` inside ``policy``.
    """

    policy: nn.Module
    reference: nn.Module | None
    optimizers: Sequence[Any] = field(default=())

    @property
    def adapted(self) -> bool:
        """Return True if policy and reference are PEFT adapters on one base model."""
        return self.reference is None and bool(getattr(unwrapped(self.policy), "peft_config", None))

    def check(self) -> None:
        """Raise ``RLWatchError`` with the reason if there is no reference model, or if it cannot be reset."""
        if self.reference is not None:
            self.pairs()
        elif self.adapted:
            adapter_of(unwrapped(self.policy))
        else:
            raise RLWatchError("there is no reference model")

    def pairs(self) -> list[TensorPair]:
        """Return pairs of a policy tensor and the reference tensor that corresponds to it.

        For PEFT the call creates the adapter ``ref`` if it is missing. Raises ``RLWatchError`` if the tensors do not
        match.
        """
        if self.reference is not None:
            alike = megatron.pairs if divided(self.policy) else model_pairs
            return alike(self.policy, self.reference)
        return adapter_pairs(unwrapped(self.policy))


class ResetReference:
    """Handler of the command ``reset-reference`` with the argument ``{"optimizer": "clear" | "keep"}`` (default
    ``clear``).

    Execute the command only when no rollouts with log-probs of the reference are in flight. Either all tensors of the
    reference change or none. Every rank executes it.

    Parameters
    ----------
    find
        Returns the current policy, reference and optimizers. It is called for every command, because trainers wrap
        models late. May raise ``RLWatchError`` with the reason why this trainer's reference cannot be reset.
    error_boundary
        Error boundary that leads to the run and its health. While the run collapses, the reset is vetoed.
    done
        Called with the command and its report after a reset, for instance to keep the new reference in checkpoints.
    """

    kind: str = "reset-reference"

    def __init__(
        self,
        find: Callable[[], Anchored],
        error_boundary: ErrorBoundary,
        done: Callable[[Command, Mapping[str, JSON]], None] | None = None,
    ) -> None:
        self._find = find
        self._error_boundary = error_boundary
        self._done = done

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason if the reference cannot be reset now: no reference, an optimizer whose
        state cannot be cleared, or a veto because the run collapses.
        """
        args = COMMAND_KINDS[self.kind].read(command.args)
        anchored = self._find()
        self._refuse_if_collapsing(force=command.force)
        if args["optimizer"] == CLEAR:
            clearable(anchored.optimizers)
        anchored.check()

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Copy the policy into the reference, clear the optimizer's state if requested, and return a report.

        The report holds the number of tensors, the fingerprint of the reference, ``exact`` (True if the policy has the
        same fingerprint) and a ``summary``.
        """
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
        run = self._error_boundary.run
        veto = None if run is None else veto_reset_reference(run.health(), force=force)
        if veto is not None:
            raise RLWatchError(veto)


def _compared(pairs: Sequence[TensorPair]) -> dict[str, JSON]:
    """Return the number of tensors, the reference's fingerprint, and ``exact``: whether the policy has the same.

    For a reference of a coarser dtype, the policy is compared after rounding to it.
    """
    policy_print = fingerprint(_as_reference(pair) for pair in pairs)
    reference_print = fingerprint(pair.reference for pair in pairs)
    return {"tensors": len(pairs), "fingerprint": reference_print, "exact": policy_print == reference_print}


def _as_reference(pair: TensorPair) -> Tensor:
    return pair.policy.detach().to(pair.reference.dtype)


# Clearing the state of an optimizer without creating a new one.


def clearable(optimizers: Iterable[Any]) -> list[Optimizer]:
    """Return the torch optimizers inside the wrappers in ``optimizers``, whose state can be cleared.

    Raises ``RLWatchError`` if there is no optimizer, or if one is not a ``torch.optim.Optimizer``. DeepSpeed's
    optimizers, for example, keep state in their own partitions, and clearing a dictionary would not reset it.
    """
    inner = [
        one
        for optimizer in optimizers
        for one in (megatron.clearable(optimizer) if megatron.steps(optimizer) else [inner_optimizer(optimizer)])
    ]
    if not inner:
        raise RLWatchError("there is no optimizer to clear; send optimizer=keep to reset the reference alone")
    for optimizer in inner:
        if not isinstance(optimizer, Optimizer):
            raise RLWatchError(
                f"the state of a {type(optimizer).__module__}.{type(optimizer).__name__} cannot be cleared; "
                "send optimizer=keep to reset the reference alone"
            )
    return inner


def clear_state(optimizers: Iterable[Any]) -> int:
    """Clear the moments and step counts of every parameter of ``optimizers``, and return how many parameters had state.

    The next step begins as that of a new optimizer. Learning rates and other settings stay. Raises ``RLWatchError`` as
    :func:`clearable` does.
    """
    every = list(optimizers)
    clearable(every)
    return sum(megatron.clear_state(one) if megatron.steps(one) else _forget(inner_optimizer(one)) for one in every)


def _forget(optimizer: Optimizer) -> int:
    count = len(optimizer.state)
    optimizer.state.clear()
    return count
