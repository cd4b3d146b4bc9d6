"""What trackers and trainers left on disk, as their own libraries wrote it (``written/``, by write_samples.py)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import native_logs
import pytest

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, logs_in, read_log

WRITTEN = Path(__file__).parent / "written"
REWARDS = [0.1, 0.2, 0.3, 0.4, 0.5]
LEFT_AS_IT_IS = ["0.0", "0.0", "0.0", "nan", "inf"]
CONFIG = {"lr": "1e-06", "beta": "0.04"}
ROWS = [(step, {"train/reward": step / 10, "kl": 0.5}) for step in range(1, 6)]


def values(run, name: str) -> list[float]:
    return [record.metrics[name] for record in run.records if name in record.metrics]


@pytest.mark.parametrize("name", ["swanlab-0.10.3.swanlab", "swanlab-0.7.20.swanlab"])
def test_a_run_of_swanlab_is_read_with_what_was_not_finite(name):
    """Protocol Buffers since 0.8, JSON before; what SwanLab measures of the machine is none of the run's."""
    [run] = read_log(WRITTEN / name)

    assert (run.format, [record.step for record in run.records]) == ("swanlab", [1, 2, 3, 4, 5])
    assert {name for record in run.records for name in record.metrics} == {"train/reward", "train/entropy", "kl"}
    assert values(run, "train/reward") == REWARDS
    assert [repr(value) for value in values(run, "kl")] == LEFT_AS_IT_IS
    assert run.records[0].ts > 1_700_000_000


def test_the_directory_of_a_swanlab_run_is_the_run(tmp_path):
    """``swanlog/run-.../``, as the trainer names it."""
    home = tmp_path / "run-20261123_180151-l1bt2kiz"
    (home / "files").mkdir(parents=True)
    shutil.copy(WRITTEN / "swanlab-0.10.3.swanlab", home / "run-l1bt2kiz.swanlab")

    assert [run.name for run in read_log(home)] == ["run-l1bt2kiz"]
    assert logs_in(tmp_path) == [home / "run-l1bt2kiz.swanlab"]


def test_an_offline_session_of_clearml_is_read_and_says_that_nan_became_zero():
    """Its own doing: what it wrote is all there is."""
    [run] = read_log(WRITTEN / "clearml-2.1.12" / "metrics.jsonl")

    assert (run.format, run.config) == ("clearml", CONFIG)
    assert (values(run, "train/reward"), values(run, "kl")) == (REWARDS, [0.0] * 5)
    assert "NaN" in run.notes[0]
    assert any("best" in skipped.reason for skipped in run.skipped)


@pytest.mark.parametrize(
    ("below", "names"), [("", ["grpo-s1", "grpo-s1-90ed4a2b"]), ("*", None), ("*/90*", ["grpo-s1"])]
)
def test_a_file_store_of_mlflow_is_read_from_its_root_an_experiment_or_a_run(below, names):
    """Each run with its values; two of one name are told apart."""
    store = WRITTEN / "mlruns-3.17.2"
    path = next(path for path in store.glob(below) if path.name != "0") if below else store
    runs = read_log(path)

    assert [run.name for run in runs] == (names or ["grpo-s1", "grpo-s1-90ed4a2b"])
    assert all(values(run, "train/reward") == REWARDS for run in runs)
    assert all([repr(value) for value in values(run, "kl")] == LEFT_AS_IT_IS for run in runs)
    assert runs[0].records[0].ts > 1_700_000_000
    assert all(run.config == CONFIG for run in runs)


def test_a_file_store_below_a_directory_is_found_and_a_damaged_line_counted(tmp_path):
    """Deleted runs are left out."""
    store = tmp_path / "project" / "mlruns"
    shutil.copytree(WRITTEN / "mlruns-3.17.2", store)
    deleted, kept = sorted(path for path in store.glob("*/*") if path.is_dir())
    about = deleted / "meta.yaml"
    about.write_text(about.read_text().replace("lifecycle_stage: active", "lifecycle_stage: deleted"))
    with (kept / "metrics" / "kl").open("a") as file:
        file.write("179545\n")

    assert logs_in(tmp_path) == [store]
    tail = LogTail(store)
    assert [record.step for record in tail.poll()] == [1, 2, 3, 4, 5]
    with (kept / "metrics" / "kl").open("a") as file:
        file.write("1795452000000 0.5 6\n")
    assert [(record.step, record.metrics) for record in tail.poll()] == [(6, {"kl": 0.5})]
    [run] = read_log(store)
    assert run.name == "grpo-s1"
    assert [(skipped.count, skipped.lines) for skipped in run.skipped] == [(1, (6,))]


@pytest.mark.parametrize("ending", ["log", "csv"])
def test_what_stable_baselines3_writes_is_read(ending):
    """The step is the iteration; a loss of entropy, which is its negative, is not taken for the entropy."""
    [run] = read_log(WRITTEN / f"sb3-2.9.2.{ending}")

    assert (run.source, [record.step for record in run.records]) == ("sb3", [1, 2, 3, 4, 5])
    assert values(run, "rollout/ep_rew_mean")[3] == pytest.approx(22.818, abs=0.02)
    assert values(run, "train/entropy_loss")[-1] == pytest.approx(-0.688, abs=0.001)


