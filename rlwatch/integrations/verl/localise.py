"""Localisation of gradient spikes in one worker of verl. The worker has no run; the driver collects the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor

from rlwatch.error_boundary import ErrorBoundary, Reported
from rlwatch.errors import RLWatchError
from rlwatch.gradloc.distributed import World
from rlwatch.gradloc.locate import Located
from rlwatch.gradloc.passes import Outputs, RandomState, RecordedPasses
from rlwatch.gradloc.rows import event_body
from rlwatch.integrations.compat import lacking
from rlwatch.integrations.localising import (
    Localise,
    Localiser,
    LocatedStep,
    Spike,
    batches_of,
    encoded_batches,
    scale_of,
    world_of,
)
from rlwatch.integrations.step_tally import Decode
from rlwatch.integrations.verl.batch import Packed, identity_of, rewards_of, tokens_of
from rlwatch.integrations.verl.compat import PASSES, STEPS
from rlwatch.integrations.verl.settings import hindrance
from rlwatch.integrations.weights import flattened, gradients_of
from rlwatch.metrics import LAYER_PREFIX
from rlwatch.tensors.gradnorm import GradNorms, layer_of


class RankLocalising:
    """Localisation of gradient spikes on one rank: it keeps the forward passes of the loss in each optimizer step, and
    examines the gradient before use.

    ``engine`` is verl's engine of the actor, ``error_boundary`` the error boundary, ``world`` the ranks that localise
    together. ``decode`` converts token ids to text; None: no text is kept.
    """

    def __init__(
        self, engine: Any, error_boundary: ErrorBoundary, settings: Localise, world: World, decode: Decode | None = None
    ) -> None:
        self.localiser = Localiser(error_boundary, settings, decode=decode, world=world)
        self.localiser.expects = True
        self._tap = EngineLossPassTap(engine, error_boundary, self.localiser.passes)
        self._engine = engine
        self._settings = settings
        self._decode = decode
        self._world: World | None = world
        self._rank = world.rank
        self._step = 1
        self._localised: list[Located] = []

    @classmethod
    def of(cls, worker: Any, error_boundary: ErrorBoundary, settings: Localise, *, text: bool = False) -> Self:
        """Create the localisation for the actor of verl's ``worker``.

        ``error_boundary`` is the error boundary. With ``text``, the text of the reported tokens is kept. A collective:
        every rank calls it. Raises ``RLWatchError`` with the reason if it is not possible.
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
        return cls(engine, error_boundary, settings, world, getattr(tokenizer, "decode", None))

    def attach(self) -> None:
        """Wrap the engine's forward step, so that the forward passes of the loss are kept."""
        self._tap.attach()

    def keep(self, model_output: Any, data: Any) -> None:
        """Keep ``model_output``, the outputs of a forward pass, before the loss is computed from them; ``data`` is the
        micro-batch.
        """
        if self._world is not None:
            self._tap.keep(model_output, data)

    def check(self, norms: GradNorms | None) -> None:
        """Examine the complete gradient before it is clipped or unscaled.

        ``norms`` is this rank's part, if it was read. Waits for the device, as the engine does next to see if the norm
        is finite. If it fails on one of several ranks, all ranks stop localising.
        """
        try:
            with Reported(lambda _: self.leave()):
                if self._world is not None:
                    self._check(norms, self._world)
        finally:
            self.localiser.passes.clear()

    def leave(self) -> None:
        """Stop localising on this rank, and so on all ranks."""
        if self._world is not None and self._world.size > 1:
            self._world = None
            self.localiser.leave()

    def take(self, step: int) -> Mapping[str, Any]:
        """Return what was localised since the last call, as that of ``step``, and the number of spikes refused so far.

        ``localised`` has an entry for each optimizer step: its ``batches`` as bytes, and on rank 0 the ``event``.
        ``localisations_refused`` counts spikes that the time budget did not allow.
        """
        localised, self._localised, self._step = self._localised, [], step + 1
        self.localiser.passes.clear()
        return {
            "localised": [self._packed(step, located) for located in localised],
            "localisations_refused": self.localiser.refused,
        }

    def _packed(self, step: int, located: Located) -> Mapping[str, Any]:
        what = LocatedStep(step, located, self._settings, self._decode)
        event = {"event": event_body(located.report)} if self._rank == 0 else {}
        return {"batches": encoded_batches(batches_of(what, self._rank)), **event}

    def _check(self, norms: GradNorms | None, world: World) -> None:
        squares, scale = self._squares(norms, world)
        left = 1.0 if scale is None else scale
        norm = math.sqrt(sum(squares.values())) / left
        located = self.localiser.check(Spike(self._engine.module, self._step, norm, scale, left))
        if located is not None:
            self._localised.append(located)
        self.localiser.delivered({LAYER_PREFIX + layer: square**0.5 for layer, square in squares.items()})

    def _squares(self, norms: GradNorms | None, world: World) -> tuple[dict[str, float], float | None]:
        """Return the squared norm of each layer over all ranks, and the loss scale, with one wait. A collective."""
        model = self._engine.module
        norms = norms or gradients_of(model, self._rank)
        layers = dict.fromkeys(layer_of(name) for name, p in model.named_parameters() if p.grad is not None)
        squares_here = (
            torch.zeros(len(layers)) if norms is None else norms.squares
        )  # None: others hold the same gradients
        here, scale = arrived(squares_here.double(), _loss_scale(self._engine))
        return dict(zip(layers, world.sum(here).tolist(), strict=True)), scale


