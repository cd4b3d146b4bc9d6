"""How many tokens a model chooses from."""

from __future__ import annotations

from typing import Any


def vocab_size_of(model: Any) -> int | None:
    """Entries of the softmax: entropy cannot exceed its logarithm. None if the model does not say."""
    described = getattr(model, "config", None)
    if described is None:
        return None
    text = described.get_text_config() if hasattr(described, "get_text_config") else described
    size = getattr(text, "vocab_size", None)
    return int(size) if size else None
