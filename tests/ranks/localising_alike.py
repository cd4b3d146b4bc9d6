"""Scenarios: a step localised under DDP and under FSDP2, and training that is looked at in every step."""

from contextlib import contextmanager

import torch
import torch._dynamo  # see training.py
from localising_step import EQUAL, FD, JVP, UNEQUAL, Where, localise, marks, take, whole_batch
from localising_traces import FAULTS, traced
from tallying import join_group
from tiny_step import policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import resharded, whole

from rlwatch.gradloc import direction
from rlwatch.gradloc import passes as gradient_passes
from rlwatch.gradloc.distributed import Processes
from rlwatch.gradloc.report import NotLocalised

STEPS = 3
SINGLE = [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
"""Of two ranks. A static graph takes no accumulation."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
REPLICATED = {
    "plain": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}, "inner": {},
    "checkpointing": {"static_graph": True}, "views": {"gradient_as_bucket_view": True},
}  # fmt: skip
SHARDED = {
    "plain": {}, "kept": {"reshard_after_forward": False}, "checkpointing": {}, "untied": {}, "grouped": {},
    "half": {"mp_policy": BF16}, "half kept": {"mp_policy": BF16, "reshard_after_forward": False},
}  # fmt: skip
TRAINED = {2: ("plain", "checkpointing", "half kept"), 4: ("hybrid",)}
OF_FOUR = {"plain": {}, "half": {"mp_policy": BF16}, "hybrid": {}}
ONE_OF_A_KIND = {2: ("plain", "checkpointing", "half kept"), 4: ("hybrid",)}
"""What is sharded in the scenario ``sharded``; the rest is in ``sharded_otherwise``."""


def replicate(model, how, settings):
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
    return DistributedDataParallel(model, **settings)


def shard(model, how, settings, ranks):
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
    shape = (2, ranks // 2) if how == "hybrid" else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    if how == "grouped":  # as accelerate has it where the head is tied
        fully_shard([model.model.embed_tokens, model.model.norm, model.lm_head], mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def looked_at(wrap, groups, rank, ranks, world, *, tie=True):
    """What is found of the first step; and whether weights, gradients and random state are as before."""
    bare = policy(tie=tie)
    batch, model = whole_batch(bare), wrap(bare)
    passes = take(model, batch, groups[rank], ranks=ranks)
    before = marks(resharded(model))
    found = localise(model, passes, Where(groups, rank), world)
    return {**found, "same": marks(resharded(model)) == before}


def trained(build, groups, rank, ranks, world=None, *, at=whole, methods=(FD,)):
    """Marks of training with dropout that is localised in every step; with no ``world`` in none."""
    model = build(policy(dropout=0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(STEPS):
        passes = take(model, whole_batch(policy(seed=step)), groups[rank], ranks=ranks, loss="dapo_kl")
        if world is not None:
            localise(at(model), passes, Where(groups, rank), world, methods=methods, k=1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return marks(resharded(model), optimizer)


def inner(model):
    """A loop may give what DDP wraps, and run its forwards through the wrapper."""
    return model.module


@contextmanager
def never_resharded():
    """As if looking did not mind what FSDP2 left gathered."""
    modules = (direction, gradient_passes)
    before = [module.reshard for module in modules]
    try:
        for module in modules:
            module.reshard = lambda model: None
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            module.reshard = original


def replicated(rank, ranks, folder):
    """DDP: unequal numbers of micro-batches, and of four ranks one has none."""
    join_group(rank, ranks, folder)
    world, groups = Processes(30.0), UNEQUAL[ranks]
    kinds = REPLICATED if ranks == 2 else {"plain": {}}

    def both(how, settings):
        def build(model):
            return replicate(model, how, settings)

        parts = SINGLE if "static_graph" in settings else groups
        methods = (FD, JVP) if how in ("plain", "inner") else (FD,)
        at = inner if how == "inner" else whole
        return [trained(build, parts, rank, ranks), trained(build, parts, rank, ranks, world, at=at, methods=methods)]

    return {
        "step": looked_at(lambda model: replicate(model, "plain", {}), groups, rank, ranks, world),
        "trained": {how: both(how, settings) for how, settings in kinds.items()},
        "traced": {
            fault: traced(lambda model: replicate(model, "plain", {}), fault, groups, rank, ranks, world)
            for fault in FAULTS
        },
    }  # fmt: skip


def sharded(rank, ranks, folder):
    """FSDP2: as many micro-batches on every rank."""
    return _sharded(rank, ranks, folder, lambda how: how in ONE_OF_A_KIND[ranks], FAULTS if ranks == 2 else ())


def sharded_otherwise(rank, ranks, folder):
    """The same of other kinds, and with four ranks of numbers that are none."""
    return _sharded(rank, ranks, folder, lambda how: how not in ONE_OF_A_KIND[ranks], FAULTS if ranks == 4 else ())


def _sharded(rank, ranks, folder, wanted, faults):
    join_group(rank, ranks, folder)
    world, groups = Processes(30.0), EQUAL[ranks]
    kinds = {how: settings for how, settings in (SHARDED if ranks == 2 else OF_FOUR).items() if wanted(how)}

    def both(how, settings):
        def build(model):
            return shard(model, how, settings, ranks)

        return [trained(build, groups, rank, ranks), trained(build, groups, rank, ranks, world)]

    def never():
        try:
            with never_resharded():
                return trained(lambda model: shard(model, "plain", {}, ranks), groups, rank, ranks, world)
        except NotLocalised as why:
            return str(why)

    return {
        "step": {
            how: looked_at(
                lambda model, how=how, settings=settings: shard(model, how, settings, ranks),
                groups, rank, ranks, world, tie=how != "untied",
            )
            for how, settings in kinds.items()
        },
        "trained": {how: both(how, kinds[how]) for how in TRAINED[ranks] if how in kinds},
        "never resharded": never() if ranks == 2 and "plain" in kinds else None,
        "traced": {
            fault: traced(lambda model: shard(model, "plain", {}, ranks), fault, groups, rank, ranks, world)
            for fault in faults
        },
    }  # fmt: skip
