"""Search for the first non-finite tensor of a step whose gradient norm is NaN or infinite.

Such a gradient has no direction to attribute, and ``.grad`` alone does not help: one bad token breaks nearly all of it.
So quantities are examined in the order in which they were computed: parameters, inputs of the loss, log-probs,
coefficients. If all of these are finite, the outputs of modules (one forward pass) and their gradients (one more
forward pass, and a backward pass) follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.gradloc.broken import (
    Broken,
    StepFacts,
    broken_activation,
    broken_log_probs,
    broken_output_gradient,
    broken_sum,
    first_index,
)
from rlwatch.gradloc.distributed import Alone, World, gather_plain
from rlwatch.gradloc.passes import LossPass, RecordedPasses, beside_training
from rlwatch.gradloc.report import MOST_TOKENS, Cost, NonfiniteTrace, Origin, TensorKind, TokenAt
from rlwatch.tensors.gradnorm import layer_of

Find = Callable[[nn.Module, LossPass], Broken | None]


def trace(model: nn.Module, passes: RecordedPasses, *, world: World | None = None) -> NonfiniteTrace:
    """Return the first non-finite tensor of this rank's part of the step, and its origin.

    Call it after the backward pass, with the gradients in place. A collective if ``world`` has more than one rank: each
    rank examines its own micro-batches, and all stop when one has found something. Parameters, ``.grad``, random
    numbers, buffers and hooks are unchanged afterwards.
    """
    began = time.perf_counter()
    ranks = Alone() if world is None else world
    facts = StepFacts.of(model, passes)
    verdict = StepVerdict(passes, facts, ranks.rank)
    first, cost = verdict.standing(model), Cost()
    known = _any(first is not None, passes, ranks)
    if not known and _any(_to_explain(facts), passes, ranks):
        first, cost = _run_again(model, verdict, ranks)
        known = _any(first is not None, passes, ranks)
    if not known:
        first = verdict.of_padding() or verdict.of_gradient()
        known = _any(first is not None, passes, ranks)
    cost = replace(cost, seconds=time.perf_counter() - began)
    named = first or nothing(elsewhere=known)
    return replace(named, broken=facts.counts(), chain=facts.chain(), id0_frac=facts.id0_frac, cost=cost)


def _to_explain(facts: StepFacts) -> bool:
    """Return True if gradients or log-probs are not finite and no known quantity explains it."""
    return bool(facts.gradients or "logp" in facts.inside)


def _run_again(model: nn.Module, verdict: StepVerdict, world: World) -> tuple[NonfiniteTrace | None, Cost]:
    """Run the step again by micro-batch: first all forward passes, then forward and backward."""
    passes = verdict.passes
    activation, forwards = _first_of(broken_activation, model, passes, world)
    broken_here = "logp" in verdict.facts.inside
    if _any(activation is not None or broken_here, passes, world):
        if activation:
            return verdict.of_forward(*activation), Cost(forwards)
        again, more = _first_of(broken_log_probs, model, passes, world)
        recurs = _any(again is not None or activation is not None, passes, world)
        cost = Cost(forwards + more)
        if not recurs:
            return (verdict.not_recurred("logp") if broken_here else None), cost
        return (verdict.of_forward() if broken_here and again is not None else None), cost
    gradient, more = _first_of(broken_output_gradient, model, passes, world)
    cost = Cost(forwards + more, more)
    if _any(gradient is not None, passes, world):
        return (verdict.of_output_gradient(*gradient) if gradient else None), cost
    with beside_training(model):
        summed = broken_sum(model, passes)
    cost = Cost(cost.forwards + len(passes.all), cost.backwards + len(passes.all))
    padding = verdict.of_padding()
    if _any(summed is not None or padding is not None, passes, world):
        return padding or (verdict.of_gradient() if summed is not None else None), cost
    return verdict.not_recurred("gradients"), cost


def _first_of(
    find: Find, model: nn.Module, passes: RecordedPasses, world: World
) -> tuple[tuple[int, Broken] | None, int]:
    """Return the result of ``find`` in the first micro-batch where any rank has one, and the number of those tried."""
    most = int(world.max(_number(len(passes.all), passes)))
    for k in range(most):
        with beside_training(model):
            broken = find(model, passes.all[k]) if k < len(passes.all) else None
        if _any(broken is not None, passes, world):
            return (None if broken is None else (k, broken)), k + 1
    return None, most


def _any(holds: bool, passes: RecordedPasses, world: World) -> bool:
    return bool(world.max(_number(holds, passes)).item()) if world.size > 1 else holds


def _number(value: float, passes: RecordedPasses) -> Tensor:
    """Return a tensor on the device of the step, where collectives run."""
    device = passes.all[0].tokens.logp.device if passes.all else None
    return torch.tensor(float(value), device=device)


# Deduction of what was non-finite first, in words.

COEFFICIENTS = ("coefficient", "entropy coefficient", "aux coefficient")


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Deduction of the quantity of a step that was the first not to be finite.

    Each method returns a trace, which names that quantity and its origin, or None if the method found none. ``facts``
    lists the non-finite quantities.
    """

    passes: RecordedPasses
    facts: StepFacts
    rank: int

    def standing(self, model: nn.Module) -> NonfiniteTrace | None:
        """Return the trace of the first non-finite quantity, as far as it is known without repeating a pass."""
        if self.facts.parameters:
            return self._of_parameter(model)
        if self.facts.buffers:
            worst = self.facts.buffers[0]
            return _of_tensor(TensorKind.BUFFER, worst, Origin.WEIGHTS, f"the buffer {worst.name} holds NaN")
        if not any(name in self.facts.inside for name in COEFFICIENTS):
            return None
        return self._of_input() or self._of_coefficient()

    def of_forward(self, k: int = 0, broken: Broken | None = None) -> NonfiniteTrace:
        """Return the trace of a forward pass in which log-probs of finite weights ceased to be finite.

        ``k`` is the micro-batch. ``broken`` is the first non-finite output of a module in it; None if there is none,
        and then the trace names the log-probs.
        """
        if broken is None:
            k, worst = self.facts.inside["logp"][0]
            why = "weights and the outputs of all modules are finite, the head or what follows it overflowed"
            return self._of_tokens(
                TensorKind.LOGP, worst, (k, self.facts.flags(self.passes, k, "logp")), Origin.FORWARD, why
            )
        return self._of_module(
            TensorKind.ACTIVATION,
            Origin.FORWARD,
            (k, broken),
            "from finite weights, the output of",
            "is the first not finite",
        )

    def of_output_gradient(self, k: int, broken: Broken) -> NonfiniteTrace:
        """Return the trace of the first non-finite gradient in the backward pass, if the forward pass is finite.

        ``k`` is the micro-batch, ``broken`` the gradient of a module's output.
        """
        return self._of_module(
            TensorKind.OUTPUT_GRADIENT,
            Origin.BACKWARD,
            (k, broken),
            "everything is finite going forward; going back, the gradient of the output of",
            "is the first not finite",
        )

    def not_recurred(self, name: str) -> NonfiniteTrace | None:
        """Return a trace that states that ``name`` was not finite in training, but is finite in the repeated step.

        ``name`` is ``"logp"`` or ``"gradients"``. None if it was finite on this rank.
        """
        if name == "logp":
            k, worst = self.facts.inside["logp"][0]
            what = f"the log-prob of token {worst.index[1]} of {self._sequence(k, worst.index[0])}"
            at = TokenAt(self.rank, k, worst.index[0], worst.index[1])
            return _trace(TensorKind.LOGP, worst, Origin.CHANCE, _CHANCE.format(what), at=at, token_id=self._id(at))
        if not self.facts.gradients:
            return None
        worst = self.facts.gradients[-1]
        return _of_tensor(TensorKind.GRADIENT, worst, Origin.CHANCE, _CHANCE.format(f"the gradient of {worst.name}"))

    def of_padding(self) -> NonfiniteTrace | None:
        """Return the trace of a non-finite value at a padding position, if only such positions are non-finite."""
        for name, places in self.facts.padding.items():
            k, worst = places[0]
            row, position = (*worst.index, 0)[:2]
            text = (
                f"only padding is not finite: {name} at slot {position} of {self._sequence(k, row)}; the loss may be "
                f"NaN, {'and it reached the gradients' if self.facts.gradients else 'the gradients are finite'}"
            )
            return _trace(TensorKind.PADDING, worst, Origin.DATA, text, at=TokenAt(self.rank, k, row, position))
        return None

    def of_gradient(self) -> NonfiniteTrace | None:
        """Return the trace of a parameter's non-finite gradient, if no other quantity is non-finite."""
        if not self.facts.gradients:
            return None
        last = self.facts.gradients[-1]
        text = (
            f"the gradient of {last.name} is not finite although log-probs, coefficients and what flows between "
            "modules are: a sum over tokens overflowed, or it does not come from the passes that were kept"
        )
        return _of_tensor(TensorKind.GRADIENT, last, Origin.BACKWARD, text)

    def _of_parameter(self, model: nn.Module) -> NonfiniteTrace:
        worst, others = self.facts.parameters[0], len(self.facts.parameters) - 1
        module, _, leaf = worst.name.rpartition(".")
        row = leaf == "weight" and len(worst.index) == 2 and isinstance(model.get_submodule(module), nn.Embedding)
        token = worst.index[0] if row else None
        text = (
            f"{worst.name}{f' and {others} more' if others else ''} {'are' if others else 'is'} not finite "
            f"({worst.count} of its elements, first at {list(worst.index)}"
            f"{'' if token is None else f', the row of token id {token}'}): the weights were broken before this step"
        )
        at = None if token is None else self._where_read(token)
        return _of_tensor(TensorKind.PARAMETER, worst, Origin.WEIGHTS, text, token_id=token, at=at)

    def _where_read(self, token: int) -> TokenAt | None:
        """Return the first position of ``token`` in a response."""
        for k, one in enumerate(self.passes.all):
            if one.tokens.ids is None:
                continue
            here = (one.tokens.ids == token) & one.tokens.mask.bool()
            if here.any():
                return TokenAt(self.rank, k, *first_index(here))
        return None

    def _of_input(self) -> NonfiniteTrace | None:
        """Return the trace of the earliest non-finite input at which the loss is not finite either.

        An input that the loss does not use is not to blame.
        """
        names = [name for name in self.facts.inside if name not in (*COEFFICIENTS, "logp")]
        for name in names:
            if name == "rewards" and "advantages" not in names:
                continue
            for k, broken in self.facts.inside[name]:
                flags = self._where(k, name)
                if name != "rewards":  # one reward breaks the advantages of a whole group
                    flags &= self._not_finite_in_loss(k)
                if flags.any():
                    origin, why = origin_of_input(name, self.passes.all[k], first_index(flags))
                    return self._of_tokens(TensorKind.INPUT, broken, (k, flags), origin, why)
        return None

    def _of_coefficient(self) -> NonfiniteTrace | None:
        for name in COEFFICIENTS[:2]:
            for k, broken in self.facts.inside.get(name, ()):
                flags = self._where(k, name)
                if flags.any():
                    origin, why = origin_of_coefficient(self.passes.all[k], flags)
                    return self._of_tokens(TensorKind.COEFFICIENT, broken, (k, flags), origin, why)
        for _, broken in self.facts.inside.get(COEFFICIENTS[2], ()):
            text = "the gradient of the auxiliary loss is not finite"
            return _trace(TensorKind.COEFFICIENT, broken, Origin.BACKWARD, text)
        return None

    def _where(self, k: int, name: str) -> Tensor:
        """Return (B, T): True where ``name`` is not finite although the policy's log-prob is."""
        return self.facts.flags(self.passes, k, name) & self.passes.all[k].tokens.logp.isfinite()

    def _not_finite_in_loss(self, k: int) -> Tensor:
        return torch.stack([self.facts.flags(self.passes, k, name) for name in COEFFICIENTS]).any(0)

    def _of_tokens(
        self, kind: TensorKind, broken: Broken, where: tuple[int, Tensor], origin: Origin, why: str
    ) -> NonfiniteTrace:
        k, flags = where
        one, at = self.passes.all[k], first_index(flags)
        places = tuple(TokenAt(self.rank, k, *place) for place in flags.nonzero()[:MOST_TOKENS].tolist())
        whole = len(places) > 1 and bool((flags[at[0]] == one.tokens.mask[at[0]].bool()).all())
        token = self._id(places[0])
        which = "every token" if whole else f"token {at[1]}" + ("" if token is None else f" (id {token})")
        text = f"{broken.name} is not finite at {which} of {self._sequence(k, at[0])}: {why}"
        return _trace(kind, broken, origin, text, at=places[0], token_id=token, tokens=places)

    def _of_module(
        self, kind: TensorKind, origin: Origin, where: tuple[int, Broken], before: str, after: str
    ) -> NonfiniteTrace:
        k, broken = where
        place = ""
        if len(broken.index) > 1:
            place = f", at position {broken.index[1]} of the context of {self._sequence(k, broken.index[0])}"
        at = self._response_token(k, broken)
        text = f"{before} {broken.name or 'the model'} {after}{place}"
        return _of_tensor(kind, broken, origin, text, at=at, token_id=self._id(at))

    def _response_token(self, k: int, broken: Broken) -> TokenAt | None:
        """Return the response token read at a place of the context, if contexts end with responses, as is usual."""
        rows, positions = self.passes.all[k].shape
        if len(broken.index) < 2 or broken.shape[0] != rows or broken.shape[1] < positions:
            return None
        position = broken.index[1] - (broken.shape[1] - positions)
        return TokenAt(self.rank, k, broken.index[0], position) if position >= 0 else None

    def _sequence(self, k: int, row: int) -> str:
        return f"sequence {self.passes.all[k].first_row + row} (micro-batch {k})"

    def _id(self, at: TokenAt | None) -> int | None:
        if at is None:
            return None
        ids = self.passes.all[at.microbatch].tokens.ids
        return None if ids is None else int(ids[at.row, at.position])


