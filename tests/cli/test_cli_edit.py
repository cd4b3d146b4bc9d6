"""Naming, tagging, archiving, deleting, restoring and purging runs in the shell, and finding them again."""

from __future__ import annotations

import pytest
from cli_helpers import Invoke, record_run, strict

import rlwatch
from rlwatch.records import RunInfo, RunState
from rlwatch.store.url import open_store


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Three seeds of two settings."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path / "runs"))
    store = open_store(tmp_path / "runs")
    for seed, lr in ((1, 3e-5), (2, 3e-5), (3, 1e-4)):
        record_run(store, f"s{seed}", name=f"seed{seed}", state=None)
        config = {"actor": {"optim": {"lr": lr}}, "seed": seed, "beta": 0.0}
        writer = store.open_run(RunInfo(f"s{seed}", config=config))
        writer.finish(RunState.FINISHED, "", 1.0)
        writer.close()
    return store


def listed(invoke: Invoke, *options: str) -> set[str]:
    return {row["run_id"] for row in strict(invoke("runs", "--format", "json", *options).stdout)["runs"]}


def test_what_people_say_shows_everywhere_and_is_undone(invoke: Invoke, store) -> None:
    """In the list, in show, in Python; the trainer's name comes back."""
    done = invoke("edit", "s1", "--name", "best  one", "--tag", "paper", "--note", "see plan", "--by", "ann")

    assert done.stdout == "s1 · best one · tags paper · notes see plan\n"
    assert "paper" in invoke("runs").stdout
    shown = invoke("show", "best one").stdout
    assert [word in shown for word in ("see plan", "seed1", "paper")] == [True] * 3
    row = next(row for row in rlwatch.open(store.url).rows(search="tag=paper"))
    assert (row["name"], row["tags"], row["notes"], row["archived"]) == ("best one", "paper", "see plan", False)

    assert invoke("edit", "s1", "--name", "", "--untag", "paper", "--note", "").stdout == "s1 · seed1\n"
    history = invoke("edit", "s1", "--history").stdout
    assert "name best one; +paper; notes see plan" in history
    assert "ann" in history


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("lr=3e-5", {"s1", "s2"}),
        ("lr=0.00003 -seed=2", {"s1"}),
        ("learning_rate>5e-5", {"s3"}),
        ("actor.optim.lr>=3e-5 seed<2", {"s1"}),
        ("beta", {"s1", "s2", "s3"}),
        ("beta!=0", set()),
        ("seed3", {"s3"}),
        ("name~eed2", {"s2"}),
        ('"seed 3"', set()),
        ("nothing=like it", set()),
        ("", {"s1", "s2", "s3"}),
    ],
)
def test_runs_are_found_by_settings_and_text(invoke: Invoke, store, query: str, expected: set[str]) -> None:
    """A number is a number however it is written; all terms must fit."""
    assert listed(invoke, "--search", query) == expected


def test_a_secret_is_not_found_by_its_value(invoke: Invoke, store) -> None:
    """Nor does asking confirm it."""
    store.open_run(RunInfo("k", config={"api_key": "hunter2hunter2"})).close()

    assert listed(invoke, "--search", "hunter2hunter2") == set()
    assert listed(invoke, "--search", "api_key=hunter2hunter2") == set()


def test_archived_and_deleted_runs_are_out_of_the_way(invoke: Invoke, store) -> None:
    """Each where it was put, and back again."""
    invoke("edit", "s1", "--archive")
    said = invoke("edit", "s2", "s3", "--delete", "--by", "bob").stdout
    assert "deleted by bob: rlwatch edit s2 --restore undoes it" in said

    assert listed(invoke) == set()
    assert listed(invoke, "--archived") == {"s1"}
    assert listed(invoke, "--deleted") == {"s2", "s3"}
    assert invoke("show", "s2").exit_code == 2

    invoke("edit", "seed2", "--restore")
    invoke("edit", "s1", "--unarchive")
    assert listed(invoke) == {"s1", "s2"}


def test_a_purge_says_first_and_spares_what_is_fresh(invoke: Invoke, store) -> None:
    """Nothing goes without --yes, nor within the grace; then the data are gone and who did it is not."""
    invoke("edit", "s1", "--delete", "--by", "bob")

    assert "1 deleted run left" in invoke("purge", "--yes").stdout
    assert "to remove: s1" in invoke("purge", "--grace", "0m").stdout
    assert listed(invoke, "--deleted") == {"s1"}
    assert "removed: s1" in invoke("purge", "s1", "--grace", "0m", "--yes", "--by", "cy").stdout
    assert listed(invoke, "--deleted") == set()
    assert [(one.run_id, one.by, one.deleted_by) for one in store.purges()] == [("s1", "cy", "bob")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("s1",), "nothing to change"),
        (("s1", "s2", "--name", "x"), "takes one run"),
        (("s1", "--delete", "--restore"), "either --delete or --restore"),
        (("s1", "--tag", "a,b"), "without a comma"),
        (("s1", "--name", "x" * 201), "at most 200"),
        (("absent", "--archive"), "no run 'absent'"),
    ],
)
def test_what_makes_no_sense_is_refused(invoke: Invoke, store, options: tuple[str, ...], says: str) -> None:
    """With what to do; nothing is kept."""
    result = invoke("edit", *options)

    assert result.exit_code == 2
    assert says in result.stderr
    assert store.edits("s1") == []


def test_a_live_run_is_not_deleted(invoke: Invoke, store) -> None:
    """It would train on unseen."""
    writer = rlwatch.init(project="p", name="live", store=store.url, run_id="live")
    try:
        result = invoke("edit", "live", "--delete")
    finally:
        writer.finish()

    assert result.exit_code == 2
    assert "is live" in result.stderr
    assert "stop it first" in result.stderr
