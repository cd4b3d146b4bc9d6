"""Where localisation runs: each kind of loss, model and trainer with a plant of its own; the table of the guide.

    python benchmarks/blame_where.py [--only WORD] [--seeds 3]
    python benchmarks/blame_where.py --ranks            # TRL on two gloo processes: DDP, FSDP2
    python benchmarks/blame_where.py --zero             # the same under DeepSpeed: ZeRO-1 and -2, float32 and bfloat16

Twelve healthy steps, and one with the plant, in a loop of one's own (a real ``Watcher``) or in the real TRL trainer.
``right``: verdict and cause are, and every planted token is recorded. Where a trainer cannot be looked into, the row
has the reason that is given. accelerate takes neither FSDP nor DeepSpeed for a launch on CPUs: this script tells it
that the processes are theirs, which then run as on GPUs. On several ranks each training (two micro-batches a step, a KL
term, clipping) runs twice more, without localisation and with every step localised, and ``the same`` says whether all
weights came out bit for bit alike.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blame import (
    DRIFT,
    GROUP,
    GSPO,
    KL,
    LAYERED,
    PPO,
    PROMPT,
    RATIO,
    RESPONSE,
    REWARD,
    SETTINGS,
    TASKS,
    WEIGHTED,
    Batch,
    Expected,
    at_tokens,
    fresh,
    one_row,
    one_token_drifted,
    outputs,
    policy,
    recorded,
)  # fmt: skip
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import rlwatch
from rlwatch.integrations.localising import Localise

HEALTHY = 12
Plant = Callable[["Step", int], Sequence[tuple[int, int]]]
"""Changes a step; returns the tokens that it made large, where these are single ones."""


@dataclass
class Step(Batch):
    """Rollouts, the tokens that a selection keeps, and the experts that the rollout engine chose (B, L, layers * k)."""

    keep: Tensor | None = None
    routes: Tensor | None = None


def plain(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response."""
    out = outputs(model, ids, PROMPT)
    return out.logp, out.entropy


@dataclass(frozen=True)
class Case:
    """One row: model, loss and forward, and the plant with what is right for it."""

    plant: Plant
    expected: Expected
    loss: Callable[[Any, Tensor, Tensor, Step], Tensor] = PPO
    model: Callable[[int], Any] = lambda seed: policy(seed=seed, std=0.1)
    forward: Callable[..., tuple[Tensor, Tensor]] = plain
    prepare: Callable[[Any, Step], Step] = lambda _model, step: step
    says: str = ""


def token(name: str, change: Callable[[Tensor], Tensor], *, negative: bool = False) -> Plant:
    """One token's ``name`` changed, of those that count."""

    def plant(step: Step, seed: int) -> Sequence[tuple[int, int]]:
        before = getattr(step, name).clone()
        counted = step.mask if step.keep is None else step.mask & step.keep
        at_tokens(name, 1, change, negative=negative)(replace(step, mask=counted), seed)
        return [tuple(at) for at in (getattr(step, name) != before).nonzero().tolist()]

    return plant


def whole(change: Callable[[Any, int], None]) -> Plant:
    """A plant that is not of single tokens."""

    def plant(step: Step, seed: int) -> Sequence[tuple[int, int]]:
        change(step, seed)
        return []

    return plant


HUGE = token("advantages", lambda a: torch.where(a < 0, -400.0, 400.0))

# Losses.


def selected(model: Any, logp: Tensor, entropy: Tensor, b: Step) -> Tensor:
    """The policy's term of the tokens of highest entropy only."""
    kept = b.mask if b.keep is None else b.mask & b.keep
    return PPO(model, logp, entropy, replace(b, mask=kept))


def top_entropy(model: Any, step: Step) -> Step:
    """Keep the fifth of the tokens with the highest entropies."""
    with torch.no_grad():
        entropy = outputs(model, step.ids, PROMPT).entropy
    return replace(step, keep=entropy >= entropy[step.mask].quantile(0.8))


def penalty_only(model: Any, logp: Tensor, entropy: Tensor, b: Step) -> Tensor:
    """No reward tells anything: k3 alone."""
    return PPO(model, logp, entropy, replace(b, advantages=torch.zeros_like(b.advantages), beta=0.5))


