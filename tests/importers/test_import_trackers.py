"""TensorBoard's and wandb's files: what their own libraries write is read, as they read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import binary_logs
import pytest
from binary_logs import START, Event, history, log, wandb
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs
from tensorboardX import SummaryWriter

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, read_log, sniff
from rlwatch.importers.binary_records import LevelDbLog, TfRecords, fields, floating, masked_crc32c, message, signed
from rlwatch.importers.registry import logs_below
from rlwatch.metrics import resolve
from rlwatch.scanner import scan_all
from rlwatch.testing.importer_contract import comparable

ROWS = [(step, {"train/loss": step * 0.5, "train/reward": 1.25}) for step in range(1, 5)]
EVENTS = "events.out.tfevents.{}.host"


def test_what_a_summary_writer_wrote_is_read_as_tensorboard_reads_it(tmp_path: Path) -> None:
    """Every scalar, NaN and the infinities too; pictures of distributions and text are left out and counted."""
    with SummaryWriter(str(tmp_path / "seed3")) as writer:
        for step in range(6):
            writer.add_scalar("train/loss", binary_logs.nonfinite(step) if step > 2 else 0.1 * step, step)
            writer.add_scalar("train/reward", 1 / (step + 1), step)
            writer.add_histogram("weights", [1.0, 2.0], step)
        writer.add_text("args", "lr=1e-6")
    [run] = read_log(tmp_path / "seed3")
    oracle = EventAccumulator(str(tmp_path / "seed3"), size_guidance={"scalars": 0}).Reload()

    assert (run.name, run.format) == ("seed3", "tensorboard")
    for tag in oracle.Tags()["scalars"]:
        expected = [(event.step, event.wall_time, repr(event.value)) for event in oracle.Scalars(tag)]
        found = [(r.step, repr(r.metrics[tag])) for r in run.records if tag in r.metrics]
        assert found == [(step, value) for step, _, value in expected]
    assert {"'weights' is not a scalar", "'args/text_summary' is not a scalar"} <= {s.reason for s in run.skipped}
    assert all(record.ts > 1.7e9 for record in run.records)


def test_scalars_as_tensors_are_read_where_they_are_scalars(tmp_path: Path) -> None:
    """TensorFlow 2 and torch's ``new_style`` write them so; only the first event of a tag names the plugin."""
    given_ = [Event(wall_time=START, file_version="brain.Event:2")]
    for step in range(3):
        for tag, plugin in (("loss", "scalars"), ("curve", "pr_curves")):
            event = Event(wall_time=START + step, step=step)
            value = event.summary.value.add(tag=tag)
            value.tensor.dtype = 1
            if step == 1:
                value.tensor.tensor_content = b"\x00\x00\x40\x3f"  # 0.75
            else:
                value.tensor.float_val.append(0.5)
            if step == 0:
                value.metadata.plugin_data.plugin_name = plugin
            given_.append(event)
    (tmp_path / EVENTS.format(1)).write_bytes(binary_logs.events(*given_))
    [run] = read_log(tmp_path)

    assert [dict(record.metrics) for record in run.records] == [{"loss": 0.5}, {"loss": 0.75}, {"loss": 0.5}]


def test_a_value_that_is_not_finite_does_not_wait_for_the_next_step(tmp_path: Path) -> None:
    """The rest of its step comes with the next one; it cuts a step once, however much of it is broken."""
    log = tmp_path / EVENTS.format(1)
    row = {"train/loss": 1.0, "train/grad_norm": math.nan, "train/kl": math.nan, "train/reward": math.inf}
    log.write_bytes(binary_logs.event_file([(1, row)]))
    tail = LogTail(log)
    first = tail.poll()

    assert [list(record.metrics) for record in first] == [["train/loss", "train/grad_norm"]]
    assert [list(record.metrics) for record in tail.close()] == [["train/kl", "train/reward"]]


