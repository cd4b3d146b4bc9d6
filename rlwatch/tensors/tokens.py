"""The per-token view of one micro-batch, whatever trainer it came from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Detached tensors of one micro-batch of B responses, right-padded to T tokens.

    ``logp`` (B, T) log-probs of the sampled tokens under the policy being updated, nats; ``mask`` (B, T) the tokens
    the loss counts. Optional, each ``None`` where it does not exist (never a stand-in): ``entropy`` (B, T) nats,
    ``ids`` (B, T), ``advantages`` (B,), (B, 1) or (B, T), ``old_logp``, ``ref_logp``, ``rollout_logp`` (B, T), ``clip``
    (low, high) of a token-level PPO clip, ``cut`` (B,) whether a response was cut at the length limit.
    """

    logp: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    ids: Tensor | None = None
    advantages: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    clip: tuple[float, float] | None = None
    cut: Tensor | None = None

    @property
    def token_advantages(self) -> Tensor | None:
        """Advantages (B, T) or (B, 1), to go with tokens."""
        if self.advantages is None or self.advantages.dim() > 1:
            return self.advantages
        return self.advantages.unsqueeze(1)

    @property
    def trainer_logp(self) -> Tensor:
        """Log-probs of the weights the rollout engine had: the old policy's, or (on-policy) the current one's."""
        return self.logp if self.old_logp is None else self.old_logp