def by_response(_model: Any, logp: Tensor, _entropy: Tensor, b: Step) -> Tensor:
    """GSPO: ratios of responses, and the mean of responses' means."""
    lengths = b.mask.sum(1, keepdim=True)
    ratio = ((logp - b.old) * b.mask).sum(1, keepdim=True).div(lengths).exp().expand_as(logp)
    term = -torch.minimum(ratio * b.advantages, ratio.clamp(0.8, 1.2) * b.advantages)
    return ((term * b.mask).sum(1) / lengths[:, 0]).mean()


def of_engine(_model: Any, logp: Tensor, _entropy: Tensor, b: Step, *, cap: float, level: str) -> Tensor:
    """Log-probs of the rollout engine corrected for, by truncated importance weights."""
    log_weight = b.old - b.rollout
    if level == "response":
        log_weight = ((log_weight * b.mask).sum(1) / b.mask.sum(1)).unsqueeze(1).expand_as(logp)
    ratio = (logp - b.old).exp()
    term = -torch.minimum(ratio * b.advantages, ratio.clamp(0.8, 1.2) * b.advantages)
    return (term * log_weight.exp().clamp(max=cap) * b.mask).sum() / b.mask.sum()


def truncated(model: Any, logp: Tensor, entropy: Tensor, b: Step) -> Tensor:
    """At 2, token by token."""
    return of_engine(model, logp, entropy, b, cap=2.0, level="token")


def of_responses(model: Any, logp: Tensor, entropy: Tensor, b: Step) -> Tensor:
    """A weight for each response."""
    return of_engine(model, logp, entropy, b, cap=1e4, level="response")


def stale_engine(step: Step, seed: int) -> None:
    """The engine took the tokens of a response for e^4 times less likely."""
    step.rollout[int(step.advantages[:, 0].abs().argsort(descending=True)[seed % 3])] -= 4.0


def with_tools(_model: Any, step: Step) -> Step:
    """Tokens 3 to 6 of each response are what a tool answered."""
    mask = step.mask.clone()
    mask[:, 3:7] = False
    return replace(step, mask=mask)


# Models.


class Straight(torch.autograd.Function):
    """Rounds forward, and passes the gradient on as it came."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x * 8).round() / 8

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def rounded(seed: int) -> Any:
    """A policy with a straight-through estimator inside."""
    model = policy(seed=seed, std=0.1)
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, out: Straight.apply(out))
    return model


class Routed(TorchFunctionMode):
    """Experts are the given ones, (B, L, layers * k), whatever the router says; its weights are for these."""

    def __init__(self, routes: Tensor, k: int) -> None:
        super().__init__()
        self._left = list(routes.flatten(0, 1).split(k, -1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        chosen = self._left.pop(0)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class Chosen(TorchFunctionMode):
    """Keeps which experts were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self.indices.append(result.indices)
        return result


EXPERTS = 2
"""Each token goes to so many of four."""


def mixture(seed: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=EXPERTS, attn_implementation="eager",
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config).train()


def engine_routes(model: Any, step: Step) -> Step:
    """Experts as an engine with noise of its own chose them, and log-probs that belong to these."""
    with torch.no_grad(), Chosen() as chosen:
        torch.manual_seed(0)
        noise = model.model.embed_tokens.register_forward_hook(lambda _m, _i, x: x + 0.1 * torch.randn_like(x))
        outputs(model, step.ids, PROMPT)
        noise.remove()
    rows = len(step.ids)
    routes = torch.cat([one.view(rows, -1, EXPERTS) for one in chosen.indices], -1)
    with torch.no_grad():
        logp = routed(model, step.ids, routes)[0]
    noise_of = step.old - step.ref
    return replace(step, routes=routes, old=logp + noise_of, ref=logp, rollout=logp)


def routed(model: Any, ids: Tensor, routes: Tensor) -> tuple[Tensor, Tensor]:
    """Forward with the engine's experts."""
    with Routed(routes, EXPERTS):
        out = outputs(model, ids, PROMPT)
    return out.logp, out.entropy