_CHANCE = "{} was not finite, and did not recur: weights, inputs and all that was run again from them are finite"


def _of_tensor(
    kind: TensorKind,
    broken: Broken,
    origin: Origin,
    text: str,
    *,
    at: TokenAt | None = None,
    token_id: int | None = None,
) -> NonfiniteTrace:
    """Return the trace of a tensor of the model, or of one that a module made."""
    owner = f"{broken.name}.output" if kind in {TensorKind.ACTIVATION, TensorKind.OUTPUT_GRADIENT} else broken.name
    return _trace(kind, broken, origin, text, at=at, token_id=token_id, layer=layer_of(owner))


def _trace(
    kind: TensorKind,
    broken: Broken,
    origin: Origin,
    text: str,
    *,
    at: TokenAt | None = None,
    token_id: int | None = None,
    tokens: tuple[TokenAt, ...] = (),
    layer: str = "",
) -> NonfiniteTrace:
    index, dtype, count = broken.index, broken.dtype, broken.count
    return NonfiniteTrace(kind, broken.name, text, origin, layer, at, token_id, index, dtype, count, tokens)


def nothing(*, elsewhere: bool) -> NonfiniteTrace:
    """Return the trace of a rank on which all numbers are finite; ``elsewhere``: another rank found one that is not."""
    where = "another rank found what is not" if elsewhere else "nothing that was looked at is not"
    return NonfiniteTrace(TensorKind.NOTHING, "", f"everything is finite on this rank: {where}", elsewhere=elsewhere)


