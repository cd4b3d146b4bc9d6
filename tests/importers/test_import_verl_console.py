"""verl's console lines, in every state they are found in."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlwatch.importers import ImportedRun, read_log


def read(tmp_path: Path, text: str) -> ImportedRun:
    log = tmp_path / "verl.log"
    log.write_bytes(text.encode())
    [run] = read_log(log)
    return run


def merged(run: ImportedRun) -> dict[int, dict[str, float]]:
    """Step -> metrics, later records over earlier ones: what a closed step will hold."""
    steps: dict[int, dict[str, float]] = {}
    for record in run.records:
        steps.setdefault(record.step, {}).update(record.metrics)
    return steps


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("0.001", 0.001),
        ("-6.231", -6.231),
        ("1e-06", 1e-06),
        ("np.float64(0.31)", 0.31),
        ("np.float32(-inf)", -math.inf),
        ("np.int64(3)", 3.0),
        ("inf", math.inf),
        ("192519", 192519.0),
    ],
)
def test_numbers_are_read_however_numpy_prints_them(tmp_path, printed, value):
    """Bare and wrapped, of either sign, in any notation."""
    run = read(tmp_path, f"step:7 - actor/entropy:{printed} - actor/lr:1e-06\n")

    assert run.records[0].metrics == {"actor/entropy": value, "actor/lr": 1e-06}


@pytest.mark.parametrize("printed", ["nan", "np.float64(nan)", "NaN"])
def test_nan_is_a_value(tmp_path, printed):
    """The step at which a run died is not skipped."""
    run = read(tmp_path, f"step:59 - actor/kl_loss:{printed} - actor/pg_clipfrac:0.002\n")

    assert math.isnan(run.records[0].metrics["actor/kl_loss"])
    assert run.records[0].metrics["actor/pg_clipfrac"] == 0.002


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "(main_task pid=63313) ",
        "\x1b[36m(TaskRunnerV1 pid=12, ip=10.0.0.3)\x1b[0m ",
        "(TaskRunner pid=9) Training Progress:   3%|▎         | 3/100 [00:10<05:00,  3.1s/it]",
        "\rTraining Progress:   3%|▎    | 3/100 [00:10<05:00,  3.1s/it]\r(TaskRunner pid=9) ",
        "2026-05-01 10:00:00,123 - INFO - ",
    ],
)
def test_what_stands_before_the_line_does_not_matter(tmp_path, prefix):
    """Ray, colours, progress bars, logging."""
    run = read(tmp_path, f"{prefix}step:3 - critic/score/mean:0.5 - actor/grad_norm:1.5\n")

    assert [(r.step, dict(r.metrics)) for r in run.records] == [(3, {"critic/score/mean": 0.5, "actor/grad_norm": 1.5})]


@pytest.mark.parametrize(
    "junk", [" -", " [repeated 3x across cluster]", "(WorkerDict pid=4) loading", " \x1b[0m", "\r"]
)
def test_what_is_glued_behind_the_line_does_not_matter(tmp_path, junk):
    """The last number is still read."""
    run = read(tmp_path, f"step:3 - critic/score/mean:0.5 - actor/grad_norm:1.5{junk}\n")

    assert run.records[0].metrics == {"critic/score/mean": 0.5, "actor/grad_norm": 1.5}


def test_names_may_hold_spaces_colons_dashes_and_at_signs(tmp_path):
    """They are kept as they are."""
    names = ["val-core/openai/gsm8k/acc/mean@4", "val-aux/omni-math/reward/mean@1", "my reward: strict", "mfu"]
    run = read(tmp_path, "step:4 - " + " - ".join(f"{name}:0.25" for name in names) + " - actor/lr:0.0\n")

    assert list(run.records[0].metrics) == [*names, "actor/lr"]


def test_what_is_not_a_number_is_counted_with_its_lines(tmp_path):
    """Strings, booleans and None are no metrics."""
    line = "step:{} - a:None - actor/lr:0.1 - stage:warmup - done:True - actor/entropy:0.5\n"
    run = read(tmp_path, "".join(line.format(step) for step in range(5)))

    assert run.records[0].metrics == {"actor/lr": 0.1, "actor/entropy": 0.5}
    assert {s.reason: (s.count, s.lines) for s in run.skipped} == {
        "'a' is not a number": (5, (1, 2, 3)),
        "'stage' is not a number": (5, (1, 2, 3)),
        "'done' is not a number": (5, (1, 2, 3)),
    }


def test_what_is_not_a_number_at_the_end_of_a_line_is_counted(tmp_path):
    """Though it might have been cut off and go on in the next line."""
    run = read(tmp_path, "step:1 - actor/lr:0.1 - stage:warmup\nstep:2 - actor/lr:0.1 - stage:done\n")

    assert [(s.reason, s.count, s.lines) for s in run.skipped] == [("'stage' is cut off or not a number", 2, (1, 2))]


@pytest.mark.parametrize(
    "wrapped",
    [
        "step:166 - actor/entropy:0.76 - critic/score/mean:0.30\n         - actor/grad_norm:2.22 - num_turns/mean:2.0\n",
        "step:166 - actor/entropy:0.76 - critic/score/mean:0.30 -\nactor/grad_norm:2.22 - num_turns/mean:2.0\n",
        "step:166 - actor/entropy:0.76 - critic/score/mean:0.30 - actor/gra\nd_norm:2.22 - num_turns/mean:2.0\n",
        "step:166 - actor/entropy:0.76 - critic/score/mean:0.3\n0 - actor/grad_norm:2.22 - num_turns/mean:2.0\n",
        "step:166 - actor/entropy:0.76 - critic/score/mean:0.30 - actor/grad_norm:\n2.22 - num_turns/mean:2.0\n",
        "(TaskRunner pid=1) step:166 - actor/entropy:0.76 - critic/score/mean:0.30\n"
        "(TaskRunner pid=1)  - actor/grad_norm:2.22\n(TaskRunner pid=1)  - num_turns/mean:2.0\n",
        "step:166 - actor/entropy:0.76 - critic/score/mean:0.30\nTraining:  3%|▎ | 3/99 [00:10<05:00, 3.1s/it]\n"
        " - actor/grad_norm:2.22 - num_turns/mean:2.0\n",
    ],
)
def test_a_line_wrapped_over_several_physical_lines_is_one_step(tmp_path, wrapped):
    """Wrapped at a dash, in a name, in a number, under Ray, with a bar between."""
    run = read(tmp_path, wrapped)

    assert merged(run) == {
        166: {"actor/entropy": 0.76, "critic/score/mean": 0.30, "actor/grad_norm": 2.22, "num_turns/mean": 2.0}
    }
    assert {record.attempt for record in run.records} == {1}


@pytest.mark.parametrize(
    "other",
    ["100", "- item: 3", "2026-05-01 10:00:00,123 - INFO - saved", "  - loading:shards", "{'a': 1}", "- 12 - 13"],
)
def test_other_output_is_not_taken_for_the_rest_of_a_line(tmp_path, other):
    """A bare number must not lengthen the last value."""
    run = read(tmp_path, f"step:1 - actor/lr:0.1 - actor/entropy:0.5\n{other}\nstep:2 - actor/entropy:0.4\n")

    assert merged(run) == {1: {"actor/lr": 0.1, "actor/entropy": 0.5}, 2: {"actor/entropy": 0.4}}


def test_two_lines_glued_together_are_two_steps(tmp_path):
    """A lost line end loses no step."""
    run = read(tmp_path, "step:1 - actor/entropy:0.5 (pid=1)(TaskRunner pid=1) step:2 - actor/entropy:0.4\n")

    assert merged(run) == {1: {"actor/entropy": 0.5}, 2: {"actor/entropy": 0.4}}


@pytest.mark.parametrize("bad", ["-1", "1.5", "nan", "x", "1e400"])
def test_one_bad_step_in_a_messy_log_is_counted_and_left_out(tmp_path, bad):
    """The rest of the log is still read."""
    run = read(tmp_path, f"step:1 - actor/lr:0.1\nstep:{bad} - actor/lr:0.2\nstep:2 - actor/lr:0.3\n")

    assert [record.step for record in run.records] == [1, 2]
    assert [(s.count, s.lines) for s in run.skipped] == [(1, (2,))]
    assert repr(bad) in run.skipped[0].reason


def test_a_name_cut_off_at_the_end_is_counted(tmp_path):
    """The complete pairs of a half-written line are kept."""
    run = read(tmp_path, "step:1 - actor/lr:0.1 - actor/gra")

    assert run.records[0].metrics == {"actor/lr": 0.1}
    assert [s.reason for s in run.skipped] == ["'actor/gra' is cut off or not a number"]


def test_validation_before_training_is_step_zero(tmp_path):
    """verl logs step 0 with validation metrics only."""
    run = read(tmp_path, "step:0 - val-core/math/acc/mean@1:0.3\nstep:1 - actor/entropy:0.5\n")

    assert merged(run) == {0: {"val-core/math/acc/mean@1": 0.3}, 1: {"actor/entropy": 0.5}}


def test_the_source_is_verl(tmp_path):
    """Whatever its metrics are called."""
    assert read(tmp_path, "step:1 - actor/entropy:0.5\n").source == "verl"


def test_a_log_of_a_windows_shell_is_read(tmp_path):
    """UTF-16 with a byte order mark, CR LF."""
    log = tmp_path / "verl.log"
    log.write_bytes("step:1 - actor/entropy:0.5\r\nstep:2 - actor/entropy:0.4\r\n".encode("utf-16"))
    [run] = read_log(log)

    assert merged(run) == {1: {"actor/entropy": 0.5}, 2: {"actor/entropy": 0.4}}
