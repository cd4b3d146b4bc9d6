"""Logs of loops of one's own: nulls, rows of several kinds, lines in the author's words, documents, tables of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from native_logs import json_document, loop_console

from rlwatch import scan
from rlwatch.errors import ImportFormatError
from rlwatch.importers import ImportedRun, LogTail, read_log, sniff
from rlwatch.importers.naming import naming_of
from rlwatch.metrics import known
from rlwatch.records import Severity
from rlwatch.testing.importer_contract import comparable


def read(tmp_path: Path, rows: Sequence[Mapping[str, object]] | str, name: str = "metrics.jsonl") -> ImportedRun:
    log = tmp_path / name
    log.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    [run] = read_log(log)
    return run


def values(run: ImportedRun, name: str) -> dict[int, float]:
    return {record.step: record.metrics[name] for record in run.records if name in record.metrics}


def training(first: int, last: int, **more: object) -> list[dict[str, object]]:
    return [{"step": step, "loss": 0.5, "mean_reward": 0.1, "grad_norm": 1.0, **more} for step in range(first, last)]


# null


def test_null_in_a_baseline_row_is_not_measured(tmp_path):
    """A loop that evaluates before it trains writes null for what it has not done: 42 sound runs were critical for it."""
    run = read(tmp_path, [{"step": 0, "loss": None, "mean_reward": None, "accuracy": 0.4}, *training(1, 40)])

    assert run.records[0].metrics == {"accuracy": 0.4}
    assert [(s.reason, s.count) for s in run.skipped] == [("a null (read as not measured)", 2)]
    assert [alarm.kind for alarm in scan(tmp_path / "metrics.jsonl").alarms] == []


def test_null_of_several_metrics_that_every_training_row_had_is_nan(tmp_path):
    """They went together, as they do when the weights are NaN and the writer has no word for it."""
    broken = [{"step": step, "loss": None, "mean_reward": 0.1, "grad_norm": None} for step in range(20, 24)]
    run = read(tmp_path, [*training(1, 20), *broken])

    assert [step for step, value in values(run, "loss").items() if math.isnan(value)] == [20, 21, 22, 23]
    report = scan(tmp_path / "metrics.jsonl")
    assert [(a.kind, a.severity, a.step) for a in report.alarms][:1] == [("nonfinite", Severity.CRITICAL, 20)]


@pytest.mark.parametrize("beside", [math.nan, math.inf, "nan"])
def test_null_beside_a_value_that_is_not_finite_is_nan(tmp_path, beside):
    """One writer, two ways: it replaced NaN and let infinity through."""
    run = read(tmp_path, [*training(1, 9), {"step": 9, "loss": None, "mean_reward": 0.1, "grad_norm": beside}])

    assert math.isnan(values(run, "loss")[9])


def test_null_after_the_metrics_own_nan_is_nan(tmp_path):
    """It stays broken."""
    rows = [
        *training(1, 9),
        {"step": 9, "loss": math.nan, "mean_reward": 0.1},
        {"step": 10, "loss": None, "mean_reward": 0.1},
    ]

    assert math.isnan(values(read(tmp_path, rows), "loss")[10])


@pytest.mark.parametrize(
    "row",
    [
        {"step": 9, "loss": None, "mean_reward": 0.1, "grad_norm": 1.0},
        {"step": 9, "type": "eval", "loss": None, "mean_reward": None, "grad_norm": None, "n": 1},
        {"step": 9, "baseline": True, "loss": None, "mean_reward": None, "n": 1},
        {"step": 9, "loss": None, "mean_reward": None, "val_accuracy": 0.5},
        {"step": 9, "clip_fraction": None, "reference_kl": None, "loss": 0.5},
        {"step": 0, "loss": None, "mean_reward": None, "n": 1},
    ],
    ids=["alone", "eval", "baseline", "held-out beside", "never finite", "another start"],
)
def test_null_without_such_evidence_is_not_measured(tmp_path, row):
    """It would be a critical alarm in a sound run."""
    run = read(tmp_path, [*training(1, 9), row])

    assert all(math.isfinite(value) for record in run.records for value in record.metrics.values())
    assert any(s.reason == "a null (read as not measured)" for s in run.skipped)


def test_null_of_a_metric_that_is_measured_now_and_then_is_not_nan(tmp_path):
    """Fields of the schema that an evaluation fills every fourth step."""
    rows = [
        {**row, "acc": 0.5 if i % 4 == 0 else None, "kl": 0.1 if i % 4 == 0 else None}
        for i, row in enumerate(training(1, 30))
    ]
    run = read(tmp_path, rows)

    assert list(values(run, "acc")) == list(range(1, 30, 4))


# Kinds of rows


def mixed(steps: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for step in range(1, steps):
        rows.append({"type": "rollout", "grpo_step": step, "reward": 0.2, "seconds": 3.0})
        rows.append({"type": "train", "grpo_step": step, "optimizer_step": 2 * step, "reward": 0.4, "loss": 0.5})
        if step % 5 == 0:
            rows.append({"type": "eval", "grpo_step": step, "reward": 0.9, "accuracy": 0.9})
    return rows


def test_rows_of_rollouts_updates_and_evaluations_are_not_one_series(tmp_path):
    """A reward on held-out prompts is none of the training."""
    run = read(tmp_path, mixed(12))

    assert (run.format, set(values(run, "reward").values())) == ("jsonl", {0.2})
    assert set(values(run, "train/reward").values()) == {0.4}
    assert values(run, "eval/reward") == {5: 0.9, 10: 0.9}
    assert values(run, "eval/accuracy") == {5: 0.9, 10: 0.9}
    assert scan(tmp_path / "metrics.jsonl").view.metrics.count("val/score") == 1


def test_the_word_for_a_kind_of_row_is_not_told_as_left_out(tmp_path):
    """It was read: as the kind."""
    run = read(tmp_path, [{"type": "train", "step": step, "loss": 0.5, "reward": 0.1} for step in range(9)])

    assert run.skipped == ()


def test_a_field_that_is_no_kind_of_row_changes_no_name(tmp_path):
    """``phase`` may be a part of a curriculum."""
    run = read(tmp_path, [{**row, "phase": "warmup" if i < 5 else "main"} for i, row in enumerate(training(1, 11))])

    assert len(values(run, "loss")) == 10


def test_a_dict_that_was_written_as_text_is_read(tmp_path):
    """By a tracker that knows no objects."""
    rows = [
        {"step": i, "metrics": "{'reward': 0.5, 'kl': nan}", "logs": '{"loss": 0.25}', "note": "{x"} for i in (1, 2)
    ]
    run = read(tmp_path, rows)

    assert repr(dict(run.records[0].metrics)) == "{'reward': 0.5, 'kl': nan, 'loss': 0.25}"


def test_metrics_in_objects_are_read_by_their_way(tmp_path):
    """What holds them says nothing; settings are no series."""
    rows = [{"step": i, "metrics": {"reward": {"mean": 0.5}}, "config": {"lr": 1e-6}} for i in range(3)]

    assert [dict(record.metrics) for record in read(tmp_path, rows).records] == [{"reward/mean": 0.5}] * 3


def test_ms_swifts_log_is_read_also_when_its_training_ended(tmp_path):
    """Its last line is the whole state."""
    rows = [
        {"loss": 0.5, "reward": 0.1, "epoch": i / 9, "global_step/max_steps": f"{i}/9", "memory(GiB)": 1}
        for i in range(1, 9)
    ]
    state = {"last_model_checkpoint": "x", "log_history": [{"loss": 0.5, "step": 1}], "memory": 16.5}
    run = read(tmp_path, [*rows, state], "logging.jsonl")

    assert (run.format, run.source, len(run.records)) == ("jsonl", "ms-swift", 8)


def test_llama_factorys_log_says_its_steps(tmp_path):
    """As ``current_steps``."""
    rows = [{"current_steps": 5 * i, "total_steps": 50, "loss": 0.5, "reward": 0.1, "lr": 1e-6} for i in range(1, 6)]

    assert list(values(read(tmp_path, rows, "trainer_log.jsonl"), "loss")) == [5, 10, 15, 20, 25]


# Documents


ROWS = [(step, {"loss": 0.5, "reward": step / 10}) for step in range(1, 9)]


def test_a_list_of_rows_is_a_run(tmp_path):
    """However it is indented, and also where no row says its step."""
    for text in (json_document(ROWS).decode(), json.dumps([{"reward": 0.1 * i, "loss": 0.5} for i in range(1, 9)])):
        run = read(tmp_path, text, "log.json")
        assert (run.format, [r.step for r in run.records]) == ("json", list(range(1, 9)))
    assert run.notes == ("no row holds its step: rows are numbered 1, 2, 3...",)


def test_lists_of_numbers_are_columns(tmp_path):
    """Those as long as most are."""
    document = {
        "config": {"lr": 1e-6},
        "history": {"rewards_avg": [0.1, 0.2, 0.3], "loss": [3.0, 2.0, None], "eval": [0.5]},
    }
    run = read(tmp_path, json.dumps(document), "log.json")

    assert [dict(record.metrics) for record in run.records][:2] == [
        {"rewards_avg": 0.1, "loss": 3.0},
        {"rewards_avg": 0.2, "loss": 2.0},
    ]


def test_columns_may_stand_in_groups(tmp_path):
    """Beside settings, which are no columns."""
    history = {"steps": [1, 2, 3], "train": {"reward": [0.1, 0.2, 0.3], "entropy": [1.0, 0.9, 0.8]}}
    run = read(tmp_path, json.dumps({"config": {"lr": 1e-6}, "history": history}), "result.json")

    assert [r.step for r in run.records] == [1, 2, 3]
    assert dict(run.records[2].metrics) == {"train/reward": 0.3, "train/entropy": 0.8}


def test_tables_of_one_document_are_runs(tmp_path):
    """Two cells of a notebook; a table of held-out prompts beside one of the training is none of its own."""
    log = tmp_path / "tables.json"
    log.write_text(
        json.dumps([{"cell": c, "rows": [{"step": i, "reward": 0.1} for i in range(3)]} for c in ("a", "b")])
    )
    assert [run.name for run in read_log(log)] == ["a", "b"]

    rows = {"train_log": [{"step": i, "reward": 0.1} for i in range(3)], "eval_log": [{"step": 2, "reward": 0.9}] * 2}
    run = read(tmp_path, json.dumps(rows), "log.json")
    assert (set(values(run, "reward").values()), set(values(run, "eval/reward").values())) == ({0.1}, {0.9})


@pytest.mark.parametrize("field", ["log_type", "entry_kind", "data_split", "type"])
def test_rows_of_an_evaluation_are_told_by_whatever_field_says_so(tmp_path, field):
    """Their rewards are none of the training."""
    rows = [{field: "train", "step": step, "final_reward": 0.5} for step in range(1, 9)]
    rows += [{field: "eval", "step": step, "final_reward": -1.0} for step in (4, 8)]
    run = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "log.jsonl")

    assert set(values(run, "final_reward").values()) == {0.5}
    assert set(values(run, "eval/final_reward").values()) == {-1.0}


def test_the_table_of_a_notebook_is_a_run(tmp_path):
    """Names that were broken at their slashes are mended; cells without a value are not measured."""
    table = "<table><tr><th>Step</th><th>Training Loss</th><th>completions / mean_length</th></tr>"
    table += "".join(f"<tr><td>{i}</td><td>0.5</td><td>{'No log' if i == 2 else 90}</td></tr>" for i in range(1, 9))
    cells = [{"cell_type": "code", "outputs": [{"data": {"text/html": [table, "</table>"]}}]}]
    run = read(tmp_path, json.dumps({"cells": cells}), "train.ipynb")

    assert (run.format, run.source, len(run.records)) == ("notebook", "trl/grpo", 8)
    assert list(values(run, "completions/mean_length")) == [1, 3, 4, 5, 6, 7, 8]
    assert known(run.records[0].metrics, run.source) == {"loss/policy", "len/mean"}


# Lines


@pytest.mark.parametrize(
    ("line", "metrics"),
    [
        ("Epoch:[1/1]({n}/500), Reward: 0.5, KL_ref: 0.25, Avg Len: 129, LR: 0.00000100", {"Reward": 0.5, "KL_ref": 0.25, "Avg Len": 129, "LR": 1e-6}),
        ("[run] step={n} loss=-0.5 avg_entropy=1.25 reward=nan", {"loss": -0.5, "avg_entropy": 1.25, "reward": math.nan}),
        ("2025-09-23 08:59:11,896 - INFO - iter {n}/90 | policy loss: 1e-3 | entropy: 0.25", {"policy loss": 1e-3, "entropy": 0.25}),
        ("Step {n}: reward = 0.5, kl = 0.25, took: 9.00min, acc: 30%", {"reward": 0.5, "kl": 0.25, "acc": 0.3}),
        ("(worker pid=9) Update #{n} reward: 0.5; entropy: 0.25", {"reward": 0.5, "entropy": 0.25}),
        ("INFO 10:00:01 trainer step={n} reward=0.5 entropy=0.25", {"reward": 0.5, "entropy": 0.25}),
        ("INFO trainer reward=0.5 entropy=0.25 step={n}", {"reward": 0.5, "entropy": 0.25}),
        ("step {n} | reward 0.5 | entropy 0.25 | 1.2 s", {"reward": 0.5, "entropy": 0.25}),
        ("Training:  5%|#  | {n}/60 [00:01<01:00, 1.0it/s, reward=0.5, entropy=0.25]", {"reward": 0.5, "entropy": 0.25}),
        ("{{'iter': {n}, 'reward': 0.5, 'entropy': nan, 'note': 'x'}}", {"reward": 0.5, "entropy": math.nan}),
        ("{{'iter': {n}, 'train': {{'reward': np.float64(0.5), 'kl': 0.25}}, 'optim': {{'lr': 1e-6}}}}", {"train/reward": 0.5, "train/kl": 0.25, "optim/lr": 1e-6}),
    ],
)  # fmt: skip
def test_a_line_of_names_and_numbers_is_a_row(tmp_path, line, metrics):
    """In whatever words; a number with a unit is none."""
    run = read(tmp_path, "".join(f"loading: 3, done\n{line.format(n=n)}\n" for n in range(1, 6)), "run.log")

    assert (run.format, [r.step for r in run.records]) == ("loop-console", [1, 2, 3, 4, 5])
    assert repr(dict(run.records[0].metrics)) == repr({name: float(value) for name, value in metrics.items()})


@pytest.mark.parametrize(
    "block",
    [
        "Iteration {n}\n  mean reward: 0.5\n  entropy: 0.25\n",
        "=== Step {n}/9 ===\nsampling...\n- mean reward: 0.5\n- entropy = 0.25\nsaved to disk\n",
        "----\n| step | {n} |\n| mean reward | 0.5 |\n| entropy     | 0.25 |\n----\n",
        "step: {n}\nmean reward: 0.5\nentropy: 0.25\n\n",
    ],
)
def test_a_step_may_be_a_block_of_lines(tmp_path, block):
    """A line with the step, or a row of a table, and then a name and a number a line; whole or in pieces."""
    text = "beta: 0.04\nseed: 3\n" + "".join(block.format(n=n) for n in range(1, 8))
    run = read(tmp_path, text, "run.log")
    (tmp_path / "run.log").write_text("")
    tail, found = LogTail(tmp_path / "run.log"), []
    for at in range(0, len(text), 37):
        with (tmp_path / "run.log").open("a") as log:
            log.write(text[at : at + 37])
        found += tail.poll()
    found += tail.close()

    assert [(r.step, dict(r.metrics)) for r in run.records] == [
        (n, {"mean reward": 0.5, "entropy": 0.25}) for n in range(1, 8)
    ]
    assert run.format == "loop-console"
    assert comparable(found) == comparable(run.records)


@pytest.mark.parametrize(
    ("line", "step", "metrics"),
    [
        ("step: {n}, reward: 0.5", 3, {"reward": 0.5}),
        ("step {n} | reward 0.5", 3, {"reward": 0.5}),
        ("Step {n}: Mean Reward=0.5", 3, {"Mean Reward": 0.5}),
        ("Step {n}/90: reward 48 %", 3, {"reward": 0.48}),
        ("step {n} reward 0.5 kl 0.01", 3, {"reward": 0.5, "kl": 0.01}),
        ("[{n}/90] reward: 0.48 -> 0.5", 3, {"reward": 0.5}),
        ("step {n}  loss=0.1  reward=0.65±0.077", 3, {"loss": 0.1, "reward": 0.65}),
        ("step {n},000 | reward 0.5 | mean length 1,234", 3000, {"reward": 0.5, "mean length": 1234.0}),
        ("step={n}.0 reward=0.5 (12/16 correct)", 3, {"reward": 0.5}),
        ("I0923 08:59:11.123456 47 loop.py:12] [{n}/90] reward=0.5", 3, {"reward": 0.5}),
        ("Step {n}\n  reward 0.5\n  KL: 2 %\n", 3, {"reward": 0.5, "KL": 0.02}),
        ("step {n} | reward 0.5 |\n    kl 0.0{n} | entropy 0.25", 3, {"reward": 0.5, "kl": 0.03, "entropy": 0.25}),
        ("Finished step {n}. Average reward: 0.5. KL: 0.25.", 3, {"Average reward": 0.5, "KL": 0.25}),
        ("it    {n} reward 0.5 kl 0.25", 3, {"reward": 0.5, "kl": 0.25}),
        ("Step {n}: reward 0.5 (best so far), kl 0.25", 3, {"reward": 0.5, "kl": 0.25}),
        ("Step {n}: reward 0.5, kl=0.25, entropy=0.7", 3, {"reward": 0.5, "kl": 0.25, "entropy": 0.7}),
        ("step\t{n}\treward\t0.5\tkl\t0.25", 3, {"reward": 0.5, "kl": 0.25}),
        ("- INFO - batch {n} of 9, length: 4\n- INFO - rl_loss: 0.1, data: {{'reward': 0.5}}", 3, {"length": 4.0, "rl_loss": 0.1, "data/reward": 0.5}),
    ],
)  # fmt: skip
def test_what_a_line_may_look_like(tmp_path, line, step, metrics):
    """One metric a line, percent, a change, a spread, thousands, a row on two lines."""
    text = "".join(line.format(n=n).replace("0.1", f"0.1{n}") + "\n" for n in range(1, 8))
    found: dict[str, float] = {}
    for record in read(tmp_path, text, "run.log").records:
        if record.step == step:
            found.update(record.metrics)

    assert {name: round(value, 1 if "loss" in name else 9) for name, value in found.items()} == metrics


def test_what_was_left_out_of_a_row_is_said(tmp_path):
    """Once for each name."""
    text = "".join(f"step {n} reward=0.{n}±0.1 took=3.5s\n" for n in range(1, 8))

    assert [s.reason for s in read(tmp_path, text, "run.log").skipped] == [
        "'took' (its number has a unit)",
        "'reward ±' (a spread)",
    ]


SAMPLED = {
    "a chain of thought": "Step 1: x = 3\nStep 2: reward = 5\nStep 3: score: 3\nSo entropy = 0.0 and kl = 4\n",
    "a row of its own": "step 2 | reward 0.9 | entropy 0.0\n",
    "a traceback": 'Traceback (most recent call last):\n  File "a.py", line 3, in step\n    reward = 5\nValueError: step 7\n',
    "source code": "def step(reward=5, kl=3):\n    return {'reward': 1, 'loss': 2, 'kl': 0}\n",
    "an answer": '{"answer": 5, "reward": 1}\nscore: 0.5, entropy: 0.25\n',
}


@pytest.mark.parametrize("shape", ["line", "block", "dict"])
@pytest.mark.parametrize("text", SAMPLED)
def test_what_the_model_wrote_changes_nothing(tmp_path, text, shape):
    """Printed among the rows now and then: whole, and as it grows, the rows are those that were written."""
    row = {
        "line": "step {n} | reward 0.{n} | entropy 0.5\n",
        "block": "Step {n}\n  reward: 0.{n}\n  entropy: 0.5\n",
        "dict": "{{'loss': 0.5, 'reward': 0.{n}, 'epoch': 0.{n}}}\n",
    }[shape]
    rows = [row.format(n=n) + (SAMPLED[text] if n % 5 == 0 else "") for n in range(10, 40)]
    alone = read(tmp_path, "".join(row.format(n=n) for n in range(10, 40)), "alone.log")
    run = read(tmp_path, "".join(rows), "run.log")
    (tmp_path / "run.log").write_text("")
    tail, found = LogTail(tmp_path / "run.log"), []
    for line in rows:
        with (tmp_path / "run.log").open("a") as log:
            log.write(line)
        found += tail.poll()
    found += tail.close()

    assert comparable(run.records) == comparable(alone.records)
    assert comparable(found) == comparable(run.records)


def test_a_console_that_goes_on_in_another_form_is_read_on(tmp_path):
    """The trainer was changed before it was started again."""
    text = "".join(f"step {n} | reward 0.5 | kl 0.25\n" for n in range(1, 30))
    text += "".join(f"Iteration {n}: mean_reward=0.5, kl=0.25\n" for n in range(1, 30))
    run = read(tmp_path, text, "run.log")

    assert [(r.attempt, r.step) for r in run.records] == [(a, n) for a in (1, 2) for n in range(1, 30)]


def test_of_several_ranks_the_first_counts(tmp_path):
    """Rows of others, with values of their own, are left out, and that is said."""
    text = "".join(f"[rank{rank}]: step {n} reward=0.{n}{rank} kl=0.1\n" for n in range(1, 9) for rank in range(3))
    run = read(tmp_path, text, "run.log")

    assert list(values(run, "reward").values()) == [float(f"0.{n}0") for n in range(1, 9)]
    assert "another rank" in run.skipped[0].reason


def test_lines_of_an_evaluation_are_none_of_the_training(tmp_path):
    """They call what they measure as the training does."""
    text = ""
    for n in range(1, 30):
        text += f"step {n} | reward 0.5 | kl 0.25\n" + (f"Eval at step {n}: reward = 0.9\n" if n % 5 == 0 else "")
    run = read(tmp_path, text, "run.log")

    assert set(values(run, "reward").values()) == {0.5}
    assert set(values(run, "eval/reward")) == {5, 10, 15, 20, 25}


def test_a_printed_dict_without_a_step_is_no_row(tmp_path):
    """Of an answer, or of an evaluation, between the lines of a training."""
    text = "".join(
        f"step {n}: loss: 0.5, entropy: 0.25\n{{'format_reward': 1.0, 'reward': 0.0}}\n" for n in range(1, 6)
    )
    run = read(tmp_path, text, "run.log")

    assert [dict(r.metrics) for r in run.records] == [{"loss": 0.5, "entropy": 0.25}] * 5


def test_lines_of_names_that_nobody_knows_are_refused_with_the_names(tmp_path):
    """The shape is no trouble then."""
    (tmp_path / "run.log").write_text("".join(f"step={n} apples={n / 9} pears=0.5\n" for n in range(9)))

    with pytest.raises(
        ImportFormatError, match=r"none of its 2 metrics is known to rlwatch \(found 'apples', 'pears'\)"
    ):
        read_log(tmp_path / "run.log")


@pytest.mark.parametrize(
    ("name", "first", "line"),
    [
        ("run.log", "", "step: {n}, myscore: {v}"),
        ("bars.log", "", "step {n} | myscore {v}"),
        ("run.jsonl", "", '{{"step": {n}, "myscore": {v}}}'),
        ("run.csv", "step,myscore", "{n},{v}"),
        ("long.csv", "run_id,step,metric,value", "a,{n},myscore,{v}"),
        ("run.md", "| step | myscore |\n|---|---|", "| {n} | {v} |"),
    ],
)
def test_a_log_of_one_unknown_name_is_refused_with_the_option_that_reads_it(tmp_path, name, first, line):
    """The advice of the error, followed, reads the log."""
    log = tmp_path / name
    log.write_text("\n".join([*([first] if first else []), *(line.format(n=n, v=n / 9) for n in range(9))]) + "\n")

    with pytest.raises(ImportFormatError, match=r"its only metric is not .*'myscore'.*--map reward=myscore"):
        read_log(log)
    [run] = read_log(log, naming=naming_of(["reward=myscore"]))

    assert [record.metrics for record in run.records] == [{"reward/mean": n / 9} for n in range(9)]


def test_steps_of_lines_go_on_across_epochs(tmp_path):
    """Each epoch counts anew; a start from the beginning is an attempt."""
    epochs = [(epoch, n) for epoch in (1, 2) for n in (10, 20, 30)] + [(1, 10), (1, 20), (1, 30)]
    lines = [f"Epoch {epoch} step {n}/30: reward: 0.5, entropy: 0.25\n" for epoch, n in epochs]
    run = read(tmp_path, "".join(lines), "run.log")

    assert [(r.attempt, r.step) for r in run.records] == [
        *[(1, step) for step in (10, 20, 30, 40, 50, 60)],
        *[(2, step) for step in (10, 20, 30)],
    ]


def test_lines_without_a_step_are_numbered(tmp_path):
    """And that is said."""
    run = read(tmp_path, "".join(f"rl_loss: -0.5, time: {n}.5, token_entropy: 0.25\n" for n in range(6)), "run.log")

    assert [record.step for record in run.records] == [1, 2, 3, 4, 5, 6]
    assert run.notes == ("no line holds its step: rows are numbered 1, 2, 3...",)


def test_lines_with_nothing_but_a_loss_are_read_where_nothing_else_is(tmp_path):
    """A warm-up prints them before the trainer's rows; whole or in pieces, the log is the trainer's."""
    warm = "".join(f"step {n}/90  loss=0.5  lr=1e-5\n" for n in range(1, 9))
    assert read(tmp_path, warm, "sft.log").format == "loop-console"

    rows = "".join(f"{{'loss': 0.5, 'reward': 0.5, 'epoch': {n / 10}}}\n" for n in range(1, 9))
    whole = read(tmp_path, warm + rows, "run.log")
    (tmp_path / "run.log").write_text(warm)
    tail = LogTail(tmp_path / "run.log")
    found = tail.poll()
    (tmp_path / "run.log").write_text(warm + rows)
    found += tail.poll() + tail.close()

    assert whole.format == tail.format == "trl-console"
    assert comparable(found) == comparable(whole.records)


def test_text_and_settings_are_no_rows(tmp_path):
    """Answers of the model and printed configurations have names and numbers, too, and may be printed at each start."""
    (tmp_path / "run.log").write_text(
        "x: 3, y = 5 and so z: 8\nlearning_rate: 1e-5, beta: 0.04\nmax_len: 5\nweights: accuracy=0.7, reward=0.5\n" * 9
    )

    with pytest.raises(ImportFormatError, match="no known format"):
        read_log(tmp_path / "run.log")


def test_what_a_trainer_prints_is_read_as_the_trainers(tmp_path):
    """Also where it would do as a line of anybody's."""
    (tmp_path / "a.log").write_text("step:1 - actor/entropy:0.5 - critic/score/mean:0.25\n" * 4)

    assert sniff(tmp_path / "a.log").name == "verl-console"


