"""runs, show, alerts: what a store holds, as text and as JSON."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import NOW, Invoke, record_run, strict

import rlwatch
from rlwatch.clock import ManualClock
from rlwatch.records import (
    Alert,
    AlertState,
    Finding,
    OutboxMessage,
    OutboxStatus,
    RunInfo,
    RunState,
    Severity,
    SpikeBatch,
    StepRecord,
)
from rlwatch.store.url import open_store


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """A store of three runs: one finished, one crashed, one whose writer fell silent."""
    store = open_store(tmp_path / "runs", clock=ManualClock(NOW))
    record_run(store, "alpha-1", name="seed1", project="math")
    record_run(store, "beta-2", name="seed2", project="code", state=RunState.CRASHED, grad_norm=math.nan)
    record_run(store, "gamma-3", state=None)
    store.close()
    return tmp_path / "runs"


def _finding(step: int, kind: str = "grad_spike", severity: Severity = Severity.WARNING) -> Finding:
    return Finding("gradients", kind, severity, step, step - 1, f"{kind} at {step}", {"ratio": math.inf}, seq=step)


def test_runs_lists_every_run_with_its_state_and_last_values(runs_dir: Path, invoke: Invoke) -> None:
    """One line a run."""
    result = invoke("runs", "--store", runs_dir)

    assert result.exit_code == 0
    lines = {
        word: line for line in result.stdout.splitlines() for word in ("alpha-1", "beta-2", "gamma-3") if word in line
    }
    assert lines["alpha-1"].split()[:6] == ["finished", "not", "judged", "math", "seed1", "alpha-1"]
    assert "crashed" in lines["beta-2"]
    assert "NaN" in lines["beta-2"]
    assert "dead" in lines["gamma-3"]
    assert "1.25" in lines["alpha-1"]


def test_runs_as_json_is_strict_and_alone_on_stdout(runs_dir: Path, invoke: Invoke) -> None:
    """Values under their canonical names, NaN as a string."""
    document = strict(invoke("runs", "--store", runs_dir, "--format", "json").stdout)
    rows = {row["run_id"]: row for row in document["runs"]}

    assert document["unreadable"] == {}
    assert set(rows) == {"alpha-1", "beta-2", "gamma-3"}
    assert rows["beta-2"]["last_values"]["optim/grad_norm"] == "NaN"
    assert rows["beta-2"]["status"] == "crashed"
    assert rows["gamma-3"]["status"] == "dead"
    assert rows["gamma-3"]["state"] == "running"
    assert rows["alpha-1"]["last_step"] == 5


def test_runs_can_be_narrowed_to_a_project_and_a_number(runs_dir: Path, invoke: Invoke) -> None:
    """The newest are kept."""
    one = strict(invoke("runs", "--store", runs_dir, "--project", "code", "--format", "json").stdout)
    two = strict(invoke("runs", "--store", runs_dir, "--limit", "2", "--format", "json").stdout)

    assert [row["run_id"] for row in one["runs"]] == ["beta-2"]
    assert len(two["runs"]) == 2
    assert "no runs in project 'nope'" in invoke("runs", "--store", runs_dir, "--project", "nope").stdout


def test_a_store_that_does_not_exist_yet_has_no_runs_and_is_not_made(tmp_path: Path, invoke: Invoke) -> None:
    """Looking must not create."""
    result = invoke("runs", "--store", tmp_path / "nothing")

    assert (result.exit_code, result.stdout.strip()) == (0, "no runs yet")
    assert not (tmp_path / "nothing").exists()


def test_the_store_is_taken_from_the_environment(runs_dir: Path, invoke: Invoke) -> None:
    """As the trainer takes it."""
    result = invoke("runs", "--format", "json", env={"RLWATCH_STORE": str(runs_dir)})

    assert len(strict(result.stdout)["runs"]) == 3


def test_a_damaged_run_is_reported_with_its_reason_and_hides_no_other(runs_dir: Path, invoke: Invoke) -> None:
    """In both formats."""
    (runs_dir / "beta-2" / "run.db").write_bytes(b"this is no database" * 100)

    text = invoke("runs", "--store", runs_dir)
    document = strict(invoke("runs", "--store", runs_dir, "--format", "json").stdout)

    assert text.exit_code == 0
    assert "unreadable: beta-2: " in text.stdout
    assert {row["run_id"] for row in document["runs"]} == {"alpha-1", "gamma-3"}
    assert list(document["unreadable"]) == ["beta-2"]


def test_a_run_name_cannot_command_the_terminal(tmp_path: Path, invoke: Invoke) -> None:
    """Nor does rich read it as markup."""
    store = open_store(tmp_path / "runs")
    record_run(store, "evil", name="\x1b]0;pwned\x07[bold red]x[/]<script>")

    for arguments in (("runs",), ("show", "evil")):
        output = invoke(*arguments, "--store", tmp_path / "runs").stdout
        assert "\x1b" not in output
        assert "\x07" not in output
        assert "[bold red]x[/]<script>" in output


def test_show_tells_who_where_and_how(runs_dir: Path, invoke: Invoke) -> None:
    """By name as well as by id."""
    result = invoke("show", "seed1", "--store", runs_dir)

    assert result.exit_code == 0
    for words in ("seed1  finished", "alpha-1", "math", "trl/grpo", "node7, pid 42", "entropy 1.25", "no findings"):
        assert words in result.stdout


def test_show_says_how_far_the_layers_are_from_moving_in_step(tmp_path: Path, invoke: Invoke) -> None:
    """The last heterogeneity beside the run's usual and largest, and the heaviest layer; no word where none is known."""
    store = open_store(tmp_path / "runs")
    for run, more in (("told", True), ("silent", False)):
        writer = store.open_run(RunInfo(run, created_at=NOW))
        for at in range(1, 12):
            layers = {"layers/heterogeneity": 0.8 if at == 7 else 0.1 + at / 1000, "layers/max_share": 0.64}
            norms = {"grad_layer/model.layers.0": 3.0, "grad_layer/model.layers.1": 4.0}
            writer.write([StepRecord(at, {"entropy": 1.0, **norms, **(layers if more else {})})])
        writer.close()

    text = invoke("show", "told", "--store", tmp_path / "runs").stdout
    layers = strict(invoke("show", "told", "--store", tmp_path / "runs", "--format", "json").stdout)["layers"]

    assert "heterogeneity 0.111 (usually 0.106, largest 0.8 at step 7; 0: all in step)" in " ".join(text.split())
    assert "model.layers.1 holds 64" in " ".join(text.split())
    assert (layers["heterogeneity"], layers["step"], layers["largest_step"]) == (pytest.approx(0.111), 11, 7)
    assert "heterogeneity" not in invoke("show", "silent", "--store", tmp_path / "runs").stdout


