"""The reference policy of one worker, and making the policy its own reference.

verl holds the reference as a second model in the same process, sharded alike; with LoRA it is the base model, with
the adapter disabled. Every rank copies its own shards and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.optimizer import clear_state, clearable
from rlwatch.integrations.handlers.shards import local
from rlwatch.integrations.handlers.weights import Pair, copy_all, fingerprint, model_pairs
from rlwatch.integrations.verl.adapter import FrozenAdapter
from rlwatch.integrations.verl.flat import flat_pairs, flattened
from rlwatch.records import JSON, Command

ENGINES = ("fsdp", "fsdp2")
"""Strategies whose shards can be copied one to one, and whose gradients can be read by layer."""


class Anchor:
    """Handles ``reset-reference`` on one rank. ``worker`` is verl's ``ActorRolloutRefWorker``."""

    kind: str = "reset-reference"

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.adapter: FrozenAdapter | None = None

    @property
    def policy(self) -> Any:
        """The actor's engine. Raises ``RLWatchError`` where it cannot be read."""
        actor = self._worker.actor
        if actor is None:
            raise RLWatchError("this worker holds no actor")
        strategy = str(self._worker.config.actor.strategy)
        if strategy not in ENGINES:
            raise RLWatchError(f"the actor is trained with {strategy!r}, whose weights rlwatch does not copy")
        return actor.engine

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason to refuse."""
        if COMMAND_KINDS[self.kind].read(command.args)["optimizer"] == "clear":
            clearable([self.policy.optimizer])
        synchronized()
        if self.lora:
            FrozenAdapter.of(self.policy).check()
        else:
            self.pairs()

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Reset; returns what was done."""
        optimizer = COMMAND_KINDS[self.kind].read(command.args)["optimizer"]
        synchronized()
        report = self._freeze() if self.lora else self._copy()
        cleared = clear_state([self.policy.optimizer]) if optimizer == "clear" else 0
        return {**report, "optimizer": optimizer, "cleared": cleared}

    @property
    def lora(self) -> bool:
        """Whether the reference is the policy without its adapter."""
        return self._worker.ref is None and bool(getattr(self.policy, "_is_lora", False))

    def pairs(self) -> list[Pair]:
        """Policy and reference, tensor by tensor, sharded alike. Raises ``RLWatchError`` if they are not."""
        ref = self._worker.ref
        if ref is None:
            raise RLWatchError(
                "there is no reference: neither actor.use_kl_loss nor algorithm.use_kl_in_reward is set, "
                "or it is held by another worker"
            )
        policy, reference = self.policy.module, ref.engine.module
        pairs = (flat_pairs if flattened(policy) else model_pairs)(policy, reference)
        for name, ours, theirs in pairs:
            if local(ours).shape != local(theirs).shape:
                raise RLWatchError(f"{name!r} is sharded differently in the policy and in the reference")
        return pairs

    def tensors(self) -> dict[str, Tensor]:
        """The reference, by name: the shards of this rank, whose memory they share."""
        synchronized()
        if self.lora:
            return FrozenAdapter.of(self.policy).kept
        return {pair.name: local(pair.theirs) for pair in self.pairs()}

    def _copy(self) -> dict[str, JSON]:
        pairs = self.pairs()
        copy_all(pairs)
        exact = all(torch.equal(local(p.theirs), local(p.ours).to(local(p.theirs))) for p in pairs)
        return {"tensors": len(pairs), "fingerprint": fingerprint(local(p.theirs) for p in pairs), "exact": exact}

    def _freeze(self) -> dict[str, JSON]:
        adapter = FrozenAdapter.of(self.policy)
        adapter.freeze()
        kept = list(adapter.kept.values())
        return {"tensors": len(kept), "fingerprint": fingerprint(kept), "exact": True, "adapter": True}


def synchronized() -> None:
    """Wait for copies that offloading may still have under way: the CPU must not read them before."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