# Several starts


@pytest.mark.parametrize("summary", [False, True])
def test_trainings_glued_into_one_console_are_attempts(tmp_path, summary):
    """Their epochs begin anew; nothing else tells, since no bar does."""
    one = "".join(f"{{'loss': 0.5, 'reward': {i / 10}, 'epoch': {i / 5}}}\n" for i in range(1, 6))
    end = "{'train_runtime': 12.0, 'train_loss': 0.1, 'epoch': 1.0}\n" if summary else ""
    run = read(tmp_path, (one + end) * 3, "glued.log")

    assert [(r.attempt, r.step) for r in run.records] == [(a, s) for a in (1, 2, 3) for s in range(1, 6)]


def test_a_start_from_a_checkpoint_goes_on_from_there(tmp_path):
    """As far as its epoch says."""
    epochs = [i / 10 for i in range(1, 11)] + [i / 10 for i in range(6, 12)]
    run = read(tmp_path, "".join(f"{{'loss': 0.5, 'reward': 0.5, 'epoch': {e}}}\n" for e in epochs), "glued.log")

    assert [(r.attempt, r.step) for r in run.records][10:] == [(2, s) for s in range(6, 12)]


# Tables of runs


def test_a_table_of_runs_is_refused_with_one_sentence(tmp_path):
    """It has no step: neither wandb's nor one with a column of runs."""
    wandb = '"Name","State","Notes","train/loss"\n"run_1","finished","-","0.2"\n'
    index = "run_id,step,reward_mean,entropy\n" + "".join(f"seed{i},{100 + i},0.5,0.25\n" for i in range(5))
    for text in (wandb, index):
        (tmp_path / "runs.csv").write_text(text)
        with pytest.raises(ImportFormatError, match="is a table of runs: one row a run") as caught:
            read_log(tmp_path / "runs.csv")
        assert "tried" not in str(caught.value)


