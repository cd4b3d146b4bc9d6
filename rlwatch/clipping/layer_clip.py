"""Layer-wise clipping of the gradients a model holds."""

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
"""Name of the tap in a failure's line."""


class LayerClip:
    """Clips every layer by a threshold of its own: call it in place of ``clip_grad_norm_``.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> clip = LayerClip(model)
    >>> _ = model(torch.ones(1, 2)).sum().backward()
    >>> float(clip().total) > 0
    True

    Gradients are scaled in place; where the rule scales none, they come out bit-identical. Nothing waits for the
    device, no random number is drawn, and the same gradients and state give the same result. Under DDP call it after
    the last backward of the step, on every rank; likewise with FSDP2, whose ranks then exchange one number for each
    parameter tensor. With a float16 loss scale call it after ``scaler.unscale_(optimizer)``.

    A gradient that is not finite has no length to clip to. With ``nonfinite="keep"`` such a step is left to the loop's
    own guard (a loss scaler, a skipped step): no gradient is touched, the rule sees nothing of it, it is counted.
    With ``"zero"`` the gradients of the layers concerned are set to zero, and the others treated as in any step.

    Where it fails in the middle of training (a rule that raises, a device without memory), it is warned of, no layer is
    scaled and the global clip to ``max_norm`` is done by torch; after the third failure always so. With several ranks
    the error is raised: ranks that clip differently would drift apart unseen.

    Parameters
    ----------
    model
        The policy, wrapped (DDP, FSDP2, ``torch.compile``, PEFT) or not. Tied weights count once, in the first layer
        that has them.
    rule
        A :class:`~rlwatch.clipping.rules.ClipRule`, or the name of one: ``"layer-median"``, ``"adagc"``, ``"aggc"``,
        ``"zclip"``, ``"max-norm"``.
    by
        What is clipped as one: ``"layer"``, ``"tensor"``, ``"module"`` or ``"all"``; by default what the rule wants.
    max_norm
        Of a global clip after the layers' (what remains of all of them together is at most this); None: none.
    nonfinite
        ``"keep"`` or ``"zero"``.

    Raises
    ------
    ConfigError
        If an argument is not what it should be, or the weights lie flattened in one piece (FSDP1)
        or Megatron holds the gradients.
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
        self.seam = ErrorBoundary()
        self._zero = _choice(nonfinite) == ZERO
        positive("LayerClip", max_norm=max_norm)
        self._layout = LayerLayout.of(model, self.by)
        self._state = dict(first_state(self.rule, len(self._layout.groups)))
        self._counts = {
            name: torch.zeros((), dtype=torch.int64, device="cpu") for name in ("steps", "clipped", "nonfinite")
        }

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that are clipped together, in model order."""
        return self._layout.groups

    def clip(self, before: Callable[[Tensor], object] | None = None) -> Clipped:
        """Clip the gradients that the model holds now; once a step, before the optimizer's.

        ``before``, if given, is called with their norm (0-d) while they are still as they came.
        """
        if not self.seam.works(TAP):
            return self._together()
        return call_or(lambda: self.by_layer(before), self._otherwise)

    def _otherwise(self, error: Exception) -> Clipped:
        wrong_from_the_start = self.last is None and isinstance(error, ConfigError)
        if wrong_from_the_start or _several_ranks():
            raise error
        self.seam.failed(TAP, error)
        return self._together()

    __call__ = clip

    @torch.no_grad()
    def by_layer(self, before: Callable[[Tensor], object] | None = None) -> Clipped:
        """:meth:`clip`, but what fails is raised; then no gradient was changed."""
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
        """The global clip alone, as torch does it."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.max_norm is None:
            held = [torch.linalg.vector_norm(cast("Tensor", parameter.grad).float()) for parameter in parameters]
            total = torch.linalg.vector_norm(torch.stack(held)) if held else torch.zeros((), device="cpu")
        else:
            total = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        none = total.new_zeros(0)
        return Clipped((), total, none, none, torch.ones_like(total))

    def counts(self) -> dict[str, int]:
        """Steps so far: all, those with a layer scaled down, those with a non-finite gradient. Waits for the device."""
        return {name: int(count) for name, count in self._counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """State of the rule and counts, on the CPU: training resumed with it goes on as if it had never stopped."""
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
            If it is of another rule, other layers or another window; then nothing is changed.
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
        """Coefficient of the global clip, as ``clip_grad_norm_`` has it; 1 where the total is not finite."""
        if self.max_norm is None:
            return torch.ones_like(total)
        # The norm that the layers' clips leave, from their norms: gradients are not read a second time. Where no layer
        # was scaled it is the total itself, so that the step is bit for bit the one of clip_grad_norm_; 1e-6 is torch's
        # too.
        left = torch.where(scales == 0, 0.0, before * scales).square().sum().sqrt()
        left = torch.where((scales == 1).all(), total, left)
        return torch.where(left.isfinite(), (self.max_norm / (left + 1e-6)).clamp(max=1.0), 1.0)

    def _apply(self, parameters: list[Parameter], clipped: Clipped) -> None:
        """Allocate all memory before any gradient changes, so that all gradients are scaled, or none."""
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
    """One step's gradients, before and after. Tensors on the device, float32 (L groups): nothing here was waited for.

    Parameters
    ----------
    groups
        Names of the L groups (layers, unless clipped by something else). None where clipping them failed: then only
        the global clip, if one was asked for, was done.
    total
        0-d L2 norm of all gradients before clipping: what ``clip_grad_norm_`` returns.
    before
        (L,) norms before clipping; 0 where there is no gradient.
    scales
        (L,) factors the rule chose; 1 where it chose none.
    coefficient
        0-d factor of the global clip that came after it; 1 where there was none.
    """

    groups: tuple[str, ...]
    total: Tensor
    before: Tensor
    scales: Tensor
    coefficient: Tensor

    @property
    def after(self) -> Tensor:
        """(L,) norms after clipping; NaN or Inf where they were that before and were left so."""
        return torch.where(self.scales == 0, 0.0, self.before * self.scales * self.coefficient)

    @property
    def layers_clipped(self) -> Tensor:
        """0-d number of groups that the rule scaled down."""
        return (self.scales < 1).sum()

    @property
    def scale_min(self) -> Tensor:
        """0-d smallest factor of the rule, in [0, 1]: 1 where it scaled none down."""
        return self.scales.min().clamp(max=1.0) if self.groups else torch.ones_like(self.total)

    @property
    def nonfinite(self) -> Tensor:
        """0-d number of groups with a NaN or Inf in their gradients (or a norm beyond float32)."""
        return (~self.before.isfinite()).sum()

    def metrics(self) -> dict[str, Tensor]:
        """Metrics for ``watcher.step(step, **clipped.metrics())``: canonical names, 0-d tensors."""
        if not self.groups:
            return {"optim/grad_norm": self.total}
        return {
            "optim/grad_norm": self.total,
            "optim/layers_clipped": self.layers_clipped.float(),
            "optim/clip_scale_min": self.scale_min,
        }

    def stats(self) -> Stats:
        """Metrics without the norm, as statistics of a step; every rank has the same."""
        one = torch.ones_like(self.total)
        return {name: Latest.of(x, one) for name, x in self.metrics().items() if name != "optim/grad_norm"}


# Layout: the parameters of a model that are clipped together.


@dataclass(slots=True)
class LayerLayout:
    """L groups and the P parameters in them.

    ``group_of`` (P) names the group of each parameter in model order; ``members`` (L, most members of a group) are the
    places of each group's parameters, filled up with P.
    """

    by: By
    groups: tuple[str, ...]
    group_of: list[str]
    members: Tensor

    @classmethod
    def of(cls, model: nn.Module, by: By) -> LayerLayout:
        """Assign the model's parameters, with frozen ones, to groups. Raises ``ConfigError`` if that is impossible."""
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
        """Parameters of the model, in order. Raises ``ConfigError`` if they are others than at the beginning."""
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
        """Parts of the gradients on this rank, by group and device."""
        row_of = {group: row for row, group in enumerate(self.groups)}
        parts: dict[tuple[int, torch.device], list[Tensor]] = {}
        for group, parameter in zip(self.group_of, parameters, strict=True):
            grad = local_gradient(parameter)
            if grad is not None:
                parts.setdefault((row_of[group], grad.device), []).append(grad)
        return parts


