"""The forward passes of a loop of one's own, kept so that a spike of the gradient can be localised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlwatch.gradloc.passes import Outputs, Passes, RandomState
from rlwatch.tensors.tokens import TokenBatch

STRANGE = "it is not what forward() returned, so its gradient cannot be localised"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the loop's own function; ``logp`` and ``entropy`` say which of its results they are."""

    compute: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    logp: int | None = None
    entropy: int | None = None

    def again(self, rows: Sequence[int] | None = None) -> Outputs:  # noqa: ARG002  (a loop's function runs whole)
        """Run it again."""
        results = parts_of(self.compute(*self.args, **self.kwargs))
        return Outputs(results[self.logp or 0], None if self.entropy is None else results[self.entropy])


@dataclass(slots=True)
class Ran:
    """The forward that ran last: its results (with the graph: not for long), and the generators as it found them."""

    call: Call
    results: Sequence[Any]
    random: RandomState


@dataclass(slots=True)
class LossPasses:
    """Ties what ``forward`` returned to what ``observe`` is given."""

    passes: Passes
    _ran: Ran | None = field(default=None, init=False)

    def ran(self, call: Call, result: Any, before: RandomState) -> None:
        """A forward ran."""
        self._ran = Ran(call, parts_of(result), before)

    def observed(self, inputs: Mapping[str, Any], tokens: TokenBatch) -> dict[str, str]:
        """Tie the forward to its log-probs, before their backward. Returns what is wrong with them, if anything."""
        ran, self._ran = self._ran, None
        logp, entropy = inputs.get("logp"), inputs.get("entropy")
        if ran is None or not isinstance(logp, Tensor) or not logp.requires_grad:
            return {}
        at = _index(logp, ran.results)
        if at is None or logp.shape != tokens.logp.shape:
            return {"logp": STRANGE}
        call = Call(ran.call.compute, ran.call.args, ran.call.kwargs, at, _index(entropy, ran.results))
        outputs = Outputs(logp, entropy if call.entropy is not None else None)
        self.passes.add(call.again, outputs, tokens, random=ran.random, drew=True)
        return {}

    def forget(self) -> None:
        """The step is over."""
        self._ran = None
        self.passes.clear()


def parts_of(result: Any) -> Sequence[Any]:
    """Results of a function, one by one."""
    return result if isinstance(result, tuple | list) else (result,)


def _index(wanted: Any, results: Sequence[Any]) -> int | None:
    """Index of the result that is ``wanted`` itself."""
    if not isinstance(wanted, Tensor):
        return None
    return next((i for i, result in enumerate(results) if result is wanted), None)