def test_a_format_nobody_knows_is_refused_with_what_would_be_read(tmp_path):
    """And only then with what was tried."""
    (tmp_path / "notes.txt").write_text("nothing here\n" * 9)

    with pytest.raises(ImportFormatError, match=r"no known format; log a row a step, as JSON lines .* \(tried "):
        read_log(tmp_path / "notes.txt")


def test_a_printed_dict_of_nobodys_is_read_by_its_words(tmp_path):
    """Only Hugging Face's rows have an epoch; where none has, names may mean what they say."""
    run = read(tmp_path, "".join(f"{{'loss': 0.5, 'avg_reward': 0.1, 'lr': {i}}}\n" for i in range(1, 5)), "own.log")

    assert (run.format, run.source) == ("trl-console", "")
    assert "reward/mean" in scan(tmp_path / "own.log").metrics


def test_the_console_of_a_loop_reads_the_same_in_pieces(tmp_path):
    """As it grows."""
    data = loop_console([(step, {"Reward": 0.5, "KL": 0.25}) for step in range(1, 30)])
    log = tmp_path / "run.log"
    log.write_bytes(b"")
    tail, found = LogTail(log), []
    for end in range(0, len(data) + 97, 97):
        log.write_bytes(data[:end])
        found += tail.poll()
    found += tail.close()

    assert comparable(found) == comparable(read_log(log)[0].records)


