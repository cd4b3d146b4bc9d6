"""The trainer of ``trainer.use_v1=false`` and of verl 0.5 to 0.8: scalars, and the cause of its end."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from rlwatch.integrations.verl.endings import fitting
from rlwatch.integrations.verl.heartbeat import IN_PLACE
from rlwatch.integrations.verl.tracking import Session


def install(module: ModuleType) -> str:
    """Make ``module.RayPPOTrainer.fit`` record what ends it; its ``Tracking`` opens the run, if it is to."""
    original = module.RayPPOTrainer.fit

    @wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        with fitting(Session(), self):
            return original(self, *args, **kwargs)

    module.RayPPOTrainer.fit = fit
    return IN_PLACE
