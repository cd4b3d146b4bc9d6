"""Following a log while it is written: the same records, whatever the timing."""

from __future__ import annotations

import gzip
import math
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import native_logs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, read_log
from rlwatch.testing.importer_contract import comparable

PACE = 10
ROWS = [(PACE * i, {"grad_norm": 0.5 * i, "reward": math.nan if i == 3 else 1.25}) for i in range(1, 8)]
AGAIN = [*ROWS, *ROWS[4:]]
VERL = [(step, {"actor/grad_norm": 1.0, "critic/score/mean": value["reward"]}) for step, value in AGAIN]


def buffered_trl() -> bytes:
    """Rows in batches long after their steps, as a buffered stdout gives them."""
    out, n = [native_logs.bar(0)], 0
    for batch in (4, 3):
        out += [f"\r{native_logs.bar(i)}" for i in range(n, n + PACE * batch + 1)]
        n += PACE * batch
        out += ["\n", *(f"{{'loss': 0.5, 'reward': {i}.25, 'epoch': 0.1}}\n" for i in range(batch))]
        out += [f"\r{native_logs.bar(n)}"]
    return "".join(out).encode()


LOGS = {
    "verl console": native_logs.verl_console(VERL),
    "verl console, wrapped": native_logs.verl_console(VERL).replace(b" - critic", b"\n   - critic"),
    "verl file logger": native_logs.verl_jsonl(VERL),
    "flat JSON lines": native_logs.swift_jsonl(AGAIN),
    "TRL console": native_logs.trl_console(AGAIN),
    "TRL console, buffered": buffered_trl(),
    "TRL console, no bars": b"".join(f"{{'loss': {i}, 'kl': 0.5, 'epoch': 1}}\n".encode() for i in range(9)),
    "TRL console, CR LF": native_logs.trl_console(AGAIN).replace(b"\n", b"\r\n"),
    "OpenRLHF console": native_logs.openrlhf_console([(s, {"policy_loss": 0.5, "kl": m["reward"]}) for s, m in AGAIN]),
    "long CSV": native_logs.long_csv(ROWS),
    "wide CSV": native_logs.wide_csv(ROWS, names=["grad_norm", "reward"]),
    "half a line at the end": native_logs.verl_jsonl(VERL)[:-11],
    "UTF-16": native_logs.verl_console(VERL).decode().encode("utf-16"),
}


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as file:
        file.write(data)


@cache
def at_once(kind):
    """The log read whole, as a file: once for all the ways in which it may arrive."""
    with TemporaryDirectory() as place:
        (Path(place) / "run.log").write_bytes(LOGS[kind])
        [run] = read_log(Path(place) / "run.log")
    return run


