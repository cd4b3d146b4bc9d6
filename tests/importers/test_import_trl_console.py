"""Rows of HF's Trainer on a console, and where their steps come from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from native_logs import bar, cleared, trl_console

from rlwatch.errors import ImportFormatError
from rlwatch.importers import ImportedRun, read_log
from rlwatch.importers.registry import WINDOW


def read(tmp_path: Path, text: str) -> ImportedRun:
    log = tmp_path / "trl.log"
    log.write_bytes(text.encode())
    [run] = read_log(log)
    return run


def steps(run: ImportedRun) -> list[int]:
    return [record.step for record in run.records]


def row(loss: float = 0.5, **more: object) -> str:
    return str({"loss": loss, "reward": 1.5, **more, "epoch": 0.1})


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("0.005131", 0.005131),
        ("'0.005131'", 0.005131),
        ("'1.412e+04'", 14120.0),
        ("-0.0", 0.0),
        ("1", 1.0),
        ("inf", math.inf),
        ("'-inf'", -math.inf),
        ("np.float64(0.5)", 0.5),
        ("tensor(0.5, device='cuda:0')", 0.5),
    ],
)
def test_values_are_floats_or_strings_of_floats(tmp_path, printed, value):
    """transformers 5 prints strings."""
    run = read(tmp_path, f"{{'loss': 0.1, 'kl': {printed}, 'epoch': 0.5}}\n")

    assert run.records[0].metrics == {"loss": 0.1, "kl": value, "epoch": 0.5}


@pytest.mark.parametrize("printed", ["nan", "'nan'", "None", "np.float64(nan)"])
def test_nan_and_none_are_nan(tmp_path, printed):
    """None is TRL's mean of nothing but NaN."""
    run = read(tmp_path, f"{{'loss': 0.1, 'entropy': {printed}, 'epoch': 0.5}}\n")

    assert math.isnan(run.records[0].metrics["entropy"])


def test_a_row_without_its_leading_brace_is_read(tmp_path):
    """It got lost when the line was copied; ms-swift says the step itself."""
    run = read(tmp_path, "'loss': -0.0, 'kl': 0.25, 'epoch': 0.0, 'global_step/max_steps': '5/3766', 'left': '18h'}\n")

    assert [(r.step, dict(r.metrics)) for r in run.records] == [(5, {"loss": 0.0, "kl": 0.25, "epoch": 0.0})]
    assert [s.reason for s in run.skipped] == ["'left' is not a number"]


def test_the_value_at_which_a_row_is_cut_off_is_left_out(tmp_path):
    """'kl': 0.00070 may have been 0.000704."""
    run = read(tmp_path, row() + "\n{'loss': 0.4, 'reward': 1.25, 'kl': 0.00070")

    assert run.records[1].metrics == {"loss": 0.4, "reward": 1.25}
    assert [(s.count, s.lines) for s in run.skipped] == [(1, (2,))]


@pytest.mark.parametrize("width", [40, 77, 180])
def test_a_row_that_was_wrapped_is_one(tmp_path, width):
    """In the middle of a name or of a number, where a terminal was so wide; what follows is none of it."""
    names = {f"rewards/function_{i}/mean": i + 0.25 for i in range(6)}
    rows = [str({"loss": 0.0123, "grad_norm": 1.5, **names, "reward": i / 8, "epoch": i / 4}) for i in range(1, 4)]
    wrapped = [row[at : at + width] for row in rows for at in range(0, len(row), width)]
    run = read(tmp_path, "\n".join([*wrapped, "Saving the model: 3", *wrapped[:1]]))

    assert [dict(record.metrics) for record in run.records][:3] == [
        {"loss": 0.0123, "grad_norm": 1.5, **names, "reward": i / 8, "epoch": i / 4} for i in range(1, 4)
    ]
    assert len(run.records) <= 4


@pytest.mark.parametrize(
    "other",
    [
        "{'learning_rate': 5e-06, 'beta': 0.04, 'num_generations': 8}",
        "{'reward': 1.0, 'answer': '42', 'length': 17}",
        "{'actor': {'kl': 0.1, 'loss': 'k3'}}",
        "GRPOConfig(loss=1, epoch=2)",
        "{'loss': 'dapo', 'epoch': 'no'}",
    ],
)
def test_other_dicts_are_not_rows(tmp_path, other):
    """Settings, and what a reward function prints for debugging."""
    assert len(read(tmp_path, f"{other}\n{row()}\n{other}\n{row()}\n").records) == 2


