"""The parts of the verl plugin that need no verl: waiting for imports, the heartbeat, settings, versions, replies."""

import importlib
import json
import logging
import os
import subprocess
import sys
import time

import pytest

from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.compat import AfterImport, lacking
from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.level import Level
from rlwatch.integrations.verl import __main__ as launcher
from rlwatch.integrations.verl import compat, heartbeat, plugin
from rlwatch.integrations.verl.ranks import accepted, answering, refusal_of
from rlwatch.integrations.verl.settings import VerlSettings, plain, wanted


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(heartbeat, "current", None)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path / "state" / "verl"


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module somebody will import: ``stranger.answer`` is 41."""
    (tmp_path / "stranger.py").write_text("answer = 41\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "stranger"
    sys.modules.pop("stranger", None)


def raise_one(module):
    module.answer += 1


def test_what_was_registered_runs_once_the_module_is_there(stranger):
    """Not before, and once."""
    watcher = AfterImport()
    watcher.register(stranger, raise_one)

    assert stranger not in sys.modules
    assert importlib.import_module(stranger).answer == 42
    assert importlib.import_module(stranger).answer == 42


def test_a_module_that_is_there_already_is_changed_at_once(stranger):
    """Whoever imported it first."""
    module = importlib.import_module(stranger)

    AfterImport().register(stranger, raise_one)

    assert module.answer == 42


def test_a_module_that_does_not_exist_stays_missing():
    """The importer gets the error it would have got."""
    AfterImport().register("no_such_module_at_all", raise_one)

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")


def test_other_modules_are_none_of_its_business(stranger):
    """Looking for a spec answers None."""
    watcher = AfterImport()
    watcher.register("something.else", raise_one)

    assert watcher.find_spec(stranger, None) is None
    assert importlib.import_module(stranger).answer == 41


def test_the_module_keeps_its_loader_and_its_source(stranger):
    """``inspect`` and ``importlib.resources`` work on it as ever."""
    AfterImport().register(stranger, raise_one)
    module = importlib.import_module(stranger)

    assert module.__spec__.loader.get_source(stranger) == "answer = 41\n"


def test_looking_at_the_plugin_loads_nothing(state):
    """Only while verl is imported does importing it do anything."""
    importlib.reload(plugin)

    assert heartbeat.current is None
    assert not state.exists()


def test_a_hook_that_fails_leaves_verl_alone(state, stranger, caplog):
    """The import succeeds; one warning; the heartbeat says what was wrong."""
    plugin.load({stranger: "rlwatch.integrations.verl.no_such_hook:install"})

    with caplog.at_level(logging.WARNING, "rlwatch"):
        module = importlib.import_module(stranger)

    assert module.answer == 41
    assert caplog.text.count("could not hook into stranger") == 1
    assert heartbeat.latest()[0].hooks[stranger].startswith("ModuleNotFoundError")


def test_loading_twice_is_loading_once(state):
    """One heartbeat a process."""
    plugin.load()
    first = heartbeat.current
    plugin.load()

    assert heartbeat.current is first


def test_a_process_says_that_it_is_watched(state):
    """As driver or worker; without a heartbeat it says nothing."""
    heartbeat.acting("worker")
    plugin.load()
    heartbeat.acting("driver")

    (beat,) = heartbeat.latest()
    assert (beat.role, beat.pid) == ("driver", os.getpid())
    assert set(beat.hooks.values()) == {heartbeat.WAITING}


def test_old_heartbeats_go(state):
    """The newest are kept."""
    state.mkdir(parents=True)
    for i in range(5):
        path = state / f"host-{i}.json"
        path.write_text("{}")
        os.utime(path, (i, i))

    heartbeat.begin("1", "2", most=3)

    assert sorted(path.name for path in state.glob("host-?.json")) == ["host-3.json", "host-4.json"]


def test_unreadable_heartbeats_are_left_out(state):
    """A half-written file, another version's file."""
    heartbeat.begin("1", "2").note("a", "b")
    (state / "x-1.json").write_text("{")
    (state / "x-2.json").write_text(json.dumps({"of": "the future"}))

    assert [beat.hooks for beat in heartbeat.latest()] == [{"a": "b"}]


