"""A name that is almost right is asked about; one that is not is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import Invoke, record_run, write_log

from rlwatch.store.url import open_store


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with one run, and a log beside it."""
    monkeypatch.chdir(tmp_path)
    record_run(open_store(tmp_path / "rlwatch-runs"), "seed3", project="math-rl")
    write_log(tmp_path / "train.log", [{"step": step, "reward": 0.5, "kl": 0.01} for step in range(1, 6)])
    return tmp_path


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("scan trian.log", "did you mean train.log?"),
        ("scan train.log --as trl-consol", "did you mean trl-console or"),
        ("scan train.log --source tlr", "unknown trainer 'tlr'; did you mean trl?"),
        ("show sede3", "did you mean seed3?"),
        ("runs --project math-lr", "no runs in project 'math-lr'; did you mean math-rl?"),
        ("command seed3 lower_lr", "did you mean lower-lr?"),
        ("alerts silence --run sede3 --for 1h --why x", "no run is called 'sede3' yet; did you mean seed3?"),
        ("alerts silence --kind kl_drfit --for 1h --why x", "did you mean kl_drift"),
    ],
)
def test_what_is_almost_a_name_is_asked_about(place: Path, invoke: Invoke, command: str, hint: str):
    """Runs, projects, files, formats, trainers, commands, kinds."""
    result = invoke(*command.split())

    assert hint in " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize(
    "command",
    ["runs --project elsewhere", "scan train.log --source my-loop", "alerts silence --run seed3 --for 1h --why x"],
)
def test_what_is_no_mistake_is_not_asked_about(place: Path, invoke: Invoke, command: str):
    """A trainer of one's own, a run that is there."""
    result = invoke(*command.split())

    assert "did you mean" not in result.stdout + result.stderr
    assert "yet" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("show seed3 --store nowhere", "the store sqlite://"),
        ("report gone.log", "(and there is no file or directory 'gone.log')"),
        ("diff seed3 gone.log", "(and there is no file or directory 'gone.log')"),
        ("report seed3 -o gone/post-mortem.html", "there is no directory gone"),
        ("export history seed3 gone/history.csv", "there is no directory gone"),
        ("export tensorboard seed3 train.log", "train.log is a file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(place: Path, invoke: Invoke, command: str, said: str):
    """A store, a log or a directory that is not there."""
    result = invoke(*command.split())

    assert (result.exit_code, said in result.stderr, result.stderr.count("\n")) == (2, True, 1)


@pytest.mark.parametrize("command", ["scan train.log", "watch train.log --once", "rules test train.log"])
def test_a_rule_that_can_never_fire_is_told(
    place: Path, invoke: Invoke, command: str, caplog: pytest.LogCaptureFixture
):
    """Wherever the file is obeyed; where a run would be alerted about, by the log, as a trainer is told."""
    (place / "odd.toml").write_text('[[rules]]\nname = "x"\nkinds = ["entrpy_collapse"]\n')

    result = invoke(*command.split(), "--config", "odd.toml")

    assert "did you mean 'entropy_collapse'" in result.stderr + caplog.text
