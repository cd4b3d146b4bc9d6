"""Comparison of the rollout engine's weights with the trainer's after each sync of weights.

An event is recorded when the weights begin or cease to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.weights import flattened, unwrapped
from rlwatch.metrics import WEIGHTS_PREFIX
from rlwatch.records import JSON
from rlwatch.tensors.gradnorm import layer_of, plain_name
from rlwatch.tensors.mergeable import Mean, Stats, merge
from rlwatch.tensors.weight_gap import ADAPTER, BASE, DIFFER, TrainerWeight, trainer_weights, weight_stats

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

    def sent(
        self, model: nn.Module, pairs: Iterable[Any], error_boundary: ErrorBoundary, add: Callable[[Stats], None]
    ) -> Iterator[Any]:
        """Yield ``pairs`` of name and tensor unchanged, while a sync sends them to an engine that cannot be read.

        ``error_boundary`` is the error boundary around the comparison. Each tensor is compared with the weight of
        ``model`` of that name as it passes, and a trained weight that was not sent counts as one that differs. ``add``
        gets the statistics when the last was sent. Whether the engine used what it received is not known here.
        """
        stream: _SentWeights | None = None
        for pair in pairs:
            if stream is None:
                self._turn += 1
                stream = _SentWeights(self._turn)
                error_boundary.attempt(TAP, stream.begin, model)
            error_boundary.attempt(TAP, stream.look, pair)
            yield pair
        if stream is not None:
            error_boundary.attempt(TAP, lambda: add(stream.stats()))

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


MATCHED = 0.5
"""Share of the sent names that must be known; below it the engine names its weights in another way."""


class _SentWeights:
    """Weights of one sync, compared one by one, so that gathered tensors need not be kept."""

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._expected: dict[str, TrainerWeight] = {}
        self._trained: set[str] = set()
        self._sent: set[str] = set()
        self._unknown = 0
        self._stats: Stats = {}

    def begin(self, model: nn.Module) -> None:
        """Read which weights ``model`` has now: adapters may be merged for the time of the sync."""
        if flattened(model):
            return
        plain = unwrapped(model)
        self._expected = {weight.name: weight for weight in trainer_weights(plain)}
        for raw, parameter in plain.named_parameters():
            name = plain_name(raw)
            if parameter.requires_grad or BASE in f".{name}":
                self._trained.add(name.replace(BASE, ".").replace("modules_to_save.default.", ""))

    def look(self, pair: tuple[str, Tensor]) -> None:
        """Compare one tensor that is sent."""
        name, tensor = plain_name(pair[0]), pair[1]
        weight = self._expected.get(name)
        if weight is None:
            self._unknown += 1
            return
        self._sent.add(name)
        self._stats = merge(self._stats, weight_stats([weight], {name: tensor}, self._turn))

    def stats(self) -> Stats:
        """Return what was compared; nothing where the names are mostly others."""
        if len(self._sent) < MATCHED * (len(self._sent) + self._unknown) or not self._stats:
            return {}
        stats = self._stats
        for name in sorted(self._trained & self._expected.keys() - self._sent):
            elements = float(self._expected[name].shape.numel())
            lacks: Stats = {DIFFER: _all_of(1.0), WEIGHTS_PREFIX + layer_of(name): _all_of(elements)}
            stats = merge(stats, lacks)
        return stats


def _all_of(count: float) -> Mean:
    number = torch.tensor(count, device="cpu")
    return Mean(number, number)


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
