"""Two ranks of real Megatron models on a CPU: ``python megatron_ranks.py FOLDER``. Each writes what it found as JSON.

Models, DDP, distributed optimizer and the cutting of layers and vocabulary are Megatron's, over gloo; policy losses,
log-probs over a cut vocabulary, offloading and the engine's step are verl's. Megatron insists on CUDA in places: here
tensors that it wants on ``cuda`` are made on the CPU, in plain memory, and called by CUDA's type names
(:class:`OnCPU`), and the random states of GPUs are left alone, of which nothing draws (no dropout).
"""

import json
import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits
from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu
from verl.workers.config import ActorConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

from rlwatch.errors import RLWatchError
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import StepTally, encoded_tally, merge_workers
from rlwatch.integrations.verl import megatron
from rlwatch.integrations.verl.taps import WorkerTaps
from rlwatch.integrations.verl.worker import Anchor, Keeper, _tells_of_tokens
from rlwatch.records import Command
from rlwatch.seam import Seam
from rlwatch.tensors.gradnorm import Sharded, layer_of
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

FOLDER = Path(sys.argv[1])
VOCAB, ROWS, LENGTH, RATE = 24, 4, 8, 1e-2


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def model(ranks, *, wrapped=True, distributed=True):
    """The same weights however many ``ranks`` they are cut over."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        use_cpu_initialization=True, tensor_model_parallel_size=ranks, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False, params_dtype=torch.float32,
    )  # fmt: skip
    bare = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCAB,
        max_sequence_length=LENGTH, share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    if not wrapped:
        return bare.requires_grad_(False)
    wish = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, wish, bare)


def optimizer_of(policy, *, distributed=True):
    wish = OptimizerConfig(
        optimizer="adam", lr=RATE, use_distributed_optimizer=distributed, clip_grad=1.0, params_dtype=torch.float32
    )
    return get_megatron_optimizer(wish, [policy])


def drawn():
    """Prompts with what followed, and the arguments of a policy loss but for the log-probs."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=g)
    old = -3.2 + 0.3 * torch.randn(ROWS, LENGTH, generator=g)
    advantages = torch.randn(ROWS, 1, generator=g).expand(ROWS, LENGTH).contiguous()
    return {"ids": ids, "old_log_prob": old, "advantages": advantages}


def logits_of(policy, ids):
    positions = torch.arange(LENGTH).expand(len(ids), LENGTH)
    return policy(ids, positions, torch.tril(torch.ones(LENGTH, LENGTH)).lt(0.5)[None, None])


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
        tally = StepTally({name: stat for name, stat in tally.stats.items() if isinstance(stat, Sharded)})
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


def groups(ranks):
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


def weights(policy):
    return [p.detach().clone() for p in policy.parameters()]


def trained(data, ranks, *, distributed, tapped):
    """Three steps: weights and what was told of the first."""
    POLICY_LOSS_REGISTRY.update(
        {name: getattr(loss, "__wrapped__", loss) for name, loss in POLICY_LOSS_REGISTRY.items()}
    )
    engine = engine_of(ranks, distributed=distributed)
    actor, seam, metrics, norms = actor_of(engine), Seam(), {}, []
    if tapped:
        taps = WorkerTaps(actor, POLICY_LOSS_REGISTRY, seam, Level.FULL, gradients=megatron.gradients_of)
        taps.attach()
    for step in range(3):
        norms.append(update(actor, data))
        if tapped and step == 0:
            metrics = told(taps, engine, 1)
    return {"weights": weights(engine.module[0]), "metrics": metrics, "norm": norms[0], "errors": seam.errors}


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


def refusal(act):
    try:
        act()
    except RLWatchError as reason:
        return str(reason)
    return "not refused"


def stages(data):
    """Two stages of a pipeline: refused with the reason, and nothing is read."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    engine = types.SimpleNamespace(module=[], param_dtype=torch.float32)
    return {"reason": megatron.hindrance(engine), "read": megatron.gradients_of(engine) is not None}


def main(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{FOLDER}/rendezvous")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()
    data = drawn()
    with OnCPU():
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
    RANK = int(os.fork() == 0)  # what takes seconds to import is imported once
    try:
        main(RANK)
        if RANK == 0:
            os.wait()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads of gloo may abort a process that ends in order
