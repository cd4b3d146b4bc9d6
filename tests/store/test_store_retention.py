"""Retention: what is old and bulky goes, by kind; all else is left as it was. In a directory, on PostgreSQL and in ClickHouse."""

import numpy as np
import pytest
from typer.testing import CliRunner

from rlwatch.alerts.config import load_config
from rlwatch.cli.app import app
from rlwatch.clock import ManualClock
from rlwatch.curation import edit_run
from rlwatch.curation.editing import KINDS, Pruned, prune
from rlwatch.errors import ConfigError
from rlwatch.records import CompletionBatch, Event, Finding, RunInfo, RunState, Severity, SpikeBatch, StepRecord
from rlwatch.store.checking import check_run
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, command, message

DAY = 86_400.0
NOW = 100 * DAY


@pytest.fixture(params=["directory", "postgres", "carried"])
def store(request, tmp_path):
    """An empty one of each sort."""
    if request.param == "directory":
        return open_store(tmp_path / "runs")
    return open_store(request.getfixturevalue(f"emptied_{request.param}_url"))


def record(store, run_id="run", *, end=True):
    """A run of ninety days, with everything there is once every ten; the end of it is undated."""
    writer = store.open_run(RunInfo(run_id, created_at=DAY))
    for k in range(10):
        ts = k * 10 * DAY if k else 0.0
        items = [
            StepRecord(k, {"kl": k / 10}, ts),
            SpikeBatch(k, {"logp": np.array([-0.5, np.nan])}, "culprits", ts),
            CompletionBatch(k, {"completion": ["x" * 1000]}, ts),
            Event("note", k, {}, ts),
            Finding("d", "kl_drift", Severity.INFO, k, k, "m", seq=1),
        ]
        writer.write(items)
    writer.heartbeat(90 * DAY)
    if end:
        writer.finish(RunState.FINISHED, "", 90 * DAY)
        writer.close()
    store.put_alerts([alert(run_id=run_id)], [message(run_id=run_id)])
    store.submit(command(run_id=run_id))
    return writer


def kept(store, run_id="run"):
    return {
        "rows": [(r.step, r.metrics, r.ts) for r in store.records(run_id)],
        "events": store.events(run_id),
        "findings": store.findings(run_id),
        "alerts": store.alerts(run_id),
        "messages": store.outbox(run_id),
        "commands": store.commands(run_id),
    }


def bulk(store, run_id="run"):
    return [batch.step for batch in store.spikes(run_id)], [batch.step for batch in store.completions(run_id)]


def pruned(store, ages, **rest):
    return list(prune(store, ages, by="ann", clock=ManualClock(NOW), **rest))


def test_what_is_older_goes_and_nothing_else(store):
    """Of the kind that was named; what has no date is as old as the run's last sign of life."""
    record(store)
    before = kept(store)
    would = pruned(store, {"tokens": 45 * DAY}, dry_run=True)
    assert bulk(store) == (list(range(10)), list(range(10)))
    assert store.audit() == []

    [done] = pruned(store, {"tokens": 45 * DAY})
    assert [done] == would
    assert (done.run_id, done.kind, done.n) == ("run", "tokens", 5)
    assert done.bytes > 0
    assert bulk(store) == ([0, 6, 7, 8, 9], list(range(10)))
    assert {row["step"] for row in store.top_spikes("run")} == {0, 6, 7, 8, 9}
    assert pruned(store, {"tokens": 45 * DAY}) == []

    assert [each.n for each in pruned(store, {"completions": 15 * DAY})] == [8]
    assert bulk(store) == ([0, 6, 7, 8, 9], [0, 9])
    assert kept(store) == before
    assert not check_run(store, "run").problems
    said = [(entry.by, entry.act, entry.run_id) for entry in store.audit()]
    assert said == [("ann", "prune", "run")] * 2
    writer = store.open_run(RunInfo("run"))
    writer.write([SpikeBatch(20, {"logp": np.array([1.0])}, "culprits", NOW)])
    writer.close()
    assert bulk(store)[0] == [0, 6, 7, 8, 9, 20]


