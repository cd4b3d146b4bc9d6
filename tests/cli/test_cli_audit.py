"""``rlwatch audit``: commands, silences, edits and purges in one list, whoever kept them where."""

import json

import pytest
from typer.testing import CliRunner

from rlwatch.cli.app import app
from rlwatch.cli.runs import acts_of_people
from rlwatch.clock import ManualClock
from rlwatch.curation import edit_run, purge_run
from rlwatch.errors import RunNotFoundError
from rlwatch.records import AuditEntry, Command, RunInfo, RunState
from rlwatch.store.url import open_store


@pytest.fixture
def store(tmp_path):
    """Two runs, of which one is gone; and what people did."""
    store = open_store(tmp_path)
    for run_id in ("one", "two"):
        writer = store.open_run(RunInfo(run_id))
        writer.finish(RunState.FINISHED, "", 1.0)
        writer.close()
    asked = Command("c1", "one", "set-kl-coef", {"value": 0.1}, requested_by="ann", why="KL\nsaturated", created_at=5.0)
    store.submit(asked)
    edit_run(store, "one", by="bob", name="best", tag=["paper"], clock=ManualClock(3.0))
    store.put_entry(AuditEntry("e1", 4.0, "cid", "note", "the judge was down", "one", "a1"))
    store.put_entry(AuditEntry("e2", 2.0, "cid", "silence", "everything"))
    edit_run(store, "two", by="ann", deleted=True, clock=ManualClock(6.0))
    purge_run(store, "two", by="dan", grace_s=0.0, clock=ManualClock(7.0))
    return store


def test_what_people_did_is_one_list_in_order(store):
    """With who, on which run, and in words on one line."""
    assert [(entry.at, entry.by, entry.act, entry.run_id, entry.text) for entry in acts_of_people(store)] == [
        (2.0, "cid", "silence", "", "everything"),
        (3.0, "bob", "edit", "one", "name: best; tagged: paper"),
        (4.0, "cid", "note", "one", "the judge was down"),
        (5.0, "ann", "command", "one", 'set-kl-coef {"value": 0.1}; KL saturated; queued'),
        (7.0, "dan", "purge", "two", "removed two of default for good; deleted by ann"),
    ]
    assert [entry.act for entry in acts_of_people(store, "one")] == ["edit", "note", "command"]
    with pytest.raises(RunNotFoundError):
        acts_of_people(store, "absent")


def test_the_shell_filters_it(store, tmp_path):
    """By person, act, run and time; as JSON too."""

    def shell(*args):
        return CliRunner().invoke(app, ["audit", "--store", str(tmp_path), *args])

    found = json.loads(shell("--by", "cid", "--act", "note", "--format", "json").output)
    assert [(entry["by"], entry["text"]) for entry in found] == [("cid", "the judge was down")]
    assert "set-kl-coef" in shell("one").output
    assert shell("--since", "1h").output.strip() == "no recorded acts"
    assert shell("--since", "soon").exit_code != 0