class MegatronLayer(nn.Module):
    """A block under Megatron's names: each position sees itself and the mean of what came before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attention = nn.ModuleDict(
            {"linear_qkv": nn.Linear(width, width), "linear_proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(width, width), "linear_fc2": nn.Linear(width, width)})

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, width)."""
        values = self.self_attention["linear_qkv"](nn.functional.layer_norm(x, x.shape[-1:]))
        x = x + self.self_attention["linear_proj"](values.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
        return x + self.mlp["linear_fc2"](self.mlp["linear_fc1"](x).relu())


class Megatron(nn.Module):
    """A GPT whose parameters are called as Megatron-LM calls them, behind its two wrappers."""

    def __init__(self, width: int = 32, vocab: int = 64) -> None:
        super().__init__()
        embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(vocab, width)})
        decoder = nn.ModuleDict({"layers": nn.ModuleList([MegatronLayer(width) for _ in range(3)])})
        inner = nn.ModuleDict({"embedding": embedding, "decoder": decoder, "output_layer": nn.Linear(width, vocab)})
        self.module = nn.ModuleDict({"module": inner})
        self.config = type("Config", (), {"vocab_size": vocab})()

    def logits(self, ids: Tensor) -> Tensor:
        """(B, L, V)."""
        inner: Any = self.module["module"]
        x = inner["embedding"]["word_embeddings"](ids)
        for layer in inner["decoder"]["layers"]:
            x = layer(x)
        return inner["output_layer"](x)


def megatron(seed: int) -> Any:
    torch.manual_seed(seed)
    return Megatron()


def megatron_forward(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    every = model.logits(ids[:, :-1]).log_softmax(-1)[:, PROMPT - 1 :]
    logp = every.gather(-1, ids[:, PROMPT:, None])[..., 0]
    return logp, -(every.exp() * every).sum(-1)


def rescaled(model: Any) -> None:
    """The same function, with a gradient sixty times as large in one layer."""
    attention = model.module["module"]["decoder"]["layers"][1].self_attention
    with torch.no_grad():
        attention["linear_qkv"].weight /= 60.0
        attention["linear_qkv"].bias /= 60.0
        attention["linear_proj"].weight *= 60.0


CASES: dict[str, Case] = {
    "GSPO: ratios of responses": Case(whole(one_token_drifted), DRIFT, GSPO),
    "GSPO: mean of responses' means": Case(whole(one_row), RESPONSE, by_response),
    "top-entropy mask (a fifth of the tokens)": Case(HUGE, REWARD, selected, prepare=top_entropy),
    "KL penalty alone": Case(token("ref", lambda x: x + 8), KL, penalty_only),
    "engine's log-probs, weight of a token": Case(
        token("rollout", lambda x: x - 6), Expected(("token",), ["importance weight"]), WEIGHTED,
    ),
    "engine's log-probs, weights truncated at 2": Case(HUGE, REWARD, truncated),
    "engine's log-probs, weights of responses": Case(
        whole(stale_engine), Expected(["response"], ["importance weight"]), of_responses,
    ),
    "tool calls masked out": Case(
        token("old", lambda x: x - 6, negative=True), RATIO, prepare=with_tools,
    ),
    "mixture of experts": Case(token("old", lambda x: x - 6, negative=True), RATIO, model=mixture),
    "mixture of experts, the engine's routing replayed": Case(
        token("old", lambda x: x - 6, negative=True), RATIO, model=mixture, forward=routed, prepare=engine_routes,
    ),
    "a straight-through estimator": Case(HUGE, REWARD, model=rounded),
    "Megatron's names: a token": Case(HUGE, REWARD, model=megatron, forward=megatron_forward),
    "Megatron's names: a layer": Case(
        whole(lambda _step, _seed: None), LAYERED, model=megatron, forward=megatron_forward, says="decoder.layers.1",
    ),
}  # fmt: skip


def fresh_step(case: Case, model: Any, seed: int) -> Step:
    """Healthy rollouts for a model of any kind."""
    if hasattr(model, "logits"):  # its own forward makes the log-probs
        batch = fresh(policy(seed=0, std=0.1), seed)
        with torch.no_grad():
            logp = case.forward(model, batch.ids)[0]
        batch.old, batch.ref, batch.rollout = (x - batch.old + logp for x in (batch.old, batch.ref, batch.rollout))
    else:
        batch = fresh(model, seed)
    return case.prepare(model, Step(**vars(batch)))


def judged(case: Case, seed: int) -> tuple[bool, str]:
    """Whether it is told right, and what is told."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integrations"))
    from tiny_loop import FakeRun

    model, run = case.model(seed), FakeRun()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watcher = rlwatch.Watcher(model, optimizer, run=run, localise=SETTINGS, strict=True)
    places: Sequence[tuple[int, int]] = []
    for number in range(1, HEALTHY + 2):
        step = fresh_step(case, model, 1000 * seed + number)
        if number > HEALTHY:
            places = case.plant(step, seed)
            if case.expected is LAYERED:
                rescaled(model)
        optimizer.zero_grad()
        watcher.rollouts(
            rewards=step.advantages[:, 0], groups=[i // GROUP for i in range(len(step.ids))],
            tasks=[TASKS[i // GROUP] for i in range(len(step.ids))], ids=step.ids[:, PROMPT:], mask=step.mask,
        )  # fmt: skip
        extra = () if step.routes is None else (step.routes,)
        logp, entropy = watcher.forward(case.forward, model, step.ids, *extra)
        engine = case.loss in (WEIGHTED, truncated, of_responses)
        watcher.observe(
            logp=logp, entropy=entropy, ids=step.ids[:, PROMPT:], mask=step.mask,
            advantages=torch.zeros_like(step.advantages) if case.loss is penalty_only else step.advantages,
            old_logp=step.old, ref_logp=step.ref, rollout_logp=step.rollout if engine else None,
        )  # fmt: skip
        case.loss(model, logp, entropy, step).backward()
        watcher.gradients()
        optimizer.step()
        watcher.step(number)
    bodies = {event.step: event.body for event in run.events if event.kind == "gradient_localised"}
    body = bodies.get(HEALTHY + 1)
    if body is None:
        return False, "no spike was seen"
    if body["why_not"]:
        return False, body["why_not"]
    known = set(places) <= recorded(run.spikes, HEALTHY + 1) and case.says in body["message"]
    right = body["verdict"] in case.expected.verdicts and body["cause"] in case.expected.causes and known
    return right, f"{body['verdict']}, {body['cause']} | {body['method']}, gap {body['gap']} | {body['message']}"


# The real TRL trainer on two processes.

SCENARIOS = {"TRL, DDP": "ddp", "TRL, FSDP2": "fsdp2"}
ZERO = {
    "TRL, DeepSpeed ZeRO-1": "zero1", "TRL, DeepSpeed ZeRO-2": "zero2",
    "TRL, DeepSpeed ZeRO-1, bfloat16": "zero1-bf16", "TRL, DeepSpeed ZeRO-2, bfloat16": "zero2-bf16",
}  # fmt: skip
TRL_STEPS = 12
WATCHED = {"never": False, "run": SETTINGS, "every": Localise(threshold=1e-12, share=0.99)}
"""Trainings of a scenario: with no step localised, with spikes, with every step."""


def as_fsdp() -> None:
    """Tell accelerate that these CPU processes are FSDP2's."""
    from accelerate import state
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    }  # fmt: skip
    original = state.AcceleratorState.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = kwargs.get("fsdp_plugin") or FullyShardedDataParallelPlugin()

    state.AcceleratorState.__init__ = made


