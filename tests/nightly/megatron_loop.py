"""A loop of one's own over real Megatron models, on two ranks of a CPU and on one: ``python megatron_loop.py FOLDER``.

Each process writes what it found as JSON. Models, DDP, optimizers and the cutting over ranks are Megatron's; see
``megatron_models.py`` for what stands in for CUDA.
"""

import json
import re
import types
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron_models import (
    FOLDER,
    RATE,
    ROWS,
    drawn,
    forked,
    groups,
    logits_of,
    model,
    optimizer_of,
    ranks_of,
    refusal,
    weights,
)
from torch.nn.parallel import DistributedDataParallel

import rlwatch
from rlwatch.clipping import LayerClip
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.checkpoints import ReferenceFacts, WriteDown
from rlwatch.integrations.reference import ResetReference
from rlwatch.integrations.torch import Watcher
from rlwatch.integrations.torch.commands import Means
from rlwatch.records import Command

CLIP = 0.2
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}
KINDS = {
    "plain": {},
    "tied": {"tied": True},
    "experts": {"experts": 4, **EXPERTS},
}
STEPS = 3


class Plain:
    """Bare modules, gradients in ``.grad``, an optimizer of torch's; ``clip_grad_norm_`` is left out: ranks have parts."""

    def __init__(self, ranks, *, replicas=1, **settings):
        self.bare = model(ranks, wrapped=False, **settings).requires_grad_(True)
        self.policy = DistributedDataParallel(self.bare) if replicas > 1 else self.bare
        self.optimizer = torch.optim.Adam(self.bare.parameters(), lr=RATE)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def reduce(self):
        pass

    def step(self):
        self.optimizer.step()


class Held:
    """Megatron's DDP and optimizer, as its own training loop uses them."""

    def __init__(self, ranks, *, distributed=True, **settings):
        self.policy = model(ranks, distributed=distributed, **settings)
        self.optimizer = optimizer_of(self.policy, distributed=distributed)

    def zero_grad(self):
        self.policy.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self):
        finalize_model_grads([self.policy])

    def step(self):
        _, norm, _ = self.optimizer.step()
        return norm


def logp_of(policy, ids):
    """Log-probs over a vocabulary that lies on the tensor-parallel ranks."""
    return -vocab_parallel_cross_entropy(logits_of(policy, ids).float(), ids)


def shared():
    """The rows of this data-parallel rank."""
    share, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = ROWS // ranks
    return slice(share * rows, (share + 1) * rows)