def test_show_metrics_lists_each_with_its_canonical_name(runs_dir: Path, invoke: Invoke) -> None:
    """And its unit."""
    text = invoke("show", "beta-2", "--metrics", "--store", runs_dir).stdout
    document = strict(invoke("show", "beta-2", "--metrics", "--store", runs_dir, "--format", "json").stdout)
    rows = {row["metric"]: row for row in document["metrics"]}

    assert re.search(r"grad_norm +optim/grad_norm .* 5 +NaN", text)
    assert rows["entropy"] == {
        "metric": "entropy",
        "canonical": "policy/entropy",
        "unit": "nats/token",
        "step": 5,
        "value": 1.25,
    }
    assert rows["grad_norm"]["value"] == "NaN"


def test_show_lists_the_newest_findings_and_all_on_demand(tmp_path: Path, invoke: Invoke) -> None:
    """Fifteen findings: ten, or fifteen."""
    store = open_store(tmp_path / "runs")
    writer = store.open_run(RunInfo("r", created_at=NOW))
    writer.write([StepRecord(step, {"entropy": 1.0}) for step in range(1, 16)])
    writer.write([_finding(step) for step in range(1, 16)])
    writer.close()

    some = invoke("show", "r", "--store", tmp_path / "runs").stdout
    every = invoke("show", "r", "--findings", "--store", tmp_path / "runs").stdout
    document = strict(invoke("show", "r", "--store", tmp_path / "runs", "--format", "json").stdout)

    def findings(shown: str) -> list[str]:
        return [line for line in shown.splitlines() if line.startswith("warning ") and "grad_spike at" in line]

    assert len(findings(some)) == 10
    assert "5 older: --findings" in some
    assert "grad_spike at 15" in some
    assert len(findings(every)) == 15
    assert len(document["findings"]) == 15
    assert document["findings"][0]["evidence"] == {"ratio": "Infinity"}


