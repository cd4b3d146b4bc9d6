"""The loss passes of verl's FSDP engine, kept until its optimizer has stepped so that they can be run again.

The engine's ``forward_step`` computes log-probs (and entropies) of a micro-batch, packed or padded, fused or not, and
hands them to the loss as jagged tensors over whole sequences. It is run again as it is, with a function in the place of
the loss that only takes them; that changes nothing in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rlwatch.gradloc.passes import Outputs, Passes, RandomState
from rlwatch.integrations.verl.microbatch import rewards_of, tokens_of
from rlwatch.integrations.verl.packed import Packed
from rlwatch.seam import Seam

PARTS = {"logp": "log_probs", "entropy": "entropy"}
"""Our name -> verl's, of what its loss takes of the policy."""

Loss = Callable[..., Any]


@dataclass(slots=True)
class Taker:
    """Stands where ``loss`` does: takes the outputs, padded to ``width`` positions, and asks for nothing.

    Top-k distillation calls its loss for the logits too; then it does what it does.
    """

    loss: Loss
    width: int
    outputs: Outputs | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine calls a loss."""
        if "model_output" not in kwargs:
            return self.loss(*args, **kwargs)
        where = Packed.of(kwargs["data"], self.width)
        self.outputs = Outputs(**{name: where.take(part) for name, part in parts_of(kwargs["model_output"]).items()})
        return torch.zeros(()), {}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``forward_step`` that a backward follows."""

    forward_step: Callable[..., Any]
    micro_batch: Any
    loss: Loss
    random: RandomState

    def again(self, width: int, rows: Sequence[int] | None = None) -> Outputs:
        """Run it again with ``width`` positions, of some sequences only where ``rows`` says which."""
        from verl.utils.tensordict_utils import index_select_tensor_dict

        batch = self.micro_batch if rows is None else index_select_tensor_dict(self.micro_batch, list(rows))
        taker = Taker(self.loss, width)
        self.forward_step(batch, loss_function=taker, forward_only=True)
        if taker.outputs is None:
            raise RuntimeError("verl's forward did not call the loss")
        return taker.outputs


class LossPassTap:
    """Watches the forwards of one engine that a backward follows, and keeps them in ``passes``."""

    def __init__(self, engine: Any, seam: Seam, passes: Passes) -> None:
        self._engine = engine
        self._seam = seam
        self._passes = passes
        self._call: Call | None = None

    def attach(self) -> None:
        """Put the wrapper in place."""
        original = self._engine.forward_step

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not kwargs.get("forward_only", True):
                self._call = self._seam.attempt("loss pass", _begun, original, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._call = None

        self._engine.forward_step = tapped

    def keep(self, model_output: Mapping[str, Any], data: Any) -> None:
        """The forward is over, and its loss is called next with these: to be called before it.

        The longest response is asked for, which may wait for the device; verl's loss asks for the same, next.
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
        for name, part in parts.items():
            if part.requires_grad:
                part.register_hook(self._passes.contained(_Reader(one.coefficients, name, where)))  # type: ignore[no-untyped-call]


def parts_of(model_output: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the engine computed, jagged over whole sequences, by our names."""
    return {ours: model_output[theirs] for ours, theirs in PARTS.items() if model_output.get(theirs) is not None}


def _begun(forward_step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    (micro_batch,) = args
    return Call(forward_step, micro_batch, kwargs["loss_function"], RandomState.now())


@dataclass(frozen=True, slots=True)
class _Again:
    call: Call
    width: int

    def __call__(self, rows: Sequence[int] | None = None) -> Outputs:
        return self.call.again(self.width, rows)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a coefficient off the gradient of a jagged output. A second backward through it adds to the first."""

    into: dict[str, Tensor]
    name: str
    where: Packed

    def __call__(self, gradient: Tensor) -> None:
        read, before = self.where.take(gradient.detach()), self.into.get(self.name)
        self.into[self.name] = read if before is None else before + read
