"""``rlwatch diff``: runs of a store and logs, the same answer; settings; exit codes."""

import json
from pathlib import Path

import pytest
from cli_helpers import Invoke, strict
from twins import collapsed, records, sound

from rlwatch.records import RunInfo
from rlwatch.store.url import open_store


def put(directory: Path, run_id: str, metrics, config) -> None:
    """A run of the store."""
    store = open_store(str(directory))
    writer = store.open_run(RunInfo(run_id, source="trl/grpo", config=config))
    writer.write(records(metrics))
    writer.close()
    store.close()


def write(path: Path, metrics) -> Path:
    """The same run as a log."""
    lines = [json.dumps({"step": row.step, **row.metrics}) for row in records(metrics)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def twins(tmp_path: Path) -> Path:
    """A crashed run and its twin."""
    put(tmp_path / "store", "bad", collapsed(300, 1, at=170), {"lr": 3e-6, "hub_token": "hf_" + "a" * 30})
    put(tmp_path / "store", "good", sound(300, 2), {"lr": 1e-6, "hub_token": "hf_" + "b" * 30})
    return tmp_path / "store"


def test_the_first_metric_its_step_and_its_evidence_come_first(invoke: Invoke, twins: Path):
    """Then the others, and the settings, without secrets."""
    result = invoke("diff", "bad", "good", "--store", twins)

    assert result.exit_code == 1
    head, answer, *rest = result.stdout.splitlines()
    assert head == "bad vs good"
    assert answer.startswith("  optim/grad_norm diverged first, at step 17")
    assert "x noise. Then policy/entropy at step 1" in answer
    assert any(line.split()[:3] == ["lr", "3e-06", "1e-06"] for line in rest)
    assert "hf_" not in result.stdout


def test_a_log_and_a_run_of_the_store_can_be_held_against_each_other(invoke: Invoke, twins: Path, tmp_path: Path):
    """Names are read canonically on both sides."""
    log = write(tmp_path / "other.jsonl", sound(300, 3))

    answer = strict(invoke("diff", "bad", "good", log, "--store", twins, "--format", "json").stdout)

    assert answer["runs"] == ["bad", "good", "other"]
    assert [one["first"] for one in answer["comparisons"]] == ["optim/grad_norm"] * 2
    (parted, *_) = answer["comparisons"][0]["partings"]
    assert parted["at"] - parted["together"] == 1
    assert parted["evidence"].startswith("optim/grad_norm diverged at step")
    assert [setting["values"] for setting in answer["config"] if setting["name"] == "lr"] == [
        {"bad": 3e-6, "good": 1e-6}
    ]


def test_two_logs_need_no_store(invoke: Invoke, tmp_path: Path):
    """Sound twins: nothing parted, exit code 0; the same file twice is told apart by number."""
    one, other = write(tmp_path / "a.jsonl", sound(200, 1)), write(tmp_path / "b.jsonl", sound(200, 2))

    result = invoke("diff", one, other)
    same = invoke("diff", one, one)

    assert result.exit_code == same.exit_code == 0
    assert "None of 10 metrics diverged up to step 199" in result.stdout
    assert "All rows of" in same.stdout
    assert same.stdout.startswith("a (1) vs a (2)")
    assert not (tmp_path / "rlwatch-runs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bad"], "two runs are needed"),
        (["bad", "nobody"], "no run 'nobody'"),
        (["bad", "good", "--by", "moon"], "--by is one of step, tokens, time, not 'moon'"),
        (["bad", "good", "--by", "tokens"], "bad and good did not record tokens"),
    ],
)
def test_what_cannot_be_compared_is_one_line(invoke: Invoke, twins: Path, arguments: list[str], says: str):
    """And exit code 2, never an empty answer."""
    result = invoke("diff", *arguments, "--store", twins)

    assert result.exit_code == 2
    assert says in result.stderr


def test_time_is_an_axis_too(invoke: Invoke, twins: Path):
    """Half a minute a step."""
    answer = strict(invoke("diff", "bad", "good", "--by", "time", "--store", twins, "--format", "json").stdout)

    assert answer["by"] == "time"
    assert answer["comparisons"][0]["partings"][0]["at"] == pytest.approx(170 * 30, abs=150)