def test_the_summary_at_the_end_is_not_a_step(tmp_path):
    """It holds averages over the run."""
    run = read(tmp_path, f"{row()}\n{row()}\n{{'train_runtime': 12.5, 'train_loss': 0.2, 'reward': 1.0}}\n")

    assert len(run.records) == 2
    assert [s.reason for s in run.skipped] == ["the trainer's summary row at the end"]


def test_the_bar_redrawn_after_a_row_tells_its_step(tmp_path):
    """Also where the bar before the row lags behind."""
    text = "".join(
        f"\r{bar(step - 2)}{cleared(bar(step - 2))}{row()}\n\r{bar(step)}\r{bar(step + 1)}" for step in (10, 20, 30)
    )
    run = read(tmp_path, text)

    assert steps(run) == [10, 20, 30]
    assert run.notes == ("steps are read from the progress bars (one row every 10 steps)",)


def test_the_first_step_may_be_logged_by_itself(tmp_path):
    """``logging_first_step``: 1, 10, 20."""
    run = read(tmp_path, trl_console([(step, {"loss": 0.5, "reward": 1.0}) for step in (1, 10, 20)]).decode())

    assert steps(run) == [1, 10, 20]


def test_a_row_glued_behind_a_bar_has_the_bars_step(tmp_path):
    """As a callback that prints does it."""
    text = "".join(f"\r{bar(n)}\r{bar(n + 5)}{row()}\n\r{bar(n + 6)}" for n in (0, 5, 10))

    assert steps(read(tmp_path, text)) == [5, 10, 15]


def test_rows_glued_behind_the_bar_of_the_step_before_are_counted_by_the_bars_after_them(tmp_path):
    """A loop that prints before its bar moves on: no row belongs to step 0 and none repeats a step."""
    text = row() + "\n" + "".join(f"\r{bar(n, 13000)}{row()}\n" for n in (1, 2, 3))

    assert steps(read(tmp_path, text)) == [1, 2, 3, 4]


def test_batches_of_a_buffered_stdout_are_spread_over_the_steps_before_them(tmp_path):
    """31 rows before 620/1875 are one row every 20 steps."""
    text, n = f"\r{bar(0, 1875)}", 0
    for batch in (31, 31, 10):
        text += "".join(f"\r{bar(i, 1875)}" for i in range(n, n + 20 * batch + 1))
        n += 20 * batch
        text += "\n" + "".join(row() + "\n" for _ in range(batch)) + f"\r{bar(n, 1875)}"

    assert steps(read(tmp_path, text)) == [20 * i for i in range(1, 73)]


def test_a_batch_that_comes_late_is_still_spread_at_the_known_pace(tmp_path):
    """Other output filled the buffer at step 613; then the rest comes when the process ends."""
    text = "".join(f"\r{bar(i, 1000)}" for i in range(614))
    text += "\n" + "".join(row() + "\n" for _ in range(30))
    text += "".join(f"\r{bar(i, 1000)}" for i in range(614, 1001))
    text += "\n" + "".join(row() + "\n" for _ in range(20))
    text += "{'train_runtime': 100.0, 'train_loss': 0.1}\n"

    assert steps(read(tmp_path, text)) == [20 * i for i in range(1, 51)]


def test_a_short_buffered_run_that_prints_all_rows_at_its_end(tmp_path):
    """Everything fitted into the buffer."""
    text = "".join(f"\r{bar(i, 100)}" for i in range(101)) + "\n" + "".join(row() + "\n" for _ in range(20))

    assert steps(read(tmp_path, text)) == [5 * i for i in range(1, 21)]


def test_a_buffered_run_that_logged_its_first_step(tmp_path):
    """1, 20, 40, ...: 32 rows before 620."""
    text = f"\r{bar(619, 1875)}\r{bar(620, 1875)}\n" + "".join(row() + "\n" for _ in range(32)) + f"\r{bar(620, 1875)}"

    assert steps(read(tmp_path, text)) == [1] + [20 * i for i in range(1, 32)]


