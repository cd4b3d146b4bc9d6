"""Rules of clipping, which compute from the norms of groups of gradients the factors to scale them by.

A rule keeps no state in itself: it takes its state as tensors and returns the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from rlwatch.errors import ConfigError
from rlwatch.stats import GAUSSIAN
from rlwatch.tensors.gradnorm import layer_of, plain_name

State = Mapping[str, Tensor]
"""Memory of a rule: tensors on the device, by name. A rule never changes them in place."""


class ClipRule(Protocol):
    """Rule for the factors by which groups of gradients (layers, tensors...) are scaled.

    A rule consists of settings and arithmetic. It is deterministic, draws no random numbers, and never reads a number
    from the device (no ``.item()``, no ``if`` on a tensor). It takes all its memory as ``state`` and returns the next
    state, so that a checkpoint of the state is a checkpoint of the rule.
    """

    @property
    def by(self) -> By:
        """Unit that the rule clips by default."""
        ...

    def start(self, like: Tensor) -> State:
        """Return the state before the first step. ``like`` (L,) has the shape, type and device of all later norms."""
        ...

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the factors for the gradients of this step, and the state after the step.

        Parameters
        ----------
        norms
            (L,) L2 norms before clipping, all finite and > 0; 1 where not ``seen``.
        seen
            (L,) bool, True for the groups with a finite gradient other than zero. The other groups (frozen, experts
            without a token, NaN) must leave the state unchanged, and their factors are ignored.
        state
            State that :meth:`start` or the last call returned.
        """
        ...


def positive(rule: str, **settings: float | None) -> None:
    """Raise ``ConfigError`` unless every setting that is given is a finite number > 0."""
    for name, value in settings.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{rule}: {name} must be a finite number > 0, got {value!r}")


def within_one(rule: str, **settings: float) -> None:
    """Raise ``ConfigError`` unless every setting is in [0, 1)."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{rule}: {name} must be in [0, 1), got {value!r}")


# Groups of parameters.

_INNER = re.compile(
    r"\.(?:lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|original_module|modules_to_save)(?=\.|$).*$"
)


class By(StrEnum):
    """Units of parameters whose gradients are clipped together."""

    LAYER = "layer"
    """A transformer block; each module outside of the blocks by itself. Adapters belong to their layer."""
    TENSOR = "tensor"
    """Each parameter tensor by itself."""
    MODULE = "module"
    """All modules of one kind (``q_proj``, ``down_proj``...), across the layers."""
    ALL = "all"
    """All parameters together: a global norm."""


@lru_cache(maxsize=8192)
def module_type_of(name: str) -> str:
    """Return the kind of module that a parameter belongs to. Adapters belong to the module that they adapt.

    >>> module_type_of("model.layers.3.self_attn.q_proj.lora_A.default.weight")
    'q_proj'
    >>> module_type_of("layers.0.weight")
    'layers'
    """
    bare = plain_name(name)
    inner = _INNER.sub("", bare)
    path = inner if inner != bare else bare.rpartition(".")[0]
    words = [word for word in path.split(".") if word and not word.isdigit()]
    return words[-1] if words else bare


def _everything(name: str) -> str:  # noqa: ARG001  (one group, whatever the name)
    return "all"


GROUP_OF: Mapping[By, Callable[[str], str]] = {
    By.LAYER: layer_of,
    By.TENSOR: plain_name,
    By.MODULE: module_type_of,
    By.ALL: _everything,
}
"""Function from a parameter's name to the name of its group, for each unit."""


# The rule designed for rlwatch: it compares a layer's norm with the median and the median absolute deviation of the
# layer's last norms.