# Origins of a non-finite number, derived from which quantities are finite. The chain: a gradient breaks the weights,
# the weights break the next rollout (a sampler fed with NaN writes token id 0), the rollout breaks the old log-probs.
# The reference remains finite. So a finite reference with broken old log-probs points to the policy, and a broken
# rollout alone to the rollout engine.

APART = 20.0
"""Difference of log-probs, nats, that no policy update causes: beyond it tokens are misaligned or truncated."""


def origin_of_input(name: str, one: LossPass, at: tuple[int, ...]) -> tuple[Origin, str]:
    """Return the origin of the non-finite input ``name`` at token ``at`` of the micro-batch ``one``, and the reason in
    words.
    """
    tokens = one.tokens

    def fine(values: Tensor | None) -> bool:
        return values is not None and bool(values[at].isfinite())

    if name in {"rewards", "advantages"}:
        return Origin.REWARD, "the loss multiplies with it"
    if name == "ref_logp":
        return Origin.FORWARD, "the reference model gave it"
    if name == "rollout_logp" and fine(tokens.old_logp):
        return Origin.ENGINE, "the rollout engine gave it, the trainer's own log-prob is finite"
    if name in {"old_logp", "rollout_logp"} and fine(tokens.ref_logp):
        return Origin.WEIGHTS, (
            "the reference is finite, so the policy's weights were broken when it was computed, or that pass was, the "
            "rollout's or old policy's"
        )
    if name == "old_logp":
        return Origin.FORWARD, (
            "the rollout's or old policy's pass gave it, the policy's own log-prob is finite now: compute the old "
            "log-probs with the trainer, and look at that pass's precision, padding and weights"
        )
    if name == "rollout_logp":
        return Origin.ENGINE, "the rollout's pass gave it, the policy's own log-prob is finite now"
    return Origin.UNKNOWN, "nothing here says where it comes from"


