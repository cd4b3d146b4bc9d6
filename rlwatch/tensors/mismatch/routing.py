"""Mixture of experts: tokens that trainer and rollout engine sent to different experts.

Routing is discrete, so a rounding error can change the experts, and with them the log-prob by far more than rounding.
R3 (arXiv 2510.11370) found 94 % of tokens differ in at least one layer, and about 10 % of the routers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Mean, Stats


def differing_layers(experts: Tensor, rollout_experts: Tensor) -> Tensor:
    """Number of layers in which the sets of experts differ, (B, T) int64.

    Both (B, T, layers, k) integers, in any order within the k. Works layer by layer, because a long batch holds
    millions of ids.
    """
    different = torch.zeros(experts.shape[:2], dtype=torch.int64, device=experts.device)
    for layer in range(experts.shape[2]):
        ours, theirs = experts[:, :, layer].sort(-1).values, rollout_experts[:, :, layer].sort(-1).values
        different += (ours != theirs).any(-1)
    return different


def recorded(experts: Tensor, rollout_experts: Tensor, mask: Tensor) -> Tensor:
    """Tokens (B, T) of ``mask`` (B, T) whose routing both recorded.

    The last token of a response was sampled but never fed back, so the engine has no routing of it. Its slot holds
    -1, or zeros in verl, which read as a route to expert 0: it is left out whatever it holds. So is any token with
    a negative id.
    """
    on = mask.bool()
    later = on.flip(-1).cumsum(-1).flip(-1)
    known = (experts >= 0).flatten(2).all(-1) & (rollout_experts >= 0).flatten(2).all(-1)
    return on & (later > 1) & known


def routing_stats(
    experts: Tensor, rollout_experts: Tensor, mask: Tensor, distance: Tensor | None = None, scored: Tensor | None = None
) -> Stats:
    """Of routings (B, T, layers, k) over ``mask`` (B, T). Nothing where the two do not have the same shape,
    or do not lie on the device of ``mask``: copying them would be a wait.

    ``routing_layer_frac``: share of (token, layer) pairs whose sets of experts differ; ``routing_token_frac``: share of
    tokens that differ in at least one layer; ``routing_layers``: mean number of such layers of a token.
    With ``distance`` = |d| (B, T) over ``scored`` (B, T) also ``routing_absdiff``: the mean |d| of the tokens that
    differ, to be compared with that of all.
    """
    alike = experts.shape == rollout_experts.shape and experts.device == rollout_experts.device == mask.device
    if not alike or experts.dim() != 4 or not experts.shape[2]:
        return {}
    on, layers = recorded(experts, rollout_experts, mask), differing_layers(experts, rollout_experts).float()
    moved = layers > 0
    stats: Stats = {
        "mismatch/routing_layer_frac": Mean.of(layers / experts.shape[2], on),
        "mismatch/routing_token_frac": Mean.of(moved.float(), on),
        "mismatch/routing_layers": Mean.of(layers, on),
    }
    if distance is not None and scored is not None:
        stats["mismatch/routing_absdiff"] = Mean.of(widen(distance), on & moved & scored)
    return stats
