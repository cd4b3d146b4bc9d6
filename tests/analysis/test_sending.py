"""A recorded run sent to TensorBoard, wandb and MLflow, and read back by the importers: the same values at the same steps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlwatch
from rlwatch.analysis.runs import StoredRun
from rlwatch.analysis.sending import Sent
from rlwatch.errors import ConfigError, MissingExtraError, RLWatchError
from rlwatch.importers import ImportedRun, read_log
from rlwatch.records import Finding, RunInfo, RunState, Severity, Stage, StepRecord

NAN, INF = math.nan, math.inf
BEGAN = 1_750_000_000.0
ROWS = ({"reward": 0.5, "kl[ref]": NAN}, {"reward": -INF}, {"reward": 0.25, "kl[ref]": INF}, {"reward": NAN})
SENT = [{"reward": 0.5, "kl[ref]": NAN}, {"reward": -INF}, {"reward": 0.75}, {"reward": 0.125}]
"""The branch that counts: the last two rows were run again."""


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    """Two processes, a finding that was over at the last step, one of a step that was run again, a secret."""
    store = rlwatch.open_store(tmp_path / "runs")
    config = {"lr": 1e-6, "hub_token": "hf_secret", "rollout": {"n": 8}}
    info = RunInfo("r-1", "math", "seed 3", "verl", BEGAN, config=config, tags=("paper",))
    for attempt, rows in enumerate((ROWS, SENT[2:]), start=1):
        writer = store.open_run(info)
        first = 4 - len(rows)
        seq = store.first_seq("r-1", attempt)
        writer.write(
            [StepRecord(first + i, row, BEGAN + 10 * i + attempt, attempt, seq=seq + i) for i, row in enumerate(rows)]
        )
        told = (
            [("kl", 1, 1, Stage.BEGAN), ("old", 3, 1, Stage.BEGAN)] if attempt == 1 else [("kl", 3, 2, Stage.RESOLVED)]
        )
        for kind, step, of, stage in told:
            severity = Severity.WARNING if stage is Stage.BEGAN else Severity.INFO
            writer.write(
                [Finding("d", kind, severity, step, step, f"{kind} *rises*", attempt=of, seq=seq + step, stage=stage)]
            )
        writer.finish(RunState.FINISHED, "", BEGAN + 100)
        writer.close()
    return rlwatch.open(tmp_path / "runs")["r-1"]


def to_tensorboard(run: StoredRun, where: Path, **more) -> tuple[Sent, Path]:
    return run.to_tensorboard(where / "tb", **more), where / "tb"


def to_wandb(run: StoredRun, where: Path, **more) -> tuple[Sent, Path]:
    sent = run.to_wandb(offline=True, directory=where / "wb", **more)
    (file,) = Path(sent.where).glob("*.wandb")
    deadline = time.monotonic() + 60
    while file.stat().st_size < 100 and time.monotonic() < deadline:  # a process of wandb's own writes it, all at once
        time.sleep(0.05)
    return sent, file


def to_mlflow(run: StoredRun, where: Path, **more) -> tuple[Sent, Path]:
    return run.to_mlflow(str(where / "mlruns"), **more), where / "mlruns"


SENDERS = {"tensorboard": to_tensorboard, "wandb": to_wandb, "mlflow": to_mlflow}
Sender = Callable[..., tuple[Sent, Path]]


@pytest.fixture(params=SENDERS)
def send(request, monkeypatch) -> Sender:
    """MLflow's file store is the quickest; wandb asks no server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return SENDERS[request.param]


def measured(log: ImportedRun) -> list[tuple[int, float, dict[str, str]]]:
    """Rows of a log without what findings and forecasts put there; NaN compared as text."""
    rows: dict[int, tuple[float, dict[str, str]]] = {}
    for record in log.records:
        _, known = rows.setdefault(record.step, (record.ts, {}))
        known |= {name: repr(v) for name, v in record.metrics.items() if not name.startswith(("rlwatch/", "forecast/"))}
    return [(step, ts, known) for step, (ts, known) in rows.items()]