@pytest.mark.parametrize("hole", [b"\x00" * 9, b"\x00" * 5000])
@pytest.mark.parametrize("at", ["begin", "within"])
def test_a_block_of_nul_bytes_is_passed_over_and_counted(tmp_path, hole, at):
    """A machine lost power, or the log was truncated while it was written; the rows beside it are there."""
    lines = [f"step {n} | reward 0.5 | kl 0.25\n".encode() for n in range(1, 12)]
    lines[0 if at == "begin" else 6] = hole + lines[0 if at == "begin" else 6]
    (tmp_path / "run.log").write_bytes(b"".join(lines))
    [run] = read_log(tmp_path / "run.log")

    assert [r.step for r in run.records] == list(range(1, 12))
    counted = [("a block of NUL bytes", 1)] if at == "within" else []
    assert [(s.reason.split(",")[0], s.count) for s in run.skipped] == counted


def test_of_rows_that_name_their_rank_those_of_the_first_count(tmp_path):
    """At each step; a rank that is a metric, and changes from step to step, is one."""
    rows = [{"step": n, "rank": rank, "reward": n / 10 + rank, "loss": 0.1} for n in range(1, 9) for rank in range(4)]
    run = read(tmp_path, rows)

    assert list(values(run, "reward").values()) == [n / 10 for n in range(1, 9)]
    assert [s.count for s in run.skipped if "another rank" in s.reason] == [24]
    assert len(values(read(tmp_path, [{"step": n, "rank": n, "loss": 0.1} for n in range(9)]), "rank")) == 9


