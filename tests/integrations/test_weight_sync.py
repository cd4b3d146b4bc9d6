"""The rollout engine's weights, compared after each sync: in a loop of one's own and under TRL with an engine of its own."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import install
from peft import LoraConfig
from test_torch_harmless import Waits, differing, left_behind
from tiny_loop import FakeRun, fresh_policy, train
from tiny_trl import FakeRun as TrlRun
from tiny_trl import make_trainer

import rlwatch
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.trl import watch
from rlwatch.integrations.weight_sync import SyncComparison

pytestmark = pytest.mark.torch
DIFFER, MISSING = "mismatch/weights_differ", "mismatch/adapter_missing"


class Engine:
    """Holds a copy of the policy, which the sync of step ``deaf`` and of those after it leave as it is."""

    def __init__(self, deaf=99):
        self.deaf = deaf

    def watcher(self, policy, optimizer, reference):
        """A watcher of the loop, beside which the engine is made."""
        self.policy, self.held = policy, copy.deepcopy(policy)
        self.run = FakeRun()
        return rlwatch.Watcher(policy, optimizer, ref_model=reference, run=self.run)

    def sync(self, step, watcher):
        """Before the rollouts of the step after ``step``."""
        if step < self.deaf and hasattr(self, "held"):
            self.held.load_state_dict(self.policy.state_dict())
        watcher.synced(getattr(self, "held", None))


def test_weights_that_arrive_are_equal_and_those_that_do_not_are_an_event(tmp_path):
    """With its layers, and when they were equal last."""
    engine = Engine(deaf=3)
    outcome = train(engine.watcher, steps=5, before_step=engine.sync)
    outcome.watcher.finish()
    shares = [metrics[DIFFER] for _, metrics in engine.run.logged]
    events = [(event.step, event.body) for event in engine.run.events if event.kind == "engine_weights"]

    assert shares == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert [step for step, _ in events] == [4]
    assert events[0][1]["equal"] is False
    assert events[0][1]["equal_at"] == 3
    assert events[0][1]["layers"] == ["embed", "head", "layers.0", "layers.1"]


def test_comparing_changes_no_bit_of_training_and_waits_for_no_device():
    """The same parameters, moments and random state as unwatched."""
    engine, counts, outcomes = Engine(), [], []
    for make, before in ((None, None), (engine.watcher, engine.sync)):
        with Waits() as waits:
            outcomes.append(left_behind(train(make, before_step=before)))
        counts.append(waits.seen)

    assert differing(*outcomes) == []
    assert counts[0] == counts[1]
    assert len(engine.run.logged) == 3


@pytest.mark.parametrize("engine", [None, 3, "weights", {"embed.weight": 1.0}, [torch.zeros(3)]])
def test_what_holds_no_tensors_by_name_is_refused_and_training_goes_on(engine):
    """Counted, and said why."""
    run = FakeRun()
    watcher = rlwatch.Watcher(fresh_policy(), run=run)
    watcher.synced(engine)
    watcher.step(1, loss=0.3)

    assert run.counters.snapshot() == {"refused": 1}
    assert DIFFER not in run.logged[0][1]


def test_a_watcher_without_a_model_has_nothing_to_compare_with():
    """It says so."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run)
    watcher.synced(fresh_policy())
    watcher.step(1, loss=0.3)

    assert run.counters.snapshot() == {"refused": 1}


@pytest.mark.parametrize("shape", ["module", "state", "pairs"])
def test_an_engine_is_a_module_its_state_or_pairs(shape):
    """Wrapped or not."""
    policy, run = fresh_policy(), FakeRun()
    wrapped = torch.nn.ModuleDict({"module": copy.deepcopy(policy)})
    given = {"module": wrapped, "state": wrapped.state_dict(), "pairs": list(wrapped.named_parameters())}
    watcher = rlwatch.Watcher(policy, run=run)
    watcher.synced(given[shape])
    watcher.step(1, loss=0.3)

    assert (run.logged[0][1][DIFFER], run.logged[0][1]["mismatch/weights_compared"]) == (0.0, 1.0)


# Under TRL.


