"""Integration with a custom training loop in plain PyTorch.

>>> from rlwatch.integrations.torch import Watcher  # or rlwatch.Watcher
"""

from __future__ import annotations

from rlwatch.errors import MissingExtraError

try:
    import torch as _torch
except ImportError as error:
    raise MissingExtraError("torch", "torch", "rlwatch.Watcher") from error

from rlwatch.integrations.torch.attach import Watcher

__all__ = ["Watcher"]
del _torch
