"""The first non-finite tensor of a step whose gradient norm is NaN or infinite.

There is no direction to attribute along, and ``.grad`` alone says nothing: one bad token breaks nearly all of it. So
quantities are looked at in the order in which they were made: parameters, inputs of the loss, log-probs, coefficients;
then, where all of these are finite, the outputs of modules (one forward pass) and the gradients of these (one more,
and a backward).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rlwatch.gradloc.broken import Broken
from rlwatch.gradloc.gradients import beside_training
from rlwatch.gradloc.module_flow import broken_activation, broken_output_gradient
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.report import Cost
from rlwatch.gradloc.step_facts import StepFacts
from rlwatch.gradloc.step_verdict import StepVerdict, nothing
from rlwatch.gradloc.traced import Trace
from rlwatch.gradloc.world import Alone, World

Find = Callable[[nn.Module, LossPass], Broken | None]


def trace(model: nn.Module, passes: Passes, *, world: World | None = None) -> Trace:
    """The first non-finite tensor of this rank's part of the step, and where the chain was entered.

    To be called after the backward, with the gradients in place. A collective where ``world`` has more than one rank:
    each rank looks at its own micro-batches, and all stop where one has found something. Parameters, ``.grad``, random
    numbers, buffers and hooks are afterwards as they were.
    """
    began = time.perf_counter()
    ranks = Alone() if world is None else world
    facts = StepFacts.of(model, passes)
    verdict = StepVerdict(passes, facts, ranks.rank)
    found, cost = verdict.standing(model), Cost()
    known = _any(found is not None, passes, ranks)
    if not known and _any(_to_explain(facts), passes, ranks):
        found, cost = _run_again(model, verdict, ranks)
        known = _any(found is not None, passes, ranks)
    if not known:
        found = verdict.of_padding() or verdict.of_gradient()
        known = _any(found is not None, passes, ranks)
    cost = replace(cost, seconds=time.perf_counter() - began)
    said = found or nothing(elsewhere=known)
    return replace(said, broken=facts.counts(), chain=facts.chain(), id0_frac=facts.id0_frac, cost=cost)


def _to_explain(facts: StepFacts) -> bool:
    """Whether something is not finite that what is known so far does not explain."""
    return bool(facts.gradients or "logp" in facts.inside)


def _run_again(model: nn.Module, verdict: StepVerdict, world: World) -> tuple[Trace | None, Cost]:
    """Micro-batch by micro-batch: first all forward passes, then forward and backward."""
    passes = verdict.passes
    found, forwards = _first_of(broken_activation, model, passes, world)
    broken_here = "logp" in verdict.facts.inside
    if _any(found is not None or broken_here, passes, world):
        return (verdict.of_forward(*found) if found else verdict.of_forward() if broken_here else None), Cost(forwards)
    back, more = _first_of(broken_output_gradient, model, passes, world)
    return (verdict.of_output_gradient(*back) if back else None), Cost(forwards + more, more)


def _first_of(find: Find, model: nn.Module, passes: Passes, world: World) -> tuple[tuple[int, Broken] | None, int]:
    """What ``find`` finds in the first micro-batch where any rank finds something, and how many were tried."""
    most = int(world.max(_number(len(passes.all), passes)))
    for k in range(most):
        with beside_training(model):
            found = find(model, passes.all[k]) if k < len(passes.all) else None
        if _any(found is not None, passes, world):
            return (None if found is None else (k, found)), k + 1
    return None, most


def _any(holds: bool, passes: Passes, world: World) -> bool:
    return bool(world.max(_number(holds, passes)).item()) if world.size > 1 else holds


def _number(value: float, passes: Passes) -> Tensor:
    """On the device of the step, where collectives run."""
    device = passes.all[0].tokens.logp.device if passes.all else None
    return torch.tensor(float(value), device=device)
