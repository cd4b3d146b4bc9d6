"""Logs that are rotated, truncated, copied, lost and found: every row once, whoever reads them and whenever."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import native_logs
import pytest

from rlwatch.importers import LogTail, Position
from rlwatch.importers.follow import holds_mark, is_at, kept_copy, mark_of
from rlwatch.records import StepRecord


def rows(first: int, last: int) -> bytes:
    return native_logs.verl_jsonl([(step, {"actor/grad_norm": step * 0.5}) for step in range(first, last + 1)])


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as file:
        file.write(data)


def steps(records: list[StepRecord]) -> list[int]:
    return [record.step for record in records]


def again(tail: LogTail, last_seq: int) -> LogTail:
    """Another process's tail of the same log, knowing what this one left behind."""
    position = tail.position
    assert position is not None
    kept = Position.from_dict(position.to_dict())
    assert kept == position
    return LogTail(tail.path, position=kept, last_seq=last_seq)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    log = tmp_path / "run.jsonl"
    log.write_bytes(rows(1, 5))
    return log


def test_a_log_that_is_copied_and_truncated_goes_on_as_the_same_attempt(log: Path) -> None:
    """Also what was written between the last look and the copy is read, from the copy."""
    tail = LogTail(log)
    found = tail.poll()
    append(log, rows(6, 8))
    shutil.copy(log, log.with_name("run.jsonl.1"))
    os.truncate(log, 0)
    append(log, rows(9, 12))
    found += tail.close()

    assert steps(found) == list(range(1, 13))
    assert {record.attempt for record in found} == {1}
    assert [record.seq for record in found] == list(range(1, 13))


def test_the_hole_that_a_writer_leaves_in_a_truncated_log_is_no_row(log: Path) -> None:
    """A writer that does not append goes on writing at its old place."""
    tail = LogTail(log)
    with log.open("r+b") as writer:
        writer.seek(0, os.SEEK_END)
        tail.poll()
        os.truncate(log, 0)
        writer.write(rows(6, 7))
    found = tail.poll()

    assert steps(found) == [6, 7]
    assert tail.skipped == ()


def test_bytes_that_are_yet_to_arrive_are_waited_for(log: Path) -> None:
    """A network file system shows a file longer than what has reached the server, with NUL bytes instead."""
    tail = LogTail(log)
    tail.poll()
    size = log.stat().st_size
    os.truncate(log, size + 3000)
    waiting = tail.poll()
    with log.open("r+b") as writer:
        writer.seek(size)
        writer.write(rows(6, 7))

    assert waiting == []
    assert steps(tail.poll()) == [6, 7]


def test_holes_of_megabytes_cost_no_memory_and_no_rows(tmp_path: Path) -> None:
    """Rows before, between and after them."""
    log = tmp_path / "run.jsonl"
    log.write_bytes(rows(1, 2))
    tail = LogTail(log)
    with log.open("r+b") as writer:
        for first in (3, 5):
            writer.seek(3 << 20, os.SEEK_END)
            writer.write(b"\n" + rows(first, first + 1))

    assert steps(tail.poll() + tail.close()) == [1, 2, 3, 4, 5, 6]


def test_a_file_under_another_inode_is_the_same_file_if_it_holds_the_same(log: Path) -> None:
    """As rsync leaves it at each round, and as some network file systems number files."""
    tail = LogTail(log)
    found = tail.poll()
    for last in (7, 9):
        copy = log.with_name("copy")
        copy.write_bytes(rows(1, last))
        copy.replace(log)
        found += tail.poll()

    assert steps(found) == list(range(1, 10))
    assert {record.attempt for record in found} == {1}


def test_a_released_log_goes_on_where_it_was_even_if_it_was_rotated_meanwhile(log: Path) -> None:
    """File handles can be given back between two looks."""
    tail = LogTail(log)
    found = tail.poll()
    tail.release()
    append(log, rows(6, 6))
    found += tail.poll()
    tail.release()
    append(log, rows(7, 8))
    log.rename(log.with_name("run.jsonl.1"))
    log.write_bytes(rows(9, 10))
    found += tail.close()

    assert steps(found) == list(range(1, 11))
    assert {record.attempt for record in found} == {1}


