"""verl's real ``Tracking`` with our backend; trainers of other versions; what stays when hooks do not fit."""

import logging
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import verl.utils.tracking as theirs
from verl.trainer.ppo import ray_trainer
from verl.utils.tracking import Tracking

from rlwatch.errors import ConfigError
from rlwatch.integrations.verl import attach
from rlwatch.integrations.verl.attach import FitSession, fitting
from rlwatch.integrations.verl.heartbeat import IN_PLACE
from rlwatch.records import RunState
from rlwatch.store.url import open_store


@pytest.fixture
def where(tmp_path):
    return str(tmp_path / "runs")


@pytest.fixture
def config(where):
    return {"trainer": {"rlwatch": {"store": where}, "resume_mode": "disable"}}


def recorded(where):
    store = open_store(where)
    (run,) = store.runs()
    merged = {}
    for record in store.records(run.run_id):
        merged.setdefault(record.step, {}).update(record.metrics)
    return run, merged, store.events(run.run_id)


def test_the_name_is_known_and_does_nothing_by_itself(where, config):
    """Loaded by its entry point when verl was imported; a training that does not name it is none of its business."""
    assert "rlwatch" in Tracking.supported_backend

    tracker = Tracking("math", "seed3", ["console"], config)
    tracker.log({"a": 1.0}, 1)
    tracker.finish()

    assert list(tracker.logger) == ["console"]
    assert open_store(where).runs() == []


def test_scalars_under_verls_own_names(where, config, caplog):
    """Numbers of every kind, NaN and infinities among them; everything else is left out. One warning says: scalars."""
    with caplog.at_level(logging.WARNING, "rlwatch"):
        tracker = Tracking("math", "seed3", ["rlwatch"], config)
    tracker.log({"actor/entropy": np.float64(0.5), "actor/grad_norm": math.nan, "n": 3, "name": "x", "none": None}, 1)
    tracker.log({"t": torch.tensor(2.0), "inf": np.float32(-np.inf), "flag": True, "many": np.zeros(3)}, step=2)
    tracker.finish()

    run, steps, _ = recorded(where)
    assert (run.project, run.name, run.source, run.state) == ("math", "seed3", "verl", RunState.FINISHED)
    assert {k: v for k, v in steps[1].items() if "rlwatch" not in k} == {
        "actor/entropy": 0.5, "actor/grad_norm": pytest.approx(math.nan, nan_ok=True), "n": 3.0,
    }  # fmt: skip
    assert {k: v for k, v in steps[2].items() if "rlwatch" not in k} == {"t": 2.0, "inf": -math.inf}
    assert caplog.text.count("but no tokens, gradients or commands: this trainer is no v1 PPOTrainer") == 1


def test_a_single_name_will_do(where, config):
    """``trainer.logger=rlwatch``."""
    Tracking("math", "seed3", "rlwatch", config).finish()

    assert recorded(where)[0].state is RunState.FINISHED


def test_finishing_twice_is_finishing_once(where, config):
    """verl finishes in a ``finally`` and again when the object goes."""
    tracker = Tracking("math", "seed3", ["rlwatch"], config)
    tracker.finish(exit_code=1)
    tracker.finish()
    del tracker

    run, _, _ = recorded(where)
    assert run.state is RunState.CRASHED
    assert run.state_reason == "verl ended with exit code 1"


def test_what_is_configured_wrongly_stops_set_up(config):
    """As a wrong wandb key would."""
    config["trainer"]["rlwatch"]["leevl"] = "full"

    with pytest.raises(ConfigError, match="leevl"):
        Tracking("math", "seed3", ["rlwatch"], config)


def test_logging_never_raises_into_training(where, config):
    """Whatever is wrong with us while it runs."""
    tracker = Tracking("math", "seed3", ["rlwatch"], config)
    backend = tracker.logger["rlwatch"]

    tracker.log({"a": 1.0}, "no step")
    tracker.log("not even a mapping", "nor a step")

    assert backend.run.counters["errors"] == 2
    tracker.finish()


def old_tracking():
    """As in verl 0.5: no ``finish``, the end comes with ``__del__``."""

    class OldTracking:
        supported_backend = ["console"]  # noqa: RUF012  (as verl has it)

        def __init__(self, project_name, experiment_name, default_backend="console", config=None):
            for name in [default_backend] if isinstance(default_backend, str) else default_backend:
                assert name in self.supported_backend, f"{name} is not supported"
            self.logger = {}

        def log(self, data, step, backend=None):
            for instance in self.logger.values():
                instance.log(data=data, step=step)

        def __del__(self):
            pass

    return types.SimpleNamespace(Tracking=OldTracking)


