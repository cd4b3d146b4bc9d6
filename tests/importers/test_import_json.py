"""JSON lines and trainer_state.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_logs import trainer_state, verl_jsonl

from rlwatch.errors import ImportFormatError
from rlwatch.importers import ImportedRun, read_log


def read(tmp_path: Path, text: str | bytes, name: str = "run.jsonl") -> ImportedRun:
    log = tmp_path / name
    log.write_bytes(text.encode() if isinstance(text, str) else text)
    [run] = read_log(log)
    return run


def test_verls_null_is_a_value_that_was_not_finite(tmp_path):
    """Distinct from a metric that is absent: the one is an alarm, the other nothing."""
    run = read(
        tmp_path, '{"step":1,"data":{"actor/pg_loss":null,"actor/lr":1e-6}}\n{"step":2,"data":{"actor/lr":1e-6}}\n'
    )

    assert math.isnan(run.records[0].metrics["actor/pg_loss"])
    assert "actor/pg_loss" not in run.records[1].metrics
    assert (run.format, run.source) == ("verl-jsonl", "verl")


@pytest.mark.parametrize(
    ("row", "step"),
    [
        ('{"step": 3, "loss": 0.5}', 3),
        ('{"loss": 0.5, "step": 3.0}', 3),
        ('{"loss": 0.5, "global_step": 7, "train/epoch": 1}', 7),
        ('{"loss": 0.5, "train/global_step": "8"}', 8),
        ('{"loss": 4.76e-06, "global_step/max_steps": "12/3820", "percentage": "0.03%"}', 12),
        ('{"_step": 4, "train/loss": 0.5, "_runtime": 3.5}', 4),
    ],
)
def test_a_flat_row_may_say_its_step_in_several_ways(tmp_path, row, step):
    """Those of ms-swift, HF, wandb and loops of one's own."""
    run = read(tmp_path, row + "\n")

    assert [record.step for record in run.records] == [step]
    assert not {"step", "global_step/max_steps", "_step"} & set(run.records[0].metrics)


def test_literals_of_pythons_json_are_read(tmp_path):
    """NaN, Infinity and strings that are numbers; in a row of TRL null is a mean of nothing but NaN."""
    row = '{"step": 1, "loss": NaN, "kl": -Infinity, "entropy": null, "reward": "0.5", "completion_length": "NaN"}\n'
    run = read(tmp_path, row)

    assert repr(run.records[0].metrics) == repr(
        {"loss": math.nan, "kl": -math.inf, "entropy": math.nan, "reward": 0.5, "completion_length": math.nan}
    )


def test_what_is_no_number_is_counted(tmp_path):
    """Strings, booleans, lists, and an integer too large for a float."""
    row = {"step": 1, "loss": 0.5, "s": "4m 52s", "b": True, "l": [1], "o": {"a": "b"}, "i": 10**400}
    run = read(tmp_path, json.dumps(row) + "\n")

    assert run.records[0].metrics == {"loss": 0.5}
    assert len(run.skipped) == 5


def test_a_half_written_last_line_is_counted_and_left_out(tmp_path):
    """The run is still writing, or was killed."""
    run = read(tmp_path, verl_jsonl([(1, {"actor/lr": 0.1}), (2, {"actor/lr": 0.2})])[:-9])

    assert [record.step for record in run.records] == [1]
    assert [(s.reason, s.lines) for s in run.skipped] == [("a half-written JSON line", (2,))]


@pytest.mark.parametrize("step", ["-1", "1.5", "NaN", "null", "true", '"soon"', "[1]"])
@pytest.mark.parametrize("shape", ['{{"step": {}, "loss": 0.5}}', '{{"step": {}, "data": {{"actor/lr": 0.5}}}}'])
def test_a_bad_step_is_an_error_that_names_the_line(tmp_path, shape, step):
    """It is the source's own field: something is wrong that should not be guessed."""
    with pytest.raises(ImportFormatError, match=r"run\.jsonl:2: the step must be") as caught:
        read(tmp_path, shape.format(1) + "\n" + shape.format(step) + "\n")

    assert caught.value.line == 2