NOTATIONS = {
    "a logger with its place": "2026-11-01 10:01:02.123 | INFO     | trainer.loop:train:88 - step {s} reward {r} kl {k}",
    "an underscore": "step_{s} reward_mean {r} kl_mean {k}",
    "dashes": "step {s} - reward {r} - kl {k}",
    "tensors": "step {s} {{'reward': tensor({r}, device='cuda:0'), 'kl': tensor({k}, grad_fn=<MeanBackward0>)}}",
    "arrays of one": "step={s} reward=[{r}] kl=np.float64({k})",
    "a step and its dict": "{s} {{'reward': {r}, 'kl': {k}}}",
    "a tuple": "({s}, {{'reward': {r}, 'kl': {k}}})",
    "a box": "╭──────────╮\n│ step     {s} │\n│ reward   {r} │\n│ kl       {k} │\n╰──────────╯",
    "a block with two pairs in a line": "Step {s}\n  reward={r}\n  kl={k}, tokens=100",
}
TABLES = {
    "commas": ("step,reward,kl", "{s},{r},{k}"),
    "tabs": ("step\treward\tkl", "{s}\t{r}\t{k}"),
    "blanks": ("  step    reward        kl", "{s:6d}{r:10.4f}{k:10.5f}"),
    "a printed DataFrame": ("    step  reward      kl", "{s:<4d} {s:5d} {r:10.4f} {k:10.5f}"),
}


