"""Two ranks of real Megatron models on a CPU: ``python megatron_ranks.py FOLDER``. Each writes what it found as JSON.

Models, DDP, distributed optimizer and the cutting of layers and vocabulary are Megatron's, over gloo; policy losses,
log-probs over a cut vocabulary, offloading and the engine's step are verl's. See ``megatron_models.py`` for what stands
in for CUDA.
"""

import json
import types
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_models import (
    FOLDER,
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
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu
from verl.workers.config import ActorConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import StepTally, encoded_tally, merge_workers
from rlwatch.integrations.verl.taps import WorkerTaps
from rlwatch.integrations.verl.worker import Anchor, Keeper, _tells_of_tokens
from rlwatch.records import Command
from rlwatch.tensors.gradnorm import ShardedNorm, layer_of
from rlwatch.tensors.megatron import hindrance, model_norms
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch


def engine_of(ranks, *, distributed=True):
    """What rlwatch looks at of verl's engine, and verl's own step."""
    policy = model(ranks, distributed=distributed)
    engine = types.SimpleNamespace(
        module=[policy],
        optimizer=optimizer_of(policy, distributed=distributed),
        param_dtype=torch.float32,
        peft_cls=None,
    )
    engine.optimizer_step = types.MethodType(MegatronEngine.optimizer_step, engine)
    engine.is_mp_src_rank_with_outputs = lambda: parallel_state.get_tensor_model_parallel_rank() == 0
    return engine


def actor_of(engine):
    settings = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e6)

    def loss(model_output, data):
        given = {name: data[name] for name in ("old_log_prob", "advantages")}
        mask = torch.ones_like(given["advantages"])
        return POLICY_LOSS_REGISTRY["vanilla"](log_prob=model_output, response_mask=mask, config=settings, **given)

    return types.SimpleNamespace(engine=engine, loss_fn=loss)


def update(actor, data):
    """One step of this rank's share of the rows."""
    engine, share = actor.engine, parallel_state.get_data_parallel_rank()
    rows = ROWS // parallel_state.get_data_parallel_world_size()
    mine = {name: x[share * rows : (share + 1) * rows] for name, x in data.items()}
    engine.optimizer.zero_grad()
    engine.module[0].zero_grad_buffer()
    logp = vocab_parallel_log_probs_from_logits(logits_of(engine.module[0], mine["ids"]), mine["ids"])
    loss, _ = actor.loss_fn(model_output=logp, data=mine)
    loss.backward()
    engine.module[0].finish_grad_sync()
    return float(engine.optimizer_step())


def told(taps, engine, step):
    """As the driver puts it together, on every rank."""
    tally = taps.take()
    if not _tells_of_tokens(engine):
        tally = StepTally({name: stat for name, stat in tally.stats.items() if isinstance(stat, ShardedNorm)})
    parcels = [None] * dist.get_world_size()
    dist.all_gather_object(parcels, encoded_tally(tally, step))
    return dict(merge_workers(step, StepTally(), dict(enumerate(parcels))).metrics)


def oracle(data):
    """The same step by one rank that holds all: norms of layers by autograd, log-probs by log_softmax."""
    groups(1)
    policy = model(1, wrapped=False).requires_grad_(True)
    logp = logits_of(policy, data["ids"]).float().log_softmax(-1)
    taken = logp.gather(-1, data["ids"][..., None])[..., 0]
    actor = actor_of(types.SimpleNamespace())
    actor.loss_fn(model_output=taken, data=data)[0].backward()
    squares = {}
    for name, p in policy.named_parameters():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + float(p.grad.double().square().sum())
    entropy = -(logp.exp() * logp).sum(-1)
    batch = TokenBatch(taken.detach(), torch.ones_like(taken).bool(), entropy=entropy.detach())
    tokens = {name: float(stat.value()) for name, stat in observe(batch).items() if name.startswith("policy/")}
    ratio = (taken.detach() - data["old_log_prob"]).exp()
    return {
        "layers": {f"grad_layer/{layer}": square**0.5 for layer, square in squares.items()},
        "norm": sum(squares.values()) ** 0.5,
        "tokens": tokens,
        "ratio/max": float(ratio.max()),
        "ratio/mean": float(ratio.mean()),
    }


def trained(data, ranks, *, distributed, tapped):
    """Three steps: weights and what was told of the first."""
    POLICY_LOSS_REGISTRY.update(
        {name: getattr(loss, "__wrapped__", loss) for name, loss in POLICY_LOSS_REGISTRY.items()}
    )
    engine = engine_of(ranks, distributed=distributed)
    actor, error_boundary, metrics, norms = actor_of(engine), ErrorBoundary(), {}, []
    if tapped:
        taps = WorkerTaps(
            actor, POLICY_LOSS_REGISTRY, error_boundary, Level.FULL, gradients=lambda engine: model_norms(engine.module)
        )
        taps.attach()
    for step in range(3):
        norms.append(update(actor, data))
        if tapped and step == 0:
            metrics = told(taps, engine, 1)
    return {"weights": weights(engine.module[0]), "metrics": metrics, "norm": norms[0], "errors": error_boundary.errors}