ODD = (0.5, 0.25, math.nan, math.inf, None, 1, True, "0.5", "a text", {"mean": 0.5}, [0.5])


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 0, -2, 3]),
            st.dictionaries(st.sampled_from(["entropy", "kl", "prompt", "rank"]), st.sampled_from(ODD), max_size=2),
        ),
        max_size=12,
    )
)
def test_rows_with_the_names_of_the_row_before_are_read_as_any_others(tmp_path_factory, rows):
    """Rows of finite numbers under the same names are read by a shorter way; names in turn in another order are not."""
    step, lines = 5, []
    for advance, odd in [(1, {}), *[(1, {})] * 4, *rows, (1, {})]:
        step = max(step + advance, 0)
        lines.append({"step": step, "loss": 0.1 + 0.01 * step, "grad_norm": 1.0} | odd)
    turned = [dict(reversed(line.items())) if i % 2 else line for i, line in enumerate(lines)]
    same, other = (
        read(tmp_path_factory.mktemp("logs"), "".join(json.dumps(line) + "\n" for line in each))
        for each in (lines, turned)
    )

    assert [repr((r.step, r.attempt, sorted(r.metrics.items()))) for r in same.records] == [
        repr((r.step, r.attempt, sorted(r.metrics.items()))) for r in other.records
    ]
    assert {(skip.reason, skip.count) for skip in same.skipped} == {(skip.reason, skip.count) for skip in other.skipped}


def test_the_summary_row_of_a_flat_log_is_not_a_step(tmp_path):
    """It holds averages over the run."""
    run = read(tmp_path, '{"step": 1, "loss": 0.5}\n{"step": 1, "train_runtime": 3.5, "train_loss": 0.5}\n')

    assert [record.metrics for record in run.records] == [{"loss": 0.5}]
    assert [s.reason for s in run.skipped] == ["the trainer's summary row at the end"]


def test_a_row_of_settings_is_not_a_step(tmp_path):
    """How many steps, and how often to update, are said before the first."""
    run = read(tmp_path, '{"steps":2000,"update":4,"lr":1e-6}\n{"step":1,"loss":0.5}\n{"step":2,"loss":0.4}\n')

    assert [record.step for record in run.records] == [1, 2]


def test_rows_without_a_step_name_what_was_looked_for(tmp_path):
    """So that the reader knows what to rename."""
    with pytest.raises(ImportFormatError, match="global_step/max_steps"):
        read(tmp_path, '{"loss": 0.5}\n{"loss": 0.4}\n')


def test_trainer_state_keeps_evaluations_and_drops_the_summary(tmp_path):
    """Evaluation rows are records of the same step; settings are kept."""
    text = trainer_state([(10, {"loss": 0.5, "reward": math.nan}), (10, {"eval_reward": 0.7}), (20, {"loss": 0.4})])
    run = read(tmp_path, text, "trainer_state.json")

    assert [record.step for record in run.records] == [10, 10, 20]
    assert math.isnan(run.records[0].metrics["reward"])
    assert [s.reason for s in run.skipped] == ["the trainer's summary row at the end"]
    assert run.config == {"logging_steps": 1, "max_steps": 500}
    assert {record.attempt for record in run.records} == {1}


def test_trainer_state_null_is_nan(tmp_path):
    """TRL's mean of nothing but NaN."""
    run = read(tmp_path, '{"log_history": [{"step": 1, "entropy": null, "loss": 0.0}]}', "trainer_state.json")

    assert math.isnan(run.records[0].metrics["entropy"])


def test_trainer_state_cut_in_the_middle_is_an_error_with_the_position(tmp_path):
    """It was being written."""
    text = trainer_state([(step, {"loss": 0.5, "reward": 1.0}) for step in range(1, 9)])
    with pytest.raises(ImportFormatError, match=r"checkpoint before") as caught:
        read(tmp_path, text[: len(text) // 2], "trainer_state.json")

    assert caught.value.line == text[: len(text) // 2].count(b"\n") + 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"log_history": 3}', "no list 'log_history'"),
        ('{"log_history": []}', "holds no metrics"),
        ('{"log_history": [{"step": -2, "loss": 0.1}]}', "row 1 of log_history: the step must be >= 0, got -2"),
        ('{"log_history": [{"step": 2}, 5, {"loss": 1}]}', "a row without a step"),
    ],
)
def test_a_strange_trainer_state_is_a_clear_error(tmp_path, text, problem):
    """What was wrong, in words."""
    with pytest.raises(ImportFormatError, match=problem):
        read(tmp_path, text, "trainer_state.json")


def test_the_run_is_named_after_the_directory_of_its_checkpoints(tmp_path):
    """Not after the checkpoint, which changes."""
    (tmp_path / "math-grpo" / "checkpoint-250").mkdir(parents=True)
    log = tmp_path / "math-grpo" / "checkpoint-250" / "trainer_state.json"
    log.write_bytes(trainer_state([(1, {"loss": 0.5})]))

    assert read_log(log)[0].name == "math-grpo"