def test_older_versions_record_their_scalars(where, config):
    """No ``finish`` to wrap: the run ends with the object."""
    module = old_tracking()
    assert attach.install_tracking(module) == IN_PLACE
    assert attach.install_tracking(module) == IN_PLACE, "once is enough"

    tracker = module.Tracking("math", "seed3", ["console", "rlwatch"], config)
    tracker.log({"critic/score/mean": 0.25}, 1)
    del tracker

    run, steps, _ = recorded(where)
    assert run.state is RunState.FINISHED
    assert steps[1]["critic/score/mean"] == 0.25


def test_a_legacy_trainer_records_what_ended_it(where, config):
    """``use_v1=false``, and recipes built on it: their Tracking is local to ``fit``, the cause would be lost with it."""

    class RayPPOTrainer:
        def fit(self):
            """As verl has it."""

    class RayDAPOTrainer(RayPPOTrainer):
        def fit(self):
            self.global_steps = 2
            tracker = Tracking("math", "seed3", ["rlwatch"], config)
            tracker.log({"a": 1.0}, 1)
            raise ValueError("the reward function broke")

    attach.install_legacy(types.SimpleNamespace(RayPPOTrainer=RayPPOTrainer))

    with pytest.raises(ValueError, match="the reward function broke"):
        RayDAPOTrainer().fit()

    run, _, events = recorded(where)
    assert (run.state, run.state_reason) == (RunState.CRASHED, "ValueError: the reward function broke")
    (event,) = [event for event in events if event.kind == "exception"]
    assert event.step == 2
    assert "the reward function broke" in event.body["traceback"]


def test_the_real_legacy_trainer_is_wrapped():
    """The class is there in 0.9, deprecated."""
    assert ray_trainer.RayPPOTrainer.__init__.__code__.co_filename == attach.__file__


def test_a_legacy_run_ends_with_its_fit(where, config):
    """verl before 0.9 has no ``finish``: collected later, in whatever thread, its Tracking would end the run."""
    kept = []

    class RayPPOTrainer:
        def fit(self):
            kept.append(Tracking("math", "seed3", ["rlwatch"], config))
            return "what verl returns"

    attach.install_legacy(types.SimpleNamespace(RayPPOTrainer=RayPPOTrainer))

    assert RayPPOTrainer().fit() == "what verl returns"
    assert recorded(where)[0].state is RunState.FINISHED


def test_a_tracking_may_be_collected_in_any_thread(where, config, caplog):
    """Also in one that ending the run waits for: it was "cannot join current thread", and the run never ended."""
    module = old_tracking()
    attach.install_tracking(module)
    tracker = module.Tracking("math", "seed3", ["console", "rlwatch"], config)
    run = tracker.logger["rlwatch"].run
    with caplog.at_level(logging.WARNING, "rlwatch"):
        collector = threading.Thread(target=tracker.__del__)
        collector.start()
        collector.join()
        for thread in [thread for thread in threading.enumerate() if thread.name == "rlwatch-end"]:
            thread.join()

    assert not run.active
    assert recorded(where)[0].state is RunState.FINISHED
    assert "could not" not in caplog.text


class Stricter:
    """A Tracking of some future verl."""

    supported_backend = ("console",)

    def __init__(self, project_name, experiment_name, default_backend="console", config=None, *, tags=()):
        assert set(default_backend) <= set(self.supported_backend)
        self.logger, self.tags = {}, tags

    def finish(self, exit_code=0, *, quiet=True):
        """Of every logger."""


def test_what_a_newer_tracking_takes_is_passed_on(where, config):
    """Parameters nobody knew, and names that are no list."""
    assert attach.install_tracking(types.SimpleNamespace(Tracking=Stricter)) == IN_PLACE
    tracker = Stricter("math", experiment_name="seed3", default_backend=["rlwatch"], config=config, tags=("a",))
    tracker.finish(quiet=False)

    assert tracker.tags == ("a",)
    assert Stricter.supported_backend == ["console", "rlwatch"]
    assert recorded(where)[0].state is RunState.FINISHED


def test_a_tracking_that_is_called_otherwise_is_left_alone():
    """verl then refuses the name itself, at set-up; the heartbeat has the reason."""

    class Other:
        supported_backend = ["console"]  # noqa: RUF012  (as verl has it)

        def __init__(self, run, backends):
            """Of a verl we cannot read."""

    module = types.SimpleNamespace(Tracking=Other)

    assert (
        attach.install_tracking(module)
        == "rlwatch is no logger of this verl: Other.__init__ has no parameter 'project_name'"
    )
    assert Other.supported_backend == ["console"]