def arrived(values: torch.Tensor, scale: torch.Tensor | float | None) -> tuple[torch.Tensor, float | None]:
    """Return ``values`` on the CPU and ``scale`` as a number, with one wait for the device instead of two."""
    if not isinstance(scale, torch.Tensor):
        return values.cpu(), scale
    both = torch.cat([values, scale.to(values.device, values.dtype).reshape(1)]).cpu()
    return both[:-1], both[-1:].tolist()[0]


def _loss_scale(engine: Any) -> torch.Tensor | float | None:
    """Return float16's loss scale on its device, which all gradients carry when the engine's step begins; else None."""
    scaler = getattr(engine, "scaler", None)
    return scale_of(scaler) if scaler is not None and scaler.is_enabled() else None


# The loss passes of verl's FSDP engine, kept until its optimizer has stepped so that they can be run again.
#
# The engine's ``forward_step`` computes log-probs (and entropies) of a micro-batch, packed or padded, fused or not,
# and passes them to the loss as jagged tensors over whole sequences. To repeat a pass, ``forward_step`` is called again
# with a function in place of the loss that only keeps the outputs; that changes nothing in the engine.

PARTS = {"logp": "log_probs", "entropy": "entropy"}
"""rlwatch's name -> verl's name of an output of the policy that the loss uses."""

Loss = Callable[..., Any]


@dataclass(slots=True)
class Taker:
    """Replacement of ``loss`` that keeps the outputs, padded to ``width`` positions, without computing a loss.

    Top-k distillation also calls its loss for the logits; that call is passed on.
    """

    loss: Loss
    width: int
    outputs: Outputs | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the outputs in ``outputs`` and return a loss of 0, called as the engine calls a loss."""
        if "model_output" not in kwargs:
            return self.loss(*args, **kwargs)
        where = Packed.of(kwargs["data"], self.width)
        self.outputs = Outputs(**{name: where.take(part) for name, part in parts_of(kwargs["model_output"]).items()})
        return torch.zeros(()), {}


@dataclass(frozen=True, slots=True)
class ForwardStepCall:
    """One call of the engine's ``forward_step`` that a backward pass follows, with what is needed to repeat it."""

    forward_step: Callable[..., Any]
    micro_batch: Any
    loss: Loss
    random: RandomState

    def again(self, width: int, rows: Sequence[int] | None = None) -> Outputs:
        """Repeat the forward pass for the sequences ``rows`` (None: all), and return its outputs, padded to ``width``
        positions.

        Raises ``RuntimeError`` if verl's forward pass does not call the loss.
        """
        from verl.utils.tensordict_utils import index_select_tensor_dict

        batch = self.micro_batch if rows is None else index_select_tensor_dict(self.micro_batch, list(rows))
        taker = Taker(self.loss, width)
        self.forward_step(batch, loss_function=taker, forward_only=True)
        if taker.outputs is None:
            raise RuntimeError("verl's forward did not call the loss")
        return taker.outputs


class EngineLossPassTap:
    """Hook on the forward passes of one engine that a backward pass follows; it keeps them in ``passes``."""

    def __init__(self, engine: Any, error_boundary: ErrorBoundary, passes: RecordedPasses) -> None:
        self._engine = engine
        self._error_boundary = error_boundary
        self._passes = passes
        self._call: ForwardStepCall | None = None

    def attach(self) -> None:
        """Wrap the engine's ``forward_step``."""
        original = self._engine.forward_step

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not kwargs.get("forward_only", True):
                self._call = self._error_boundary.attempt("loss pass", _begun, original, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._call = None

        self._engine.forward_step = tapped

    def keep(self, model_output: Mapping[str, Any], data: Any) -> None:
        """Keep the forward pass that has ended; call it before the loss is computed from ``model_output`` and ``data``.

        The length of the longest response is read, which may wait for the device. verl's loss reads the same next.
        """
        call, self._call = self._call, None
        if call is None:
            return
        where, parts = Packed.of(data), parts_of(model_output)
        drew = not call.random.same(RandomState.now())
        with torch.no_grad():
            detached = Outputs(**{name: where.take(part.detach()) for name, part in parts.items()})
            tokens, rewards = tokens_of(data, detached, where), rewards_of(data, where)
        again = _Again(call, where.width)
        one = self._passes.add(again, detached, tokens, random=call.random, drew=drew, rewards=rewards)
        self._error_boundary.attempt("whose responses", lambda: one.identify(identity_of(data, one.shape[0])))
        for name, part in parts.items():
            if part.requires_grad:
                part.register_hook(self._passes.contained(_Reader(one.coefficients, name, where)))  # type: ignore[no-untyped-call]


def parts_of(model_output: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the engine's outputs ``model_output`` under rlwatch's names, jagged over whole sequences."""
    return {
        name: model_output[verl_name] for name, verl_name in PARTS.items() if model_output.get(verl_name) is not None
    }


def _begun(forward_step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardStepCall:
    (micro_batch,) = args
    return ForwardStepCall(forward_step, micro_batch, kwargs["loss_function"], RandomState.now())


@dataclass(frozen=True, slots=True)
class _Again:
    call: ForwardStepCall
    width: int

    def __call__(self, rows: Sequence[int] | None = None) -> Outputs:
        return self.call.again(self.width, rows)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Hook that reads a loss coefficient from the gradient of a jagged output.

    A second backward pass adds to the first.
    """

    into: dict[str, Tensor]
    name: str
    where: Packed

    def __call__(self, gradient: Tensor) -> None:
        read, before = self.where.take(gradient.detach()), self.into.get(self.name)
        self.into[self.name] = read if before is None else before + read
