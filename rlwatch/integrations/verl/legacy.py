"""The trainer of ``trainer.use_v1=false`` and of verl before 0.9: scalars, and the cause of its end."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from rlwatch.integrations.verl.endings import fitting
from rlwatch.integrations.verl.heartbeat import IN_PLACE
from rlwatch.integrations.verl.tracking import Session


def install(module: ModuleType) -> str:
    """Let every ``module.RayPPOTrainer`` record what ends its ``fit``; its ``Tracking`` opens the run, if it is to.

    The instance is changed: subclasses (recipes) have a ``fit`` of their own, and call no other.
    """
    original = module.RayPPOTrainer.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        fit = getattr(self, "fit", None)
        if callable(fit):
            self.fit = _reporting(self, fit)

    module.RayPPOTrainer.__init__ = __init__
    return IN_PLACE


def _reporting(trainer: Any, original: Any) -> Any:
    @wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        current = Session()
        with fitting(current, trainer):
            result = original(*args, **kwargs)
        current.finish()  # its Tracking would, whenever and in whatever thread it is collected
        return result

    return fit