def test_a_log_that_vanishes_and_comes_back_is_not_read_twice(log: Path) -> None:
    """A mount that was gone for a while."""
    tail = LogTail(log)
    found = tail.poll()
    tail.release()
    away = log.with_name("away")
    log.rename(away)
    found += tail.poll()
    away.rename(log)
    append(log, rows(6, 7))

    assert steps(found + tail.poll()) == list(range(1, 8))


def test_a_later_process_numbers_on(log: Path) -> None:
    """It is given the file from its beginning, with the numbers that the rows had."""
    tail = LogTail(log)
    tail.poll()
    append(log, rows(6, 7))
    found = again(tail, 5).poll()

    assert [(record.seq, record.step) for record in found] == [(n, n) for n in range(1, 8)]


def test_a_later_process_knows_a_log_that_was_written_anew(log: Path) -> None:
    """Its rows follow those that were kept, although the file has fewer."""
    tail = LogTail(log)
    tail.poll()
    log.write_bytes(rows(3, 6))
    later = again(tail, 5)
    found = later.poll()
    append(log, rows(7, 7))
    third = again(later, 9).poll()

    assert [(record.seq, record.step) for record in found] == [(6, 3), (7, 4), (8, 5), (9, 6)]
    assert [(record.seq, record.step) for record in third] == [*((r.seq, r.step) for r in found), (10, 7)]


def test_a_later_process_finds_the_rest_of_a_log_that_was_rotated_away(log: Path) -> None:
    """The rows that nobody had read, then those of the new file."""
    tail = LogTail(log)
    tail.poll()
    append(log, rows(6, 7))
    log.rename(log.with_name("run.jsonl.1"))
    log.write_bytes(rows(8, 9))
    later = again(tail, 5)
    found = later.poll()
    while later.behind:
        found += later.poll()

    assert [(record.seq, record.step) for record in found] == [(n, n) for n in range(1, 10)]


def test_no_poll_gives_rows_of_two_files(log: Path) -> None:
    """So that the position of the second can be kept before its first row."""
    tail = LogTail(log)
    tail.poll()
    append(log, rows(6, 7))
    log.rename(log.with_name("run.jsonl.1"))
    log.write_bytes(rows(8, 9))
    first, turned, base = tail.poll(), tail.turned, tail.position.base if tail.position else None
    second = tail.poll()

    assert (steps(first), turned, base) == ([6, 7], True, 7)
    assert (steps(second), tail.turned, tail.behind) == ([8, 9], False, False)


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_a_backlog_is_taken_in_lots(log: Path, most: int) -> None:
    """None larger than asked for, all together everything."""
    tail = LogTail(log)
    lots = [tail.poll(most)]
    while tail.behind:
        lots.append(tail.poll(most))

    assert max(map(len, lots)) <= most
    assert steps([record for lot in lots for record in lot]) == [1, 2, 3, 4, 5]
    assert tail.read == (log.stat().st_size, log.stat().st_size)


def test_a_mark_tells_files_apart_by_what_is_before_a_place(tmp_path: Path) -> None:
    """Shorter, other, same; packed copies are not looked at, missing ones are none."""
    log = tmp_path / "train.log"
    log.write_bytes(b"a" * 300 + b"b" * 300)
    mark = mark_of(b"a" * 200 + b"b" * 100)
    (tmp_path / "train.log.1").write_bytes(b"a" * 300 + b"b" * 100 + b"more")
    (tmp_path / "train.log.2").write_bytes(b"a" * 300)
    with log.open("rb") as file:
        assert holds_mark(file, 400, mark)
        assert not holds_mark(file, 300, mark)
        assert not holds_mark(file, 4000, mark)
    assert kept_copy(log, 400, mark) == tmp_path / "train.log.1"
    assert kept_copy(log, 0, mark_of(b"")) is None
    assert not is_at(tmp_path / "nowhere", 0, mark_of(b""))


@pytest.mark.parametrize("data", [None, [], {}, {"file": "a", "base": "1", "offset": 2, "mark": ""}])
def test_a_position_that_is_none_is_forgotten(data: object) -> None:
    """A damaged file costs nothing but the place."""
    assert Position.from_dict(data) is None
    assert Position.from_dict({"file": "a", "base": -1, "offset": 2, "mark": "x"}) is None