def test_show_spikes_lists_tokens_worst_first(tmp_path: Path, invoke: Invoke) -> None:
    """NaN is worse than any number."""
    store = open_store(tmp_path / "runs")
    writer = store.open_run(RunInfo("r", created_at=NOW))
    columns = {"token_id": np.array([11, 12, 13]), "ratio": np.array([1.5, 300.0, math.nan]), "text": ["a", "b", "[c]"]}
    writer.write([StepRecord(1, {"entropy": 1.0}), SpikeBatch(4, columns, reason="ratio")])
    writer.close()

    text = invoke("show", "r", "--spikes", "--store", tmp_path / "runs").stdout
    document = strict(invoke("show", "r", "--spikes", "--store", tmp_path / "runs", "--format", "json").stdout)

    assert [row["token_id"] for row in document["spikes"]] == [13, 12, 11]
    assert document["spikes"][0]["ratio"] == "NaN"
    assert text.index(" 13 ") < text.index(" 12 ") < text.index(" 11 ")
    assert "[c]" in text
    assert "no token spikes" in invoke("show", "r", "--spikes", "--store", _spikeless(tmp_path)).stdout


def _spikeless(tmp_path: Path) -> Path:
    record_run(open_store(tmp_path / "other"), "r")
    return tmp_path / "other"


def test_show_of_an_unknown_run_lists_close_ones_and_exits_2(runs_dir: Path, invoke: Invoke) -> None:
    """On stderr, without a traceback; stdout stays empty for scripts."""
    result = invoke("show", "alhpa-1", "--store", runs_dir, "--format", "json")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: no run 'alhpa-1'; did you mean alpha-1")
    assert "Traceback" not in result.stderr


@pytest.fixture
def alerted_dir(tmp_path: Path) -> Path:
    """A run with a firing alert that could not be delivered, and a resolved one that was."""
    store = open_store(tmp_path / "runs")
    record_run(store, "r", name="seed1")
    firing = Alert(
        "a1",
        "r",
        "entropy",
        "entropy_collapse",
        Severity.CRITICAL,
        AlertState.FIRING,
        3,
        4,
        "entropy fell",
        fired_at=NOW,
    )
    resolved = Alert("a2", "r", "grad", "grad_spike", Severity.WARNING, AlertState.RESOLVED, 1, 2, "a spike")
    messages = [
        OutboxMessage(
            "m1",
            "r",
            "a1",
            "webhook",
            {"text": "t"},
            OutboxStatus.DEAD,
            attempts=7,
            last_error="HTTP 500",
            created_at=NOW,
        ),
        OutboxMessage("m2", "r", "a2", "webhook", {"text": "t"}, OutboxStatus.SENT, attempts=1, created_at=NOW),
    ]
    store.put_alerts([firing, resolved], messages)
    return tmp_path / "runs"


def test_alerts_tells_what_fired_and_whether_anybody_was_told(alerted_dir: Path, invoke: Invoke) -> None:
    """Delivery beside the alert."""
    lines = invoke("alerts", "--store", alerted_dir).stdout.splitlines()
    firing = next(line for line in lines if "entropy_collapse" in line)
    resolved = next(line for line in lines if "grad_spike" in line)

    assert "firing" in firing
    assert "webhook dead after 7 tries: HTTP 500" in firing
    assert "webhook sent" in resolved


def test_alerts_as_json_carry_their_delivery_without_the_payload(alerted_dir: Path, invoke: Invoke) -> None:
    """By run name too."""
    rows = strict(invoke("alerts", "seed1", "--store", alerted_dir, "--format", "json").stdout)
    firing = next(row for row in rows if row["alert_id"] == "a1")

    assert len(rows) == 2
    assert firing["severity"] == "critical"
    assert firing["state"] == "firing"
    assert firing["delivery"] == [
        {"channel": "webhook", "status": "dead", "attempts": 7, "last_error": "HTTP 500", "sent_at": None}
    ]


def test_no_alerts_is_said_in_words_and_as_an_empty_list(runs_dir: Path, invoke: Invoke) -> None:
    """Empty output would look like a failure."""
    assert invoke("alerts", "--store", runs_dir).stdout.strip() == "no alerts"
    assert strict(invoke("alerts", "alpha-1", "--store", runs_dir, "--format", "json").stdout) == []


def test_a_run_that_measures_kl_by_its_estimators_shows_one(invoke: Invoke, tmp_path: Path) -> None:
    """A loop of one's own has k1, k2 and k3 and no number called KL: k3 is it."""
    with rlwatch.init(store=str(tmp_path), run_id="mine") as run:
        run.log({"policy/kl_ref_k1": -0.5, "policy/kl_ref_k3": 0.125}, step=1)

    assert "0.125" in invoke("runs", "--store", tmp_path).stdout
    assert "KL 0.125" in invoke("show", "mine", "--store", tmp_path).stdout
