"""Rules of clipping: norms of groups of gradients in, factors out, and a state of tensors that is handed back."""

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
"""Memory of a rule: tensors on the device, by name. A rule never changes one in place."""


class ClipRule(Protocol):
    """Rule for the factor by which each group of gradients (a layer, a tensor...) is scaled.

    A rule is settings and arithmetic: deterministic, without random numbers, and without asking the device for a
    number (no ``.item()``, no ``if`` on a tensor). All it remembers it takes as ``state`` and returns anew, so that a
    checkpoint of the state is a checkpoint of the rule.
    """

    @property
    def by(self) -> By:
        """Unit that the rule clips by default."""
        ...

    def start(self, like: Tensor) -> State:
        """The state before anything was seen; ``like`` (L,) has the shape, type and device of the norms to come."""
        ...

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Factors for the gradients of this step, and the state after it.

        Parameters
        ----------
        norms
            (L,) L2 norms before clipping, all finite and > 0; 1 where not ``seen``.
        seen
            (L,) bool: the groups that have a finite gradient other than zero. The others (frozen, experts that got
            no token, NaN) must leave the state as it was; their factors are ignored.
        state
            What :meth:`start` or the last call returned.
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
    """Units that are clipped as one."""

    LAYER = "layer"
    """A transformer block; each module outside of the blocks by itself. Adapters go with their layer."""
    TENSOR = "tensor"
    """Every parameter tensor by itself."""
    MODULE = "module"
    """All modules of one kind (``q_proj``, ``down_proj``...), across the layers."""
    ALL = "all"
    """Everything: a global norm."""


