"""LoRA in verl: the reference is the base model, reached by disabling the adapter.

After a reset the reference is the adapter as it was then. It is kept apart, not added to the model: another adapter
would change the model's state, and its checkpoints would not load into a fresh process. Where verl disables the
adapter, the kept weights take its place for that forward pass, and the trained ones come back, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.shards import local
from rlwatch.integrations.handlers.unwrapping import plain_name, resharded, unwrapped
from rlwatch.integrations.verl.flat import flat_resharded, flattened

HELD = "rlwatch_frozen_adapter"


class FrozenAdapter:
    """The reference of a LoRA policy: ``kept`` are this rank's shards of the adapter, by name; empty before a reset."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.kept: dict[str, Tensor] = {}

    @classmethod
    def of(cls, engine: Any) -> FrozenAdapter:
        """The one of verl's ``engine``."""
        held = getattr(engine, HELD, None)
        if held is None:
            held = cls(engine)
            setattr(engine, HELD, held)
        return held

    def trained(self) -> dict[str, Tensor]:
        """All that is trained, by name: the shards of this rank, whose memory they share."""
        model = unwrapped(self._engine.module)
        model = flat_resharded(model) if flattened(model) else resharded(model)
        return {plain_name(name): local(p) for name, p in model.named_parameters() if p.requires_grad}

    def check(self) -> None:
        """Raise ``RLWatchError`` if there is no adapter, or it is not finite."""
        trained = self.trained()
        if not trained:
            raise RLWatchError("the policy has no trained adapter")
        for name, tensor in trained.items():
            if not bool(tensor.isfinite().all()):
                raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")

    def freeze(self) -> None:
        """The adapter as it is now becomes the reference."""
        self.hold({name: tensor.detach().clone() for name, tensor in self.trained().items()})

    def hold(self, weights: dict[str, Tensor]) -> None:
        """``weights`` become the reference."""
        self.kept = weights
        self._engine.disable_adapter = self.in_place

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts the model computes what the reference would."""
        trained = self.trained()
        live = {name: tensor.detach().clone() for name, tensor in trained.items()}
        try:
            _write(trained, self.kept)
            yield
        finally:
            _write(self.trained(), live)


def _write(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.detach().copy_(source[name])
