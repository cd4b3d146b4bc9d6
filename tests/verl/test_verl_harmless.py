"""Training with rlwatch equals training without, bit for bit: parameters, optimizer, schedule, random numbers, metrics."""

import random

import numpy as np
import pytest
import tiny_verl as tiny
import torch

FP16 = "{param_dtype:fp16,reduce_dtype:fp32,buffer_dtype:fp32}"
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(autouse=True)
def untouched():
    yield
    tiny.untap()


def trained(policy, *overrides, level=None, role="actor_rollout_ref", localise=None, **settings):
    """Two updates of several mini- and micro-batches; what came of them."""
    tiny.untap()
    worker = tiny.make_worker(policy, *overrides, role=role)
    if level is not None:
        tiny.attach(worker, level, localise=localise)
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    logged = []
    for step in range(2):
        logged.append(tiny.update(worker, tiny.batch_of(step), **settings))
        if level is not None:
            tiny.measured(worker, step)
    randomness = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    return tiny.state_of(worker), randomness, [without_usage(metrics) for metrics in logged]


def without_usage(metrics):
    """What is left out depends on the clock and on the machine's memory."""
    return {name: list(map(float, values)) for name, values in metrics.items() if not name.startswith(("perf", "mfu"))}


def assert_same(first, second):
    """Equal to the last bit, however nested."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            assert_same(first[name], second[name])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    elif isinstance(first, torch.Tensor):
        whole, other = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (first, second))
        assert torch.equal(whole, other)
    else:
        assert first == second or (first != first and second != second)


@pytest.fixture(scope="module")
def unwatched(policy):
    return trained(policy)


@pytest.mark.parametrize(
    "level",
    ["scalars", *(pytest.param(level, marks=pytest.mark.thorough) for level in ("tokens", "gradients")), "full"],
)
def test_at_every_level(policy, unwatched, level):
    """Two mini-batches of two micro-batches each, twice."""
    assert_same(unwatched, trained(policy, level=level))


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"],
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0.2"],
        pytest.param([f"{ACTOR}.entropy_coeff=0.01"], marks=pytest.mark.thorough),
        pytest.param([f"++{ACTOR}.fsdp_config.mixed_precision={FP16}"], marks=pytest.mark.thorough),
    ],
    ids=["lora", "a loss that draws random numbers", "entropy bonus", "float16"],
)
def test_whatever_is_trained(policy, overrides):
    """LoRA; a loss that uses the random stream itself; another loss term; float16 (its loss scale is off without a GPU)."""
    role = "actor_rollout" if "lora" in overrides[0] else "actor_rollout_ref"
    settings = {"calculate_entropy": True} if "entropy" in overrides[0] else {}

    without = trained(policy, *overrides, role=role, **settings)
    with_rlwatch = trained(policy, *overrides, role=role, level="full", **settings)

    assert_same(without, with_rlwatch)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], marks=pytest.mark.thorough),
        [
            "+actor_rollout_ref.model.override_config.attention_dropout=0.2",
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "actor_rollout_ref.model.use_remove_padding=True",
        ],
        pytest.param(
            ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["plain", "dropout and checkpointing, packed", "lora"],
)
def test_localising_every_step_changes_nothing(policy, overrides):
    """Each of four optimizer steps is looked at with displaced weights and with backwards of single tokens."""
    role = "actor_rollout" if "lora" in str(overrides) else "actor_rollout_ref"
    wish = {"threshold": 1e-9, "culprits": 1}
    looked_at = trained(policy, *overrides, role=role, level="full", localise=wish)

    assert_same(trained(policy, *overrides, role=role), looked_at)


def test_a_bypassed_worker_too(policy):
    """In bypass mode the update is observed in full."""
    plain, bypassed = (tiny.make_worker(policy) for _ in range(2))

    tiny.update(plain)
    tiny.attach(bypassed, "full", bypass=True)
    tiny.update(bypassed)

    assert_same(tiny.state_of(plain), tiny.state_of(bypassed))
    assert "policy/kl_ref_k3" in tiny.measured(bypassed).metrics


def test_nothing_is_touched_before_the_driver_says_so(policy):
    """The methods are there, the instances are as verl made them, and a worker that was not attached says so."""
    worker = tiny.make_worker(policy)

    assert not hasattr(worker, "rlwatch")
    assert "optimizer_step" not in vars(worker.actor.engine)
    assert worker.rlwatch_collect(1)["refused"] == "this worker is not watched"
