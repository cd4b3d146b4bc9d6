"""What the mismatch does to the gradient: it matters where it goes along with the advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.mismatch.gap import Gap
from rlwatch.tensors.paired import Correlation
from rlwatch.tensors.sides import Sides


def advantage_stats(gap: Gap, advantages: Tensor) -> Stats:
    """Over the scored tokens; ``advantages`` (B, T) or (B, 1).

    ``bias_pos`` and ``bias_neg``: mean of C = -(w - 1) A over the tokens with A > 0 and with A < 0, w = exp(d), in
    units of the advantage (VeXact, arXiv 2605.14220, eq. 5). The two signs are kept apart because they cancel in a
    mean while each distorts its own side. ``adv_corr``: Pearson's correlation of d and A, in [-1, 1]. A NaN
    advantage has no sign; it shows on both sides.
    """
    a, sides = widen(advantages), Sides.of(advantages, gap.scored)
    shift = -torch.expm1(gap.d) * a
    return {
        "mismatch/bias_pos": Mean.of(shift, sides.positive),
        "mismatch/bias_neg": Mean.of(shift, sides.negative),
        "mismatch/adv_corr": Correlation.of(gap.d, a, gap.scored),
    }
