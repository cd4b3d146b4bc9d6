"""TRL's fused language-model head, written in operations that have a forward derivative."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

HEAD = "_ChunkedLogProbFunction"
TOKENS = 1024
"""Whose logits are held at once: forward derivatives double them."""


class PureHead:
    """Stands in for TRL's ``ChunkedLogProbFunction``: the same call, log-probs and entropies only."""

    @staticmethod
    def apply(  # noqa: PLR0917  (TRL's signature)
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: Collection[str] = (),
    ) -> tuple[Tensor | None, ...]:
        """Of ``hidden`` (N, H), ``weight`` (V, H), ``bias`` (V,), ``targets`` (N,): log-probs (N,) and entropies."""

        def logits(rows: Tensor) -> Tensor:
            z = linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)).float() * scale
            return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature

        pieces = zip(torch.split(hidden, TOKENS), torch.split(targets, TOKENS), strict=True)
        chunks = [_log_probs(logits(h), t) for h, t in pieces]
        logp, entropy = (torch.cat(part) for part in zip(*chunks, strict=True))
        return logp, entropy if "entropy" in outputs else None, None, None, None


@contextmanager
def pure_head() -> Iterator[None]:
    """TRL's models use :class:`PureHead` inside: for :attr:`rlwatch.gradloc.passes.LossPass.differentiable`.

    Nothing happens where this TRL has no fused head.
    """
    utils = sys.modules.get("trl.trainer.utils")  # whose trainer asks for this has it
    fused: Any = getattr(utils, HEAD, None)
    if utils is None or fused is None:
        yield
        return
    setattr(utils, HEAD, PureHead)
    try:
        yield
    finally:
        setattr(utils, HEAD, fused)


def _log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) log-probs of the targets and entropies, nats."""
    every = logits.log_softmax(-1)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