def measured(data, ranks, *, distributed=True):
    groups(ranks)
    plain = trained(data, ranks, distributed=distributed, tapped=False)
    watched = trained(data, ranks, distributed=distributed, tapped=True)
    same = all(torch.equal(a, b) for a, b in zip(plain["weights"], watched["weights"], strict=True))
    return {"same": same, **{name: watched[name] for name in ("metrics", "norm", "errors")}}


def cut_vocabulary(data, ranks):
    """What is told of tokens whose log-probs and entropy come from logits that lie on two ranks."""
    groups(ranks)
    logits = logits_of(model(ranks, wrapped=False), data["ids"])
    logp = vocab_parallel_log_probs_from_logits(logits.clone(), data["ids"])
    batch = TokenBatch(logp, torch.ones_like(logp).bool(), entropy=vocab_parallel_entropy(logits.clone()))
    return {name: float(stat.value()) for name, stat in observe(batch).items() if name.startswith("policy/")}


def anchored(engine, reference):
    config = types.SimpleNamespace(actor=types.SimpleNamespace(strategy="megatron"))
    ref = types.SimpleNamespace(engine=types.SimpleNamespace(module=[reference]))
    return Anchor(types.SimpleNamespace(actor=types.SimpleNamespace(engine=engine), ref=ref, config=config))


def reset(data, ranks):
    """A policy that moved becomes its reference; then with its weights offloaded; then again from disk."""
    groups(ranks)
    engine, reference = engine_of(ranks), model(ranks, wrapped=False)
    actor, policy = actor_of(engine), engine.module[0]
    for _ in range(3):
        update(actor, data)
    anchor, found = anchored(engine, reference), {}

    def apart():
        with torch.no_grad():
            return float((logits_of(policy, data["ids"]) - logits_of(reference, data["ids"])).abs().max())

    before = weights(policy)
    found["apart"] = apart()
    order = Command("c1", "r1", "reset-reference", {"optimizer": "keep"})
    anchor.check(order)
    found["report"] = dict(anchor(order))
    found["after"] = apart()
    found["policy untouched"] = all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))

    update(actor, data)
    found["moved on"] = apart()
    offload_megatron_model_to_cpu([policy])
    found["offloaded"] = max(p.untyped_storage().size() for p in policy.parameters()) == 0
    anchor.check(order)
    anchor(order)
    load_megatron_model_to_gpu([policy])
    found["after, offloaded"] = apart()

    keeper = Keeper(anchor, rank=dist.get_rank(), world_size=dist.get_world_size())
    keeper.save(str(FOLDER / "reference"))
    for p in reference.parameters():
        p.data.zero_()
    keeper.restore(str(FOLDER / "reference"))
    found["from disk"] = apart()

    found["cleared"] = cleared(actor, anchor, data, ranks)
    policy.module.decoder.final_layernorm.weight.data[0] = torch.nan
    found["not finite"] = refusal(lambda: anchor.check(order))
    groups(1)
    whole = model(1, wrapped=False)
    found["cut otherwise"] = refusal(lambda: anchored(engine_of_shape(policy), whole).check(order)) if ranks > 1 else ""
    return found


def engine_of_shape(policy):
    policy.module.decoder.final_layernorm.weight.data[0] = 1.0
    return types.SimpleNamespace(module=[policy], optimizer=None, peft_cls=None)


def cleared(actor, anchor, data, ranks):
    """The step after a reset with ``optimizer=clear`` is that of a new optimizer on the same weights."""
    policy = actor.engine.module[0]
    anchor.check(Command("c2", "r1", "reset-reference", {}))
    report = anchor(Command("c2", "r1", "reset-reference", {}))
    fresh = engine_of(ranks)
    for mine, theirs in zip(fresh.module[0].parameters(), policy.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    fresh.optimizer.reload_model_params()
    update(actor, data)
    update(actor_of(fresh), data)
    off = [float((a - b).abs().max()) for a, b in zip(weights(policy), weights(fresh.module[0]), strict=True)]
    return {"parameters": report["cleared"], "off": max(off)}


def stages(data):
    """Two stages of a pipeline: refused with the reason, and nothing is read."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage = model(1, wrapped=False, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    engine = types.SimpleNamespace(module=[stage])
    return {"reason": hindrance(engine.module), "read": model_norms(engine.module) is not None}


def main(rank):
    data = drawn()
    with ranks_of(rank, 2, "rendezvous"):
        found = {
            "oracle": oracle(data),
            "tensor parallel": measured(data, 2),
            "data parallel": measured(data, 1),
            "data parallel, whole gradients": measured(data, 1, distributed=False),
            "cut vocabulary": cut_vocabulary(data, 2),
            "reset": reset(data, 2),
            "reset, data parallel": reset(data, 1),
            "stages": stages(data),
        }
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(found, default=str))
    dist.barrier()


if __name__ == "__main__":
    raise SystemExit(forked(partial(main, 0), partial(main, 1)))