def test_a_live_run_of_a_directory_is_its_trainers(store):
    """It is left, and said so; on PostgreSQL its older bulk goes while it is written, and it writes on."""
    writer = record(store, end=False)
    found = pruned(store, {"tokens": 45 * DAY})
    writer.write([SpikeBatch(11, {"logp": np.array([1.0])}, "culprits", 95 * DAY)])

    steps = bulk(store)[0]
    if store.url.startswith("sqlite"):
        assert found == [Pruned("run", "tokens", left="it is being written: once it has ended")]
        assert steps == [*range(10), 11]
    else:
        assert [each.n for each in found] == [5]
        assert steps == [0, 6, 7, 8, 9, 11]
    writer.close()


def test_archived_runs_are_deleted_and_can_be_restored(store):
    """By the age of their last sign of life; runs that nobody archived stay, however old."""
    record(store, "old")
    record(store, "kept")
    edit_run(store, "old", by="ann", archived=True)
    assert pruned(store, {"archived": 11 * DAY}) == []
    assert pruned(store, {"archived": 9 * DAY}, runs=["kept"]) == []
    assert pruned(store, {"archived": 9 * DAY}) == [Pruned("old", "archived", 1)]

    assert [run.run_id for run in store.runs()] == ["kept"]
    assert store.runs(deleted=True)[0].curation.deleted_by == "ann"
    edit_run(store, "old", by="bob", deleted=False)
    assert {run.run_id for run in store.runs()} == {"old", "kept"}


@pytest.mark.parametrize(
    ("ages", "by", "says"),
    [
        ({"findings": DAY}, "ann", f"no kind 'findings' .*{KINDS[0]}"),
        ({"tokens": 60.0}, "ann", "an hour at least, got 60 s"),
        ({"tokens": float("nan")}, "ann", "an hour at least, got nan s"),
        ({"tokens": DAY}, " ", "needs a name"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, ages, by, says):
    """With what it was, before anything is removed."""
    with pytest.raises(ConfigError, match=says):
        list(prune(open_store(tmp_path), ages, by=by))
    with pytest.raises(ConfigError, match="no directory"):
        list(prune(open_store("memory://prune"), {"tokens": DAY}, by="ann"))


def test_the_shell_goes_by_its_options_or_by_the_file(tmp_path):
    """``--older-than`` and ``--kind``, else ``[retention]``; a dry run says the same and does nothing."""
    store = open_store(tmp_path / "runs")
    record(store)
    file = tmp_path / "rlwatch.toml"
    file.write_text('[retention]\ntokens = "30d"\ncompletions = "1d"\n')
    assert load_config(file).retention == {"tokens": 30 * DAY, "completions": DAY}

    def shell(*args):
        return CliRunner().invoke(app, ["db", "prune", "--store", str(tmp_path / "runs"), *args])

    would = shell("--config", str(file), "--dry-run")
    assert would.exit_code == 0
    assert "would be removed" in would.output
    assert len(bulk(store)[0]) == 10
    done = shell("--older-than", "30d", "--kind", "tokens", "--by", "ann")
    assert done.exit_code == 0
    assert bulk(store) == ([], list(range(10)))
    assert shell("--config", str(file)).exit_code == 0
    assert bulk(store) == ([], [])
    assert "nothing" in shell("--config", str(file)).output
    for wrong, says in (
        (["--older-than", "soon", "--kind", "tokens"], "no duration"),
        (["--older-than", "3d", "--kind", "alerts"], "alerts"),
        (["--kind", "tokens"], "--older-than"),
    ):
        refused = shell(*wrong)
        assert refused.exit_code != 0
        assert says in refused.output
    file.write_text('[retention]\nfindings = "3d"\n')
    with pytest.raises(ConfigError, match="findings"):
        load_config(file)
    file.write_text('[retention]\ntokens = "3 parsecs"\n')
    with pytest.raises(ConfigError, match=r"retention\.tokens: .*no duration"):
        load_config(file)
