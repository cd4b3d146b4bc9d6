"""A list of runs at rest opens none of their files, and whatever changes a run is seen in the next list."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from rlwatch.records import RunEdit, RunInfo, RunState
from rlwatch.store.sqlite.run_index import NAME
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import steps


def aged(root: Path) -> None:
    """Give everything the time stamps of a minute ago: what changed just now is not remembered."""
    then = time.time_ns() - 60 * 10**9
    for path in [*root.rglob("*")][::-1]:
        if path.name != NAME:
            os.utime(path, ns=(then, then))


def finished(root: Path, run_id: str, **info) -> None:
    writer = open_store(root).open_run(RunInfo(run_id, **info))
    writer.write(steps(1, 2, 3))
    writer.finish(RunState.FINISHED, "", 9.0)
    writer.close()


def listed(root: Path) -> list[RunInfo]:
    """As a new process lists them."""
    return open_store(root).runs()


def lines(root: Path) -> list[str]:
    return [line for line in (root / NAME).read_text().splitlines() if line]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two runs at rest that have been listed once."""
    finished(
        tmp_path, "a", project="math", name="s3", tags=("x",), config={"lr": [1e-6, float("inf")], "deep": {"k": {}}}
    )
    finished(tmp_path, "b", created_at=5.0)
    aged(tmp_path)
    listed(tmp_path)
    return tmp_path


def test_a_run_at_rest_is_listed_without_its_files_being_opened(root: Path):
    """They are made unreadable with their size and time as they were, and the list is the same to the last setting."""
    before = [open_store(root).run(name) for name in ("a", "b")]
    for name in ("a", "b"):
        file = root / name / "run.db"
        stat = file.stat()
        with file.open("r+b") as damaged:
            damaged.write(b"\xff" * 512)
        os.utime(file, ns=(stat.st_mtime_ns, stat.st_mtime_ns))

    assert sorted(listed(root), key=lambda run: run.run_id) == before
    assert len(lines(root)) == 2
    run = next(run for run in listed(root) if run.run_id == "a")
    run.config["deep"]["k"] = 1  # a caller's copy
    assert [run.config["deep"] for run in listed(root) if run.run_id == "a"] == [{"k": {}}]


def test_a_store_object_does_not_hand_out_what_it_remembers(root: Path):
    """Nor does one that lists again and again."""
    store = open_store(root)
    for _ in range(2):
        run = next(run for run in store.runs() if run.run_id == "a")
        assert run.config["deep"] == {"k": {}}
        run.config["deep"]["k"] = 1


def resumed(root: Path) -> None:
    writer = open_store(root).open_run(RunInfo("a"))
    writer.write(steps(4, attempt=2))
    writer.close()


def resumed_and_finished(root: Path) -> None:
    writer = open_store(root).open_run(RunInfo("a"))
    writer.write(steps(4, attempt=2))
    writer.finish(RunState.FINISHED, "", 9.0)
    writer.close()


def renamed_by_a_person(root: Path) -> None:
    open_store(root).edit(RunEdit("a", "ann", 7.0, name="best"))


def deleted_by_a_person(root: Path) -> None:
    open_store(root).edit(RunEdit("a", "ann", 90.0, deleted=True))


def purged(root: Path) -> None:
    store = open_store(root)
    store.edit(RunEdit("a", "ann", 90.0, deleted=True))
    store.purge("a", by="ann", now=8.0)


def removed_by_hand(root: Path) -> None:
    shutil.rmtree(root / "a")


def another_in_its_place(root: Path) -> None:
    shutil.copyfile(root / "b" / "run.db", root / "a" / "run.db")


def moved_in(root: Path) -> None:
    shutil.copytree(root / "b", root / "c")


def begun(root: Path) -> None:
    open_store(root).open_run(RunInfo("c")).close()