def test_a_directory_of_several_starts_is_one_run(tmp_path: Path) -> None:
    """In order of the files' names; a start that goes back is the next attempt. Following gives the same."""
    tail = LogTail(_directory(tmp_path))
    found = []
    for number, data in enumerate((ROWS[:3], [(5, ROWS[0][1])], [(2, {"train/loss": 9.0})])):
        (tmp_path / EVENTS.format(1000 + number)).write_bytes(binary_logs.event_file(data))
        found += tail.poll()
        while tail.behind:
            found += tail.poll()
    found += tail.close()
    [run] = read_log(tmp_path)

    assert [(r.attempt, r.step) for r in found] == [(1, 1), (1, 2), (1, 3), (1, 5), (2, 2)]
    assert comparable(found) == comparable(run.records)


def _directory(tmp_path: Path) -> Path:
    (tmp_path / EVENTS.format(1)).touch()
    return tmp_path


def test_a_later_process_goes_on_in_the_event_file_where_the_first_was(tmp_path: Path) -> None:
    """Files that were read to their end before it are not read again."""
    for number, data in enumerate((ROWS[:2], ROWS[2:3])):
        (tmp_path / EVENTS.format(number)).write_bytes(binary_logs.event_file(data))
    tail = LogTail(tmp_path)
    tail.poll()
    tail.poll()
    (tmp_path / EVENTS.format(1)).write_bytes(binary_logs.event_file(ROWS[2:4]))
    later = LogTail(tmp_path, position=tail.position, last_seq=2)

    assert [(record.seq, record.step) for record in later.poll() + later.close()] == [(3, 3), (4, 4)]