def test_a_heartbeat_that_cannot_be_written_is_not_missed(tmp_path, monkeypatch):
    """A read-only home, a file where the directory should be."""
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(tmp_path / "state"))

    heartbeat.begin("1", "2").fail("x")

    assert heartbeat.latest() == []


def test_where_heartbeats_lie(monkeypatch, tmp_path):
    """Our variable, XDG's, the home directory."""
    monkeypatch.delenv("RLWATCH_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert heartbeat.directory() == tmp_path / "rlwatch" / "verl"

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert heartbeat.directory() == tmp_path / "home" / ".local" / "state" / "rlwatch" / "verl"


def test_heartbeats_come_newest_first(state):
    """By the time they were loaded."""
    state.mkdir(parents=True)
    for age in (30, 10, 20):
        beat = heartbeat.Heartbeat(age, "h", "python", "1", "2", time.time() - age)
        beat.write()

    assert [beat.pid for beat in heartbeat.latest()] == [10, 20, 30]
    assert [beat.pid for beat in heartbeat.latest(1)] == [10]


class Known:
    """Has what is asked for."""

    def fit(self, agent_loop_manager):
        """It."""

    def anything(self, **kwargs):
        """Passes on what it gets."""


def test_what_is_lacking_is_reported_by_name():
    """Of a class or an instance: a method, or a parameter of one. Passing on whatever comes is taking it."""
    for holder in (Known, Known()):
        assert lacking(holder, {"fit": ("agent_loop_manager",), "anything": ("batch",)}) is None
        assert lacking(holder, {"fit": (), "flee": ()}) == "Known has no flee"
        assert lacking(holder, {"fit": ("batch",)}) == "Known.fit has no parameter 'batch'"
        assert lacking(holder, {"__init__": ("config",)}) == "Known has no __init__", "object's takes anything"


def test_the_reason_for_scalars_alone_says_what_would_give_more():
    """A verl without the trainer, another trainer, a trainer that has changed."""
    assert compat.scalars_only(None, "rlwatch.nowhere.v1") == "this verl has no v1 trainer; verl 0.9 and later do"
    assert (
        compat.scalars_only("in place", "rlwatch.errors")
        == "this trainer is no v1 PPOTrainer (trainer.use_v1=true selects it)"
    )
    assert compat.scalars_only(compat.REFUSED + "PPOTrainer has no init") == "PPOTrainer has no init"


@pytest.mark.parametrize(
    ("sources", "loads"),
    [
        ({"__init__.py": "# verl 0.8"}, False),
        ({"__init__.py": 'entry_points(group="verl.plugins")'}, True),
        ({"__init__.py": "", "utils/plugins.py": '_GROUP = "verl.plugins"'}, True),
        ({}, False),
    ],
)
def test_whether_a_verl_loads_plugins_is_read_off_its_sources(tmp_path, monkeypatch, sources, loads):
    """Nothing of it is imported: that takes seconds, and may fail."""
    for name, text in sources.items():
        path = tmp_path / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\nraise RuntimeError\n")
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    assert compat.loads_plugins() is loads


def ran(tmp_path, *arguments):
    """What a script prints that the launcher runs, beside a ``ray`` that shows what it was started with."""
    (tmp_path / "ray.py").write_text("def init(*args, **kwargs):\n    return kwargs\n")
    (tmp_path / "theirs.py").write_text("called = []\ndef hook():\n    called.append(1)\n")
    (tmp_path / "victim.py").write_text(
        "import sys, ray, theirs\n"
        "from rlwatch.integrations.verl import heartbeat\n"
        "given = ray.init(num_cpus=4, runtime_env={'env_vars': {'A': '1'}, 'worker_process_setup_hook': 'theirs.hook'})\n"
        "bare = ray.init('auto')\n"
        "given['runtime_env'].pop('worker_process_setup_hook')()\n"
        "bare['runtime_env'].pop('worker_process_setup_hook')()\n"
        "print(__name__, sys.argv[1:], given, bare, theirs.called, heartbeat.current is not None)\n"
    )
    command = [sys.executable, "-m", "rlwatch.integrations.verl", *arguments]
    environment = {**os.environ, "RLWATCH_STATE_DIR": str(tmp_path / "state")}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("-m", "victim"), ("victim.py",)])