def test_a_step_of_nemo_rl_is_a_block_with_held_out_results_apart(tmp_path):
    """Times have units and are none of its metrics."""
    log = tmp_path / "train.log"
    log.write_bytes(native_logs.nemo_rl_console([(step, {"Loss": 0.5, "Avg Reward": step / 10}) for step in (1, 2, 3)]))
    [run] = read_log(log)

    expected = {"Loss": 0.5, "Avg Reward": 0.3, "eval/Accuracy": 0.25, "eval/Samples processed": 256.0}
    assert (run.format, [record.step for record in run.records]) == ("block-console", [1, 2, 3])
    assert run.records[2].metrics == expected


def test_a_step_of_areal_is_the_table_below_it(tmp_path):
    """Of several pairs in a line, as ``tabulate`` draws them."""
    names = ["ppo_actor/task_reward/avg", "ppo_actor/update/entropy/avg", "ppo_actor/update/grad_norm"]
    log = tmp_path / "main.log"
    log.write_bytes(native_logs.areal_console([(step, dict.fromkeys(names, step / 4)) for step in (1, 2)]))
    [run] = read_log(log)

    assert (run.source, run.format) == ("areal", "block-console")
    assert [(record.step, record.metrics) for record in run.records] == [
        (step, dict.fromkeys(names, step / 4)) for step in (1, 2)
    ]


def test_the_table_of_a_model_card_is_of_evaluations_but_for_the_training_loss(tmp_path):
    """Written by transformers itself."""
    from transformers.modelcard import make_markdown_table

    lines = [
        {"Training Loss": 0.5, "Epoch": 1.0, "Step": 100, "Validation Loss": 0.4, "Rewards/margins": 0.3},
        {"Training Loss": "No log", "Epoch": 2.0, "Step": 200, "Validation Loss": 0.3, "Rewards/margins": 0.4},
    ]
    (tmp_path / "README.md").write_text(
        f"# model\n\n### Training results\n\n{make_markdown_table(lines)}\n\n### Framework\n"
    )
    [run] = read_log(tmp_path / "README.md")

    assert run.format == "markdown"
    assert [(record.step, record.metrics) for record in run.records] == [
        (100, {"Training Loss": 0.5, "Epoch": 1.0, "eval/Validation Loss": 0.4, "eval/Rewards/margins": 0.3}),
        (200, {"Epoch": 2.0, "eval/Validation Loss": 0.3, "eval/Rewards/margins": 0.4}),
    ]


def test_what_the_cells_of_a_notebook_printed_is_read_where_there_is_no_table(tmp_path):
    """As the console of whichever trainer it was."""
    import json

    printed = native_logs.verl_console([(step, {"actor/entropy": 0.5, "critic/score/mean": 0.1}) for step in (1, 2, 3)])
    lines = printed.decode().splitlines(keepends=True)
    outputs = [{"output_type": "stream", "text": lines[:2]}, {"output_type": "stream", "text": "".join(lines[2:])}]
    cells = [{"cell_type": "markdown", "source": "step:9 - x:1"}, {"cell_type": "code", "outputs": outputs}]
    (tmp_path / "run.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    [run] = read_log(tmp_path / "run.ipynb")

    assert (run.format, run.source, [record.step for record in run.records]) == ("notebook", "verl", [1, 2, 3])
    assert run.notes[0] == "read from what its cells printed"


def test_a_repository_of_aim_is_named_with_what_to_do(tmp_path, monkeypatch):
    """Its databases are read by nothing but Aim; logs below the same directory are found all the same."""
    monkeypatch.setitem(sys.modules, "aimrocks", None)  # as where Aim is not installed
    for problem in ("with 0 runs; has any run tracked anything", r"with 1 run; .*pip install 'aim.* metrics to a CSV"):
        for path in (tmp_path, tmp_path / ".aim"):
            (tmp_path / ".aim").mkdir(exist_ok=True)
            assert logs_in(path) == [tmp_path / ".aim"]
            with pytest.raises(ImportFormatError, match=problem):
                read_log(path)
        (tmp_path / ".aim" / "meta" / "chunks" / "8c93c").mkdir(parents=True, exist_ok=True)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "train.log").touch()
    assert logs_in(tmp_path) == [tmp_path / "outputs" / "train.log", tmp_path / ".aim"]


def test_a_state_that_was_kept_under_another_name_is_found_below_a_directory(tmp_path):
    """People copy the one of the last checkpoint out before they delete the rest."""
    (tmp_path / "seed3-trainer_state.json").write_bytes(native_logs.trainer_state(ROWS))
    (tmp_path / "config.json").write_text("{}")

    assert logs_in(tmp_path) == [tmp_path / "seed3-trainer_state.json"]


def test_what_wandb_keeps_beside_a_run_is_named(tmp_path):
    """It holds last values or settings, of no step."""
    (tmp_path / "files").mkdir()
    for name in ("wandb-metadata.json", "wandb-summary.json", "config.yaml"):
        (tmp_path / "files" / name).write_text('{"reward": 0.5}')
        with pytest.raises(ImportFormatError, match=r"kept by wandb with a run.*\.wandb"):
            read_log(tmp_path / "files" / name)


def test_the_output_of_a_program_that_failed_before_its_first_step_says_by_what(tmp_path):
    """The last error is the answer to somebody with a dead run."""
    log = tmp_path / "slurm-12.out"
    log.write_text(
        "Loading...\nTraceback (most recent call last):\n  File 'x.py', line 3\nNotImplementedError: reward\n"
    )

    with pytest.raises(ImportFormatError, match="failed before it logged one, by NotImplementedError: reward"):
        read_log(log)
