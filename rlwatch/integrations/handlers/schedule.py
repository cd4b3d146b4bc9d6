"""Scaling what a learning-rate schedule computes, in the quantities it computes it from.

Schedulers of torch set the rate anew at every step, from the rates they began with (``LambdaLR``), or from the last
rate and a floor (``CosineAnnealingLR``). Each is proportional to those quantities: all scaled by the same factor,
every later rate is scaled by it, the scheduler's own log says so, and so does a checkpoint of its state.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rlwatch.integrations.handlers.unwrapping import inner_scheduler
from rlwatch.seam import Contained

IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
"""Learning rates an optimizer's parameter group may hold."""
IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min", "default_min_lr", "eps")
"""Learning rates a scheduler may hold; ``eps`` is the least change ``ReduceLROnPlateau`` makes."""
KNOWN = ("torch.optim.lr_scheduler", "transformers.optimization")
"""Modules whose schedulers were read."""


def scale_groups(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Scale the rates in an optimizer's parameter groups."""
    for group in groups:
        for name in IN_GROUPS:
            value = group.get(name)
            if isinstance(value, Tensor):  # a captured or compiled step reads this very tensor
                value.mul_(factor)
            elif value is not None:
                group[name] = value * factor


def scale_scheduler(scheduler: Any, factor: float) -> None:
    """Scale the rates in a scheduler and in those it is made of."""
    for part in _parts(scheduler):
        for name in IN_SCHEDULERS:
            if getattr(part, name, None) is not None:
                setattr(part, name, _scaled(getattr(part, name), factor))


def proportional(scheduler: Any) -> bool:
    """Whether the scheduler's rates follow when what they are computed from is scaled.

    Known schedulers do. Others are asked, in a copy, for their rates before and after.
    """
    return all(type(part).__module__ in KNOWN or _follows(part) for part in _parts(scheduler))


def _parts(scheduler: Any) -> Iterator[Any]:
    scheduler = inner_scheduler(scheduler)
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _scaled(value: Any, factor: float) -> Any:
    """A new object: schedulers share theirs with the optimizer and with one another."""
    return [one * factor for one in value] if isinstance(value, list | tuple) else value * factor


def _follows(scheduler: Any) -> bool:
    """Rehearse in a copy that shares nothing with training. A scheduler that raises is not known to follow."""
    with Contained(lambda _error: None):
        before, after = _rates(scheduler, 1.0), _rates(scheduler, 0.5)
        return all(math.isclose(b, 2 * a, rel_tol=1e-6) for b, a in zip(before, after, strict=True))
    return False


def _rates(scheduler: Any, factor: float) -> list[float]:
    trial = copy.copy(scheduler)
    groups = [
        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in scheduler.optimizer.param_groups
    ]
    trial.optimizer = SimpleNamespace(param_groups=groups)
    for name in IN_SCHEDULERS:
        if hasattr(trial, name):
            setattr(trial, name, copy.deepcopy(getattr(trial, name)))
    scale_groups(groups, factor)
    scale_scheduler(trial, factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [float(rate) for rate in trial.get_lr()]
