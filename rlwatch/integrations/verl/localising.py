"""Localising gradient spikes in one worker of verl. It has no run: what is found waits until the driver asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch

from rlwatch.errors import RLWatchError
from rlwatch.gradloc.distributed import World
from rlwatch.gradloc.locate import Located
from rlwatch.gradloc.rows import event_body
from rlwatch.integrations.compat import lacking
from rlwatch.integrations.localising import Localise, Localiser
from rlwatch.integrations.localising.localiser import Spike
from rlwatch.integrations.localising.ranks import world_of
from rlwatch.integrations.localising.recording import Recorded, batches_of, encoded
from rlwatch.integrations.spike_rows import Decode
from rlwatch.integrations.verl.compat import PASSES, STEPS
from rlwatch.integrations.verl.flat import flattened
from rlwatch.integrations.verl.gradients import gradients_of
from rlwatch.integrations.verl.loss_passes import LossPassTap
from rlwatch.integrations.verl.settings import hindrance
from rlwatch.metrics import LAYER_PREFIX
from rlwatch.seam import Seam
from rlwatch.tensors.gradnorm import GradNorms, layer_of


class Localising:
    """One rank's end: keeps the loss passes of each optimizer step, and looks at its gradient before it is used."""

    def __init__(self, engine: Any, seam: Seam, settings: Localise, world: World, decode: Decode | None = None) -> None:
        self.localiser = Localiser(seam, settings, decode=decode, world=world)
        self._tap = LossPassTap(engine, seam, self.localiser.passes)
        self._engine = engine
        self._settings = settings
        self._decode = decode
        self._world: World | None = world
        self._rank = world.rank
        self._step = 1
        self._found: list[Located] = []

    @classmethod
    def of(cls, worker: Any, seam: Seam, settings: Localise, *, text: bool = False) -> Self:
        """For the actor of verl's ``worker``; with ``text``, the text of culprits is kept.

        A collective: every rank calls it. Raises ``RLWatchError`` saying why it cannot be done.
        """
        engine = worker.actor.engine
        reason = hindrance("fsdp" if flattened(engine.module) else str(worker.config.actor.strategy))
        if reason is None and getattr(engine, "ulysses_sequence_parallel_size", 1) > 1:
            reason = "sequence parallelism cuts the sequences in parts, which lie on several ranks"
        if reason is None:
            reason = lacking(engine, {**STEPS, **PASSES})
        world = world_of(reason is None, otherwise=reason or "another rank cannot, or has not come")
        if reason is not None:
            raise RLWatchError(reason)
        tokenizer = getattr(engine.model_config, "tokenizer", None) if text else None
        return cls(engine, seam, settings, world, getattr(tokenizer, "decode", None))

    def attach(self) -> None:
        """Watch the forwards of the engine."""
        self._tap.attach()

    def keep(self, model_output: Any, data: Any) -> None:
        """The loss of the forward that is over is called next, with these."""
        if self._world is not None:
            self._tap.keep(model_output, data)

    def check(self, norms: GradNorms | None) -> None:
        """The gradient is complete, and neither clipped nor unscaled; ``norms`` are this rank's part if it was read.

        Waits for the device, as the engine does next to see whether the norm is finite. Once it fails on one of several
        ranks, they all leave it.
        """
        try:
            if self._world is not None:
                self._check(norms, self._world)
        except BaseException:
            self.leave()
            raise
        finally:
            self.localiser.passes.clear()

    def leave(self) -> None:
        """Do without this rank, and so without the others."""
        if self._world is not None and self._world.size > 1:
            self._world = None
            self.localiser.leave()

    def take(self, step: int) -> Mapping[str, Any]:
        """For the driver: what was ``localised`` since the last call, as that of ``step``, and what was refused so far.

        Of each optimizer step the ``batches``, as bytes, and on rank 0 the ``event``.
        """
        found, self._found, self._step = self._found, [], step + 1
        self.localiser.passes.clear()
        return {
            "localised": [self._packed(step, located) for located in found],
            "localisations_refused": self.localiser.refused,
        }

    def _packed(self, step: int, located: Located) -> Mapping[str, Any]:
        what = Recorded(step, located, self._settings, self._decode)
        event = {"event": event_body(located.report)} if self._rank == 0 else {}
        return {"batches": encoded(batches_of(what, self._rank)), **event}

    def _check(self, norms: GradNorms | None, world: World) -> None:
        squares = self._squares(norms, world)
        scale = _loss_scale(self._engine)
        left = 1.0 if scale is None else scale
        norm = math.sqrt(sum(squares.values())) / left
        located = self.localiser.check(Spike(self._engine.module, self._step, norm, scale, left))
        if located is not None:
            self._found.append(located)
        self.localiser.delivered({LAYER_PREFIX + layer: square**0.5 for layer, square in squares.items()})

    def _squares(self, norms: GradNorms | None, world: World) -> dict[str, float]:
        """Of each layer, over all ranks. A collective."""
        model = self._engine.module
        norms = norms or gradients_of(model, self._rank)
        layers = dict.fromkeys(layer_of(name) for name, p in model.named_parameters() if p.grad is not None)
        ours = torch.zeros(len(layers)) if norms is None else norms.squares  # None: others hold the same gradients
        return dict(zip(layers, world.sum(ours.double().cpu()).tolist(), strict=True))


def _loss_scale(engine: Any) -> float | None:
    """That of float16, which coefficients and gradients both carry when the engine's step begins."""
    scaler = getattr(engine, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