def test_the_launcher_gives_ray_our_hook_and_leaves_the_rest(tmp_path, arguments):
    """verl's own arguments and hook stay; the plugin is loaded here and in Ray's processes."""
    done = ran(tmp_path, *arguments, "trainer.logger=rlwatch")

    seen = "{'num_cpus': 4, 'runtime_env': {'env_vars': {'A': '1'}}} {'runtime_env': {}} [1] True"
    assert done.stdout.strip() == f"__main__ ['trainer.logger=rlwatch'] {seen}", done.stderr


def test_the_launcher_says_how_it_is_used(tmp_path):
    """Nothing to run."""
    done = ran(tmp_path, "--rlwatch.store", "x")

    assert done.returncode == 1
    assert "which module or script shall run? Usage: python -m rlwatch.integrations.verl -m" in done.stderr


def test_a_process_without_rlwatch_starts_all_the_same(monkeypatch, caplog):
    """The hook travels by value, and never raises for us."""
    hook = launcher.setup_hook()
    monkeypatch.setitem(sys.modules, "rlwatch.integrations.verl.plugin", None)
    hook()

    assert "rlwatch does not watch this process: ModuleNotFoundError" in caplog.text
    assert "<locals>" in hook.__qualname__  # pickled by value


@pytest.mark.parametrize("loggers", ["rlwatch", ["console", "rlwatch"], ("rlwatch",)])
def test_rlwatch_is_wanted_where_it_is_named(loggers):
    """A name or a list of names."""
    assert wanted(loggers)


@pytest.mark.parametrize("loggers", [None, [], "console", "rlwatch2", ["console", "file"]])
def test_rlwatch_is_not_wanted_otherwise(loggers):
    """Nothing is done then."""
    assert not wanted(loggers)


CONFIG = {
    "trainer": {
        "project_name": "math", "experiment_name": "seed3", "default_local_dir": "ckpt", "resume_mode": "auto",
        "logger": ["rlwatch"],
    }
}  # fmt: skip


def test_a_run_is_named_as_verl_names_it():
    """Project, experiment, and the directory of the checkpoints as the run's memory."""
    settings = VerlSettings.of(CONFIG)

    assert settings.level is Level.FULL
    assert settings.init["project"] == "math"
    assert settings.init["name"] == "seed3"
    assert settings.init["output_dir"] == "ckpt"
    assert settings.init["resume"] == "auto"
    assert settings.init["config"] is CONFIG
    assert (settings.init["rank"], settings.init["world_size"]) == (0, 1)


def test_a_training_from_scratch_is_a_new_run():
    """``resume_mode=disable``: not the run remembered beside old checkpoints."""
    config = {"trainer": {**CONFIG["trainer"], "resume_mode": "disable"}}

    assert VerlSettings.of(config).init["resume"] == "never"


def test_the_section_of_our_own_wins():
    """``+trainer.rlwatch.level=tokens +trainer.rlwatch.store=...``"""
    config = {"trainer": {**CONFIG["trainer"], "rlwatch": {"level": "tokens", "store": "/runs", "text": True}}}
    settings = VerlSettings.of(config)

    assert (settings.level, settings.text, settings.init["store"]) == (Level.TOKENS, True, "/runs")


@pytest.mark.parametrize(("section", "given"), [({"forecast": False}, {"forecast": False}), ({}, {})])
def test_forecasts_can_be_switched_off(section, given):
    """``+trainer.rlwatch.forecast=false``; otherwise ``rlwatch.toml`` says it."""
    init = VerlSettings.of({"trainer": {"rlwatch": section}}).init

    assert {name: value for name, value in init.items() if name == "forecast"} == given


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"levle": "full"}, "has no 'levle'; it may hold: level"),
        ({"level": "all"}, "level must be one of"),
        ({"forecast": "maybe"}, "forecast is true, false or null; got 'maybe'"),
        ({"completions": "some"}, "completions must be True, False"),
        ({"completions": {"rwos": 3}}, "completions may hold: every, rows, max_chars, budget_mb; got rwos"),
    ],
)
def test_a_wrong_section_stops_set_up(section, complaint):
    """With what was wrong and what there is."""
    with pytest.raises(ConfigError, match=complaint):
        VerlSettings.of({"trainer": {"rlwatch": section}})


