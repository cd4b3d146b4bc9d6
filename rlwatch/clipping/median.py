"""Our own rule: a layer's norm against the median and the median absolute deviation of its last norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.clipping.grouping import By
from rlwatch.clipping.rule import State, positive
from rlwatch.errors import ConfigError

GAUSSIAN = 1.4826
"""1 / Phi^-1(3/4): makes the median absolute deviation estimate a normal standard deviation."""


@dataclass(frozen=True, slots=True)
class LayerMedian:
    """Clip a layer to exp(m + k max(s, floor)), of the logarithms of its last ``window`` norms before clipping.

    m is their median, s = 1.4826 times their median absolute deviation: up to half of the window may be spikes and
    neither moves much. Norms are multiplicative, hence the logarithm. The norm of this step does not judge itself. A
    level that really changed is learnt once it fills half of the window; an average fed with clipped norms (AdaGC,
    AGGC) may never learn it.

    Not published elsewhere, and not the rule of Tencent's LayerClip, which is not public.

    Parameters
    ----------
    k
        Deviations from the median that are left alone, > 0.
    floor
        Least spread, nats, > 0: a layer with constant norms may still vary by a factor of exp(k floor).
    window
        Norms remembered of each layer, >= 2.
    warmup
        Norms of a layer before it is clipped, from 2 to ``window``.
    by
        What is clipped as one.
    """

    k: float = 4.0
    floor: float = 0.1
    window: int = 64
    warmup: int = 16
    by: By = By.LAYER

    def __post_init__(self) -> None:
        positive("LayerMedian", k=self.k, floor=self.floor)
        if not 2 <= self.warmup <= self.window:
            raise ConfigError(f"LayerMedian: need 2 <= warmup <= window, got {self.warmup} and {self.window}")

    def start(self, like: Tensor) -> State:
        """An empty window, (window, L): NaN where there is no norm yet. ``at`` (L,) is the row to fill next."""
        rows = like.new_full((self.window, *like.shape), float("nan"))
        return {"logs": rows, "at": torch.zeros_like(like, dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """See :class:`~rlwatch.clipping.rule.ClipRule`."""
        logs, at = state["logs"], state["at"]
        now = norms.log()
        center = median(logs)
        spread = GAUSSIAN * median((logs - center).abs())
        over = now - (center + self.k * spread.clamp(min=self.floor))
        ready = (~logs.isnan()).sum(0) >= self.warmup
        scales = torch.where(ready & (over > 0), (-over).exp(), 1.0)
        here = torch.arange(self.window, device=at.device)[:, None] == at
        return scales, {
            "logs": torch.where(here & seen, now, logs),
            "at": torch.where(seen, (at + 1) % self.window, at),
        }


def median(rows: Tensor) -> Tensor:
    """Of each column of (W, L), without its NaN; NaN where a column has nothing else.

    By sorting: ``torch.nanmedian`` has no deterministic form on every device.
    """
    ordered = rows.sort(0).values  # NaN comes last
    count = (~rows.isnan()).sum(0, keepdim=True)
    low = ordered.gather(0, ((count - 1) // 2).clamp(min=0))
    high = ordered.gather(0, (count // 2).clamp(max=len(rows) - 1))
    return ((low + high) / 2).squeeze(0)