def test_a_batch_glued_behind_a_bar_is_still_a_batch(tmp_path):
    """The bar beside its first row says nothing of that row."""
    text = f"\r{bar(0)}"
    for n in (320, 640):
        text += "".join(f"\r{bar(i)}" for i in range(n - 320, n + 1, 5))
        text += "".join(row() + "\n" for _ in range(64)) + f"\r{bar(n + 5)}"  # flushed a little late

    assert steps(read(tmp_path, text)) == [5 * i for i in range(1, 129)]


@pytest.mark.parametrize(
    "between", [bar(6, 6), bar(9, 20, "Generating: "), str({"eval_loss": 0.5, "eval_kl": 0.1}) + "\n" + bar(12, 12)]
)
def test_the_bar_of_something_else_right_behind_a_batch_is_not_the_trainers(tmp_path, between):
    """Of an evaluation or a generation: it does not count as far as there are rows, or has a title."""
    text = f"\r{bar(0)}\r{bar(70)}\n" + "".join(row() + "\n" for _ in range(7)) + f"{between}\n\r{bar(70)}"
    trained = [record for record in read(tmp_path, text).records if "loss" in record.metrics]

    assert [record.step for record in trained] == [10 * i for i in range(1, 8)]


def test_a_resumed_run_may_print_in_batches(tmp_path):
    """Its rows are counted from its own beginning."""
    text = trl_console([(step, {"loss": 0.5, "reward": 1.0}) for step in (10, 20, 300)]).decode()
    text += f"\nresuming\n\r{bar(0)}\r{bar(40)}\n" + "".join(row() + "\n" for _ in range(4)) + f"\r{bar(40)}"

    assert [(r.attempt, r.step) for r in read(tmp_path, text).records][3:] == [(2, 10), (2, 20), (2, 30), (2, 40)]


def test_an_evaluation_between_batches_belongs_to_the_last_row(tmp_path):
    """It was printed late too."""
    text = f"\r{bar(100)}\n{row()}\n{row()}\n\r{bar(100)}\r{bar(200)}" + str({"eval_loss": 0.5, "eval_kl": 0.1}) + "\n"
    text += f"{row()}\n{row()}\n\r{bar(200)}"

    assert steps(read(tmp_path, text)) == [50, 100, 100, 150, 200]


def test_an_evaluation_off_the_rows_pace_has_the_bars_step(tmp_path):
    """Evaluated at 25 where rows come every 10 steps."""
    text = f"\r{bar(10)}{cleared('')}{row()}\n\r{bar(10)}\r{bar(25)}\r{bar(12, 12)}\r" + str(
        {"eval_loss": 0.5, "eval_kl": 0.1}
    )

    assert steps(read(tmp_path, text)) == [10, 25]


def test_rows_without_any_bar_are_numbered_and_the_notes_say_so(tmp_path):
    """The order is all there is."""
    run = read(tmp_path, "".join(row() + "\n" for _ in range(4)))

    assert steps(run) == [1, 2, 3, 4]
    assert "no progress bar" in run.notes[0]


def test_rows_without_any_bar_are_numbered_at_the_pace_the_log_states(tmp_path):
    """Where the training arguments were printed."""
    run = read(tmp_path, "GRPOConfig(beta=0.04, logging_steps=10, seed=1)\n" + "".join(row() + "\n" for _ in range(3)))

    assert steps(run) == [10, 20, 30]
    assert "10, 20, 30..." in run.notes[0]


def test_other_bars_do_not_count_steps(tmp_path):
    """Loading, mapping, and the bar of an evaluation."""
    text = f"\r{bar(2, 2, 'Loading checkpoint shards: ')}\n\r{bar(700, 1000, 'Map: ')}\n\r{bar(0, 300)}"
    for step in (10, 20):
        text += f"\r{bar(step, 300)}{cleared(bar(step, 300))}{row()}\n\r{bar(step, 300)}"
        text += "".join(f"\r{bar(i, 12)}" for i in range(13))
        text += cleared("x") + str({"eval_loss": 0.3, "eval_reward": 0.5, "epoch": 0.2}) + f"\n\r{bar(12, 12)}"
    run = read(tmp_path, text)

    assert [(r.step, "eval_loss" in r.metrics) for r in run.records] == [
        (10, False),
        (10, True),
        (20, False),
        (20, True),
    ]
    assert {record.attempt for record in run.records} == {1}


