"""Logs made to hurt: reading them takes bounded memory and work, and says by name what it left out."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from binary_logs import event_file, history
from hypothesis import given
from hypothesis import strategies as st
from native_logs import trl_console

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, binary_records, console, follow, lines, read_log
from rlwatch.importers.lines import Segments
from rlwatch.importers.verl_console import pair_of
from rlwatch.importers.wandb_runs import _history
from rlwatch.metrics import resolve
from rlwatch.records import StepRecord
from rlwatch.scanner import branch

DEEP = "[" * 200_000 + "]" * 200_000
DIGITS = "9" * 100_000
FLAT = '{{"step": {}, "loss": 0.5, "kl": 0.1}}\n'
VERL = '{{"step": {}, "data": {{"actor/entropy": 0.5}}}}\n'


def left_out(run: Any) -> dict[str, int]:
    return {skipped.reason: skipped.count for skipped in run.skipped}


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (DEEP, "a JSON line that is nested too deeply"),
        (DIGITS, "a JSON line with an integer of thousands of digits"),
        ('"' + "x" * (8 << 20) + '"', "a line of more than 8,388,608 characters"),
    ],
    ids=["deep", "digits", "long"],
)
@pytest.mark.parametrize("row", [FLAT, VERL], ids=["flat", "verl"])
def test_one_bad_line_is_left_out_and_counted(tmp_path: Path, thing: str, reason: str, row: str) -> None:
    """Those around it are read."""
    log = tmp_path / "run.jsonl"
    log.write_text(row.format(1) + row.format(2).replace("0.5", thing) + row.format(3))
    [run] = read_log(log)
    tail = LogTail(log)
    polled = tail.poll()

    assert [record.step for record in run.records] == [1, 3]
    assert left_out(run) == {reason: 1}
    assert [record.step for record in polled] == [1, 3]
    assert {skipped.reason: skipped.count for skipped in tail.skipped} == {reason: 1}


def test_a_wrapped_line_that_is_nested_too_deeply_is_text(tmp_path: Path) -> None:
    """What Docker never wrote is no wrapper."""
    log = tmp_path / "run.log"
    log.write_text('{"log":' + DEEP + "\n" + trl_console([(1, {"loss": 0.5, "grad_norm": 1.0})]).decode())

    assert len(read_log(log)[0].records) == 1


@pytest.mark.parametrize(("thing", "words"), [(DEEP, "nested too deeply"), (DIGITS, "thousands of digits")])
def test_a_trainer_state_that_cannot_be_parsed_is_refused_by_name(tmp_path: Path, thing: str, words: str) -> None:
    """It is read as a whole or not at all."""
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": [{{"step": 1, "loss": {thing}}}]}}')
    with pytest.raises(ImportFormatError, match=words):
        read_log(tmp_path / "trainer_state.json")


def test_a_file_read_as_a_whole_has_a_largest_size(tmp_path: Path, monkeypatch: Any) -> None:
    """Also unpacked."""
    monkeypatch.setattr("rlwatch.importers.json_logs.LARGEST_DOCUMENT", 1 << 20)
    state = tmp_path / "trainer_state.json"
    state.write_bytes(gzip.compress(b'{"log_history": [' + b" " * (2 << 20) + b"]}"))
    with pytest.raises(ImportFormatError, match="is larger than the 1,048,576 bytes"):
        read_log(state)


def test_a_line_without_an_end_is_neither_kept_nor_copied() -> None:
    """64 MiB of it: memory is bounded by the longest line, and what is kept is not copied by what comes next."""
    told: list[int] = []
    segments, block = Segments(told.append), b"x" * lines.BLOCK
    largest = 0
    tracemalloc.start()
    for _ in range(64):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert segments.feed(block) == []
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before < 4 * lines.BLOCK
        largest = max(largest, peak)
    tracemalloc.stop()

    assert [segment.text for segment in segments.feed(b"\nstep:1\n")] == ["step:1"]
    assert told == [1]
    assert largest < 2 * lines.LONGEST_LINE


@given(st.data())
def test_what_is_left_out_does_not_depend_on_the_chunks(data: Any) -> None:
    """A line is too long or not, however its bytes came."""
    whole = data.draw(st.text(st.sampled_from("ab\r\n"), max_size=60)).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    def read(parts: list[bytes]) -> tuple[list[Any], list[int]]:
        told: list[int] = []
        segments = Segments(told.append, longest=5)
        return [found for part in parts for found in segments.feed(part)] + segments.finish(), told

    found, told = read(chunks)
    assert (found, told) == read([whole])
    pieces = [(n, p) for n, line in enumerate(whole.decode().split("\n"), 1) for p in line.split("\r")]
    assert [(s.line, s.text) for s in found] == [(n, p) for n, p in pieces if 0 < len(p) <= 5]
    assert told == [n for n, p in pieces if len(p) > 5]


def test_millions_of_empty_lines_cost_no_memory() -> None:
    """A block of them is nothing but a number."""
    segments = Segments()
    tracemalloc.start()
    assert segments.feed(b"\n" * (lines.BLOCK // 4)) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert segments.feed(b"a\n")[0].line == lines.BLOCK // 4 + 1
    assert peak < 8 << 20


def test_a_gzip_bomb_is_refused_after_little_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    """As soon as it has unpacked to more than any log does."""
    monkeypatch.setattr(lines, "UNPACKED_FREELY", 4 << 20)
    bomb = tmp_path / "bomb.log"
    bomb.write_bytes(gzip.compress(trl_console([(1, {"loss": 0.5, "grad_norm": 1.0})]) + bytes(64 << 20)))
    given = 0

    def unpack() -> None:
        nonlocal given
        for block in lines.blocks(bomb):
            given += len(block)

    with pytest.raises(ImportFormatError, match="unpacks to more than 200 times its size"):
        unpack()
    assert given < 16 << 20
    tail = LogTail(bomb)
    assert tail.poll() == []
    assert "unpacks to more than 200 times" in tail.problem


def test_a_packed_log_that_cannot_be_read_is_read_again_when_it_has_changed(tmp_path: Path, monkeypatch: Any) -> None:
    """Not at every poll."""
    whole = gzip.compress(b"".join(FLAT.format(step).encode() for step in range(1, 400)), mtime=0)
    log = tmp_path / "run.jsonl.gz"
    log.write_bytes(whole[: len(whole) // 2])
    tail = LogTail(log)
    opened: list[Path] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *args: (opened.append(path), real(path, *args))[1])

    assert tail.poll() == []
    assert len(opened) == 2, "for its first bytes, and to unpack it"
    for _ in range(4):
        assert tail.poll() == []
    assert len(opened) == 2 + 4, "for its first bytes"
    log.write_bytes(whole)

    assert "damaged or still being written" in tail.problem
    assert len(tail.poll()) == 399


def test_more_runs_than_anybody_asks_for_are_refused(tmp_path: Path) -> None:
    """By the name of the option that chooses one; which is found however many there are."""
    table = tmp_path / "runs.csv"
    table.write_text("run_id,step,metric,value\n" + "".join(f"r{i},1,loss,0.5\n" for i in range(5000)))
    with pytest.raises(ImportFormatError, match=r"more than 1,000 runs \('r0', 'r1', 'r2', \.\.\.\).*--run") as caught:
        read_log(table)
    [run] = read_log(table, run="r4321")
    with pytest.raises(ImportFormatError, match=r"has no run 'x'; it has: 'r0', .*'r19', \.\.\."):
        read_log(table, run="x")

    assert caught.value.line == 1002
    assert (run.name, len(run.records)) == ("r4321", 1)


def test_metrics_beyond_any_trainers_are_left_out(tmp_path: Path) -> None:
    """Too many, or with names that are none; the first ones stay."""
    row = {"step": 1, "loss": 0.5, "x" * 600: 1.0, **{f"m{i}": 1.0 for i in range(100_000)}}
    log = tmp_path / "wide.jsonl"
    log.write_text(json.dumps(row) + "\n" + json.dumps({"step": 2, "loss": 0.4, "other": 1.0}) + "\n")
    [run] = read_log(log)

    assert [len(record.metrics) for record in run.records] == [lines.MOST_NAMES, 1]
    assert left_out(run) == {
        "a metric whose name has more than 500 characters": 1,
        "a metric beyond the first 20,000 of its run": 100_000 - lines.MOST_NAMES + 1 + 1,
    }


def test_steps_that_go_back_all_the_time_are_of_no_run(tmp_path: Path) -> None:
    """Each time is another attempt, of which a run has a few."""
    log = tmp_path / "back.jsonl"
    log.write_text("".join(FLAT.format(2) + FLAT.format(1) for _ in range(1500)))
    with pytest.raises(ImportFormatError, match="go back more than 1,000 times"):
        read_log(log)


def test_the_branch_of_an_attempt_is_found_in_one_look_at_the_records() -> None:
    """However many attempts there are."""

    class Counted(list[StepRecord]):
        passes = 0

        def __iter__(self) -> Any:
            type(self).passes += 1
            return super().__iter__()

    records = Counted(StepRecord(step, {}, attempt=attempt) for attempt in range(1, 51) for step in (1, 2, 3))
    found = [(r.attempt, r.step) for r in branch(records, 50, 3)]

    assert found == [(49, 1), (49, 2)]
    assert Counted.passes <= 6


def test_many_broken_dicts_in_a_line_are_looked_at_a_few_times() -> None:
    """Each might be looked through to the end of the line."""
    rows = console.dict_rows("{'a': 1, 'b': [" * 20_000)

    assert len(rows) == console.MOST_BROKEN
    assert all(row.cut for row in rows)


def test_the_end_of_a_pair_is_looked_for_nearby() -> None:
    """A piece of a verl line has a colon in every other place."""
    far = 2 * lines.LONGEST_NAME

    assert pair_of("n" * (far - 10) + ":1") == ("n" * (far - 10), 1.0)
    assert pair_of("n" * far + ":1") is None
    assert pair_of("n" * (far - 2) + ":123456") is None
    assert pair_of("x:1," * 100_000 + ")x") is None


def test_a_pair_of_verl_with_a_screenful_behind_it_is_read() -> None:
    """Output glued behind the last value."""
    assert pair_of("actor/entropy:0.25 " + "noise " * 1000) == ("actor/entropy", 0.25)


def test_a_bar_with_a_number_of_thousands_of_digits_is_none(tmp_path: Path) -> None:
    """Python would not read it as an integer."""
    log = tmp_path / "run.log"
    log.write_bytes(trl_console([(1, {"loss": 0.5, "grad_norm": 1.0})]) + b"1%|a| 1/" + b"1" * 5000 + b" [0:1<0:2]\n")

    assert len(read_log(log)[0].records) == 1


@pytest.mark.parametrize("step", ["1" + "0" * 30, "1e300", "9007199254740992"])
def test_a_step_that_no_store_can_hold_is_named(tmp_path: Path, step: str) -> None:
    """With its line."""
    log = tmp_path / "run.jsonl"
    log.write_text(FLAT.format(1) + FLAT.format(step))
    with pytest.raises(ImportFormatError, match=r":2: the step must be below 2\*\*53"):
        read_log(log)


def test_columns_of_the_same_name_are_said(tmp_path: Path) -> None:
    """The last one counts."""
    log = tmp_path / "run.csv"
    log.write_text("step,loss,loss,kl\n1,0.1,0.2,0.3\n")
    [run] = read_log(log)

    assert run.records[0].metrics == {"loss": 0.2, "kl": 0.3}
    assert left_out(run) == {"1 columns that are called as another is (the last one counts)": 1}


def test_a_field_beyond_what_csv_reads_costs_its_line(tmp_path: Path) -> None:
    """100 MB within quotes would be one line too long; 1 MB is one the csv module refuses."""
    log = tmp_path / "run.csv"
    log.write_text("step,loss,kl\n1,0.1,0.3\n2,0.1," + '"' + "x" * (1 << 20) + '"\n3,0.1,0.3\n')
    [run] = read_log(log)

    assert [record.step for record in run.records] == [1, 3]
    assert left_out(run) == {"a line with other than 3 cells": 1}


def test_a_record_of_tensorboard_that_is_too_long_is_passed_over() -> None:
    """Without being held; the records around it are read."""
    rows = [(step, {"loss": 0.5}) for step in (1, 2)]
    whole = event_file(rows)
    (first,) = struct.unpack_from("<Q", whole)
    head = struct.pack("<Q", 32 << 20)
    long = head + struct.pack("<I", binary_records.masked_crc32c(head))
    records = binary_records.TfRecords(longest=1 << 20)
    tracemalloc.start()
    found = records.feed(whole[: first + 16] + long)
    for _ in range(32):
        found += records.feed(bytes(1 << 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    found += records.feed(bytes(4) + whole[first + 16 :])

    assert records.damage == "a record of more than 1,048,576 bytes"
    assert len(found) == 3
    assert peak < 8 << 20


def test_a_record_of_wandb_that_never_ends_is_not_held() -> None:
    """It comes in blocks of 32 KiB, each of which says that more follows."""
    size = 32768 - 7
    body = bytes(size)

    def block(kind: int, length: int) -> bytes:
        part = body[:length]
        return struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes((kind,)))), length, kind) + part

    records = binary_records.LevelDbLog(longest=1 << 20)
    records.feed(b":W&B" + bytes(3) + block(2, size - 7))
    tracemalloc.start()
    for _ in range(500):
        assert records.feed(block(3, size)) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert records.damage == "a record of more than 1,048,576 bytes"
    assert records.feed(block(2, 10) + block(4, 10)) == [bytes(20)]
    assert peak < 4 << 20


def test_a_step_of_tensorboard_with_thousands_of_scalars_is_one_row(tmp_path: Path) -> None:
    """Each value is put into it once."""
    directory = tmp_path / "run"
    directory.mkdir()
    wide = {f"m{i}": 1.0 for i in range(5000)}
    (directory / "events.out.tfevents.1.host").write_bytes(event_file([(1, {"loss": 0.5, **wide}), (2, {"loss": 0.4})]))

    assert [len(record.metrics) for record in read_log(directory)[0].records] == [5001, 1]


def test_what_belongs_to_a_picture_of_wandb_is_left_out_by_its_name() -> None:
    """Looked up, not compared with every picture there is."""
    items = {"image._type": "image-file", "image.path": 3, "imagery": 1.0, "a.image.x": 2.0}
    record = history(items, nested=False).history.SerializeToString()

    assert _history(record) == {"imagery": 1.0, "a.image.x": 2.0}


def test_a_pipe_in_the_place_of_a_log_is_never_waited_for(tmp_path: Path) -> None:
    """Also where it was a file a moment ago."""
    log = tmp_path / "run.jsonl"
    log.write_text(FLAT.format(1))
    tail = LogTail(log)
    log.unlink()
    os.mkfifo(log)

    with pytest.raises(OSError, match="is not a regular file"):
        tail.poll()
    with pytest.raises(OSError, match="is not a regular file"):
        lines.open_regular(log)


def test_a_log_that_is_mostly_nothing_is_read_in_turns(tmp_path: Path, monkeypatch: Any) -> None:
    """Between two polls other logs have theirs; holes are not read."""
    monkeypatch.setattr(follow, "A_LOOK", 1 << 18)
    monkeypatch.setattr("rlwatch.importers.tail.A_LOOK", 1 << 18)
    log = tmp_path / "run.jsonl"
    log.write_bytes(FLAT.format(1).encode() + b"noise\n" * 200_000 + FLAT.format(2).encode())
    tail, polls, steps = LogTail(log), 0, []
    while polls == 0 or tail.behind:
        steps += [record.step for record in tail.poll()]
        polls += 1

    assert steps == [1, 2]
    assert polls >= 2
    assert not tail.behind
    assert tail.poll() == []


def test_a_log_that_tells_nothing_for_long_is_recognised_in_turns(tmp_path: Path, monkeypatch: Any) -> None:
    """And a file with a hole of a terabyte costs no other log its turn."""
    monkeypatch.setattr("rlwatch.importers.tail.A_LOOK", 1 << 18)
    log = tmp_path / "run.log"
    log.write_bytes(b"noise\n" * 100_000 + trl_console([(1, {"loss": 0.5, "grad_norm": 1.0})]))
    tail, polls, found = LogTail(log), 0, []
    while polls == 0 or tail.behind:
        found += tail.poll()
        polls += 1
    found += tail.close()
    sparse = tmp_path / "sparse.log"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    hollow = LogTail(sparse)

    assert len(found) == 1
    assert polls >= 2
    assert hollow.poll() == []
    assert hollow.behind


def test_a_hole_behind_a_log_is_not_read(tmp_path: Path) -> None:
    """A terabyte that somebody reserved: what may come there is waited for."""
    log = tmp_path / "run.jsonl"
    log.write_text(FLAT.format(1))
    os.truncate(log, 1 << 40)
    tail = LogTail(log)

    assert [record.step for record in tail.poll()] == [1]
    assert not tail.behind


def test_a_log_begun_anew_before_it_was_known_is_recognised(tmp_path: Path) -> None:
    """It is shorter than what was looked at of the one before."""
    log = tmp_path / "run.jsonl"
    log.write_bytes(b"noise\n" * 200_000)
    tail = LogTail(log)
    assert tail.poll() == []
    log.write_text(FLAT.format(1) + FLAT.format(2))

    assert len(tail.poll()) == 2


def test_a_name_longer_than_any_reads_as_nothing() -> None:
    """Prefixes of trackers are looked through one after another."""
    assert resolve("train/" * 100_000 + "loss") is None
