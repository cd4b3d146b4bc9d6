"""Layer-wise clipping of the gradients that a model holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from rlwatch.clipping.rules import GROUP_OF, By, ClipRule, first_state, positive, rule_of
from rlwatch.error_boundary import ErrorBoundary, call_or
from rlwatch.errors import ConfigError
from rlwatch.tensors.gradnorm import norm_of_each
from rlwatch.tensors.megatron import divided
from rlwatch.tensors.mergeable import Latest, Stats
from rlwatch.tensors.transfer import meeting_place

KEEP, ZERO = "keep", "zero"
TAP = "layers to clip"
"""Name of this measurement in the message about a failure."""


class LayerClip:
    """Layer-wise clipping, to be called in place of ``clip_grad_norm_``: each layer has its own threshold.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> clip = LayerClip(model)
    >>> _ = model(torch.ones(1, 2)).sum().backward()
    >>> float(clip().total) > 0
    True

    Gradients are scaled in place; those that the rule does not scale stay bit-identical. A call does not wait for the
    device and draws no random numbers, and equal gradients and states give equal results. With DDP or FSDP2, call it on
    every rank after the last backward pass of the step; with FSDP2 the ranks then exchange one number for each
    parameter tensor. With a float16 loss scale, call it after ``scaler.unscale_(optimizer)``.

    A gradient that is not finite has no norm that could be clipped. With ``nonfinite="keep"``, a step with such a
    gradient is left to the training loop (a loss scaler, a skipped step): no gradient and no state of the rule changes,
    and the step is counted. With ``"zero"``, the gradients of the layers concerned are set to zero, and the other
    layers are clipped as in any step.

    If a call fails during training (the rule raises, the device has no memory left), it warns, scales no layer, and
    torch clips the global norm to ``max_norm``; after the third failure, all calls do that. With several ranks the
    error is raised instead, because ranks that clip differently would silently get different weights.

    Parameters
    ----------
    model
        The policy, wrapped (DDP, FSDP2, ``torch.compile``, PEFT) or not. Tied weights count once, in the first layer
        that has them.
    rule
        A :class:`~rlwatch.clipping.rules.ClipRule`, or the name of one: ``"layer-median"``, ``"adagc"``, ``"aggc"``,
        ``"zclip"``, ``"max-norm"``.
    by
        Unit that is clipped: ``"layer"``, ``"tensor"``, ``"module"`` or ``"all"``; by default that of the rule.
    max_norm
        Largest global norm after the layers were clipped; a larger one is clipped to it. If None, there is no global
        clip.
    nonfinite
        Treatment of gradients that are not finite, ``"keep"`` or ``"zero"``.

    Raises
    ------
    ConfigError
        If an argument is not valid, if the weights are flattened in one piece (FSDP1), or if Megatron holds the
        gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | ClipRule = "layer-median",
        *,
        by: str | None = None,
        max_norm: float | None = None,
        nonfinite: str = KEEP,
    ) -> None:
        self.model = model
        self.rule = rule_of(rule)
        self.by = _by(by or str(getattr(self.rule, "by", By.LAYER)))
        self.max_norm = max_norm
        self.last: Clipped | None = None
        """Result of the last call; None before the first."""
        self.error_boundary = ErrorBoundary()
        self._zero = _choice(nonfinite) == ZERO
        positive("LayerClip", max_norm=max_norm)
        self._layout = LayerLayout.of(model, self.by)
        self._state = dict(first_state(self.rule, len(self._layout.groups)))
        self._counts = {
            name: torch.zeros((), dtype=torch.int64, device="cpu") for name in ("steps", "clipped", "nonfinite")
        }

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that are clipped together, in the order of the model."""
        return self._layout.groups

    def clip(self, before: Callable[[Tensor], object] | None = None) -> Clipped:
        """Clip the gradients that the model holds, once before each step of the optimizer, and return the result.

        ``before``, if given, is called with the global norm (0-d) before any gradient is changed.
        """
        if not self.error_boundary.works(TAP):
            return self._together()
        return call_or(lambda: self.by_layer(before), self._otherwise)

    def _otherwise(self, error: Exception) -> Clipped:
        wrong_from_the_start = self.last is None and isinstance(error, ConfigError)
        if wrong_from_the_start or _several_ranks():
            raise error
        self.error_boundary.failed(TAP, error)
        return self._together()

    __call__ = clip

    @torch.no_grad()
    def by_layer(self, before: Callable[[Tensor], object] | None = None) -> Clipped:
        """Clip as :meth:`clip` does, but raise every error; then no gradient was changed."""
        parameters = self._layout.parameters(self.model)
        norms = gradient_norms(parameters)
        held = [norm for norm in norms if norm is not None]
        device = held[0].device if held else next(self.model.parameters()).device
        total = torch.linalg.vector_norm(torch.stack(held)) if held else torch.zeros((), device=device)
        if before is not None:
            before(total)
        layers = self._layout.norms(norms, device)
        scales = self._scales(layers)
        clipped = Clipped(self.groups, total, layers, scales, self._coefficient(total, layers, scales))
        self._apply(parameters, clipped)
        self._count(clipped)
        self.last = clipped
        return clipped

    @torch.no_grad()
    def _together(self) -> Clipped:
        """Clip the global norm only, with torch, and return the result."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.max_norm is None:
            held = [torch.linalg.vector_norm(cast("Tensor", parameter.grad).float()) for parameter in parameters]
            total = torch.linalg.vector_norm(torch.stack(held)) if held else torch.zeros((), device="cpu")
        else:
            total = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        none = total.new_zeros(0)
        return Clipped((), total, none, none, torch.ones_like(total))

    def counts(self) -> dict[str, int]:
        """Return the numbers of steps: all, with a layer scaled down, with a non-finite gradient. Waits for the GPU."""
        return {name: int(count) for name, count in self._counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule and the counts, on the CPU. With them, a resumed run continues identically."""
        return {
            "rule": type(self.rule).__name__,
            "by": str(self.by),
            "groups": list(self.groups),
            "state": {name: tensor.to("cpu", copy=True) for name, tensor in self._state.items()},
            "counts": {name: tensor.to("cpu", copy=True) for name, tensor in self._counts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises
        ------
        ConfigError
            If the state is of another rule, other layers or another window; then nothing is changed.
        """
        for name, expected in (("rule", type(self.rule).__name__), ("by", str(self.by)), ("groups", list(self.groups))):
            if state.get(name) != expected:
                raise ConfigError(f"this state of LayerClip has another {name} than the one it is loaded into")
        loaded = state["state"]
        if {name: x.shape for name, x in loaded.items()} != {name: x.shape for name, x in self._state.items()}:
            raise ConfigError("this state of LayerClip has other sizes (a window?) than the one it is loaded into")
        self._state = {name: x.clone() for name, x in loaded.items()}
        self._counts = {name: x.clone() for name, x in state["counts"].items()}

    def _scales(self, before: Tensor) -> Tensor:
        finite = before.isfinite()
        seen = finite & (before > 0)
        if not self._zero:
            seen &= finite.all()
        state = {name: x.to(before.device) for name, x in self._state.items()}
        chosen, after = self.rule.scales(torch.where(seen, before, 1.0), seen, state)
        self._state = dict(after)
        scales = torch.where(seen, chosen, 1.0)
        return torch.where(finite, scales, 0.0) if self._zero else scales

    def _coefficient(self, total: Tensor, before: Tensor, scales: Tensor) -> Tensor:
        """Return the coefficient of the global clip, as in ``clip_grad_norm_``; 1 where the total is not finite."""
        if self.max_norm is None:
            return torch.ones_like(total)
        # The global norm after the layers were clipped, computed from the layers' norms: gradients are not read a
        # second time. If no layer was scaled, it is the total itself, so that the step is that of clip_grad_norm_, bit
        # for bit; 1e-6 is torch's constant too.
        left = torch.where(scales == 0, 0.0, before * scales).square().sum().sqrt()
        left = torch.where((scales == 1).all(), total, left)
        return torch.where(left.isfinite(), (self.max_norm / (left + 1e-6)).clamp(max=1.0), 1.0)

    def _apply(self, parameters: list[Parameter], clipped: Clipped) -> None:
        """Scale all gradients or, if memory is short, none: all memory is allocated before the first is changed."""
        factors = (clipped.scales * clipped.coefficient).unbind()
        finite = clipped.before.isfinite()
        ready = [
            (grads, factors[row].to(device), (~finite[row]).to(device))
            for (row, device), grads in self._layout.gradients(parameters).items()
        ]
        for grads, factor, broken in ready:
            for grad in grads if self._zero else ():
                grad.masked_fill_(broken, 0.0)
            torch._foreach_mul_(grads, factor)

    def _count(self, clipped: Clipped) -> None:
        now = {
            "steps": torch.ones_like(clipped.layers_clipped),
            "clipped": clipped.layers_clipped > 0,
            "nonfinite": clipped.nonfinite > 0,
        }
        self._counts = {name: count.to(now[name].device) + now[name] for name, count in self._counts.items()}


def _several_ranks() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def _by(word: str) -> By:
    try:
        return By(word)
    except ValueError:
        raise ConfigError(f"by must be one of {', '.join(By)}, got {word!r}") from None


def _choice(nonfinite: str) -> str:
    if nonfinite not in (KEEP, ZERO):
        raise ConfigError(f"nonfinite must be {KEEP!r} or {ZERO!r}, got {nonfinite!r}")
    return nonfinite


# Result of one clip.


@dataclass(frozen=True, slots=True)
class Clipped:
    """Norms of one step's gradients before and after clipping, as float32 tensors on the device, for L groups.

    To compute them did not wait for the device.

    Parameters
    ----------
    groups
        Names of the L groups (layers, unless ``by`` is another unit). Empty if layer-wise clipping failed: then only
        the global norm was clipped, if ``max_norm`` was given.
    total
        0-d L2 norm of all gradients before clipping, which ``clip_grad_norm_`` would return.
    before
        (L,) norms before clipping; 0 where there is no gradient.
    scales
        (L,) factors of the rule; 1 where the rule had none.
    coefficient
        0-d factor of the global clip after the layers'; 1 where there was no global clip.
    """

    groups: tuple[str, ...]
    total: Tensor
    before: Tensor
    scales: Tensor
    coefficient: Tensor

    @property
    def after(self) -> Tensor:
        """(L,) norms after clipping; NaN or Inf where the norm was that before and was kept."""
        return torch.where(self.scales == 0, 0.0, self.before * self.scales * self.coefficient)

    @property
    def layers_clipped(self) -> Tensor:
        """0-d number of groups that the rule scaled down."""
        return (self.scales < 1).sum()

    @property
    def scale_min(self) -> Tensor:
        """0-d smallest factor of the rule, in [0, 1]; 1 where the rule scaled no group down."""
        return self.scales.min().clamp(max=1.0) if self.groups else torch.ones_like(self.total)

    @property
    def nonfinite(self) -> Tensor:
        """0-d number of groups with a NaN or Inf in their gradients (or a norm beyond float32)."""
        return (~self.before.isfinite()).sum()

    def metrics(self) -> dict[str, Tensor]:
        """Return canonical metrics as 0-d tensors, for ``watcher.step(step, **clipped.metrics())``."""
        if not self.groups:
            return {"optim/grad_norm": self.total}
        return {
            "optim/grad_norm": self.total,
            "optim/layers_clipped": self.layers_clipped.float(),
            "optim/clip_scale_min": self.scale_min,
        }

    def stats(self) -> Stats:
        """Return the metrics without the norm, as statistics of a step; they are the same on every rank."""
        one = torch.ones_like(self.total)
        return {name: Latest.of(x, one) for name, x in self.metrics().items() if name != "optim/grad_norm"}


# Layout: the parameters of a model that are clipped together.


@dataclass(slots=True)
class LayerLayout:
    """Assignment of the P parameters of a model to L groups.

    ``group_of`` (P) names the group of each parameter in the order of the model. ``members`` (L, size of the largest
    group) are the places of each group's parameters, padded with P.
    """

    by: By
    groups: tuple[str, ...]
    group_of: list[str]
    members: Tensor

    @classmethod
    def of(cls, model: nn.Module, by: By) -> LayerLayout:
        """Return the layout of a model's parameters, frozen ones included. Raises ``ConfigError`` if there is none."""
        named = list(model.named_parameters())
        if not named:
            raise ConfigError("the model has no parameters to clip the gradients of")
        if any(hasattr(p, "_is_flat_param") or hasattr(p, "_fsdp_flattened") for _, p in named):
            raise ConfigError("FSDP1 keeps weights flattened in one piece, without layers; use FSDP2")
        if divided(model):
            raise ConfigError(
                "Megatron cuts the model over ranks, or holds its gradients in buffers, where they cannot be scaled by "
                "layer; leave clipping to its optimizer (OptimizerConfig(clip_grad=))"
            )
        group_of = [GROUP_OF[by](name) for name, _ in named]
        groups = tuple(dict.fromkeys(group_of))
        places = [[i for i, group in enumerate(group_of) if group == one] for one in groups]
        width = max(map(len, places))
        filled = [[*some, *[len(named)] * (width - len(some))] for some in places]
        return cls(by, groups, group_of, torch.tensor(filled, device="cpu"))

    def parameters(self, model: nn.Module) -> list[Parameter]:
        """Return the model's parameters in order. Raises ``ConfigError`` if they are no longer those of the layout."""
        named = list(model.named_parameters())
        if [GROUP_OF[self.by](name) for name, _ in named] != self.group_of:
            raise ConfigError("the model has other parameters than when LayerClip was made; add adapters before that")
        return [parameter for _, parameter in named]

    def norms(self, norms: list[Tensor | None], device: torch.device) -> Tensor:
        """Return the (L,) norms of the groups from the P norms of the gradients; 0 where there is no gradient."""
        zero = torch.zeros((), device=device)
        squares = torch.stack([*(zero if norm is None else norm for norm in norms), zero]).square()
        self.members = self.members.to(device)
        return squares[self.members].sum(1).sqrt()

    def gradients(self, parameters: list[Parameter]) -> dict[tuple[int, torch.device], list[Tensor]]:
        """Return the local parts of the gradients on this rank, by group and device."""
        row_of = {group: row for row, group in enumerate(self.groups)}
        parts: dict[tuple[int, torch.device], list[Tensor]] = {}
        for group, parameter in zip(self.group_of, parameters, strict=True):
            grad = local_gradient(parameter)
            if grad is not None:
                parts.setdefault((row_of[group], grad.device), []).append(grad)
        return parts


# Norms of whole gradients, also where each rank holds only a shard.
#
# With plain data parallelism, the gradients are equal on all ranks and need no exchange. For a DTensor (FSDP2, tensor
# parallelism) the squares of the shards are summed over the mesh dimensions that it is sharded on, and over no others:
# a sum over replicas (HSDP) would count them twice.


def local_gradient(parameter: Parameter) -> Tensor | None:
    """Return the part of a gradient on this rank, to be changed in place; None if there is no gradient."""
    grad: Any = parameter.grad
    if grad is None:
        return None
    local: Tensor = grad.detach().to_local() if hasattr(grad, "to_local") else grad.detach()
    return local


def gradient_norms(parameters: Sequence[Parameter]) -> list[Tensor | None]:
    """Return the L2 norm of each parameter's whole gradient, 0-d float32 on one device; None without a gradient.

    Norms are accumulated in float32, in whatever type the gradients are. With DTensors this is a collective: all ranks
    pass the same parameters. Partial gradients, which are still to be summed over the ranks, are summed for the norm
    only, and not changed.
    """
    pieces = [_reduced(parameter) for parameter in parameters]
    held = [piece for piece in pieces if piece is not None]
    if not held and not any(map(_dimensions, parameters)):
        return [None] * len(parameters)
    device = meeting_place(held or parameters)
    each = iter(norm_of_each(held))
    norms = [None if piece is None else next(each) for piece in pieces]
    _sum_shards(parameters, norms, device)
    return norms


def _reduced(parameter: Parameter) -> Tensor | None:
    grad: Any = parameter.grad
    if grad is not None and hasattr(grad, "to_local") and any(p.is_partial() for p in grad.placements):
        placed: Any = parameter
        return grad.detach().redistribute(placements=placed.placements).to_local()  # type: ignore[no-any-return]
    return local_gradient(parameter)


def _sum_shards(parameters: Sequence[Parameter], norms: list[Tensor | None], device: torch.device) -> None:
    """Replace the norms of shards by norms of whole gradients, with one all-reduce for each mesh dimension."""
    meshes: dict[Any, list[int]] = {}
    for i, parameter in enumerate(parameters):
        if dimensions := _dimensions(parameter):
            meshes.setdefault((getattr(parameter, "device_mesh", None), dimensions), []).append(i)
    for (mesh, dimensions), places in meshes.items():
        zero = torch.zeros((), device=device)
        squares = torch.stack([zero if (norm := norms[i]) is None else norm for i in places]).square()
        squares = squares.to(mesh.device_type)
        for dimension in dimensions:
            dist.all_reduce(squares, group=mesh.get_group(dimension))
        for i, norm in zip(places, squares.sqrt().to(device).unbind(), strict=True):
            norms[i] = norm


def _dimensions(parameter: Parameter) -> tuple[int, ...]:
    """Return the mesh dimensions over which a parameter that requires a gradient is sharded."""
    placements = getattr(parameter, "placements", ()) if parameter.requires_grad else ()
    return tuple(i for i, placement in enumerate(placements) if placement.is_shard())
