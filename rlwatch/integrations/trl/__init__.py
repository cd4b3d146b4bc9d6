"""Integration with TRL: GRPO, RLOO and, for scalars, every trainer of Hugging Face's ``Trainer`` family.

>>> from rlwatch.integrations.trl import RLWatchCallback, watch

``callbacks=[RLWatchCallback()]`` records the scalars that the trainer logs. ``watch(trainer)`` adds measurements of
every token, gradients per layer, commands and crash reports.
"""

from __future__ import annotations

from rlwatch.errors import MissingExtraError

try:
    import torch as _torch
    import transformers as _transformers
except ImportError as error:
    raise MissingExtraError(error.name or "transformers", "trl", "the TRL integration") from error

from rlwatch.integrations.canaries import Canaries, Canary
from rlwatch.integrations.transformers.attach import RLWatchCallback
from rlwatch.integrations.transformers.layer_clipping import clip_layers
from rlwatch.integrations.trl.attach import watch

__all__ = ["Canaries", "Canary", "RLWatchCallback", "clip_layers", "watch"]
del _torch, _transformers