def test_what_a_worker_raised_is_the_cause(where, config):
    """Ray wraps it; the run's end names the error inside."""
    import ray

    inside = MemoryError("CUDA out of memory")
    session = FitSession()
    there = 'ray::update_actor() (pid=9)\n  File "worker.py", line 7, in update\nMemoryError: CUDA out of memory'
    error = ray.exceptions.RayTaskError("update_actor", there, inside)
    trackers = []

    def fit():
        trackers.append(Tracking("math", "seed3", ["rlwatch"], config))
        raise error

    with pytest.raises(ray.exceptions.RayTaskError), fitting(session, types.SimpleNamespace(global_steps=7)):
        fit()

    run, _, events = recorded(where)
    assert trackers[0].logger["rlwatch"].run is session.run
    assert run.state_reason == "MemoryError: CUDA out of memory"
    assert 'File "worker.py", line 7, in update' in events[-1].body["traceback"]


def test_our_name_is_the_only_change_to_the_class():
    """Its methods are verl's, wrapped; the module's other names are untouched."""
    assert Tracking.__init__.__wrapped__.__qualname__ == "Tracking.__init__"
    assert Tracking.finish.__wrapped__.__qualname__ == "Tracking.finish"
    assert not hasattr(Tracking.log, "__wrapped__")
    assert theirs.Tracking is Tracking


SAY = """
import verl, verl.utils.tracking as t
print("rlwatch" in t.Tracking.supported_backend, flush=True)
if "rlwatch" not in t.Tracking.supported_backend:
    t.Tracking("p", "n", ["console", "rlwatch"], {"trainer": {}})
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A process that knows nothing of us, begun once for each policy: what it said, and its state directory."""
    known = {}

    def begin(policy):
        if policy not in known:
            state = tmp_path_factory.mktemp(policy)
            environment = {**os.environ, "RLWATCH_STATE_DIR": str(state), "VERL_USE_EXTERNAL_PLUGINS": policy}
            command = [sys.executable, "-c", SAY]
            out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            known[policy] = out, state
        return known[policy]

    return begin


@pytest.mark.parametrize(("policy", "there"), [("auto", True), ("none", False)])
def test_verl_loads_the_plugin_by_its_entry_point(begun, policy, there):
    """It leaves its heartbeat, which the doctor hears."""
    out, state = begun(policy)

    assert out.stdout.strip().endswith(str(there)), out.stderr
    assert len(list((state / "verl").glob("*.json"))) == there


LEGACY = Path(__file__).parent / "legacy_fit.py"


@pytest.fixture(
    scope="module", params=[(), pytest.param(("--break",), marks=pytest.mark.thorough)], ids=["to the end", "broken"]
)
def unplugged(request, tmp_path_factory):
    """A verl that loads no plugins, as before 0.9, started by the launcher: its own ``run_ppo``, Ray, loop, Tracking."""
    folder = tmp_path_factory.mktemp("unplugged")
    environment = {**os.environ, "RLWATCH_STATE_DIR": str(folder / "state"), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-m", "rlwatch.integrations.verl", str(LEGACY), str(folder / "runs"), *request.param]

    out = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)

    return bool(request.param), out, str(folder / "runs")


def test_the_launcher_records_a_verl_that_loads_no_plugins(unplugged):
    """Every number of every step, and how it ended; one line says what is not to be had."""
    breaks, out, store = unplugged
    run, steps, events = recorded(store)
    said = out.stdout + out.stderr

    assert said.count("rlwatch records what the trainer logs and how training ends, but no tokens") == 1, said[-3000:]
    if breaks:
        assert out.returncode != 0
        assert (run.state, run.state_reason) == (RunState.CRASHED, "ValueError: the actor broke")
        assert [event.step for event in events if event.kind == "exception"] == [1]
    else:
        assert out.returncode == 0, said[-3000:]
        assert (run.state, run.project, run.name) == (RunState.FINISHED, "math", "seed3")
        assert sorted(steps) == [1, 2, 3]
        assert {"critic/score/mean", "actor/entropy", "response_length/mean", "timing_s/step"} <= steps[1].keys()
        assert math.isnan(steps[1]["actor/grad_norm"])


def test_without_it_verl_refuses_the_name(begun):
    """What users of older versions meet, and what ``rlwatch doctor`` and the docs answer."""
    out, _ = begun("none")

    assert "AssertionError: rlwatch is not supported" in out.stderr
