"""``rlwatch diff``: runs of a store and logs, the same answer; settings; exit codes."""

import json
from pathlib import Path

import numpy as np
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


@pytest.fixture
def arms(tmp_path: Path) -> Path:
    """Four seeds of two arms, by name; the second one's reward falls. Two seeds of a third, by tag; one run alone."""
    for arm, first in (("base", 0), ("hot", 10)):
        for seed in range(4):
            metrics = sound(200, first + seed)
            if arm == "hot":
                metrics["reward"] = metrics["reward"] - 0.3 * (np.arange(200) >= 120)
            put(tmp_path / "store", f"{arm}-s{seed}", metrics, {"seed": seed, "lr": 3e-6 if arm == "hot" else 1e-6})
    store = open_store(str(tmp_path / "store"))
    for seed in range(2):
        writer = store.open_run(RunInfo(f"r{seed}", source="trl/grpo", tags=("group:few",), config={"lr": seed}))
        writer.write(records(sound(200, 20 + seed)))
        writer.close()
    store.close()
    put(tmp_path / "store", "alone", sound(200, 30), {})
    return tmp_path / "store"


def test_two_groups_of_seeds_differ_from_a_step_on(invoke: Invoke, arms: Path):
    """The metric that was changed, its step and p; the bands at the end; exit code 1."""
    result = invoke("diff", "--group", "base", "--group", "hot", "--store", arms)
    told = invoke("diff", "--group", "base", "--group", "hot", "--store", arms, "--format", "json")
    answer = strict(told.stdout)
    found = {one["metric"]: one for one in answer["metrics"]}

    assert result.exit_code == told.exit_code == 1
    assert result.stdout.startswith("base (4 runs) vs hot (4 runs)")
    assert answer["answer"] in " ".join(result.stdout.split())
    assert found["reward/mean"]["answer"] == "differs"
    assert found["reward/mean"]["since"] == pytest.approx(120, abs=24)
    assert found["reward/mean"]["p"] == pytest.approx(2 / 70)
    assert found["policy/entropy"]["answer"] == "no difference found"
    assert answer["groups"]["left"]["settings_that_differ"] == []
    for side in ("left", "right"):
        assert len(found["reward/mean"]["bands"][side]["median"]) == len(found["reward/mean"]["places"])


def test_few_seeds_are_told_as_such_and_settings_that_are_mixed(invoke: Invoke, arms: Path):
    """Exit code 2: nothing can be said, which is no "no"."""
    result = invoke("diff", "--group", "base", "--group", "few", "--store", arms)

    assert result.exit_code == 2
    assert "Too few seeds: with 4 against 2" in result.stdout
    assert "runs of few are not of one configuration: lr differ" in result.stdout


def test_a_seed_that_ends_early_is_named(invoke: Invoke, arms: Path):
    """Nothing after it is compared."""
    put(arms, "base-s9", {name: values[:40] for name, values in sound(200, 40).items()}, {})
    arguments = ("diff", "--group", "base", "--group", "hot", "--store", arms)

    assert "ends early, and no row after it is compared: base-s9 at step 39" in invoke(*arguments).stdout
    assert strict(invoke(*arguments, "--format", "json").stdout)["ends_early"] == {"base-s9": 39.0}


def test_logs_by_a_pattern_are_a_group(invoke: Invoke, tmp_path: Path):
    """No store is needed."""
    for arm in "ab":
        for seed in range(4):
            write(tmp_path / f"{arm}-{seed}.jsonl", sound(60, seed + 10 * (arm == "b")))

    result = invoke("diff", "--group", tmp_path / "a-*.jsonl", "--group", tmp_path / "b-*.jsonl", "--format", "json")

    assert strict(result.stdout)["groups"]["right"]["runs"] == ["b-0", "b-1", "b-2", "b-3"]
    assert not (tmp_path / "rlwatch-runs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--group", "base", "--group", "warm"], "no group 'warm'; there are"),
        (["--group", "base", "--group", "alone"], "group 'alone' has one run, alone"),
        (["--group", "base", "--group", "a**b"], "no group 'a**b'"),
        (["--group", "base", "--group", "x" * 400], "no group 'xxx"),
        (["--group", "base"], "--group is given twice, and no runs besides"),
        (["alone", "--group", "base", "--group", "hot"], "--group is given twice, and no runs besides"),
        (["--group", "base", "--group", "base"], "two groups are needed, got 'base' twice"),
        (["--group", "base", "--group", "hot", "--by", "tokens"], "did not record tokens"),
        ([], "name two runs or logs, or two groups"),
    ],
)
def test_groups_that_cannot_be_compared_are_one_line(invoke: Invoke, arms: Path, arguments: list[str], says: str):
    """And exit code 2."""
    result = invoke("diff", *arguments, "--store", arms)

    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