def test_what_is_sent_reads_back_the_same(run: StoredRun, send: Sender, tmp_path: Path) -> None:
    """Values, NaN and infinities, steps, times; the level of what was found, and nothing of the steps run again."""
    sent, place = send(run, tmp_path)
    (log,) = read_log(place)
    name = sent.renamed.get("kl[ref]", "kl[ref]")
    expected = [{n.replace("kl[ref]", name): repr(v) for n, v in row.items()} for row in SENT]
    times = [BEGAN + 1, BEGAN + 11, BEGAN + 2, BEGAN + 12]
    levels = {record.step: record.metrics["rlwatch/kl"] for record in log.records if "rlwatch/kl" in record.metrics}

    assert measured(log) == list(zip(range(4), times, expected, strict=True))
    assert levels == {0: 0.0, 1: 2.0, 2: 2.0, 3: 0.0}
    assert not any("rlwatch/old" in record.metrics for record in log.records)
    assert (sent.rows, sent.values) == (4, 9)


def test_it_is_not_sent_twice(run: StoredRun, send: Sender, tmp_path: Path) -> None:
    """What is there is left as it is."""
    _, place = send(run, tmp_path)
    before = measured(read_log(place)[0])

    with pytest.raises(ConfigError, match=r"already"):
        send(run, tmp_path)
    assert measured(read_log(place)[0]) == before


def test_half_a_run_is_none(run: StoredRun, tmp_path: Path, monkeypatch) -> None:
    """Ctrl-C while it is sent: TensorBoard and MLflow have nothing of it, and it can be sent again."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def interrupted(records):
        yield records[0]
        raise KeyboardInterrupt

    for send in (to_tensorboard, to_mlflow):
        with pytest.raises(KeyboardInterrupt):
            send(run, tmp_path, progress=interrupted)
        assert len(measured(read_log(send(run, tmp_path)[1])[0])) == 4


def test_settings_tags_and_findings_come_along(run: StoredRun, tmp_path: Path, monkeypatch) -> None:
    """Where each tracker has a place for them; no secret among them."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (wandb,), (mlflow,) = (read_log(send(run, tmp_path)[1]) for send in (to_wandb, to_mlflow))
    accumulated = EventAccumulator(str(to_tensorboard(run, tmp_path)[1])).Reload()
    texts = {
        tag: accumulated.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in accumulated.Tags()["tensors"]
    }
    (tags,) = (tmp_path / "mlruns").glob("*/*/tags")

    assert (wandb.title, wandb.project, wandb.tags) == ("seed 3", "math", ("paper",))
    assert (wandb.config["lr"], wandb.config["rollout"]) == (1e-6, {"n": 8})
    assert (mlflow.name, mlflow.config["rollout.n"]) == ("seed 3", "8")
    assert {"paper", "rlwatch.run_id", "rlwatch.verdict"} <= {tag.name for tag in tags.iterdir()}
    note = (tags / "mlflow.note.content").read_text()
    for told in (note, texts["rlwatch/findings"], wandb.config["wandb/notes"]):
        assert "step 1, warning: kl \\*rises\\*" in told
        assert "old" not in told
    assert "- rollout.n: 8" in texts["config"]
    assert not any("hf_secret" in str(text) for text in (texts, wandb.config, mlflow.config))


@pytest.mark.parametrize("package", ["tensorboard.compat.proto.event_pb2", "wandb", "mlflow"])
def test_without_the_package_it_says_what_to_install(run: StoredRun, package: str, tmp_path: Path, monkeypatch) -> None:
    """Before anything is made."""
    monkeypatch.setitem(sys.modules, package, None)
    extra = package.partition(".")[0]

    with pytest.raises(MissingExtraError, match=rf"pip install 'rlwatch-monitor\[{extra}\]'"):
        SENDERS[extra](run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_what_mlflow_refuses_is_a_line(run: StoredRun, tmp_path: Path, monkeypatch) -> None:
    """Here: a file store without the variable that allows one."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)

    with pytest.raises(RLWatchError, match="MLflow refuses it"):
        to_mlflow(run, tmp_path)


@pytest.mark.thorough
def test_a_database_of_mlflow_reads_back_the_same(run: StoredRun, tmp_path: Path) -> None:
    """Infinities are the largest float there, and read as infinities."""
    run.to_mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (log,) = read_log(tmp_path / "mlflow.db")

    assert [row for _, _, row in measured(log)] == [
        {name.replace("kl[ref]", "kl_ref_"): repr(value) for name, value in row.items()} for row in SENT
    ]