def test_an_evaluation_before_training_is_step_zero(tmp_path):
    """``eval_on_start``."""
    run = read(
        tmp_path, f"\r{bar(0)}\n{{'eval_loss': 0.3, 'eval_reward': 0.5}}\n\r{bar(0)}\r{bar(5)}\n{row()}\n\r{bar(5)}"
    )

    assert steps(run) == [0, 5]


def test_a_resumed_run_with_another_length_is_the_next_attempt(tmp_path):
    """Its bar starts again, with another total."""
    rows = [(step, {"loss": 0.5, "reward": 1.0}) for step in (10, 20, 30)]
    again = [(step, {"loss": 0.4, "reward": 1.0}) for step in (20, 30, 40)]
    run = read(tmp_path, (trl_console(rows, total=300) + b"\nresuming\n" + trl_console(again, total=600)).decode())

    assert [(r.attempt, r.step) for r in run.records] == [(1, 10), (1, 20), (1, 30), (2, 20), (2, 30), (2, 40)]


def test_logs_wrapped_into_json_by_kaggle_and_docker_are_unwrapped(tmp_path):
    """Each piece of output is a JSON object; a line may be spread over several."""
    text = trl_console([(step, {"loss": 0.5, "reward": 1.0}) for step in (5, 10, 15)]).decode()
    pieces = [text[i : i + 61] for i in range(0, len(text), 61)]
    kaggle = "[" + "\n,".join(json.dumps({"stream_name": "stdout", "time": 1.5, "data": p}) for p in pieces) + "\n]"
    docker = "".join(json.dumps({"log": p, "stream": "stderr", "time": "2026"}) + "\n" for p in pieces)

    assert steps(read(tmp_path, kaggle)) == steps(read(tmp_path, docker)) == [5, 10, 15]


def test_a_log_that_is_all_preamble_but_for_its_end_is_recognised(tmp_path):
    """The first row may come after a megabyte of other output."""
    preamble = "".join(f"Loading dataset shard {i}: {'.' * 80}\n" for i in range(8000))

    assert steps(read(tmp_path, preamble + trl_console([(10, {"loss": 0.5, "reward": 1.0})]).decode())) == [10]


def test_a_row_on_the_seam_of_two_windows_is_recognised(tmp_path):
    """The log is looked through piece by piece."""
    preamble = (("x" * 99 + "\n") * (WINDOW // 100 + 1))[: WINDOW - 4] + "\n"

    assert steps(read(tmp_path, preamble + "step:10 - actor/lr:0.1\ndone\n")) == [10]


def test_a_row_that_says_a_bad_step_is_counted_and_left_out(tmp_path):
    """A console log is allowed one bad line."""
    run = read(tmp_path, "{'loss': 0.1, 'kl': 0.1, 'step': -3}\n{'loss': 0.1, 'kl': 0.1, 'step': 4}\n")

    assert steps(run) == [4]
    assert run.skipped[0].lines == (1,)


def test_names_unknown_to_rlwatch_are_listed_in_the_error(tmp_path):
    """With what to do."""
    with pytest.raises(ImportFormatError, match=r"'my_score'.*rename"):
        read(tmp_path, "{'my_score': 0.1, 'other': 2, 'epoch': 0.1}\n")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_that_each_rank_prints_is_one(tmp_path, ranks):
    """Without bars rows are numbered, and a copy would be a step of its own."""
    whole = [row(loss=n / 10, epoch=n / 100) for n in range(1, 9)]
    run = read(tmp_path, "".join(line * ranks for line in whole))

    assert steps(run) == list(range(1, 9))
    assert [(s.reason.split(" (")[0], s.count) for s in run.skipped] == [
        ("a row printed again as it was", 8 * (ranks - 1))
    ]


@pytest.mark.parametrize(
    "losses",
    [
        [0.0] * 40,  # nothing changes: a training that is dead from the start
        [0.1, 0.1, 0.2, 0.2, 0.2, 0.3],
        [0.1, 0.2, 0.2, 0.3, 0.3],
        [0.1, 0.1],
    ],
)
def test_equal_rows_that_tell_of_no_ranks_are_rows(tmp_path, losses):
    """Each printed equally often from the first on, and otherwise each time, are copies; nothing else is."""
    run = read(tmp_path, "".join(row(loss=loss, epoch=0.01) for loss in losses))

    assert [record.metrics["loss"] for record in run.records] == losses