@dataclass(frozen=True, slots=True)
class LayerMedian:
    """Rule that clips a layer's norm to exp(m + k max(s, floor)), from the logarithms of its last ``window`` norms.

    The norms are those before clipping, without this step's. m is the median of their logarithms, and s is 1.4826 times
    their median absolute deviation: neither changes much while less than half of the window are spikes. Logarithms are
    used because norms vary by factors. A lasting change of the level is followed once it fills half of the window; a
    rule that averages clipped norms (AdaGC, AGGC) may never follow it.

    The rule is not published elsewhere, and is not the rule of Tencent's LayerClip, which is not public.

    Parameters
    ----------
    k
        Number of deviations from the median up to which nothing is clipped, > 0.
    floor
        Smallest value of s, nats, > 0: with it, a layer with constant norms may still vary by a factor of exp(k floor).
    window
        Number of norms that are kept of each layer, >= 2.
    warmup
        Number of norms of a layer before it is clipped, from 2 to ``window``.
    by
        Unit that is clipped.
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
        """Return an empty window (window, L): NaN where there is no norm yet. ``at`` (L,) is the next row to fill."""
        rows = like.new_full((self.window, *like.shape), float("nan"))
        return {"logs": rows, "at": torch.zeros_like(like, dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the factors and the next state, as :meth:`ClipRule.scales` describes."""
        logs, at = state["logs"], state["at"]
        # Judged by the window as it was before this step: a spike must not raise its own limit.
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
    """Return the median of each column of (W, L), ignoring NaN. The result is NaN where a column has only NaN.

    The rows are sorted for it, because ``torch.nanmedian`` is not deterministic on all devices.
    """
    ordered = rows.sort(0).values  # NaN comes last
    count = (~rows.isnan()).sum(0, keepdim=True)
    low = ordered.gather(0, ((count - 1) // 2).clamp(min=0))
    high = ordered.gather(0, (count // 2).clamp(max=len(rows) - 1))
    return ((low + high) / 2).squeeze(0)


# AdaGC compares each tensor's norm with a moving average of the tensor's clipped norms.


@dataclass(frozen=True, slots=True)
class AdaGC:
    """Adaptive gradient clipping per tensor (arXiv 2502.11034, algorithm 1).

    In steps t < ``warmup``, with the global norm ||g||: h = min(absolute / ||g||, 1) for all tensors, and
    gamma_i = min(gamma_i, ||h g_i||). In later steps: h_i = min(relative gamma_i / ||g_i||, 1), and
    gamma_i = beta gamma_i + (1 - beta) ||h_i g_i||.

    Because the average is of clipped norms, it can grow by (1 - beta)(relative - 1) = 0.1 % a step at most: a tensor
    whose first gradients are tiny (the A of a LoRA adapter) stays clipped for long. The average of a tensor whose first
    gradient comes after the warm-up begins with the norm of that gradient (the paper has no such tensors).

    Parameters
    ----------
    relative, absolute
        lambda_rel and lambda_abs of the paper.
    beta
        Decay of the average per step, in [0, 1).
    warmup
        Number of steps in which the global norm is clipped instead, >= 0.
    by
        Unit that is clipped; in the paper, each tensor.
    """

    relative: float = 1.05
    absolute: float = 1.0
    beta: float = 0.98
    warmup: int = 100
    by: By = By.TENSOR

    def __post_init__(self) -> None:
        positive("AdaGC", relative=self.relative, absolute=self.absolute)
        within_one("AdaGC", beta=self.beta)

    def start(self, like: Tensor) -> State:
        """Return a state without averages (they are infinite) and without steps."""
        return {"gamma": torch.full_like(like, float("inf")), "steps": like.new_zeros((), dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the factors and the next state, as :meth:`ClipRule.scales` describes."""
        gamma, steps = state["gamma"], state["steps"]
        # The global norm of the paper's warm-up follows from the norms of the groups, without reading gradients again.
        total = torch.where(seen, norms, 0.0).square().sum().sqrt()
        warming = steps < self.warmup
        scales = torch.where(warming, self.absolute / total, self.relative * gamma / norms).clamp(max=1.0)
        # gamma is updated with the clipped norm, as published, which limits its growth to 0.1 % a step.
        clipped = scales * norms
        average = torch.where(gamma.isinf(), clipped, self.beta * gamma + (1 - self.beta) * clipped)
        updated = torch.where(warming, torch.minimum(gamma, clipped), average)
        return scales, {"gamma": torch.where(seen, updated, gamma), "steps": steps + seen.any()}


# AGGC compares the norm of all modules of one kind with an interval around the norm's moving average.


@dataclass(frozen=True, slots=True)
class AGGC:
    """Adaptive group-wise gradient clipping (arXiv 2601.11864; settings named after ZhiyuanLi218/AGGC).

    E_j is the moving average of the norms of group j after clipping. A norm above ``high`` E_j is clipped to that
    value, and a norm below ``low`` E_j is raised to that value, if ``low`` is given. Both multipliers change linearly
    to their late values, between ``switch`` and ``switch + ramp`` of ``total_steps``. After each step, E_j = beta E_j +
    (1 - beta) (norm after clipping).

    With ``high`` = 1, the default of the released code, the average can only fall. The script for verl of that code
    uses high 0.7, high_late 0.999, low 0.98, beta 0.99, switch 0.6, most_up 1.1, most_down 0.9. The released code
    starts the average at 0, so that the second step is clipped to (1 - beta) of the first; this class starts it at the
    first norm.

    Parameters
    ----------
    high, low
        Multipliers of the average. If ``low`` is None, small norms are not raised.
    high_late, low_late
        Late values of the multipliers. If None, the multipliers do not change.
    total_steps
        Length of the training, in steps; required with a late value.
    switch, ramp
        Start and duration of the change of the multipliers, as shares of the training.
    most_up, most_down
        Largest and smallest factor that is applied. If None, the factor has no such limit.
    beta
        Decay of the average per step, in [0, 1).
    by
        Unit that is clipped; in the paper, all modules of one kind.
    """

    high: float = 1.0
    low: float | None = None
    high_late: float | None = None
    low_late: float | None = None
    total_steps: int | None = None
    switch: float = 0.5
    ramp: float = 0.2
    most_up: float | None = None
    most_down: float | None = None
    beta: float = 0.98
    by: By = By.MODULE

    def __post_init__(self) -> None:
        positive("AGGC", high=self.high, low=self.low, high_late=self.high_late, low_late=self.low_late)
        positive("AGGC", ramp=self.ramp, most_up=self.most_up, most_down=self.most_down, total_steps=self.total_steps)
        within_one("AGGC", beta=self.beta, switch=self.switch)
        if (self.high_late is not None or self.low_late is not None) and self.total_steps is None:
            raise ConfigError("AGGC: high_late and low_late need total_steps, the length of training")

    def start(self, like: Tensor) -> State:
        """Return a state without averages (they are infinite) and without steps."""
        return {"average": torch.full_like(like, float("inf")), "steps": like.new_zeros((), dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the factors and the next state, as :meth:`ClipRule.scales` describes."""
        average, steps = state["average"], state["steps"]
        # An average that is not known yet is infinite: the first norm of a group becomes its average, and is not
        # clipped (the released code begins at 0 and clips the second step to 2 % of the first).
        known = average.isfinite()
        base = torch.where(known, average, norms)
        late = self._lateness(steps)
        bounded = torch.minimum(norms, _between(self.high, self.high_late, late) * base)
        if self.low is not None:
            bounded = torch.maximum(bounded, _between(self.low, self.low_late, late) * base)
        scales = torch.where(known, bounded / norms, 1.0).clamp(self.most_down, self.most_up or float("inf"))
        updated = torch.where(known, self.beta * base + (1 - self.beta) * scales * norms, norms)
        return scales, {"average": torch.where(seen, updated, average), "steps": steps + seen.any()}

    def _lateness(self, steps: Tensor) -> Tensor:
        """Return the progress from the early to the late multipliers, 0-d: 0 before the switch, 1 after the ramp."""
        if self.total_steps is None:
            return torch.zeros_like(steps, dtype=torch.float32)
        return ((steps / self.total_steps - self.switch) / self.ramp).clamp(0.0, 1.0)


def _between(early: float, late: float | None, lateness: Tensor) -> Tensor:
    return early + ((early if late is None else late) - early) * lateness


# ZClip clips a norm that is an outlier by its z-score towards the mean.

EPSILON = 1e-6
"""Number added to the standard deviation, as in the released code."""


@dataclass(frozen=True, slots=True)
class ZClip:
    """Clipping by z-score (arXiv 2504.02507; defaults of bluorion-com/ZClip, mode ``zscore``, adaptive scaling).

    z = (n - mu) / (sigma + 1e-6). Where z > ``threshold``, the norm n is clipped to mu + threshold sigma / (z /
    threshold): the larger z, the closer to the mean. Mean and variance are those of the first ``warmup`` norms, which
    are not clipped. Later steps update them with the clipped norm n': mu = alpha mu + (1 - alpha) n', and with the new
    mu, variance = alpha variance + (1 - alpha)(n' - mu)^2.

    Mean and variance are not robust: a spike within the warm-up raises the limit for about 1 / (1 - alpha) steps.

    Parameters
    ----------
    threshold
        Value of z above which a norm is clipped.
    alpha
        Decay of the averages per step, in [0, 1).
    warmup
        Number of norms of a group before it is clipped, >= 1.
    feed_spikes
        True to update the averages with clipped norms too, as the released code does unless ``skip_update_on_spike`` is
        set.
    by
        Unit that is clipped; in the paper, all gradients together (``By.ALL``).
    """

    threshold: float = 2.5
    alpha: float = 0.97
    warmup: int = 25
    feed_spikes: bool = True
    by: By = By.LAYER

    def __post_init__(self) -> None:
        positive("ZClip", threshold=self.threshold, warmup=self.warmup)
        within_one("ZClip", alpha=self.alpha)

    def start(self, like: Tensor) -> State:
        """Return a state with no norms counted."""
        zeros = torch.zeros_like(like)
        return {"mean": zeros, "variance": zeros.clone(), "count": zeros.to(torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the factors and the next state, as :meth:`ClipRule.scales` describes."""
        mean, variance, count = state["mean"], state["variance"], state["count"]
        sigma = variance.sqrt()
        z = (norms - mean) / (sigma + EPSILON)
        spiked = (count >= self.warmup) & (z > self.threshold)
        # The limit mu + threshold sigma / (z / threshold) is mu + threshold sigma at z = threshold, and falls towards
        # mu as z grows, so that the largest spike is clipped most. (mu = 1, sigma = 0.1, n = 2: z = 10, limit 1.0625.)
        limit = mean + self.threshold**2 * sigma / torch.where(spiked, z, 1.0)
        clipped = torch.where(spiked, limit, norms)
        new_mean, new_variance = self._averages(clipped, state)
        fed = seen if self.feed_spikes else seen & ~spiked
        return clipped / norms, {
            "mean": torch.where(fed, new_mean, mean),
            "variance": torch.where(fed, new_variance, variance),
            "count": count + seen,
        }

    def _averages(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the next mean and variance: plain (of the population) during the warm-up, moving ones after it."""
        mean, variance, count = state["mean"], state["variance"], state["count"]
        # Welford's update while warming: keep = n / (n + 1) makes the moving form the plain mean and variance.
        keep = torch.where(count < self.warmup, count.to(x) / (count.to(x) + 1), self.alpha)
        new_mean = keep * mean + (1 - keep) * x
        plain = keep * variance + (1 - keep) * (x - mean) * (x - new_mean)
        moving = keep * variance + (1 - keep) * (x - new_mean).square()
        return new_mean, torch.where(count < self.warmup, plain, moving)


# Constant thresholds.


@dataclass(frozen=True, slots=True)
class LayerMaxNorm:
    """Rule that clips each layer's norm to a constant, with the factor min(1, c / ||g_l||).

    Parameters
    ----------
    each
        c, the same for all layers.
    total
        Alternative to ``each``: c = total / sqrt(L) for the L layers that have a gradient, so that the norm of all
        layers together is at most ``total``. Without either, ``total`` is 1.
    by
        Unit that is clipped.

    Raises
    ------
    ConfigError
        If both are given, or one is not a finite number > 0.
    """

    each: float | None = None
    total: float | None = None
    by: By = By.LAYER

    def __post_init__(self) -> None:
        positive("LayerMaxNorm", each=self.each, total=self.total)
        if self.each is not None and self.total is not None:
            raise ConfigError("LayerMaxNorm: pass each or total, not both")

    def start(self, like: Tensor) -> State:  # noqa: ARG002  (the protocol's signature)
        """Return an empty state: the rule has no memory."""
        return {}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the factors and the unchanged state, as :meth:`ClipRule.scales` describes."""
        if self.each is not None:
            return (self.each / norms).clamp(max=1.0), state
        layers = seen.sum().clamp(min=1).to(norms)
        return ((self.total or 1.0) / layers.sqrt() / norms).clamp(max=1.0), state


# The rules that can be chosen by name, and the trial of a rule before it is used.

RULES: Mapping[str, Callable[[], ClipRule]] = {
    "layer-median": LayerMedian,
    "adagc": AdaGC,
    "aggc": AGGC,
    "zclip": ZClip,
    "max-norm": LayerMaxNorm,
}
"""Rules with their default settings, by name."""


def rule_of(rule: str | ClipRule) -> ClipRule:
    """Return the rule of a name, with its default settings, or the rule itself if it is one. Raises ``ConfigError``."""
    if isinstance(rule, str):
        if rule not in RULES:
            raise ConfigError(f"unknown rule of clipping {rule!r}; known: {', '.join(RULES)}")
        return RULES[rule]()
    if not all(callable(getattr(rule, name, None)) for name in ("start", "scales")):
        raise ConfigError(f"a rule of clipping has the methods start and scales; got {rule!r}")
    return rule


def first_state(rule: ClipRule, groups: int) -> State:
    """Return the first state of a rule, after a trial of the rule, so that a faulty rule fails before training.

    Raises ``ConfigError`` if the rule does not return factors for ``groups`` groups, or returns a state of another
    shape than its first.
    """
    like = torch.ones(groups, device="cpu")
    scales, after = rule.scales(like, torch.ones(groups, dtype=torch.bool, device="cpu"), rule.start(like))
    state = rule.start(like)
    if scales.shape != like.shape or {n: x.shape for n, x in after.items()} != {n: x.shape for n, x in state.items()}:
        raise ConfigError(
            f"{type(rule).__name__} must return {groups} factors and a state like the one it started with"
        )
    return state