def test_damage_in_an_event_file_ends_it_there_and_is_said(tmp_path: Path) -> None:
    """A wrong length or a wrong checksum: nothing is guessed."""
    log = tmp_path / EVENTS.format(1)
    whole = binary_logs.event_file(ROWS)
    for at in (len(whole) - 6, len(whole) // 2):
        log.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        [run] = read_log(log)

        assert run.records
        assert len(run.records) <= len(ROWS)
        assert "nothing after it" in run.skipped[0].reason


@given(st.binary(max_size=300))
def test_checksums_are_tensorboards(data: bytes) -> None:
    """CRC-32C, masked."""
    assert masked_crc32c(data) == theirs(data)


def test_wandb_rows_belong_to_the_trainers_step(tmp_path: Path) -> None:
    """Not to wandb's own, which counts rows; an evaluation logged between two steps belongs to the one before."""
    items = [
        {"train/global_step": 10, "train/loss": 0.5, "_step": 0, "_runtime": 1.0, "_timestamp": START},
        {"eval/acc": 0.25, "_step": 1},
        {"train/global_step": 20, "train/loss": math.nan, "train/reward": None, "name": "x", "_step": 2},
    ]
    log = tmp_path / "run-x.wandb"
    for nested in (True, False):
        log.write_bytes(binary_logs.log([binary_logs.history(row, nested=nested) for row in items]))
        [run] = read_log(log)

        assert [(r.step, r.ts) for r in run.records] == [(10, START), (10, 0.0), (20, 0.0)]
        assert "eval/acc" in run.records[1].metrics
        assert math.isnan(run.records[2].metrics["train/reward"])
        assert {"_step", "_runtime", "name"}.isdisjoint(run.records[2].metrics)


def test_wandb_steps_without_a_trainers_are_declared_or_wandbs_own(tmp_path: Path) -> None:
    """``define_metric`` first; None is no measurement there."""
    declared = wandb.Record(metric=wandb.MetricRecord(glob_name="rollout/*", step_metric="rollout/step"))
    items = [
        {"loss": 0.5, "kl": None, "_step": 7},
        {"loss": 0.5, "rollout/step": 30, "_step": 8},
        {"loss": 1, "_step": 9},
    ]
    log = tmp_path / "run-x.wandb"
    log.write_bytes(binary_logs.log([declared, *map(binary_logs.history, items)]))
    [run] = read_log(log)

    assert [record.step for record in run.records] == [7, 30, 30]
    assert "kl" not in run.records[0].metrics


def test_wandb_values_of_newer_files_and_media_are_told_apart(tmp_path: Path) -> None:
    """Numbers may be numbers; the parts of a histogram are no metrics."""
    record = binary_logs.history({"h._type": "histogram", "h.bins": [1, 2], "h.count": 3, "_step": 4, "text": "x"})
    for name, value in (("loss", {"number": 0.25}), ("n", {"integer": 3}), ("flag", {"boolean": True})):
        record.history.item.add(nested_key=["a", name], **value)
    log = tmp_path / "run-x.wandb"
    log.write_bytes(binary_logs.log([record, binary_logs.history({"loss": 1.0, "_step": 5})]))
    [run] = read_log(log)

    assert dict(run.records[0].metrics) == {"a.loss": 0.25, "a.n": 3.0}


def test_a_damaged_block_of_wandbs_costs_that_block_only(tmp_path: Path) -> None:
    """Rows of the blocks before and after are there."""
    rows = [(step, {"train/loss": 0.5, "train/x": 1 / 3}) for step in range(1, 1500)]
    whole = bytearray(binary_logs.wandb_file(rows))
    assert len(whole) > 4 * binary_logs.BLOCK
    whole[binary_logs.BLOCK + 700] ^= 1
    log = tmp_path / "run-x.wandb"
    log.write_bytes(whole)
    [run] = read_log(log)

    assert len(rows) - 400 < len(run.records) < len(rows)
    assert (run.records[0].step, run.records[-1].step) == (1, 1499)
    assert "damaged" in run.skipped[0].reason


def test_a_wandb_directory_is_its_run_and_what_is_below_a_directory_is_listed(tmp_path: Path) -> None:
    """Each log once; neither stores nor hidden directories nor what wandb keeps beside its file."""
    run = tmp_path / "wandb" / "offline-run-20260101-x"
    (run / "files").mkdir(parents=True)
    (run / "run-x.wandb").write_bytes(binary_logs.wandb_file(ROWS))
    (run / "files" / "output.log").write_text("step:1 - loss:1\n")
    board = tmp_path / "runs" / "seed1"
    board.mkdir(parents=True)
    for number in (1, 2):
        (board / EVENTS.format(number)).write_bytes(binary_logs.event_file(ROWS))
    for path in (".hidden/a.log", "store/run-1/run.db", "store/run-1/b.log", "checkpoint-5/c.log", "d.log", "e.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")

    (tmp_path / "latest.log").symlink_to(tmp_path / "d.log")
    assert list(logs_below(tmp_path)) == [tmp_path / "d.log", board, run / "run-x.wandb"]
    assert list(logs_below(tmp_path, ["*.txt"])) == [tmp_path / "e.txt"]
    assert [r.step for r in read_log(run)[0].records] == [1, 2, 3, 4]
    assert (sniff(run).name, sniff(board).name) == ("wandb", "tensorboard")
    with pytest.raises(ImportFormatError, match=r"is a directory.*rlwatch watch"):
        read_log(tmp_path)


@given(st.binary(max_size=400), st.integers(1, 50))
def test_any_bytes_are_cut_into_records_or_not_but_never_fail(data: bytes, size: int) -> None:
    """Nor does it matter in which pieces they come."""
    for kind in (TfRecords, LevelDbLog):
        pieces = kind()
        assert [r for i in range(0, len(data), size) for r in pieces.feed(data[i : i + size])] == kind().feed(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    """No other exception."""
    try:
        found = list(fields(data))
    except ValueError:
        return
    assert all(number >= 0 for number, _ in found)


def test_fields_of_the_wrong_type_are_refused() -> None:
    """A number is no message, and the other way round."""
    for read, wrong in ((signed, b"x"), (floating, 3), (floating, b"abc"), (message, 3)):
        with pytest.raises(ValueError, match="was expected"):
            read(wrong)  # type: ignore[operator]


def _trainings(directory: Path, *starts: Sequence[tuple[int, Mapping[str, float]]]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(starts):
        (directory / EVENTS.format(1000 + number)).write_bytes(binary_logs.event_file(rows))
    return directory


def _rows(first: int, last: int) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"train/loss": 0.5, "train/reward": 0.25}) for step in range(first, last)]