def origin_of_coefficient(one: LossPass, flags: Tensor) -> tuple[Origin, str]:
    """Return the origin of non-finite coefficients dL/dlogp of the micro-batch ``one`` whose inputs are finite, and the
    reason in words.

    ``flags`` (B, T): True where a coefficient is not finite. The reason includes how far apart the log-probs of the
    policies are there.
    """
    tokens = one.tokens
    pairs = {
        "the old policy": (tokens.logp, tokens.old_logp),
        "the reference": (tokens.logp, tokens.ref_logp),
        "the rollout engine": (tokens.trainer_logp, tokens.rollout_logp),
    }
    apart = {name: _largest(policy - other, flags) for name, (policy, other) in pairs.items() if other is not None}
    if not apart:
        return Origin.BACKWARD, "its inputs are finite, the loss itself overflowed"
    farthest = max(apart, key=apart.__getitem__)
    data = apart.get("the rollout engine", 0.0) > APART
    reason = f"its inputs are finite, its log-prob is {apart[farthest]:.3g} nats from that of {farthest}"
    return (Origin.DATA if data else Origin.BACKWARD), reason


def _largest(gaps: Tensor, flags: Tensor) -> float:
    return float(torch.where(flags, gaps.abs(), 0.0).nan_to_num(0.0).max())


# Exchange of traces, so that every rank has that of the rank that found something; it is sent as text.


def shared_trace(local: NonfiniteTrace, world: World) -> NonfiniteTrace:
    """Return, on every rank, the trace of the first rank that found something; ``local`` if none did. A collective.

    Its counts (``broken``, ``chain``, ``id0_frac``, ``cost``) are those of that rank.
    """
    if world.size == 1:
        return local
    every = gather_plain(world, asdict(local) if local.found else None)
    first = next((body for body in every if body is not None), None)
    return local if first is None else _trace_from(first)


def _trace_from(body: Mapping[str, Any]) -> NonfiniteTrace:
    changed = {
        "kind": TensorKind(body["kind"]),
        "origin": Origin(body["origin"]),
        "at": None if body["at"] is None else TokenAt(**body["at"]),
        "index": tuple(body["index"]),
        "tokens": tuple(TokenAt(**at) for at in body["tokens"]),
        "chain": tuple(body["chain"]),
        "notes": tuple(body["notes"]),
        "cost": Cost(**body["cost"]),
    }
    return NonfiniteTrace(**{**body, **changed})
