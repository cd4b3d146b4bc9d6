"""What ``rlwatch doctor`` says of the verl plugin, which verl would load in silence and drop in silence."""

import time
from importlib import metadata

import pytest

from rlwatch.cli import doctor
from rlwatch.cli.doctor import CheckStatus
from rlwatch.integrations.verl.heartbeat import IN_PLACE, WAITING, Heartbeat


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch, installed):
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(tmp_path))
    monkeypatch.delenv(doctor.POLICY, raising=False)
    installed("verl", "0.9.1", verl="GROUP = 'verl.plugins'")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [metadata.EntryPoint("rlwatch", "x", group)])


def beat(pid=1, *, age_s=60.0, role="", error="", **hooks):
    Heartbeat(pid, "node7", "python", "0.1.0", "0.9.1", time.time() - age_s, hooks, role, error).write()


def said():
    return {check.name: (check.level, check.text) for check in doctor.verl_checks()}


def test_without_verl_there_is_nothing_to_say(installed):
    """Most people have no verl."""
    installed("verl", "")

    assert doctor.verl_checks() == []


def test_a_plugin_that_was_loaded_is_fine():
    """When, where, by which verl."""
    beat(tracking=IN_PLACE, trainer=WAITING)

    assert said() == {
        "verl plugin": (CheckStatus.OK, "registered under 'verl.plugins'"),
        "verl heartbeat": (CheckStatus.OK, "verl 0.9.1 loaded rlwatch 0.1.0 1\u202fmin ago on node7"),
    }


def test_an_installation_without_the_entry_point_is_reported(monkeypatch):
    """A source tree on the path is not enough for verl."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])

    level, text = said()["verl plugin"]
    assert level is CheckStatus.WARN
    assert "reinstall rlwatch-monitor" in text


def test_a_verl_that_loads_no_plugins_is_reported_with_the_line_that_works(installed):
    """Before 0.9: verl itself would only say that 'rlwatch' is no logger."""
    installed("verl", "0.7.1", verl="")

    level, text = said()["verl plugin"]
    assert level is CheckStatus.WARN
    assert text == (
        "verl 0.7.1 loads no plugins, and refuses 'rlwatch' as a logger; start it with: "
        "python -m rlwatch.integrations.verl -m verl.trainer.main_ppo ..."
    )


@pytest.mark.parametrize(
    ("policy", "kept_away"), [("none", True), ("other", True), ("auto", False), ("a, rlwatch", False)]
)
def test_verls_own_switch_is_heeded(monkeypatch, policy, kept_away):
    """``VERL_USE_EXTERNAL_PLUGINS`` may keep it from loading."""
    monkeypatch.setenv(doctor.POLICY, policy)
    beat()

    texts = [check.text for check in doctor.verl_checks()]
    assert any("keeps verl from loading it" in text for text in texts) is kept_away


def test_silence_is_reported_with_what_breaks_it(tmp_path):
    """No process has ever loaded it: where the files would lie, and how to try."""
    level, text = said()["verl heartbeat"]

    assert level is CheckStatus.WARN
    assert str(tmp_path) in text
    assert "python -c 'import verl'" in text


def test_a_hook_that_failed_is_reported_by_name():
    """And the last error of the process."""
    beat(trainer="AttributeError: no PPOTrainer", tracking=IN_PLACE, error="the workers do not know rlwatch")

    level, text = said()["verl heartbeat"]
    assert level is CheckStatus.WARN
    assert "trainer: AttributeError: no PPOTrainer; the workers do not know rlwatch" in text
    assert "tracking" not in text


def test_the_last_watched_driver_and_worker_are_distinguished():
    """The newest process may be a mere import."""
    beat(1, age_s=60)
    beat(2, age_s=4 * 3600, role="driver")
    beat(3, age_s=5 * 86400, role="worker")

    texts = said()
    assert texts["verl driver"][1].endswith("4\u202fh ago on node7, watched as driver")
    assert texts["verl worker"][1].endswith("5\u202fd ago on node7, watched as worker")


def test_heartbeats_of_another_environment_are_still_heard(installed):
    """The command may run where verl is not installed."""
    installed("verl", "")
    beat()

    assert list(said()) == ["verl heartbeat"]
