"""The rules that go by a name, and the trial of any rule before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlwatch.clipping.adagc import AdaGC
from rlwatch.clipping.aggc import AGGC
from rlwatch.clipping.max_norm import LayerMaxNorm
from rlwatch.clipping.median import LayerMedian
from rlwatch.clipping.rule import ClipRule, State
from rlwatch.clipping.zclip import ZClip
from rlwatch.errors import ConfigError

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
    like = torch.ones(groups)
    scales, after = rule.scales(like, torch.ones(groups, dtype=torch.bool), rule.start(like))
    state = rule.start(like)
    if scales.shape != like.shape or {n: x.shape for n, x in after.items()} != {n: x.shape for n, x in state.items()}:
        raise ConfigError(
            f"{type(rule).__name__} must return {groups} factors and a state like the one it started with"
        )
    return state
