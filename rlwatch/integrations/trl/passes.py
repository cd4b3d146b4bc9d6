"""The forward passes of a generation, whose log-probs RLOO sums up before its loss sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlwatch.tensors import kl
from rlwatch.tensors.mergeable import Stats, nonfinite_stats
from rlwatch.tensors.tokens import TokenBatch


class Passes:
    """Keeps what the passes of one generation returned, in order: the policy, then the reference if there is one.

    GRPO hands both to its loss, where they are read; of RLOO only here.
    """

    def __init__(self, *, full: bool = True) -> None:
        self._full = full
        self._logps: list[Tensor] = []

    def add(self, logps: Tensor) -> None:
        """Log-probs (B, T) of one pass."""
        self._logps.append(logps.detach())

    def clear(self) -> None:
        """Forget them."""
        self._logps.clear()

    def take(self, outputs: Mapping[str, Any]) -> Stats:
        """Of the RLOO generation that ``outputs`` came from: KL to the reference, of the policy that sampled."""
        passes, self._logps = self._logps, []
        if "old_logps" not in outputs or not passes:
            return {}
        policy, mask = passes[0], outputs["completion_mask"]
        stats = nonfinite_stats("old_logp", policy, mask)
        if len(passes) < 2:
            return stats
        batch = TokenBatch(policy, mask, advantages=outputs["advantages"], ref_logp=passes[1])
        return stats | kl.observe_kl(batch) | (kl.observe_kl_quantiles(batch) if self._full else {})
