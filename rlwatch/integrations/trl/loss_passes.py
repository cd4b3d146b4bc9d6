"""The loss passes of a GRPO or RLOO trainer, kept until the optimizer has stepped so that they can be run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from rlwatch.gradloc.passes import Outputs, Passes, RandomState
from rlwatch.integrations.trl.pure_head import pure_head
from rlwatch.seam import Seam
from rlwatch.tensors.tokens import TokenBatch

METHOD = "_get_per_token_logps_and_entropies"
BY_SEQUENCE = ("input_ids", "attention_mask")
"""Arguments with one row for each sequence."""
POSITIONAL = (*BY_SEQUENCE, "logits_to_keep", "batch_size")
"""Arguments after the policy, in order."""
PLAIN = (*POSITIONAL, "compute_entropy", "compute_aux_loss")
"""Arguments with which single sequences can be run; images are cut to pieces in other ways."""


@dataclass(slots=True)
class Call:
    """One call of the trainer's forward with the policy, as it was made."""

    method: Callable[..., Any]
    policy: Any
    arguments: Mapping[str, Any]
    random: RandomState
    drew: bool

    @property
    def splits(self) -> bool:
        """Whether single sequences of it can be run."""
        return all(value is None or name in PLAIN for name, value in self.arguments.items())

    def again(self, rows: Sequence[int] | None = None) -> Outputs:
        """Run it again, without what wraps the policy for several ranks (which must not notice)."""
        given = dict(self.arguments)
        if rows is not None:
            given |= {name: given[name][list(rows)] for name in BY_SEQUENCE}
        return Outputs(*self.method(self.policy, **given)[:3])

    def differentiable(self, rows: Sequence[int] | None = None) -> Outputs:
        """The same through a head that has a forward derivative."""
        with pure_head():
            return self.again(rows)


class LossPassTap:
    """Watches the forward of the loss on one trainer and keeps it in ``passes``."""

    def __init__(self, trainer: Any, seam: Seam, passes: Passes) -> None:
        self._trainer = trainer
        self._seam = seam
        self._passes = passes
        self._latest: tuple[Call, Outputs] | None = None

    def attach(self, live: Callable[[], bool]) -> None:
        """Put the closure in place; it looks while ``live``."""
        original = getattr(self._trainer, METHOD)

        @wraps(original)
        def tapped(model: Any, *args: Any, **kwargs: Any) -> Any:
            looks = bool(kwargs.get("compute_entropy")) and live()
            before = self._seam.attempt("loss pass", RandomState.now) if looks else None
            result = original(model, *args, **kwargs)
            if before is not None:
                given = dict(zip(POSITIONAL, args, strict=False)) | kwargs
                self._seam.attempt("loss pass", self._note, result, before, original, model, given)
            return result

        setattr(self._trainer, METHOD, tapped)

    def keep(self, tokens: TokenBatch) -> None:
        """The loss that just ran saw ``tokens``; its forward was the last one seen."""
        latest, self._latest = self._latest, None
        if latest is not None:
            call, outputs = latest  # the outputs carry the graph: nobody may hold them any longer than this
            drew, other = call.drew or not call.splits, call.differentiable
            self._passes.add(call.again, outputs, tokens, random=call.random, drew=drew, differentiable=other)

    def forget(self) -> None:
        """The step is over."""
        self._latest = None
        self._passes.clear()

    def _note(self, result: Any, before: RandomState, method: Any, model: Any, given: Mapping[str, Any]) -> None:
        outputs = Outputs(*result[:3])
        if outputs.logp.requires_grad:
            drew = not before.same(RandomState.now())
            policy = self._trainer.accelerator.unwrap_model(model)
            self._latest = Call(_unprofiled(method), policy, given, before, drew), outputs


def _unprofiled(method: Any) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """The bare method: TRL's decorator sends every call's time to the tracker."""
    inner = getattr(getattr(method, "__func__", None), "__wrapped__", None)
    return method if inner is None else inner.__get__(method.__self__)  # type: ignore[no-any-return]