@pytest.mark.parametrize("written", [*NOTATIONS, *TABLES])
def test_a_notation_of_a_loop_is_read_whole(tmp_path, written):
    """What was written equals what is read, behind a greeting and with a completion in between."""
    head, line = TABLES.get(written) or ("Loading model...", NOTATIONS[written])
    rows = [(s, round(0.2 + s / 100, 4), round(0.01 + s / 1000, 5)) for s in range(1, 31)]
    text = ["Loading 3 of 7 shards...", "WARNING: foo is deprecated since 2.0", head]
    for s, r, k in rows:
        text += [line.format(s=s, r=r, k=k), *(["Step 1: x = 3 so reward = 5"] if s == 15 else [])]
    (tmp_path / "run.log").write_text("\n".join(text) + "\n")

    [run] = read_log(tmp_path / "run.log")
    found = [
        (one.step, *(v for name, v in one.metrics.items() if "reward" in name or "kl" in name)) for one in run.records
    ]

    assert found == rows


def test_a_table_in_passing_changes_nothing_for_the_lines_of_a_loop(tmp_path):
    """A summary with a column for the step is none of the rows."""
    lines = [f"step {s}: reward: {s / 100}, kl: 0.01" for s in range(1, 31)]
    summary = ["", "step  reward", "   5    0.99", "  10    0.98", ""]
    (tmp_path / "run.log").write_text("\n".join([*summary, *lines[:20], *summary, *lines[20:]]) + "\n")

    [run] = read_log(tmp_path / "run.log")

    assert [(one.step, one.metrics["reward"]) for one in run.records] == [(s, s / 100) for s in range(1, 31)]