def test_trainings_of_one_directory_are_runs(tmp_path: Path) -> None:
    """Each begins at its beginning; a start that goes on from a checkpoint, and an empty one, are none."""
    board = _trainings(tmp_path / "logs", _rows(1, 9), [], _rows(1, 3), _rows(1, 20), _rows(10, 30), _rows(1, 5))
    runs = read_log(board)

    assert [(run.name, len(run.records)) for run in runs] == [("logs", 8), ("logs#2", 2), ("logs#3", 39), ("logs#4", 4)]
    assert [max(record.attempt for record in run.records) for run in runs] == [1, 1, 2, 1]
    assert "4 trainings" in runs[0].notes[0]
    assert "1 event file without a scalar" in runs[0].notes[1]
    assert [run.name for run in read_log(board, run="logs#3")] == ["logs#3"]
    assert len(scan_all(board)) == 4


def test_a_second_writer_of_a_directory_is_no_training(tmp_path: Path) -> None:
    """It has other metrics of the same steps."""
    other = [(step, {"eval/score": 0.5}) for step in range(1, 9)]
    [run] = read_log(_trainings(tmp_path / "logs", _rows(1, 9), other))

    assert len(run.records) == 16


def test_a_directory_of_boards_holds_their_runs(tmp_path: Path) -> None:
    """As TensorBoard shows it; one run can be chosen, and what holds no scalar is passed over."""
    for name in ("a/seed1", "a/seed2", "b"):
        _trainings(tmp_path / name, _rows(1, 9))
    _trainings(tmp_path / "b", _rows(1, 9), _rows(1, 4))
    _trainings(tmp_path / "empty", [])

    assert [run.name for run in read_log(tmp_path)] == ["a/seed1", "a/seed2", "b", "b#2"]
    assert [run.name for run in read_log(tmp_path, run="b#2")] == ["b#2"]
    with pytest.raises(ImportFormatError, match="has no run 'c'"):
        read_log(tmp_path, run="c")


def test_settings_tags_and_the_machine_come_along_with_a_wandb_file(tmp_path: Path) -> None:
    """A sample of the machine has no step: the row after it gets the last; what is no number is left out."""
    run = wandb.Record(run=wandb.RunRecord(run_id="a", tags=["math", "seed3"]))
    run.run.project, run.run.display_name, run.run.run_group, run.run.notes = "rl", "lively-owl", "seeds", "try 3"
    run.run.config.update.add(key="lr", value_json="1e-6")
    run.run.config.update.add(key="_wandb", value_json='{"cli_version": "0.31"}')
    changed = wandb.Record()
    changed.config.update.add(nested_key=["actor"], value_json='{"clip": NaN}')
    changed.config.update.add(key="broken", value_json="{")
    records = [run, changed]
    for step in range(3):
        for sample in range(2):
            stats = wandb.Record()
            stats.stats.item.add(key="gpu.0.memory", value_json=str(10 * step + sample))
            stats.stats.item.add(key="gpu.0.name", value_json='"H200"')
            records += [stats] if step < 2 else []
        records.append(history({"reward": step, "loss": 0.5, "train/global_step": step}))
    file = tmp_path / "run-a.wandb"
    file.write_bytes(log(records))
    [read] = read_log(file)

    assert (read.name, read.title, read.project, read.tags) == ("run-a", "lively-owl", "rl", ("math", "seed3"))
    settings = {"lr": 1e-6, "actor": {"clip": math.nan}, "wandb/group": "seeds", "wandb/notes": "try 3"}
    assert repr(dict(read.config)) == repr(settings)
    assert [record.metrics.get("system/gpu.0.memory") for record in read.records] == [1, 11, None]
    assert {name for record in read.records for name in record.metrics if name.startswith("system/")} == {
        "system/gpu.0.memory"
    }
    assert not any(map(resolve, ("system/gpu.0.memory", "system/cpu", "system/proc.memory.rssMB", "system/gpu.0.gpu")))
