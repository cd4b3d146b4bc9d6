"""Which parameters of a model are clipped together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rlwatch.clipping.grouping import GROUP_OF, By
from rlwatch.clipping.norms import local_gradient
from rlwatch.errors import ConfigError


@dataclass(slots=True)
class Layout:
    """L groups and the P parameters in them.

    ``group_of`` (P) names the group of each parameter in model order; ``members`` (L, most members of a group) are the
    places of each group's parameters, filled up with P.
    """

    by: By
    groups: tuple[str, ...]
    group_of: list[str]
    members: Tensor

    @classmethod
    def of(cls, model: nn.Module, by: By) -> Layout:
        """Of the parameters the model has now, frozen ones included. Raises ``ConfigError`` if they cannot be told."""
        named = list(model.named_parameters())
        if not named:
            raise ConfigError("the model has no parameters to clip the gradients of")
        if any(hasattr(p, "_is_flat_param") or hasattr(p, "_fsdp_flattened") for _, p in named):
            raise ConfigError("FSDP1 keeps weights flattened in one piece, where layers cannot be told; use FSDP2")
        group_of = [GROUP_OF[by](name) for name, _ in named]
        groups = tuple(dict.fromkeys(group_of))
        places = [[i for i, group in enumerate(group_of) if group == one] for one in groups]
        width = max(map(len, places))
        filled = [[*some, *[len(named)] * (width - len(some))] for some in places]
        return cls(by, groups, group_of, torch.tensor(filled))

    def parameters(self, model: nn.Module) -> list[Parameter]:
        """Those of the model, in order. Raises ``ConfigError`` if they are others than at the beginning."""
        named = list(model.named_parameters())
        if [GROUP_OF[self.by](name) for name, _ in named] != self.group_of:
            raise ConfigError("the model has other parameters than when LayerClip was made; add adapters before that")
        return [parameter for _, parameter in named]

    def norms(self, norms: list[Tensor | None], device: torch.device) -> Tensor:
        """(L,) norms of the groups, of the P norms of the gradients; 0 where there is none."""
        zero = torch.zeros((), device=device)
        squares = torch.stack([*(zero if norm is None else norm for norm in norms), zero]).square()
        self.members = self.members.to(device)
        return squares[self.members].sum(1).sqrt()

    def gradients(self, parameters: list[Parameter]) -> dict[tuple[int, torch.device], list[Tensor]]:
        """What this rank holds of the gradients, by group and device."""
        row_of = {group: row for row, group in enumerate(self.groups)}
        found: dict[tuple[int, torch.device], list[Tensor]] = {}
        for group, parameter in zip(self.group_of, parameters, strict=True):
            grad = local_gradient(parameter)
            if grad is not None:
                found.setdefault((row_of[group], grad.device), []).append(grad)
        return found