def test_a_comma_is_of_thousands_between_blanks_and_of_decimals_between_semicolons(tmp_path):
    """``1,000`` is a thousand in every line of a console; with semicolons ``0,5`` is a half."""
    (tmp_path / "blanks.log").write_text("Loading\nstep  reward  len\n1,000  0.5  1,176\n2,000  0.25  1,200.5\n")
    (tmp_path / "german.log").write_text("Loading\nstep;reward\n1;0,5\n2;nan\n3;\n4;-inf\n")

    [blanks], [german] = read_log(tmp_path / "blanks.log"), read_log(tmp_path / "german.log")

    assert [(one.step, dict(one.metrics)) for one in blanks.records] == [
        (1000, {"reward": 0.5, "len": 1176.0}),
        (2000, {"reward": 0.25, "len": 1200.5}),
    ]
    assert [(one.step, repr(one.metrics["reward"])) for one in german.records] == [(1, "0.5"), (2, "nan"), (4, "-inf")]


def test_a_completion_inside_a_block_is_no_part_of_it(tmp_path):
    """Lines of several pairs count where they recur as they are written."""
    lines = []
    for s in range(1, 31):
        lines += [f"Step {s}", f"  reward={s / 100}", f"  kl=0.01, tokens={s}"]
        lines += ["so x = 3, reward = 7, and kl = 9"] if s in (5, 15) else []
    (tmp_path / "run.log").write_text("\n".join(lines) + "\n")

    [run] = read_log(tmp_path / "run.log")

    assert [(one.step, dict(one.metrics)) for one in run.records] == [
        (s, {"reward": s / 100, "kl": 0.01, "tokens": float(s)}) for s in range(1, 31)
    ]


def test_a_list_of_several_numbers_is_no_value(tmp_path):
    """Only a list of one is: which of several would be the reward?"""
    (tmp_path / "run.log").write_text("".join(f"step={s} kl=0.5 reward=[0.5, 0.{s}]\n" for s in range(1, 20)))

    [run] = read_log(tmp_path / "run.log")

    assert {name for one in run.records for name in one.metrics} == {"kl"}
