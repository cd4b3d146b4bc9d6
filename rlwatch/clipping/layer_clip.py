"""Layer-wise clipping of the gradients a model holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rlwatch.clipping.grouping import By
from rlwatch.clipping.layout import Layout
from rlwatch.clipping.norms import gradient_norms
from rlwatch.clipping.result import Clipped
from rlwatch.clipping.rule import ClipRule, positive
from rlwatch.clipping.rules import first_state, rule_of
from rlwatch.errors import ConfigError
from rlwatch.seam import Seam, by_a_signal

KEEP, ZERO = "keep", "zero"
TAP = "layers to clip"
"""What it is called where it fails."""


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
        A :class:`~rlwatch.clipping.rule.ClipRule`, or the name of one: ``"layer-median"``, ``"adagc"``, ``"aggc"``,
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
        If an argument is not what it should be, or the weights lie flattened in one piece (FSDP1).
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
        """What the last call did; None before the first."""
        self.seam = Seam()
        self._zero = _choice(nonfinite) == ZERO
        positive("LayerClip", max_norm=max_norm)
        self._layout = Layout.of(model, self.by)
        self._state = dict(first_state(self.rule, len(self._layout.groups)))
        self._counts = {name: torch.zeros((), dtype=torch.int64) for name in ("steps", "clipped", "nonfinite")}

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of what is clipped as one, in model order."""
        return self._layout.groups

    def clip(self, before: Callable[[Tensor], object] | None = None) -> Clipped:
        """Clip the gradients that the model holds now; once a step, before the optimizer's.

        ``before``, if given, is called with their norm (0-d) while they are still as they came.
        """
        if self.seam.works(TAP):
            try:
                return self.by_layer(before)
            except Exception as error:
                wrong_from_the_start = self.last is None and isinstance(error, ConfigError)
                if wrong_from_the_start or _several_ranks() or by_a_signal(error):
                    raise
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
            total = torch.linalg.vector_norm(torch.stack(held)) if held else torch.zeros(())
        else:
            total = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
        none = total.new_zeros(0)
        return Clipped((), total, none, none, torch.ones_like(total))

    def counts(self) -> dict[str, int]:
        """Steps so far: all, those with a layer scaled down, those with a non-finite gradient. Waits for the device."""
        return {name: int(count) for name, count in self._counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """All it remembers, on the CPU: training resumed with it goes on as if it had never stopped."""
        return {
            "rule": type(self.rule).__name__,
            "by": str(self.by),
            "groups": list(self.groups),
            "state": {name: tensor.to("cpu", copy=True) for name, tensor in self._state.items()},
            "counts": {name: tensor.to("cpu", copy=True) for name, tensor in self._counts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned.

        Raises
        ------
        ConfigError
            If it is of another rule, other layers or another window; then nothing is changed.
        """
        for name, ours in (("rule", type(self.rule).__name__), ("by", str(self.by)), ("groups", list(self.groups))):
            if state.get(name) != ours:
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
        """Of the global clip, as ``clip_grad_norm_`` has it; 1 where the total is not finite."""
        if self.max_norm is None:
            return torch.ones_like(total)
        left = torch.where(scales == 0, 0.0, before * scales).square().sum().sqrt()
        left = torch.where((scales == 1).all(), total, left)
        return torch.where(left.isfinite(), (self.max_norm / (left + 1e-6)).clamp(max=1.0), 1.0)

    def _apply(self, parameters: list[Parameter], clipped: Clipped) -> None:
        """First all that takes memory, then what changes gradients: all of them are scaled, or none."""
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
