"""verl's real worker, engines and loss on a CPU, in this process; and the driver's side of it without Ray."""

import copy
import inspect
import random
from functools import lru_cache
from types import SimpleNamespace

import torch
from omegaconf import open_dict
from tensordict import TensorDict
from train import configuration
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.engine_workers import ActorRolloutRefWorker

from rlwatch.integrations.verl.ranks import accepted

ROWS, N = 8, 16
engine_workers.aggressive_empty_cache = lambda **_: None  # half a second of garbage collection for each worker


def config_of(policy, *overrides):
    """verl's configuration, as its command line would make it."""
    return copy.deepcopy(composed(policy, overrides))


@lru_cache
def composed(policy, overrides):
    """A second each."""
    settings = {"store": policy / "runs", "run_id": "tiny", "steps": 4, "workers": 1, "command": []}
    return configuration(policy, SimpleNamespace(**settings, overrides=overrides))


def make_worker(policy, *overrides, role="actor_rollout_ref", seed=0):
    """An ``ActorRolloutRefWorker`` with its models built; its ranks are this process alone."""
    torch.manual_seed(seed)
    config = config_of(policy, *overrides)
    with open_dict(config):
        config.actor_rollout_ref.actor.optim.total_training_steps = 100
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role=role)
    worker.init_model()
    return worker


def batch_of(seed=0, rows=ROWS, *, lengths=None, masks=None, **changes):
    """A batch as verl's driver sends it to ``update_actor``: jagged responses with random old log-probs."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = lengths or [rng.randint(3, 6) for _ in range(rows)]
    prompts = [torch.randint(4, N, (rng.randint(3, 5),), generator=generator) for _ in range(rows)]
    responses = [torch.randint(4, N, (length,), generator=generator) for length in lengths]
    masks = masks or [torch.ones(length, dtype=torch.long) for length in lengths]

    def spread(scale, shift):
        return [shift + scale * torch.randn(length, generator=generator) for length in lengths]

    fields = {
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)],
        "prompts": prompts,
        "responses": responses,
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": spread(0.3, -2.8),
        "ref_log_prob": spread(0.3, -2.8),
        "rollout_log_probs": spread(0.3, -2.8),
        "advantages": spread(1.0, 0.0),
    }
    fields |= changes
    data = TensorDict({name: jagged(rows) for name, rows in fields.items()}, batch_size=[rows])
    tu.assign_non_tensor(data, **settings())
    return data


def settings(**changes):
    given = {
        "global_batch_size": ROWS, "mini_batch_size": ROWS // 2, "epochs": 1, "seed": 42,
        "dataloader_kwargs": {"shuffle": False}, "temperature": 1.0, "calculate_entropy": False,
        "distillation_use_topk": False, "distillation_only": False,
    }  # fmt: skip
    return {**given, **changes}


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def update(worker, data=None, **changes):
    """verl's metrics of one ``update_actor``: two mini-batches of two micro-batches unless told otherwise."""
    data = batch_of() if data is None else data.clone()
    if changes:
        tu.assign_non_tensor(data, **changes)
    return tu.get(worker.update_actor(data), "metrics")


def log_probs(worker, data=None, *, ref=False, no_adapter=False):
    """Of the policy, or of the reference, over whole sequences."""
    data = batch_of() if data is None else data.clone()
    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=not ref, no_lora_adapter=no_adapter)
    output = worker.compute_ref_log_prob(data) if ref else worker.compute_log_prob(data)
    return output["log_probs"].values()


def weights_of(worker):
    """Copies of the actor's parameters."""
    return {n: p.detach().full_tensor().clone() for n, p in worker.actor.engine.module.named_parameters()}


def state_of(worker):
    """Everything of training that must not change by being watched."""
    moments = worker.actor.engine.optimizer.state_dict()
    return copy.deepcopy((weights_of(worker), moments, worker.actor.engine.lr_scheduler.state_dict()))


def attach(worker, level="full", **settings):
    """Switch rlwatch on, as the driver would."""
    return accepted([worker.rlwatch_attach({"level": level, **settings})])[0]


def untap():
    """Leave verl's registry of losses, which the process shares, as verl made it."""
    for mode, loss in POLICY_LOSS_REGISTRY.items():
        POLICY_LOSS_REGISTRY[mode] = inspect.unwrap(loss)


def measured(worker, step=1):
    """The metrics of what the worker measured since the last call."""
    from rlwatch.integrations.step_tally import StepTally, merge_workers

    (reply,) = accepted([worker.rlwatch_collect(step)])
    parcels = {0: reply["parcel"]} if "parcel" in reply else {}
    return merge_workers(step, StepTally(), parcels)


class LocalGroup:
    """A worker group of one worker in this process: calls answer as Ray's references would be got."""

    def __init__(self, worker):
        self.worker = worker

    def __getattr__(self, name):
        method = getattr(self.worker, name)
        return lambda *args, **kwargs: [method(*args, **kwargs)]
