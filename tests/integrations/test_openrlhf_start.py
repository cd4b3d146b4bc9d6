"""Starting OpenRLHF through rlwatch: its command line, Ray's hook, and what is wrapped in each process."""

import logging
import sys
import types
from functools import partial

import pytest
from installations import Installations

from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.integrations.openrlhf import __main__, attach, compat
from rlwatch.integrations.openrlhf.compat import OpenRLHFSettings, parsed

MODULE = "openrlhf.cli.train_ppo_ray"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretends that this version of OpenRLHF is installed."""
    pretend = partial(Installations(tmp_path / "site", monkeypatch), "openrlhf")
    pretend("0.11.2")
    return pretend


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rlwatch"]


def test_our_options_come_before_the_module_and_its_own_after():
    """OpenRLHF's options are passed on as they are."""
    ours = ["--rlwatch.project", "math", "--rlwatch.store", "/runs", "--rlwatch.level", "tokens", "--rlwatch.text"]
    theirs = ["--actor.adam.lr", "1e-6", "--rlwatch.name", "not ours"]
    settings, module, rest = parsed([*ours, "-m", MODULE, *theirs])

    assert settings == OpenRLHFSettings("tokens", text=True, init={"project": "math", "store": "/runs"})
    assert module == MODULE
    assert rest == theirs


def test_without_options_everything_is_watched_and_no_text_kept():
    """The defaults."""
    assert parsed(["-m", MODULE])[0] == OpenRLHFSettings("full", text=False, init={})


@pytest.mark.parametrize(("given", "wanted"), [("true", True), ("false", False)])
def test_forecasts_can_be_switched(given, wanted):
    """As ``rlwatch.init(forecast=)`` does; otherwise ``rlwatch.toml`` says it."""
    assert parsed(["--rlwatch.forecast", given, "-m", MODULE])[0].init == {"forecast": wanted}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which module shall run"),
        (["--rlwatch.project", "x"], "which module shall run"),
        (["-m"], "-m needs the name of a module"),
        (["--rlwatch.projct", "x", "-m", MODULE], "unrecognized arguments: --rlwatch.projct x"),
        (["--rlwatch.store", "-m", MODULE], "expected one argument"),
        (["--rlwatch.level", "all", "-m", MODULE], "level must be one of scalars"),
        (["--rlwatch.forecast", "maybe", "-m", MODULE], "rlwatch.forecast: invalid choice: 'maybe'"),
    ],
)
def test_a_wrong_command_line_is_refused_in_words(arguments, words):
    """Before anything starts."""
    with pytest.raises(ConfigError, match=words):
        parsed(arguments)


def test_settings_travel_as_plain_values():
    """Through Ray's pickles, to processes that may be on other machines."""
    settings = OpenRLHFSettings("tokens", text=True, init={"project": "p"})

    assert OpenRLHFSettings.of(settings.plain()) == settings


def test_actors_get_openrlhfs_variables_and_ours():
    """What the user set wins over OpenRLHF's defaults, as in OpenRLHF itself."""
    environment = {"NCCL_DEBUG": "INFO", "RLWATCH_STORE": "/runs", "RLWATCH_RUN_ID": "", "HOME": "/root"}
    variables = __main__.runtime_env(OpenRLHFSettings(), environment)["env_vars"]

    assert variables == {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "INFO",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
        "RLWATCH_STORE": "/runs",
    }


def test_the_hook_arms_the_process_and_never_raises(installed, package, monkeypatch, caplog):
    """An actor must start all the same, also where rlwatch is not installed."""
    package()
    hook = __main__.setup_hook(OpenRLHFSettings(init={"project": "p"}))
    hook()
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer

    assert hasattr(BasePPOTrainer.__init__, "__wrapped__")
    monkeypatch.setitem(sys.modules, "rlwatch.integrations.openrlhf.attach", None)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        hook()

    assert said(caplog)[0].startswith("rlwatch does not watch this process: ModuleNotFoundError")
    assert "<locals>" in hook.__qualname__  # pickled by value


class Ray(types.ModuleType):
    """Remembers how it was started."""

    def __init__(self, *, running=False):
        super().__init__("ray")
        self.running, self.started = running, []

    def is_initialized(self):
        return self.running

    def init(self, **kwargs):
        self.started.append(kwargs)


