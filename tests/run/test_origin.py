"""Where a run comes from: what is kept of it, and what never is."""

import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest

import rlwatch
from rlwatch.compare import config_diff
from rlwatch.curation.search import matching
from rlwatch.records import ORIGIN, RunInfo
from rlwatch.run import identity as origins
from rlwatch.run.identity import git, origin, packages
from rlwatch.store.memory import MemoryStore


def test_a_run_keeps_where_it_comes_from_beside_its_settings():
    """Command, packages and Python at least; every attempt its own; settings stay what they were."""
    store = MemoryStore()
    for lr in (1, 2):
        rlwatch.init(store=store, run_id="r", config={"lr": lr}, resume="auto").finish()
    kept = store.configs("r")
    assert [kept[attempt]["lr"] for attempt in (1, 2)] == [1, 2]
    assert all({"command", "packages", "python"} <= set(kept[attempt][ORIGIN]) for attempt in (1, 2))
    assert kept[1][ORIGIN]["packages"]["numpy"]


def test_versions_are_those_of_the_installed_packages():
    """As ``importlib.metadata`` reads them from all of a package's metadata."""
    assert packages() == {name: version(name) for name in packages()}
    assert packages()["numpy"] == np.__version__


def test_a_setting_of_ones_own_with_that_name_is_left_alone():
    """Nothing a person recorded is replaced."""
    store = MemoryStore()
    rlwatch.init(store=store, run_id="r", config={ORIGIN: "mine"}).finish()
    assert store.run("r").config == {ORIGIN: "mine"}


def test_runs_that_come_from_other_code_differ_in_that_setting():
    """The same in the shell and the dashboard: origin is a setting like others."""
    one, other = ({"lr": 1, ORIGIN: {"git": {"commit": commit}, "python": "3.12"}} for commit in ("a", "b"))
    assert [setting.name for setting in config_diff([one, other])] == ["origin.git.commit"]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (["t.py", "--api-key", "12345", "--lr", "1"], "t.py --api-key [redacted] --lr 1"),
        (["t.py", "--hf_token=12345"], "t.py --hf_token=[redacted]"),
        (["t.py", "--password", "--lr", "1"], "t.py --password --lr 1"),
        (["t.py", "--max-tokens", "512", "a b"], "t.py --max-tokens 512 'a b'"),
        (["t.py", "postgresql://ann:12345@db/x"], "t.py postgresql://[redacted]@db/x"),
    ],
)
def test_a_command_is_kept_without_its_secrets(said, kept, monkeypatch):
    """By the name of the option, or by their shape."""
    monkeypatch.setattr(sys, "orig_argv", said)
    assert origin()["command"] == kept


def test_an_environment_variable_that_is_not_listed_is_never_read(monkeypatch):
    """Whatever it holds."""
    monkeypatch.setenv("MY_VARIABLE", "do-not-keep")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    found = origin()
    assert found["environment"]["SLURM_JOB_ID"] == "77"
    assert "do-not-keep" not in str(found)


def test_the_commit_and_what_differs_from_it(tmp_path):
    """Of the directory's code; nothing where there is none."""
    assert git(str(tmp_path)) == {}
    place = tmp_path / "code"
    place.mkdir()

    def run(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", place, *who, *arguments], check=True, capture_output=True)

    run("init", "-q", "-b", "trunk")
    (place / "a.py").write_text("1\n")
    run("add", "a.py")
    run("commit", "-q", "-m", "begin")
    (place / "a.py").write_text("2\n")
    found = git(str(place))
    assert (found["branch"], found["changed_files"], len(found["commit"])) == ("trunk", "1", 40)


def test_a_machine_without_git_or_gpus_is_no_error(monkeypatch, tmp_path):
    """Entries that nobody can tell are left out."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    origins.git.cache_clear()
    origins.gpus.cache_clear()
    assert not {"git", "gpus"} & set(origin())
    origins.gpus.cache_clear()


def test_runs_are_found_by_where_they_come_from_when_that_is_named():
    """Words alone are looked for elsewhere: every run has Python among its packages' names."""
    run = RunInfo("r", config={"lr": 1, ORIGIN: {"git": {"commit": "abc1"}, "command": "python train.py"}})
    assert matching([run], "origin.git.commit=abc1") == [run]
    assert matching([run], "python") == []