def as_deepspeed() -> None:
    """Tell accelerate that these CPU processes are DeepSpeed's, which talk through gloo."""
    import deepspeed.ops
    from accelerate import state
    from accelerate.utils import DistributedType
    from transformers import training_args

    # What it would compile for messages between the processes of one machine; gloo carries them as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    state.PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_GPU)
    training_args.is_torch_bf16_gpu_available = lambda: True


def settings_of(scenario: str) -> dict[str, Any]:
    """Training arguments; accelerate is told what the processes are."""
    if scenario == "fsdp2":
        as_fsdp()
    if not scenario.startswith("zero"):
        return {}
    as_deepspeed()
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"zero_optimization": {"stage": int(scenario[4])}, "zero_allow_untested_optimizer": True}
    low = {"bf16": {"enabled": True}} if scenario.endswith("bf16") else {}
    return {"deepspeed": zero | low | dict.fromkeys(names, "auto"), "use_cpu": False, "bf16": bool(low)}


def train_rank(scenario: str, folder: Path) -> None:
    """One rank of real GRPO trainings whose last step has an off-policy token on rank 1: those of :data:`WATCHED`."""
    for room in ("integrations", "gradloc", "localising"):
        sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / room))
    rank, more = int(os.environ["RANK"]), settings_of(scenario)
    import tiny_trl
    from planted import Planted, off_policy
    from transformers import Qwen2ForCausalLM

    from rlwatch.integrations.trl import watch

    # Each rank reads a policy of its own: saved before there is a process group, in which only rank 0 writes.
    tiny_trl.model_on_disk(folder / f"policy{rank}")
    left: dict[str, Any] = {}
    for name, localise in WATCHED.items():
        policy = Qwen2ForCausalLM.from_pretrained(folder / f"policy{rank}")
        trainer = tiny_trl.make_trainer(
            folder / f"{name}{rank}", model=policy, num_iterations=2, max_steps=TRL_STEPS, learning_rate=1e-5,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, beta=0.1, **more
        )  # fmt: skip
        watch(trainer, store=folder / "store", run_id=name, sigterm=False, localise=localise)
        planted = Planted(trainer, off_policy(size=1e3), step=TRL_STEPS) if rank == 1 else None
        begun = time.perf_counter()
        trainer.train()
        left[f"{name} s"] = time.perf_counter() - begun
        left[name] = bits(trainer.accelerator.unwrap_model(trainer.model))
        left["places"] = None if planted is None else planted.places
    (folder / f"left{rank}.json").write_text(json.dumps(left))


