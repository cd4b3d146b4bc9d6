"""Integration with Hugging Face's ``Trainer``, whose parts every trainer built on it shares.

>>> from rlwatch.integrations.transformers import RLWatchCallback, watch

``callbacks=[RLWatchCallback()]`` records the scalars that the trainer logs. ``watch(trainer)`` adds the raw loss,
gradients per layer, commands and crash reports. Once this module is imported, ``report_to="rlwatch"`` in the training
arguments means that callback, as ``report_to="wandb"`` means wandb's.
"""

from __future__ import annotations

from rlwatch.errors import MissingExtraError

try:
    import torch as _torch
    import transformers as _transformers
except ImportError as error:
    raise MissingExtraError(error.name or "transformers", "transformers", "the transformers integration") from error

from rlwatch.integrations.transformers.attach import RLWatchCallback, watch
from rlwatch.integrations.transformers.compat import offer
from rlwatch.integrations.transformers.layer_clipping import clip_layers

__all__ = ["RLWatchCallback", "clip_layers", "watch"]
offer(RLWatchCallback)
del _torch, _transformers, offer
