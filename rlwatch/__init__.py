"""rlwatch: a monitor for reinforcement-learning post-training of language models.

>>> import rlwatch
>>> with rlwatch.init(project="demo", name="doctest", store="memory://") as run:
...     run.log({"entropy": 0.9, "grad_norm": 1.2}, step=1)

Importing this package is quick: what needs numpy or more is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlwatch.version import __version__

if TYPE_CHECKING:
    from rlwatch.analysis.runs import open  # noqa: A004  (rlwatch.open)
    from rlwatch.clipping import LayerClip
    from rlwatch.errors import RLWatchError
    from rlwatch.integrations.tensorboard import tee_tensorboard
    from rlwatch.integrations.torch import Watcher
    from rlwatch.integrations.wandb import tee_wandb
    from rlwatch.run import Run, init
    from rlwatch.scanner import Report, scan
    from rlwatch.store.url import open_store

_HOMES = {
    "LayerClip": "rlwatch.clipping",
    "RLWatchError": "rlwatch.errors",
    "Report": "rlwatch.scanner",
    "Run": "rlwatch.run",
    "Watcher": "rlwatch.integrations.torch",
    "init": "rlwatch.run",
    "open": "rlwatch.analysis.runs",
    "open_store": "rlwatch.store.url",
    "scan": "rlwatch.scanner",
    "tee_tensorboard": "rlwatch.integrations.tensorboard",
    "tee_wandb": "rlwatch.integrations.wandb",
}

__all__ = [
    "LayerClip",
    "RLWatchError",
    "Report",
    "Run",
    "Watcher",
    "__version__",
    "init",
    "open",
    "open_store",
    "scan",
    "tee_tensorboard",
    "tee_wandb",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rlwatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
