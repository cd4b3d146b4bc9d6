"""Comparison of the rollout engine's weights with the trainer's after each sync of weights.

An event is recorded when the weights begin or cease to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from rlwatch.integrations.weights import flattened, unwrapped
from rlwatch.metrics import WEIGHTS_PREFIX
from rlwatch.records import JSON
from rlwatch.tensors.gradnorm import plain_name
from rlwatch.tensors.mergeable import Stats
from rlwatch.tensors.weight_gap import ADAPTER, DIFFER, trainer_weights, weight_stats

EVENT = "engine_weights"
TAP = "weights of the engine"


class SyncComparison:
    """Comparison of the rollout engine's weights with the trainer's at each sync, which notes when they begin or cease
    to be equal.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._equal: bool | None = None
        self._equal_at: int | None = None

    def compare(self, model: nn.Module, engine: object) -> Stats:
        """Return statistics of the differences between the weights of ``model`` and of ``engine``.

        Call it right after a sync. Empty for a model that FSDP1 flattens, because its weights have no shape of their
        own.

        Raises
        ------
        TypeError
            If ``engine`` holds no tensors by name.
        """
        held = dict(tensors_of(engine))
        if flattened(model):
            return {}
        merged = not any(ADAPTER in f".{name}" for name in held)
        self._turn += 1
        return weight_stats(trainer_weights(unwrapped(model), merged=merged), held, self._turn)

    def changed(self, step: int, metrics: Mapping[str, float]) -> dict[str, JSON] | None:
        """Return the body of an event if the weights compared at ``step`` are equal and were not before, or the
        reverse; else None.

        ``metrics`` are those of the step, with the share of tensors that differ.
        """
        share = metrics.get(DIFFER)
        if share is None:
            return None
        equal, before = share == 0.0, self._equal
        body: dict[str, JSON] | None = None
        if equal is not before and not (equal and before is None):
            layers = [name for name, value in metrics.items() if name.startswith(WEIGHTS_PREFIX) and value > 0]
            body = {"equal": equal, "tensors": share, "equal_at": self._equal_at}
            body["layers"] = [name.removeprefix(WEIGHTS_PREFIX) for name in layers]
        self._equal = equal
        if equal:
            self._equal_at = step
        return body


def tensors_of(engine: Any) -> Iterable[tuple[str, Tensor]]:
    """Yield the weights of a rollout engine as (name, tensor), with names as in the model without wrappers.

    ``engine`` is a module, a mapping from name to tensor, or an iterable of (name, tensor). Raises ``TypeError`` for
    anything else.
    """
    if isinstance(engine, nn.Module):
        pairs: Iterable[Any] = engine.named_parameters()
    elif isinstance(engine, Mapping):
        pairs = engine.items()
    elif isinstance(engine, Iterable) and not isinstance(engine, str | bytes | Tensor):
        pairs = engine
    else:
        raise TypeError(f"an engine's weights are a module, a mapping or pairs of name and tensor, got {type(engine)}")
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"an engine's weights are tensors by name, got {type(name)} and {type(tensor)}")
        yield plain_name(name), tensor
