"""Hugging Face's ``Trainer``, and what every trainer built on it shares."""

from __future__ import annotations

from rlwatch.errors import MissingExtraError

try:
    import torch as _torch
    import transformers as _transformers
except ImportError as error:
    raise MissingExtraError(error.name or "transformers", "transformers", "the transformers integration") from error

del _torch, _transformers