def trained(tmp_path, sync=None, **config):
    """A trainer whose engine lives in its own process, where TRL finds it; ``sync(engine, step)`` replaces its sync."""
    trainer, run = make_trainer(tmp_path, max_steps=4, learning_rate=3e-3, **config), TrlRun()
    install(trainer)
    engine = trainer.vllm_generation
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=engine.model))
    engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    if sync is not None:
        engine.sync_weights = lambda: sync(engine, trainer.state.global_step)
    watch(trainer, run=run)
    trainer.train()
    assert run.counters.snapshot() == {}
    return run


def merged(engine, step):
    """As TRL sends a model with an adapter."""
    policy = engine.trainer.model
    policy.merge_adapter()
    send(engine, policy)
    policy.unmerge_adapter()


def without_adapter(engine, step):
    """The base weights alone, once the adapter has learnt something."""
    if step < 2:
        merged(engine, step)
    else:
        send(engine, engine.trainer.model)


def send(engine, policy):
    held = dict(engine.model.named_parameters())
    for name, parameter in policy.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if plain in held:
            held[plain].data.copy_(parameter.data)


def test_an_engine_of_trl_that_gets_the_weights_is_equal_at_each_step(tmp_path):
    """TRL's own call of the sync is the moment."""
    run = trained(tmp_path)

    assert [tap[DIFFER] for tap in run.taps().values()] == [0.0] * 4
    assert [event for event in run.events if event.kind == "engine_weights"] == []


def test_a_sync_of_trl_that_leaves_out_a_layer_is_an_event(tmp_path):
    """From the step on in which the policy has moved away from what the engine kept."""

    def all_but_the_head(engine, step):
        policy = dict(engine.trainer.model.named_parameters())
        for name, parameter in engine.model.named_parameters():
            if step == 0 or not name.startswith("model.layers.1."):
                parameter.data.copy_(policy[name].data)

    run = trained(tmp_path, all_but_the_head)
    shares = [tap[DIFFER] for tap in run.taps().values()]
    (event,) = [event for event in run.events if event.kind == "engine_weights"]

    assert shares[0] == 0.0 < min(shares[1:])
    assert event.body["layers"] == ["model.layers.1"]


@pytest.mark.parametrize(("sync", "missing"), [(merged, 0.0), (without_adapter, 1.0)])
def test_an_adapter_that_is_not_loaded_is_seen_under_trl(tmp_path, sync, missing):
    """And one that is merged is not."""
    run = trained(tmp_path, sync, peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    last = list(run.taps().values())[-1]

    assert last[MISSING] == missing
    assert (last[DIFFER] > 0) == (missing > 0)


def test_weights_that_a_sync_does_not_send_count_as_ones_that_differ():
    """Of an engine that cannot be read: what passes is compared, in any dtype, and handed on as it is."""
    policy, error_boundary, taken = fresh_policy(), ErrorBoundary(), []
    whole = [(name, tensor.detach()) for name, tensor in policy.named_parameters()]
    halved = [(name, tensor.bfloat16()) for name, tensor in whole]
    wrong = [(name, tensor + 1 if name == "head.bias" else tensor) for name, tensor in whole]
    for pairs in (whole, halved, [pair for pair in whole if "layers.1" not in pair[0]], wrong):
        comparison = SyncComparison()
        handed = list(comparison.sent(policy, iter(pairs), error_boundary, taken.append))
        assert all(one is other for one, other in zip(handed, pairs, strict=True))
    equal, cast, missing, off = (
        {name: stat.value().item() for name, stat in stats.items() if stat.count > 0} for stats in taken
    )

    assert equal[DIFFER] == cast[DIFFER] == 0.0
    assert missing[DIFFER] == pytest.approx(4 / 11)
    assert missing["mismatch/weights_differ/layers.1"] == 1.0
    assert off[DIFFER] == pytest.approx(1 / 11)
    assert list(SyncComparison().sent(policy, iter([]), error_boundary, taken.append)) == []
    assert len(list(SyncComparison().sent(policy, iter([("other", torch.ones(2))]), error_boundary, taken.append))) == 1
    assert error_boundary.errors == 0