@pytest.mark.parametrize(
    "change",
    [
        resumed,
        resumed_and_finished,
        renamed_by_a_person,
        deleted_by_a_person,
        purged,
        removed_by_hand,
        another_in_its_place,
        moved_in,
        begun,
    ],
    ids=lambda change: change.__name__,
)
def test_whatever_changes_a_run_is_in_the_next_list(root: Path, change):
    """Compared with a list that remembers nothing; by who had listed before and by a new process, again once settled."""
    kept = open_store(root)
    was = kept.runs()

    change(root)

    for age in (False, True):
        if age:
            aged(root)
        mine, others = kept.runs(), listed(root)
        names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        truth = {run.run_id: run for run in (open_store(root).run(name) for name in names)}
        shown = sorted(name for name, run in truth.items() if not run.curation.deleted)
        assert sorted(run.run_id for run in others) == shown
        assert [truth[run.run_id] for run in others] == others == mine
        assert others != was


def test_what_waits_in_the_journal_of_a_dead_process_is_found(root: Path, child):
    """A trainer that is killed before its last rows are stored: the list has what it left, not what was."""
    process = child(
        """
writer = open_store(sys.argv[1]).open_run(RunInfo("a"))
for step in range(4, 40):
    writer.journal.append_record(step, 1.0, {"kl": 1.0})
os._exit(9)
        """,
        root,
    )
    assert process.wait(timeout=600) == 9
    aged(root)

    assert {run.run_id: (run.attempt, run.last_step) for run in listed(root)} == {"a": (2, 39), "b": (1, 3)}


def test_what_changed_just_now_is_not_remembered(tmp_path: Path):
    """The next change might leave the same time stamp."""
    finished(tmp_path, "a")

    assert [run.run_id for run in listed(tmp_path)] == ["a"]
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00\xff{",
        '["0.0.0", [], {}]\n',
        '[1,2]\n{"a":1}\nnull\n',
        '["VERSION",[[1,2,3],null,null,null],{"run_id":"a"}]\n',
        '["VERSION","x",{"run_id":"a","tags":5}]\n',
        '["VERSION",[[1],[2]],null]\n["VERSION',
    ],
)
def test_a_file_that_is_no_memory_of_ours_is_no_matter(root: Path, text: str):
    """Torn, of another version, of other things: the runs are read from their own files, and remembered again."""
    true = listed(root)
    version = json.loads(lines(root)[0])[0]
    (root / NAME).write_text(text.replace("VERSION", version))

    assert listed(root) == true
    assert listed(root) == true
    assert len(lines(root)) == len([line for line in text.splitlines() if line.strip()]) + 2


def test_a_line_that_was_cut_short_costs_itself(root: Path):
    """And the lines that are added after it are whole."""
    true, kept = listed(root), lines(root)
    (root / NAME).write_text(kept[0] + "\n" + kept[1][:40])

    assert listed(root) == true
    assert [lines(root)[0], lines(root)[-1]] == kept


def test_where_nothing_can_be_kept_runs_are_listed_all_the_same(tmp_path: Path):
    """Something else has its name, as where the directory is not ours to write."""
    (tmp_path / NAME).mkdir()
    finished(tmp_path, "a")
    aged(tmp_path)

    assert [run.run_id for run in listed(tmp_path)] == [run.run_id for run in listed(tmp_path)] == ["a"]


def test_the_file_does_not_grow_with_what_changes(root: Path):
    """It is made anew once most of its lines are old; a run with megabytes of settings is not in it."""
    finished(root, "large", config={"prompt": "x" * 100_000})
    for step in range(80):
        writer = open_store(root).open_run(RunInfo("a"))
        writer.write(steps(10 + step, attempt=step + 2))
        writer.finish(RunState.FINISHED, "", 9.0)
        writer.close()
        aged(root)
        assert {run.run_id: run.last_step for run in listed(root)} == {"a": 10 + step, "b": 3, "large": 3}

    assert len(lines(root)) < 72
    assert (root / NAME).stat().st_size < 72 * 1000
    assert (root / NAME).stat().st_mode & 0o077 == 0
