"""Steps whose gradient is not finite, on several ranks and on one."""

import math
from dataclasses import replace

import torch
from localising_step import marks, take, whole_batch
from tiny_step import policy
from training import resharded

from rlwatch.gradloc.nonfinite import trace
from rlwatch.tensors.gradnorm import plain_name

ROW, POSITION, MARKED = 6, 2, 2
"""The token at fault, and an id that no other token has."""
FAULTS = ("advantage", "weight", "backward")


class Overflow(torch.autograd.Function):
    """Finite forwards; backwards infinite at ``flags``."""

    @staticmethod
    def forward(ctx, x, flags):
        ctx.save_for_backward(flags)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (flags,) = ctx.saved_tensors
        return gradient.masked_fill(flags, math.inf), None


def overflow_at(model, marked):
    """In the first layer, where the id is ``marked``."""
    read = {}

    def remember(module, args, kwargs):
        read["ids"] = kwargs["input_ids"]

    def overflow(module, args, output):
        return Overflow.apply(output, (read["ids"] == marked)[..., None])

    model.register_forward_pre_hook(remember, with_kwargs=True)
    model.model.layers[0].mlp.register_forward_hook(overflow)


def faulty(fault):
    """The model and the batch."""
    model = policy()
    batch = whole_batch(model)
    advantages, ids = batch.advantages.clone(), batch.ids.clone()
    if fault == "advantage":
        advantages[ROW, POSITION] = math.nan
    if fault == "weight":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] = math.nan
    if fault == "backward":
        ids[ROW, batch.prompt + POSITION] = MARKED
        overflow_at(model, MARKED)
    return model, replace(batch, ids=ids, advantages=advantages)


def traced(build, fault, groups, rank, ranks, world=None):
    """What the trace says on this rank, with rows of the whole batch."""
    model, batch = faulty(fault)
    model = build(model)
    passes = take(model, batch, groups[rank], ranks=ranks)
    before = marks(resharded(model))
    found = trace(model, passes, world=world)
    where = None if found.at is None else [groups[rank][found.at.microbatch][found.at.row], found.at.position]
    return {
        "kind": found.kind.value, "name": plain_name(found.name), "layer": found.layer, "origin": found.origin.value,
        "at": where, "elsewhere": found.elsewhere, "found": found.found, "same": marks(resharded(model)) == before,
    }  # fmt: skip