def one_step(trained, watcher, step, *, rollouts):
    data = {name: x[shared()] for name, x in drawn().items()}
    trained.zero_grad()
    logp = logp_of(trained.policy, data["ids"])
    ratio = (logp - data["old_log_prob"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * data["advantages"], clipped * data["advantages"]).mean()
    if watcher is not None:
        first = data["advantages"][:, 0]
        if rollouts:
            watcher.rollouts(
                rewards=first.tolist(), groups=[int(i) // 2 for i in range(ROWS)[shared()]], ids=data["ids"]
            )
        watcher.observe(
            logp=logp, mask=torch.ones_like(logp), advantages=first, old_logp=data["old_log_prob"], ids=data["ids"],
            ref_logp=data["old_log_prob"] - 0.1,
        )  # fmt: skip
    loss.backward()
    trained.reduce()
    if watcher is not None:
        watcher.gradients()
    norm = trained.step()
    if watcher is not None:
        watcher.step(step, loss=loss, grad_norm_of_megatron=norm or 0.0)


def _run_id(name):
    return re.sub(r"\W+", "-", name)


def watched(name, trained, **more):
    return Watcher(
        trained.policy, trained.optimizer, clip=CLIP, store=FOLDER / "store", run_id=_run_id(name), sigterm=False, **more,
    )  # fmt: skip


def recorded(name, step=1):
    store = rlwatch.open_store(FOLDER / "store")
    return {r.step: dict(r.metrics) for r in store.records(_run_id(name))}[step]


def measured(name, make):
    """Weights after some steps, watched or not; and on rank 0 what was recorded of the first."""
    plain = make()
    for step in range(1, STEPS + 1):
        one_step(plain, None, step, rollouts=True)
    trained = make()
    with watched(name, trained) as watcher:
        for step in range(1, STEPS + 1):
            one_step(trained, watcher, step, rollouts=True)
    dist.barrier()
    same = all(torch.equal(a, b) for a, b in zip(weights(plain.policy), weights(trained.policy), strict=True))
    found = {"same": same, "counters": watcher.run.counters.snapshot()}
    return {**found, "metrics": recorded(name)} if dist.get_rank() == 0 else found


def alone(kind):
    """The gradients of the whole model on one rank, by autograd and float64."""
    groups(1)
    trained = Plain(1, **KINDS[kind])
    name = f"alone {kind}"
    with watched(name, trained) as watcher:
        one_step(trained, watcher, 1, rollouts=True)
    squares = {}
    for parameter, p in trained.bare.named_parameters():
        layer = rlwatch.tensors.gradnorm.layer_of(parameter)
        squares[layer] = squares.get(layer, 0.0) + float(p.grad.double().square().sum())
    return {
        "metrics": recorded(name),
        "layers": {f"grad_layer/{layer}": square**0.5 for layer, square in squares.items()},
        "norm": sum(squares.values()) ** 0.5,
    }


def broken():
    """A gradient with a NaN in the half of a matrix that lies on the second rank."""
    groups(2)
    trained = Plain(2)
    with watched("broken", trained) as watcher:
        logp_of(trained.policy, drawn()["ids"]).sum().backward()
        if dist.get_rank() == 1:
            trained.bare.decoder.layers[1].mlp.linear_fc1.weight.grad[0, 0] = torch.nan
        watcher.gradients()
        watcher.step(1)
    dist.barrier()
    return {"metrics": recorded("broken")} if dist.get_rank() == 0 else {}


def broken_experts():
    """A NaN in the first expert of each rank: by the same name, but another one."""
    experts_2()
    trained = Held(1, expert_model_parallel_size=2, **KINDS["experts"])
    with watched("broken experts", trained) as watcher:
        one_step(trained, None, 1, rollouts=False)
        buffer = trained.policy.expert_parallel_buffers[0]
        start, _, _ = buffer.param_index_map[next(iter(buffer.param_index_map))]
        buffer.grad_data[start] = torch.nan
        watcher.gradients()
        watcher.step(1)
    dist.barrier()
    return {"metrics": recorded("broken experts")} if dist.get_rank() == 0 else {}


def reset(make):
    """The policy becomes its reference, of which each rank has its part; it is not put into checkpoints."""
    groups(2)
    trained, reference = make(), model(2, wrapped=False)
    ids = drawn()["ids"]
    one_step(trained, None, 1, rollouts=False)
    means = Means(trained.policy, reference, trained.optimizer)
    handler, write = (
        ResetReference(means.anchored, ErrorBoundary()),
        WriteDown(means.anchored, lambda: dist.get_rank() == 0),
    )

    def apart():
        with torch.no_grad():
            return float((logits_of(trained.policy, ids) - logits_of(reference, ids)).abs().max())

    before, order = apart(), Command("c1", "r1", "reset-reference", {"optimizer": "clear"})
    handler.check(order)
    report = dict(handler(order))
    after = apart()
    kept = refusal(lambda: write.check(write.command(FOLDER, ReferenceFacts(1))))
    one_step(trained, None, 2, rollouts=False)
    return {"before": before, "after": after, "report": report, "kept": kept}


def bare_2():
    return Plain(2)


def held_2():
    return Held(2)


def stages():
    """Two stages of a pipeline: refused, with what to do instead."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    policy = model(1, wrapped=False, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32).requires_grad_(True)
    trained = types.SimpleNamespace(policy=policy, optimizer=torch.optim.Adam(policy.parameters()))
    last = parallel_state.is_pipeline_last_stage()
    data = drawn()
    with watched("stages", trained) as watcher:
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        if last:
            watcher.observe(logp=data["old_log_prob"], mask=torch.ones_like(data["old_log_prob"]))
        watcher.rollouts(rewards=data["advantages"][:, 0].tolist())
        watcher.gradients()
        watcher.step(1, grad_norm=7.0)
    dist.barrier()
    strict = Watcher(policy, store="memory://strict", sigterm=False, strict=True)
    found = {"refused": watcher.run.counters.snapshot(), "why": refusal(strict.gradients)}
    return {**found, "metrics": recorded("stages")} if dist.get_rank() == 0 else found


def refused():
    """What would read gradients that are not there, at set-up."""
    groups(2)
    cut, held = model(2, wrapped=False).requires_grad_(True), model(2)
    inside = Watcher(held.module, store="memory://inside", sigterm=False, strict=True)

    return {
        "localise": refusal(lambda: Watcher(cut, localise=True, store="memory://localise")),
        "clip": [refusal(lambda model=one: LayerClip(model)) for one in (cut, held)],
        "inside": refusal(inside.gradients),
    }


def whole():
    with ranks_of(0, 1, "alone"):
        found = {kind: alone(kind) for kind in KINDS}
    (FOLDER / "alone.json").write_text(json.dumps(found, default=str))


def experts_2():
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)


def parted(rank):
    with ranks_of(rank, 2, "rendezvous"):
        found = {}
        groups(2)
        found["tensor parallel"] = measured("tensor parallel", lambda: Plain(2))
        found["tensor parallel, tied"] = measured("tensor parallel, tied", lambda: Plain(2, tied=True))
        found["tensor parallel, held"] = measured("tensor parallel, held", lambda: Held(2))
        groups(1)
        found["data parallel"] = measured("data parallel", lambda: Plain(1, replicas=2))
        found["data parallel, held"] = measured("data parallel, held", lambda: Held(1))
        found["data parallel, whole gradients"] = measured("data parallel, whole", lambda: Held(1, distributed=False))
        experts_2()
        for name, distributed in (("experts", True), ("experts, whole gradients", False)):
            found[name] = measured(
                name, lambda d=distributed: Held(1, distributed=d, expert_model_parallel_size=2, **KINDS["experts"])
            )
        found["broken"] = broken()
        found["broken experts"] = broken_experts()
        found["reset"] = reset(bare_2)
        found["reset, held"] = reset(held_2)
        found["stages"] = stages()
        found["refused"] = refused()
        (FOLDER / f"rank{rank}.json").write_text(json.dumps(found, default=str))
        dist.barrier()


if __name__ == "__main__":
    raise SystemExit(forked(whole, partial(parted, 0), partial(parted, 1)))
