"""One step whose gradient is localised: the same rows and micro-batches on several ranks, and on one."""

import hashlib
import math
from contextlib import nullcontext

import torch
from tiny_step import LOSSES, outputs, plant, policy, rollouts

from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.culprits import on_host
from rlwatch.gradloc.cures import InterventionCatalog, Proposal, clipped_advantages, scaled
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.distributed import Alone
from rlwatch.gradloc.nonfinite import trace
from rlwatch.gradloc.passes import RandomState, RecordedPasses
from rlwatch.gradloc.report import Method
from rlwatch.gradloc.verification import screen, top_tokens, union_candidates, verify
from rlwatch.tensors.tokens import TokenBatch

UNEQUAL = {2: [[[0, 1], [2, 3], [4]], [[5, 6, 7]]], 4: [[[0], [1], [2]], [[3, 4]], [[5, 6, 7]], []]}
"""Ranks -> for each its micro-batches, as rows: of four ranks the last has none."""
EQUAL = {2: [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 4: [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]}
"""As sharded models need them."""
TOP = 20
PROPOSALS = [
    Proposal("clip advantages", 0.5, "", clipped_advantages(0.5)), Proposal("without the term", None, "", only=True),
    Proposal("rescale entropy", 0.0, "", scaled(1.0), entropy=0.0),
]  # fmt: skip
"""Cures that change tokens on every rank."""
FD, JVP = Method.FD, Method.JVP


def whole_batch(model):
    """Eight responses with three culprits among their tokens."""
    batch, _ = plant(rollouts(model), "ratio", 3, math.e**4)
    return batch


def take(model, batch, groups, *, ranks=1, loss="dapo_entropy", forward=outputs):
    """Forward and backward of this rank's micro-batches, of which DDP sends only the last: the passes."""
    model.zero_grad(set_to_none=True)
    passes, total = RecordedPasses(), batch.mask.sum() / ranks
    if not groups:  # data parallelism needs a backward of every rank
        (forward(model, batch.ids[:1], batch.prompt).logp.sum() * 0).backward()
    for i, rows in enumerate(groups):
        waits = hasattr(model, "no_sync") and i < len(groups) - 1
        with model.no_sync() if waits else nullcontext():
            keep(model, batch.rows(rows), passes, forward, lambda out, part: LOSSES[loss](out, part, total))
    return passes


def keep(model, part, passes, forward, loss):
    def again(rows=None):
        return forward(model, part.ids if rows is None else part.ids[list(rows)], part.prompt)

    random = RandomState.now()
    out = again()
    tokens = TokenBatch(
        out.logp.detach(), part.mask, entropy=out.entropy.detach(), ids=part.response,
        advantages=part.advantages, old_logp=part.old, ref_logp=part.ref,
    )  # fmt: skip
    passes.add(again, out, tokens, random=random, drew=not random.same(RandomState.now()))
    loss(out, part).backward()


class Where:
    """Tokens by their row in the whole batch, however that is divided."""

    def __init__(self, groups, rank):
        self.groups, self.rank = groups, rank

    def names(self, tokens):
        return [f"{self.groups[at.rank][at.microbatch][at.row]},{at.position}" for at in tokens]

    def table(self, contributions):
        rows = [row for rows in self.groups[self.rank] for row in rows]
        values = [row for table in contributions for row in table.tolist()]
        return {str(row): line for row, line in zip(rows, values, strict=True)}


def localise(model, passes, where, world=None, *, methods=(FD, JVP), k=3):
    """All that localisation finds of the step, as plain numbers."""
    world = world or Alone()
    direction = Direction.of(model, world=world)
    found = {m.value: attribute(model, passes, direction, world=world, methods=(m,)) for m in methods}
    best = found[methods[-1].value].contributions
    candidates = union_candidates(passes, best, [screen(one) for one in passes.all], k, world=world)
    notes = []
    own = verify(model, passes, candidates, world=world, notes=notes)
    traced = trace(model, passes, world=world)
    pharmacy = InterventionCatalog(model, passes, on_host(passes, world.rank, forms=True), direction, world)
    cures = {one.kind: pharmacy.cure(one) for one in PROPOSALS}
    return {
        "cures": {kind: None if cure is None else cure.after for kind, cure in cures.items()},
        "norm": direction.norm,
        "layers": dict(direction.layers),
        "gap": {m: one.gap for m, one in found.items()},
        "complete": {m: one.complete for m, one in found.items()},
        "contributions": {m: where.table(one.contributions) for m, one in found.items()},
        "top": where.names(top_tokens(passes, best, TOP, world=world)),
        "candidates": where.names(candidates),
        "own": dict(zip(where.names(own), [one.norm for one in own.values()], strict=True)),
        "shares": dict(zip(where.names(own), [dict(one.layers) for one in own.values()], strict=True)),
        "notes": notes,
        "traced": [traced.kind.value, traced.elsewhere],
    }


def alone(groups, *, methods=(FD, JVP), loss="dapo_entropy", **shape):
    """The same of one process that has all micro-batches."""
    model = policy(**shape)
    flat = [rows for mine in groups for rows in mine]
    passes = take(model, whole_batch(model), flat, loss=loss)
    return localise(model, passes, Where([flat], 0), methods=methods)


def local(tensor):
    """What of it is on this rank."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def marks(model, optimizer=None):
    """The bytes of all that training holds on this rank: weights, gradients, buffers, moments, random state, modes."""
    digest = hashlib.sha256()
    moments = [] if optimizer is None else [v for e in optimizer.state.values() for v in e.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for tensor in [*model.parameters(), *model.buffers(), *gradients, *moments, torch.get_rng_state()]:
        digest.update(local(tensor).flatten().view(torch.uint8).numpy().tobytes())
    digest.update(repr([module.training for module in model.modules()]).encode())
    return digest.hexdigest()