@lru_cache(maxsize=8192)
def module_type_of(name: str) -> str:
    """The kind of module a parameter belongs to, adapters with the module they adapt.

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
"""Parameter name -> name of its group."""


# Our own rule: a layer's norm against the median and the median absolute deviation of its last norms.


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
        """Factors and the next state, see :class:`ClipRule`."""
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
    """Median of each column of (W, L), without its NaN; NaN where a column has nothing else.

    By sorting: ``torch.nanmedian`` has no deterministic form on every device.
    """
    ordered = rows.sort(0).values  # NaN comes last
    count = (~rows.isnan()).sum(0, keepdim=True)
    low = ordered.gather(0, ((count - 1) // 2).clamp(min=0))
    high = ordered.gather(0, (count // 2).clamp(max=len(rows) - 1))
    return ((low + high) / 2).squeeze(0)


# AdaGC: each tensor's norm against a moving average of its own clipped norms.


@dataclass(frozen=True, slots=True)
class AdaGC:
    """Adaptive gradient clipping per tensor (arXiv 2502.11034, algorithm 1).

    For step t < ``warmup``, with the global norm ||g||: h = min(absolute / ||g||, 1) for all, and
    gamma_i = min(gamma_i, ||h g_i||). After: h_i = min(relative gamma_i / ||g_i||, 1), and
    gamma_i = beta gamma_i + (1 - beta) ||h_i g_i||.

    Because the average is fed with what was clipped, it can grow by (1 - beta)(relative - 1) = 0.1 % a step at most: a
    tensor whose first gradients are tiny (the A of a LoRA adapter) stays clipped for long. A tensor first seen after
    the warm-up begins with that norm (the paper has no such tensors).

    Parameters
    ----------
    relative, absolute
        lambda_rel and lambda_abs.
    beta
        Of the average, in [0, 1).
    warmup
        Steps in which the global norm rules, >= 0.
    by
        What is clipped as one; published: each tensor.
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
        """State without an average yet (infinite) and without steps."""
        return {"gamma": torch.full_like(like, float("inf")), "steps": like.new_zeros((), dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Factors and the next state, see :class:`ClipRule`."""
        gamma, steps = state["gamma"], state["steps"]
        # Norms of groups make the global norm of the paper's warm-up; no gradient is read again.
        total = torch.where(seen, norms, 0.0).square().sum().sqrt()
        warming = steps < self.warmup
        scales = torch.where(warming, self.absolute / total, self.relative * gamma / norms).clamp(max=1.0)
        # gamma is fed with the clipped norm, as published: that is what bounds its growth to 0.1 % a step.
        clipped = scales * norms
        average = torch.where(gamma.isinf(), clipped, self.beta * gamma + (1 - self.beta) * clipped)
        updated = torch.where(warming, torch.minimum(gamma, clipped), average)
        return scales, {"gamma": torch.where(seen, updated, gamma), "steps": steps + seen.any()}


# AGGC: the norm of all modules of one kind against an interval around its moving average.


@dataclass(frozen=True, slots=True)
class AGGC:
    """Adaptive group-wise gradient clipping (arXiv 2601.11864; settings named after ZhiyuanLi218/AGGC).

    With E_j the moving average of the norms of group j after clipping, a norm above ``high`` E_j is clipped to it; one
    below ``low`` E_j is raised to it, if ``low`` is given. Both multipliers go linearly to their late values, between
    ``switch`` and ``switch + ramp`` of ``total_steps``. Then E_j = beta E_j + (1 - beta) norm after clipping.

    Two things to know. With ``high`` = 1, the default of the released code, the average can only fall; its script for
    verl uses high 0.7, high_late 0.999, low 0.98, beta 0.99, switch 0.6, most_up 1.1, most_down 0.9. And that code
    starts the average at 0, so that the second step is clipped to (1 - beta) of the first; here it starts at the first
    norm.

    Parameters
    ----------
    high, low
        Multipliers of the average; ``low`` None: small norms are left alone.
    high_late, low_late
        Their late values; None: as before.
    total_steps
        Length of training, in steps; needed where there is a late value.
    switch, ramp
        When the multipliers change, as shares of the training.
    most_up, most_down
        Bounds of the factor: the largest, and the smallest (for clipping at most so far); None: none.
    beta
        Of the average, in [0, 1).
    by
        What is clipped as one; published: all modules of one kind.
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
        """State without an average yet (infinite) and without steps."""
        return {"average": torch.full_like(like, float("inf")), "steps": like.new_zeros((), dtype=torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Factors and the next state, see :class:`ClipRule`."""
        average, steps = state["average"], state["steps"]
        # An unknown average is infinite: the first norm of a group becomes it, and is not clipped (the released code
        # begins at 0 and clips the second step to 2 % of the first).
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
        """0 before the switch, 1 after the ramp, 0-d."""
        if self.total_steps is None:
            return torch.zeros_like(steps, dtype=torch.float32)
        return ((steps / self.total_steps - self.switch) / self.ramp).clamp(0.0, 1.0)


def _between(early: float, late: float | None, lateness: Tensor) -> Tensor:
    return early + ((early if late is None else late) - early) * lateness


# ZClip: a norm that is an outlier by its z-score is clipped towards the mean.

EPSILON = 1e-6
"""Added to the standard deviation, as in the released code."""


@dataclass(frozen=True, slots=True)
class ZClip:
    """Clipping by z-score (arXiv 2504.02507; defaults of bluorion-com/ZClip, mode ``zscore``, adaptive scaling).

    z = (n - mu) / (sigma + 1e-6). Where z > ``threshold`` the norm n is clipped to mu + threshold sigma / (z /
    threshold), the further out the closer to the mean. Mean and variance are those of the first ``warmup`` norms, which
    are not clipped; then mu = alpha mu + (1 - alpha) n' and variance = alpha variance + (1 - alpha)(n' - mu)^2 with the
    clipped norm n' and the new mu.

    Mean and variance are no robust statistics: a spike within the warm-up widens what is allowed for about
    1 / (1 - alpha) steps.

    Parameters
    ----------
    threshold
        Of z.
    alpha
        Of the averages, in [0, 1).
    warmup
        Norms of a group before it is clipped, >= 1.
    feed_spikes
        Whether a clipped norm enters the averages (the released code: yes, unless ``skip_update_on_spike``).
    by
        What is clipped as one; published: everything (``By.ALL``).
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
        """State with nothing counted."""
        zeros = torch.zeros_like(like)
        return {"mean": zeros, "variance": zeros.clone(), "count": zeros.to(torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """Factors and the next state, see :class:`ClipRule`."""
        mean, variance, count = state["mean"], state["variance"], state["count"]
        sigma = variance.sqrt()
        z = (norms - mean) / (sigma + EPSILON)
        spiked = (count >= self.warmup) & (z > self.threshold)
        # mu + threshold sigma / (z / threshold): at z = threshold it is the threshold itself, and it falls towards mu
        # with z, so that the worst spike is trusted least. (mu = 1, sigma = 0.1, n = 2: z = 10, limit 1.0625.)
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
        """Plain mean and (population) variance while the warm-up lasts, moving ones after it."""
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
    """Clip each layer's norm to a constant: min(1, c / ||g_l||).

    Parameters
    ----------
    each
        c, the same for all layers.
    total
        Instead of ``each``: c = total / sqrt(L) for the L layers that have a gradient, so that the norm of all is at
        most ``total``. By default 1.
    by
        What is clipped as one.

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
        """Factors and the next state, see :class:`ClipRule`."""
        if self.each is not None:
            return (self.each / norms).clamp(max=1.0), state
        layers = seen.sum().clamp(min=1).to(norms)
        return ((self.total or 1.0) / layers.sqrt() / norms).clamp(max=1.0), state


# The rules that go by a name, and the trial of any rule before it is used.

RULES: Mapping[str, Callable[[], ClipRule]] = {
    "layer-median": LayerMedian,
    "adagc": AdaGC,
    "aggc": AGGC,
    "zclip": ZClip,
    "max-norm": LayerMaxNorm,
}
"""By name, with their default settings."""


def rule_of(rule: str | ClipRule) -> ClipRule:
    """The rule itself, or the one of that name with its default settings. Raises ``ConfigError``."""
    if isinstance(rule, str):
        if rule not in RULES:
            raise ConfigError(f"unknown rule of clipping {rule!r}; known: {', '.join(RULES)}")
        return RULES[rule]()
    if not all(callable(getattr(rule, name, None)) for name in ("start", "scales")):
        raise ConfigError(f"a rule of clipping has the methods start and scales; got {rule!r}")
    return rule


def first_state(rule: ClipRule, groups: int) -> State:
    """The state a rule starts with, after it was tried once: one that cannot work fails here, not in training.

    Raises ``ConfigError`` if it returns something else than factors for ``groups`` groups and a state of one shape.
    """
    like = torch.ones(groups, device="cpu")
    scales, after = rule.scales(like, torch.ones(groups, dtype=torch.bool, device="cpu"), rule.start(like))
    state = rule.start(like)
    if scales.shape != like.shape or {n: x.shape for n, x in after.items()} != {n: x.shape for n, x in state.items()}:
        raise ConfigError(
            f"{type(rule).__name__} must return {groups} factors and a state like the one it started with"
        )
    return state