@pytest.mark.parametrize("kind", LOGS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_polls_of_any_chunks_equal_one_reading(tmp_path, kind, data):
    """However the bytes arrived: cut in a number, a character, a line end."""
    whole = LOGS[kind]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    log = tmp_path / "run.log"
    log.write_bytes(b"")
    tail = LogTail(log)
    found = tail.poll()
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        append(log, whole[start:end])
        found += tail.poll()
    found += tail.close()
    run = at_once(kind)

    assert comparable(found) == comparable(run.records)
    assert (tail.format, tail.source, tail.skipped, tail.notes) == (run.format, run.source, run.skipped, run.notes)


@pytest.mark.parametrize("kind", ["verl file logger", "OpenRLHF console", "TRL console, no bars"])
def test_byte_by_byte(tmp_path, kind):
    """The smallest chunks there are."""
    whole = LOGS[kind][:1200]
    log = tmp_path / "run.log"
    log.write_bytes(b"")
    tail = LogTail(log)
    found = []
    for i in range(len(whole)):
        append(log, whole[i : i + 1])
        found += tail.poll()
    found += tail.close()

    assert comparable(found) == comparable(read_log(log)[0].records)


def test_a_line_is_given_as_soon_as_it_is_complete(tmp_path):
    """Not a step later; a half-written one is held back."""
    log = tmp_path / "run.jsonl"
    log.write_bytes(b"")
    tail = LogTail(log)
    append(log, b'{"step":1,"data":{"actor/lr":0.1}}\n{"step":2,"data":{"actor/l')
    first = tail.poll()
    append(log, b'r":0.2}}\n')
    second = tail.poll()

    assert [record.step for record in first] == [1]
    assert [(record.step, record.metrics) for record in second] == [(2, {"actor/lr": 0.2})]
    assert tail.poll() == []


def test_a_nan_on_a_verl_console_is_given_with_its_own_line(tmp_path):
    """The alarm must not wait for the next step."""
    log = tmp_path / "run.log"
    log.write_bytes(native_logs.verl_console([(1, {"actor/grad_norm": math.nan})]))
    tail = LogTail(log)

    assert math.isnan(tail.poll()[0].metrics["actor/grad_norm"])


def test_the_trainers_summary_releases_what_waited_for_a_bar(tmp_path):
    """Training is over: no bar will come."""
    log = tmp_path / "run.log"
    log.write_text(f"\r{native_logs.bar(20)}\n" + "{'loss': 0.5, 'kl': 0.1, 'epoch': 1}\n" * 2)
    tail = LogTail(log)
    waiting = tail.poll()
    append(log, b"{'train_runtime': 1.5, 'train_loss': 0.5}\n")

    assert waiting == []
    assert [record.step for record in tail.poll()] == [10, 20]


@pytest.mark.parametrize("longer", [False, True])
def test_a_truncated_file_is_read_anew_as_the_next_attempt(tmp_path, longer):
    """verl's file logger truncates when it is started again, even where the new file is already longer."""
    log = tmp_path / "run.jsonl"
    log.write_bytes(native_logs.verl_jsonl(VERL[:4]))
    tail = LogTail(log)
    found = tail.poll()
    more = [(step + 1, {"actor/grad_norm": 2.5}) for step in range(40, 40 + (20 if longer else 2))]
    log.write_bytes(native_logs.verl_jsonl(more))
    found += tail.poll() + tail.close()

    assert [(r.attempt, r.step) for r in found] == [(1, s) for s, _ in VERL[:4]] + [(2, s) for s, _ in more]
    assert [record.seq for record in found] == list(range(1, len(found) + 1))


def test_a_truncated_file_loses_its_half_line(tmp_path):
    """It must not be glued to the new beginning."""
    log = tmp_path / "run.jsonl"
    log.write_bytes(native_logs.verl_jsonl(VERL[:2]) + b'{"step":')
    tail = LogTail(log)
    tail.poll()
    log.write_bytes(native_logs.verl_jsonl(VERL[:1]))

    assert [(record.attempt, record.step) for record in tail.poll()] == [(2, 10)]
    assert tail.skipped == ()


def test_a_rotated_log_is_read_to_its_end_and_goes_on_in_the_new_file(tmp_path):
    """Same process, same attempt; what was written between two polls is not lost."""
    log = tmp_path / "run.log"
    log.write_bytes(native_logs.verl_console(VERL[:2]))
    tail = LogTail(log)
    found = tail.poll()
    append(log, native_logs.verl_console(VERL[2:4])[:-1])  # its line end never came
    log.rename(tmp_path / "run.log.1")
    found += tail.poll()  # between the two halves of a rotation
    log.write_bytes(native_logs.verl_console(VERL[4:6]))
    found += tail.poll() + tail.close()

    assert [(record.attempt, record.step) for record in found] == [(1, step) for step, _ in VERL[:6]]


def test_a_log_that_is_removed_is_waited_for(tmp_path):
    """It may come back."""
    log = tmp_path / "run.jsonl"
    log.write_bytes(native_logs.verl_jsonl(VERL[:2]))
    tail = LogTail(log)
    tail.poll()
    log.unlink()

    assert tail.poll() == []
    log.write_bytes(native_logs.verl_jsonl(VERL[2:3]))
    assert [record.step for record in tail.poll()] == [30]


def test_a_log_that_tells_nothing_yet_is_waited_for(tmp_path):
    """A megabyte of preamble, read once, and then the first row."""
    log = tmp_path / "run.log"
    log.write_bytes(b"")
    tail = LogTail(log)
    for i in range(10):
        append(log, f"Loading dataset shard {i}\n".encode() * 3000)
        assert (tail.poll(), tail.format) == ([], "")
    append(log, native_logs.verl_console(VERL[:1]))

    assert [record.step for record in tail.poll()] == [10]


def test_what_will_never_be_a_log_is_refused(tmp_path):
    """Waiting for it would be for ever."""
    log = tmp_path / "run.h5"
    log.write_bytes(b"\x89HDF\r\n")

    with pytest.raises(ImportFormatError, match="HDF5"):
        LogTail(log).poll()
    with pytest.raises(ImportFormatError, match="no such file"):
        LogTail(tmp_path / "nowhere")


def test_trainer_state_is_read_again_when_it_changes(tmp_path):
    """Each checkpoint rewrites it; a half-written one is left for the next time; a resume rewinds."""
    log = tmp_path / "trainer_state.json"
    states = [native_logs.trainer_state(ROWS[:3]), native_logs.trainer_state(ROWS[:5])]
    resumed = native_logs.trainer_state([*ROWS[:3], (40, {"grad_norm": 9.0, "reward": 1.0})])
    log.write_bytes(states[0])
    tail = LogTail(log)
    first = tail.poll()
    unchanged = tail.poll()
    log.write_bytes(states[1][:-200])
    half = tail.poll()
    log.write_bytes(states[1])
    second = tail.poll()
    log.write_bytes(resumed)
    third = tail.poll()

    assert (unchanged, half) == ([], [])
    assert [(r.attempt, r.step) for r in first + second] == [(1, step) for step, _ in ROWS[:5]]
    assert [(r.attempt, r.step, r.metrics["grad_norm"]) for r in third] == [(2, 40, 9.0)]


def test_a_packed_log_is_read_again_when_it_changes(tmp_path):
    """gzip cannot be read from the middle."""
    log = tmp_path / "run.log.gz"
    log.write_bytes(gzip.compress(native_logs.verl_console(VERL[:2])))
    tail = LogTail(log)
    first = tail.poll()
    log.write_bytes(gzip.compress(native_logs.verl_console(VERL[:4])))
    os.utime(log, (2e9, 2e9))

    assert [record.step for record in first + tail.poll()] == [10, 20, 30, 40]


def test_one_run_of_several_can_be_followed(tmp_path):
    """Without saying which it is an error that names them."""
    log = tmp_path / "runs.csv"
    log.write_text("run_id,step,metric,value\na,1,loss,0.5\nb,1,loss,0.25\na,2,loss,0.5\n")
    tail = LogTail(log, run="b")

    assert [record.metrics for record in tail.poll() + tail.close()] == [{"loss": 0.25}]
    with pytest.raises(ImportFormatError, match="'a', 'b'"):
        LogTail(log).poll()


def test_a_bad_step_is_the_same_error_as_in_a_whole_reading(tmp_path):
    """With the line."""
    log = tmp_path / "run.jsonl"
    log.write_text('{"step": 1, "loss": 0.5}\n{"step": -1, "loss": 0.5}\n')

    with pytest.raises(ImportFormatError, match=r"run\.jsonl:2"):
        LogTail(log).poll()
