"""Which gradients are clipped together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache

from rlwatch.tensors.gradnorm import layer_of, plain_name

_INNER = re.compile(
    r"\.(?:lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|original_module|modules_to_save)(?=\.|$).*$"
)


class By(StrEnum):
    """What is clipped as one."""

    LAYER = "layer"
    """A transformer block; each module outside of the blocks by itself. Adapters go with their layer."""
    TENSOR = "tensor"
    """Every parameter tensor by itself."""
    MODULE = "module"
    """All modules of one kind (``q_proj``, ``down_proj``...), across the layers."""
    ALL = "all"
    """Everything: a global norm."""


@lru_cache(maxsize=8192)
def module_type_of(name: str) -> str:
    """The kind of module a parameter belongs to, adapters with the module they adapt.

    >>> module_type_of("model.layers.3.self_attn.q_proj.lora_A.default.weight")
    'q_proj'
    >>> module_type_of("layers.0.weight")
    'layers'
    """
    bare = plain_name(name)
    inner = _INNER.sub("", bare)
    path = inner if inner != bare else bare.rpartition(".")[0]
    words = [word for word in path.split(".") if word and not word.isdigit()]
    return words[-1] if words else bare


def _everything(name: str) -> str:  # noqa: ARG001  (one group, whatever the name)
    return "all"


GROUP_OF: Mapping[By, Callable[[str], str]] = {
    By.LAYER: layer_of,
    By.TENSOR: plain_name,
    By.MODULE: module_type_of,
    By.ALL: _everything,
}
"""Parameter name -> name of its group."""