def bits(model: nn.Module) -> list[str]:
    """Checksum of each weight, as far as it is here."""
    local = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    return [hashlib.sha256(p.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for p in local]


def of_ranks(scenario: str) -> tuple[bool, str]:
    """Whether the token is named, and what is told."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        around = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
            "ACCELERATE_TORCH_DEVICE": "cpu",
        }  # fmt: skip
        around["ACCELERATE_USE_DEEPSPEED" if scenario.startswith("zero") else "ACCELERATE_USE_CPU"] = "true"
        probe.close()
        command = [sys.executable, __file__, "--scenario", scenario, "--folder", folder]
        ranks = [
            subprocess.Popen(
                command, env={**around, "RANK": str(i), "LOCAL_RANK": str(i)}, text=True, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for i in range(2)
        ]  # fmt: skip
        errors = [rank.communicate(timeout=1200)[1] for rank in ranks]
        store = Path(folder) / "store"
        if any(rank.returncode for rank in ranks) or not store.exists():
            return False, "the trainer did not run: " + " ".join(errors[0].strip().splitlines()[-1:])
        events = list(rlwatch.open_store(store).events("run"))
        left = [json.loads((Path(folder) / f"left{i}.json").read_text()) for i in range(2)]
        (planted,) = left[1]["places"]
        same = all(rank[name] == rank["never"] for rank in left for name in WATCHED)
        missing = [e.body for e in events if e.kind == "not_available"]
    body = next((e.body for e in events if e.kind == "gradient_localised" and e.step == TRL_STEPS), None)
    if body is None or body["why_not"]:
        return False, json.dumps(missing) if body is None else str(body["why_not"])
    worst = body["culprits"][0] if body["culprits"] else {}
    place = [worst.get(name) for name in ("rank", "microbatch", "row", "position")]
    right = place == [1, 0, *planted] and body["verdict"] == "token" and body["cause"] == "token ratio"
    alike = "the same" if same else "not the same"
    step_s, cost = left[0]["never s"] / TRL_STEPS, body["cost"]
    price = f"{cost['forwards']} forwards, {cost['backwards']} backwards, {cost['seconds'] / step_s:.1f} steps"
    return right and same, f"{alike} | {body['method']}, gap {body['gap']} | {price} | {body['message']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--ranks", action="store_true", help="TRL on two processes")
    parser.add_argument("--zero", action="store_true", help="TRL on two processes under DeepSpeed")
    parser.add_argument("--scenario", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.scenario:
        return train_rank(options.scenario, options.folder)
    if options.zero and importlib.util.find_spec("deepspeed") is None:
        parser.error("--zero needs DeepSpeed, which is not installed here: pip install deepspeed")
    scenarios = (SCENARIOS if options.ranks else {}) | (ZERO if options.zero else {})
    for name, scenario in scenarios.items():
        if options.only in name:
            right, said = of_ranks(scenario)
            print(f"| {name} | {'right' if right else 'not right'} | {said}", flush=True)
    for name, case in CASES.items() if not scenarios else ():
        if options.only in name:
            with contextlib.redirect_stderr(io.StringIO()):
                found = [judged(case, seed) for seed in range(options.seeds)]
            said = next((said for right, said in found if not right), found[0][1])
            print(f"| {name} | {sum(right for right, _ in found)} of {len(found)} | {said}", flush=True)
    return None


if __name__ == "__main__":
    main()
