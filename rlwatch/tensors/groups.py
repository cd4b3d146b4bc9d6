"""Groups of responses to one prompt: those whose rewards are all equal teach nothing."""

from __future__ import annotations

from torch import Tensor

from rlwatch.tensors.masked import widen


def zero_variance(rewards: Tensor, group_size: int, *, tolerance: float = 1e-8) -> Tensor:
    """Whether the group of each response has zero reward variance, shape (B,), bool.

    ``rewards`` (B,), the ``group_size`` responses of a prompt next to each other. Equal means within
    ``tolerance`` of each other. A NaN reward is unlike anything, so its group has variance.
    Raises ``ValueError`` if the groups do not divide the batch.
    """
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} rewards do not divide into groups of {group_size}")
    groups = widen(rewards).view(-1, group_size)
    flat = (groups.amax(-1) - groups.amin(-1)) <= tolerance
    return flat.repeat_interleave(group_size)


def zero_variance_fraction(rewards: Tensor, group_size: int) -> Tensor:
    """Fraction of responses in zero-variance groups, 0-d, in [0, 1]; arguments as :func:`zero_variance`."""
    return zero_variance(rewards, group_size).float().mean()
