"""Hard reset of the reference policy: the policy becomes its own anchor.

Two published meanings: ProRL (arXiv 2505.24864) also clears the optimizer state; ProRL v2 keeps it. The
learning rate is not touched: after a clear the first update is about lr per element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlwatch.control.policy import veto_reset_reference
from rlwatch.errors import RLWatchError
from rlwatch.integrations.seam import Seam
from rlwatch.integrations.trl.compat import sharding_engine
from rlwatch.integrations.trl.reference import adapter_pairs, copy_all, fingerprint, model_pairs
from rlwatch.records import JSON, Command

CLEAR, KEEP = "clear", "keep"


class ResetReference:
    """Handles ``reset-reference`` with ``{"optimizer": "clear" | "keep"}`` (default ``clear``).

    Call it at a generation boundary only. Nothing changes unless everything can.
    """

    kind: str = "reset-reference"

    def __init__(self, trainer: Any, seam: Seam) -> None:
        self._trainer = trainer
        self._seam = seam

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason to refuse."""
        optimizer = command.args.get("optimizer", CLEAR)
        if optimizer not in (CLEAR, KEEP):
            raise RLWatchError(f"optimizer must be 'clear' or 'keep', got {optimizer!r}")
        self._refuse_if_impossible()
        self._refuse_if_collapsing(force=command.force)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Reset; returns what was done. Raises ``RLWatchError`` with the reason to refuse."""
        optimizer = command.args.get("optimizer", CLEAR)
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        done = self._copy(policy)
        cleared = self._clear_optimizer() if optimizer == CLEAR else 0
        kept = f"optimizer state of {cleared} parameters cleared" if optimizer == CLEAR else "optimizer state kept"
        summary = f"reference = policy ({done['tensors']} tensors, {done['fingerprint']}), {kept}"
        return {**done, "optimizer": optimizer, "cleared": cleared, "forced": command.force, "summary": summary}

    def _refuse_if_impossible(self) -> None:
        trainer = self._trainer
        engine = sharding_engine(trainer)
        if engine is not None:
            raise RLWatchError(f"weights are sharded by {engine}, and a reset there is not supported yet")
        if trainer.accelerator.num_processes > 1:
            raise RLWatchError(
                f"{trainer.accelerator.num_processes} ranks must reset together; it needs the collective"
            )
        if not getattr(trainer, "beta", 0.0):
            raise RLWatchError("there is no reference: beta is 0, so the loss has no KL term")

    def _refuse_if_collapsing(self, *, force: bool) -> None:
        run = self._seam.run
        veto = None if run is None else veto_reset_reference(run.health(), force=force)
        if veto is not None:
            raise RLWatchError(veto)

    def _copy(self, policy: Any) -> dict[str, JSON]:
        """Copy policy to reference, and check that they are equal now."""
        ref_model = getattr(self._trainer, "ref_model", None)
        if ref_model is not None:
            pairs = model_pairs(policy, self._trainer.accelerator.unwrap_model(ref_model))
        elif getattr(policy, "peft_config", None):
            pairs = adapter_pairs(policy)
        else:
            raise RLWatchError(f"{type(self._trainer).__name__} holds no reference model")
        copy_all(pairs)
        ours, theirs = fingerprint(p for p, _ in pairs), fingerprint(r for _, r in pairs)
        return {"tensors": len(pairs), "fingerprint": ours, "exact": ours == theirs}

    def _clear_optimizer(self) -> int:
        """Drop the moments and step counts of every parameter; returns how many had any."""
        optimizer = self._trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        count = len(optimizer.state)
        optimizer.state.clear()
        return count