@pytest.mark.parametrize(
    ("wish", "kept"),
    [(False, None), (True, KeepCompletions()), ({"every": 5, "rows": 2}, KeepCompletions(every=5, rows=2))],
)
def test_completions_are_kept_where_that_is_asked_for(wish, kept):
    """No text leaves the trainer otherwise."""
    assert VerlSettings.of({"trainer": {"rlwatch": {"completions": wish}}}).completions == kept
    assert VerlSettings.of(CONFIG).completions is None


def trained_with(strategy, **section):
    """A configuration of verl."""
    return {"trainer": {"rlwatch": section}, "actor_rollout_ref": {"actor": {"strategy": strategy}}}


def test_spikes_are_localised_at_the_closest_level():
    """Unless something else is wished; a worker that cannot says so, which stops nothing."""
    assert VerlSettings.of(trained_with("fsdp2")).localise == {}
    assert VerlSettings.of(trained_with("fsdp")).localise == {}
    assert VerlSettings.of(trained_with("fsdp2", level="gradients")).localise is None
    assert VerlSettings.of(trained_with("fsdp2", localise=False)).localise is None
    assert VerlSettings.of(trained_with("fsdp2", level="tokens", localise=True)).localise == {}


@pytest.mark.torch
def test_how_spikes_are_localised_can_be_chosen():
    """``+trainer.rlwatch.localise={culprits:3}``"""
    chosen = {"culprits": 3, "threshold": 100}

    assert VerlSettings.of(trained_with("fsdp2", localise=chosen)).localise == chosen


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (trained_with("fsdp", localise=True), "localise: FSDP1 flattens parameters, .*actor.strategy=fsdp2"),
        (trained_with("megatron", localise=True), "localise: megatron does not show gradients parameter by parameter"),
        (trained_with("fsdp2", localise=True, level="scalars"), "localise needs level=tokens or closer, got 'scalars'"),
    ],
)
def test_spikes_that_cannot_be_localised_stop_set_up_where_it_was_wished(config, complaint):
    """Before the models are loaded, and with what would help."""
    with pytest.raises(ConfigError, match=complaint):
        VerlSettings.of(config)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("wish", "complaint"),
    [
        ("yes", "localise is true, false, or holds: culprits, .*; got 'yes'"),
        ({"culprit": 3}, "localise is true, false, or holds: culprits, .*; got culprit"),
        ({"skip": True}, "got skip"),
        ({"keep_inputs": "spikes"}, "got keep_inputs"),
        ({"culprits": 0}, "culprits must be an integer of at least 1"),
    ],
)
def test_a_wrong_wish_stops_set_up(wish, complaint):
    """With what was wrong and what there is; steps are not left out in verl."""
    with pytest.raises(ConfigError, match=complaint):
        VerlSettings.of(trained_with("fsdp2", localise=wish))


def test_no_configuration_is_enough():
    """Older trainers give Tracking none."""
    assert VerlSettings.of(None, "project", "name").init["project"] == "project"
    assert plain(None) == {}
    assert plain(CONFIG) is CONFIG


class Worker:
    """A worker with a rank."""

    rank = 3

    @answering
    def works(self, value):
        """Answers."""
        return {"value": value}

    @answering
    def refuses(self):
        """Refuses."""
        raise RLWatchError("there is nothing to do")

    @answering
    def fails(self):
        """Breaks."""
        raise KeyError("gone")


def test_a_worker_answers_whatever_happens():
    """Refusals and bugs are words."""
    assert Worker().works(7) == {"rank": 3, "value": 7}
    assert Worker().refuses() == {"rank": 3, "refused": "there is nothing to do"}
    assert Worker().fails()["refused"].startswith("it failed on rank 3: KeyError")


def test_one_refusal_is_the_refusal_of_all():
    """The same reason of several ranks is one reason."""
    replies = [{"rank": 1}, {"rank": 0, "refused": "no"}, {"rank": 2, "refused": "no"}]

    assert refusal_of(replies) == "no"
    with pytest.raises(RLWatchError, match=r"^no$"):
        accepted(replies)
    with pytest.raises(RLWatchError, match="no worker answered"):
        accepted([])
    assert [reply["rank"] for reply in accepted([{"rank": 1}, {"rank": 0}])] == [0, 1]