# Norms of whole gradients, also where this rank holds a shard of each.
#
# Gradients of plain data parallelism are the same on all ranks and need nothing. Of a DTensor (FSDP2, tensor
# parallelism) the squares of the shards are summed over the mesh dimensions it is sharded on, and over no others: a
# sum over replicas (HSDP) would count them twice.


def local_gradient(parameter: Parameter) -> Tensor | None:
    """Return the part of a gradient on this rank, to be changed in place; None if there is none."""
    grad: Any = parameter.grad
    if grad is None:
        return None
    local: Tensor = grad.detach().to_local() if hasattr(grad, "to_local") else grad.detach()
    return local


def gradient_norms(parameters: Sequence[Parameter]) -> list[Tensor | None]:
    """L2 norm of each parameter's whole gradient, 0-d float32 on one device; None where there is no gradient.

    Accumulated in float32 whatever the gradients' type. With DTensors a collective: every rank passes the same
    parameters. What still waits to be summed over ranks is summed for this, and left as it is.
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
    """Replace norms of shards by those of whole gradients: one all-reduce for each mesh dimension."""
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
    """Mesh dimensions that a parameter with a gradient to come is sharded on."""
    placements = getattr(parameter, "placements", ()) if parameter.requires_grad else ()
    return tuple(i for i, placement in enumerate(placements) if placement.is_shard())