@pytest.fixture
def module_to_run(tmp_path, monkeypatch):
    """A module that notes its name and arguments."""
    (tmp_path / "victim.py").write_text("import sys\nsys.modules['builtins'].seen = (__name__, sys.argv[1:])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["old"])


def test_ray_is_started_with_the_hook_and_the_module_run_as_main(installed, monkeypatch, module_to_run):
    """OpenRLHF then finds Ray initialised and leaves it so."""
    import builtins

    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    __main__.main(["-m", "victim", "--a", "1"])

    assert builtins.seen == ("__main__", ["--a", "1"])
    assert callable(ray.started[0]["runtime_env"]["worker_process_setup_hook"])


def test_without_openrlhf_the_module_runs_unwatched_with_one_warning(installed, monkeypatch, module_to_run, caplog):
    """And the warning says what still works."""
    import builtins

    installed("")
    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        __main__.main(["-m", "victim"])

    assert builtins.seen == ("__main__", [])
    assert ray.started == []
    assert said(caplog) == [
        "rlwatch records nothing here: OpenRLHF is not installed; its console output can be read: "
        "rlwatch watch train.log"
    ]


def test_a_ray_that_runs_already_is_refused(installed, monkeypatch):
    """Its processes would not be watched."""
    monkeypatch.setitem(sys.modules, "ray", Ray(running=True))
    with pytest.raises(ConfigError, match="Ray is initialised already"):
        __main__.main(["-m", "victim"])


def test_without_ray_the_message_says_what_to_install(installed, monkeypatch):
    """The one import error a user can meet."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"watching OpenRLHF needs the package 'ray'"):
        __main__.main(["-m", "victim"])


@pytest.mark.parametrize("version", ["0.10.4", "0.11.2", "0.12.0", "1.0"])
def test_no_version_is_refused_for_its_number(installed, version):
    """What is there decides, in the process where it is."""
    installed(version)

    assert compat.unknown() is None


def test_arguments_of_another_shape_leave_training_unwatched_with_one_line(installed, monkeypatch, caplog):
    """As before 0.10.1, where they were one flat list: nothing raises into what makes the trainer."""
    installed("0.9.10")
    trainer = types.SimpleNamespace(args=types.SimpleNamespace(ckpt_path="/x", use_wandb=None), kl_ctl=None)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        attach.drive_trainer(trainer, OpenRLHFSettings())

    assert said(caplog) == [
        "rlwatch records nothing here: OpenRLHF 0.9.10: there is no args.logger; its console output can be read: "
        "rlwatch watch train.log"
    ]


DRIVER = """
class BasePPOTrainer:
    def __init__(self, strategy):
        self.strategy = strategy
    def train_step(self, rollout_samples, global_step): ...
    def ppo_train(self, global_steps): ...
    def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None): ...
"""
ACTOR = """
class ActorPPOTrainer:
    def __init__(self, strategy, actor):
        self.actor = actor
    def ppo_train(self, kl_ctl): ...
    def training_step(self, experience, kl_ctl, step): ...
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An ``openrlhf`` whose two modules hold what the test says."""

    def write(driver=DRIVER, actor=ACTOR):
        ray = tmp_path / "openrlhf" / "trainer" / "ray"
        ray.mkdir(parents=True)
        for directory in (ray.parent.parent, ray.parent, ray):
            (directory / "__init__.py").write_text("")
        (ray.parent / "ppo_trainer.py").write_text(driver)
        (ray / "ppo_actor.py").write_text(actor)
        monkeypatch.syspath_prepend(str(tmp_path))

    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        monkeypatch.delitem(sys.modules, name)
    finders = list(sys.meta_path)
    yield write
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]


def test_trainers_are_met_as_they_are_made(installed, package):
    """Whichever a process imports, and not before."""
    package()
    met = []
    attach.arm(
        OpenRLHFSettings("tokens").plain(),
        drive=lambda trainer, settings: met.append((trainer.strategy, settings.level)),
        tap=lambda trainer, settings: met.append((trainer.actor, settings.level)),
    )
    before = "openrlhf" in sys.modules
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    class PPOTrainer(BasePPOTrainer):
        """Made as Ray makes it: a subclass that came by value."""

    PPOTrainer("s")
    ActorPPOTrainer("s", actor="a")

    assert not before
    assert met == [("s", "tokens"), ("a", "tokens")]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"driver": DRIVER.replace("BasePPOTrainer", "Other")}, "openrlhf.trainer.ppo_trainer has no BasePPOTrainer"),
        ({"driver": DRIVER.replace("train_step", "step")}, "BasePPOTrainer has no train_step"),
        ({"driver": DRIVER.replace("logs_dict", "logs")}, "save_logs_and_checkpoints has no parameter 'logs_dict'"),
        (
            {"actor": ACTOR.replace("experience", "batch")},
            "ActorPPOTrainer.training_step has no parameter 'experience'",
        ),
    ],
)
def test_what_is_not_as_we_know_it_is_left_alone_with_one_warning(installed, package, caplog, changed, words):
    """Its process trains unwatched."""
    package(**changed)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        attach.arm(OpenRLHFSettings().plain())
        import openrlhf.trainer.ppo_trainer
        import openrlhf.trainer.ray.ppo_actor

    assert len(said(caplog)) == 1
    assert words in said(caplog)[0]
    for name in vars(openrlhf.trainer.ppo_trainer).values():
        assert not hasattr(getattr(name, "__init__", None), "__wrapped__") or "driver" not in changed


def test_a_newer_version_that_has_what_we_wrap_is_watched(installed, package):
    """Its number says nothing."""
    package()
    installed("0.12.0")
    met = []
    attach.arm(OpenRLHFSettings().plain(), tap=lambda trainer, settings: met.append(trainer.actor))
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    ActorPPOTrainer("s", actor="a")
    assert met == ["a"]
