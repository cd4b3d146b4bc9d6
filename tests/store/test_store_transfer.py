"""Runs copied from store to store, whichever they are: the same afterwards, again and again, and when it was cut short."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rlwatch.cli.app import app
from rlwatch.errors import RunLockedError, StoreError
from rlwatch.ports import Progress
from rlwatch.records import (
    DISTRIBUTIONS,
    STAGES,
    Acknowledgement,
    AuditEntry,
    Command,
    CommandStatus,
    CompletionBatch,
    Event,
    Finding,
    ForecastAnswer,
    OutboxStatus,
    RunEdit,
    RunInfo,
    RunState,
    Severity,
    Silence,
    SpikeBatch,
    Stage,
    StepRecord,
)
from rlwatch.store.transfer import contents, copy_run, copy_shared
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, forecast, message


def recorded(store, run_id: str = "run") -> None:
    """Two attempts of everything there is, with odd numbers."""
    odd = [math.nan, math.inf, -math.inf, -0.0, 1.5]
    for attempt, (first, last) in enumerate(((0, 700), (600, 1300)), start=1):
        run = RunInfo(run_id, "math", "s3", "trl/grpo", 5.0, {"lr": 1e-6 * attempt}, ("a",), host="node", pid=7)
        writer = store.open_run(run)
        assert writer.run.attempt == attempt
        for step in range(first, last, 100):
            rows = [
                StepRecord(k, {"kl": odd[k % 5], **({"eval": 1.0} if k % 7 else {})}, float(k), attempt, k % 2)
                for k in range(step, step + 100)
            ]
            seq = writer.last_seq + 1
            writer.write([*rows, Event("note", step, {"n": math.nan}, 1.0, attempt), forecast(step, 0.5, seq, attempt)])
        finding = Finding("d", "kl_drift", Severity.WARNING, 3, 3, "m", {"x": math.inf}, seq=seq, attempt=attempt)
        writer.write([finding, replace(finding, stage=Stage.RESOLVED)], Progress((), seq))
        tokens = {"logp": np.array(odd, dtype=np.float32), "text": ["é\x00"] * 5}
        writer.write([SpikeBatch(first, tokens, "far-out tokens", 2.0, attempt)])
        writer.write([SpikeBatch(first, {"count": np.array([attempt])}, DISTRIBUTIONS, 2.0, attempt)])
        writer.write([SpikeBatch(first, {"stage": ["reward"], "begin": np.array([1e9])}, STAGES, 2.0, attempt)])
        writer.write([CompletionBatch(first, {"text": ["a", "b"], "reward": np.array([1.0, math.nan])}, 2.0, attempt)])
        if attempt == 2:
            writer.finish(RunState.CRASHED, "NaN", 9.0)
        writer.close()
    store.submit(
        Command("c1", run_id, "pause", {"x": math.nan}, status=CommandStatus.DONE, result="ok", finished_at=3.0)
    )
    store.submit(Command("c2", run_id, "stop", requested_by="ann", idempotency_key="k"))
    kept = replace(alert(), run_id=run_id)
    store.put_alerts([kept], [replace(message(), run_id=run_id, status=OutboxStatus.SENT, attempts=3)])
    store.acknowledge(Acknowledgement(kept.alert_id, run_id, "ann", "seen", 4.0))
    store.answer_forecast(ForecastAnswer(run_id, 3, True, "ann", "yes", 4.0))
    store.put_entry(AuditEntry("e1", 4.0, "ann", "note", "said", run_id))
    store.edit(RunEdit(run_id, "ann", 10.0, name="best", notes="n", tagged=("paper",), archived=True))


@pytest.fixture
def source(tmp_path: Path):
    store = open_store(tmp_path / "from")
    recorded(store)
    return store


def test_a_copy_is_the_same_wherever_it_lies_and_back_again(
    source, emptied_postgres_url, emptied_carried_url, tmp_path: Path
):
    """Directory to PostgreSQL to ClickHouse to a directory: what the last one holds is what the first one held."""
    source.put_silence(Silence("s1", "ann", "why", 1.0, 2.0))
    source.put_entry(AuditEntry("e0", 4.0, "ann", "note", "of no run"))
    first, places = source, (emptied_postgres_url, emptied_carried_url, tmp_path / "to")
    for place in places:
        target = open_store(place)
        copied = copy_run(first, target, "run")
        copy_shared(first, target)
        assert (copied.differs, copied.written) == ([], 1414)
        first = target

    assert contents(first, "run") == contents(source, "run")
    assert copied.counts == {
        "run": 2,
        "rows": 1414,
        "findings": 4,
        "forecasts": 14,
        "spikes": 2,
        "distributions": 2,
        "stages": 2,
        "completions": 2,
        "commands": 2,
        "alerts": 1,
        "messages": 1,
        "acknowledgements": 1,
        "answers": 1,
        "edits": 1,
        "audit": 1,
    }
    assert first.series("run", ["kl"])["kl"].values.tobytes() == source.series("run", ["kl"])["kl"].values.tobytes()
    assert first.judged("run") == source.judged("run")
    assert [first.first_seq("run", attempt) for attempt in (1, 2)] == [1, source.first_seq("run", 2)]
    assert (first.run("run").name, first.run("run").curation.notes, first.run("run").heartbeat_at) == ("best", "n", 9.0)
    assert ([each.silence_id for each in first.silences()], len(first.audit())) == (["s1"], 2)


class CutError(Exception):
    """The copy ends here."""


def test_a_copy_that_was_cut_short_goes_on_and_one_that_is_whole_adds_nothing(source, tmp_path: Path):
    """Whenever it was: in the first attempt, at its end, in the second."""
    target, seen = open_store(tmp_path / "to"), []

    def cut(upto: int) -> None:
        seen.append(upto)
        raise CutError

    for _ in range(2):
        with pytest.raises(CutError):
            copy_run(source, target, "run", cut)
    assert seen == [707, 1414]
    assert copy_run(source, target, "run").differs == []
    again = copy_run(source, target, "run")

    assert (again.written, again.differs) == (0, [])
    assert contents(target, "run") == contents(source, "run")


def test_what_was_added_since_follows(source, tmp_path: Path):
    """A third attempt, and what people said meanwhile."""
    target = open_store(tmp_path / "to")
    copy_run(source, target, "run")
    writer = source.open_run(RunInfo("run"))
    writer.write([StepRecord(1300, {"kl": 1.0}, attempt=3), SpikeBatch(1300, {"logp": np.zeros(1)}, attempt=3)])
    writer.close()
    source.edit(RunEdit("run", "bob", 11.0, deleted=True))

    assert copy_run(source, target, "run").written == 1
    assert contents(target, "run") == contents(source, "run")


def test_a_run_that_is_another_or_goes_on_there_is_left_alone(source, tmp_path: Path):
    """By its project and birth, by its length, by its lock."""
    other, ahead, held = (open_store(tmp_path / name) for name in ("other", "ahead", "held"))
    other.open_run(RunInfo("run", "code", created_at=1.0)).close()
    with pytest.raises(StoreError, match="another run"):
        copy_run(source, other, "run")
    for store in (ahead, held):
        copy_run(source, store, "run")
    writer = ahead.open_run(RunInfo("run"))
    writer.close()
    with pytest.raises(StoreError, match="ahead"):
        copy_run(source, ahead, "run")
    writer = held.amend_run("run")
    with pytest.raises(RunLockedError, match="being written"):
        copy_run(source, held, "run")
    writer.close()


def test_a_digest_sees_what_differs(source, tmp_path: Path):
    """A number, a text, the sign of zero; and nothing where nothing does."""
    target = open_store(tmp_path / "to")
    recorded(target)
    assert contents(target, "run") == contents(source, "run")
    target.edit(RunEdit("run", "ann", 12.0, notes="other"))
    found = contents(target, "run")
    assert [kind for kind in found if found[kind] != contents(source, "run")[kind]] == ["edits"]
    for value in (0.0, -0.0):
        store = open_store(tmp_path / str(value))
        writer = store.open_run(RunInfo("run", created_at=1.0))
        writer.write([StepRecord(1, {"kl": value})])
        writer.close()
    found = [contents(open_store(tmp_path / str(value)), "run")["rows"] for value in (0.0, -0.0)]
    assert found[0] != found[1]


def test_the_shell_copies_what_fits_a_pattern_and_tells_what_was_not_the_same(source, tmp_path: Path):
    """By id or name; nothing that fits, and a run that is another, end with an error."""
    recorded(source, "other-1")
    run = CliRunner().invoke
    said = run(app, ["db", "copy", source.url, str(tmp_path / "to"), "other-*"])
    assert said.exit_code == 0, said.output
    assert [each.run_id for each in open_store(tmp_path / "to").runs()] == ["other-1"]
    assert "1414" in said.output.replace(",", "")
    none = run(app, ["db", "copy", source.url, str(tmp_path / "to"), "absent-*"])
    assert (none.exit_code, "absent-*" in none.output) == (2, True)
    same = run(app, ["db", "copy", source.url, source.url])
    assert same.exit_code == 2

    (tmp_path / "wrong").mkdir()
    open_store(tmp_path / "wrong").open_run(RunInfo("run", "code", created_at=1.0)).close()
    wrong = run(app, ["db", "copy", source.url, str(tmp_path / "wrong")])
    assert (wrong.exit_code, "another run" in wrong.output) == (1, True)
    assert len(open_store(tmp_path / "wrong").runs()) == 2  # the other one was copied all the same
