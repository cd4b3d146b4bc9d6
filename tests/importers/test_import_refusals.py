"""What cannot be read is refused with the path, what was wrong and what to do; never with a traceback."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_logs import trl_console, verl_console

from rlwatch.errors import ImportFormatError
from rlwatch.importers import formats, read_log, sniff

ROWS = [(step, {"loss": 0.5, "actor/grad_norm": 1.0}) for step in range(1, 6)]


def refusal(path) -> str:
    with pytest.raises(ImportFormatError) as caught:
        read_log(path)
    assert str(caught.value).startswith(str(path))
    return caught.value.problem


def test_a_missing_file(tmp_path):
    """Named."""
    assert refusal(tmp_path / "nowhere.log") == "no such file"


def test_a_missing_file_beside_one_of_almost_its_name(tmp_path):
    """Mistyped, most likely."""
    (tmp_path / "healthy-console.log").write_text("x")
    (tmp_path / "notes.txt").write_text("x")

    assert refusal(tmp_path / "helthy-console.log") == f"no such file; did you mean {tmp_path / 'healthy-console.log'}?"


def test_a_directory(tmp_path):
    """The newest state in it is what was meant, perhaps."""
    assert "give the log file" in refusal(tmp_path)
    for age, name in enumerate(["checkpoint-500", "checkpoint-250"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
        os.utime(tmp_path / name / "trainer_state.json", (1000 - age, 1000 - age))

    assert refusal(tmp_path).endswith("checkpoint-500/trainer_state.json")


def test_a_pipe(tmp_path):
    """It could be read only once."""
    os.mkfifo(tmp_path / "pipe")

    assert "tee" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", gzip.compress(b"", mtime=0)])
def test_an_empty_file(tmp_path, content):
    """Also of blank lines, also packed."""
    (tmp_path / "run.log").write_bytes(content)

    assert "empty" in refusal(tmp_path / "run.log")


def test_a_binary_file(tmp_path):
    """Of no known kind."""
    (tmp_path / "run.bin").write_bytes(bytes(range(256)) * 20)

    assert "binary" in refusal(tmp_path / "run.bin")


def test_nul_bytes_at_the_end_of_a_log_do_not_make_it_binary(tmp_path):
    """A machine that lost power leaves them."""
    (tmp_path / "a.log").write_bytes(verl_console(ROWS) + bytes(50))

    assert len(read_log(tmp_path / "a.log")[0].records) == 5


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("logs.zip", b"PK\x03\x04\x14", "zip"),
        ("table.h5", b"\x89HDF\r\n", "HDF5"),
        ("page.html", b"<!DOCTYPE html><html><body>loss</body>", "web page"),
        ("nb.json", b'[{"cell": 1, "output": "<table border=\\"1\\" class=\\"dataframe\\">"}]', "notebook"),
    ],
)
def test_known_formats_that_are_not_supported_are_named(tmp_path, name, content, kind):
    """With what to do instead."""
    (tmp_path / name).write_bytes(content)
    problem = refusal(tmp_path / name)

    assert kind in problem
    assert "not supported yet" in problem
    assert "CSV" in problem or "unpack" in problem


def test_a_notebook_without_rows_is_named(tmp_path):
    """Neither a table nor a console in it."""
    (tmp_path / "nb.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code"}]}))

    assert "a notebook of whose outputs none is" in refusal(tmp_path / "nb.ipynb")


def test_a_database_is_named(tmp_path):
    """rlwatch's own runs are databases too."""
    with sqlite3.connect(tmp_path / "run.db") as database:
        database.execute("create table t (x)")

    assert "SQLite" in refusal(tmp_path / "run.db")


def test_an_unknown_format_says_what_was_tried_and_what_was_missing(tmp_path):
    """Every format by its name; a reason only where one was nearly found, so that the error stays readable."""
    (tmp_path / "notes.txt").write_text("Dear diary,\ntoday the reward went up.\n")
    (tmp_path / "rows.jsonl").write_text('{"reward": 0.5, "kl": 0.1}\n' * 9)
    problem, nearly = refusal(tmp_path / "notes.txt"), refusal(tmp_path / "rows.jsonl")

    assert set(problem.split("(tried ")[1].rstrip(")").split(", ")) == set(formats())
    assert "(a row without a step (looked for step, " in nearly
    assert len(problem) < 700


def test_a_log_of_unknown_metrics_says_how_to_name_them(tmp_path):
    """A few of the names are given."""
    (tmp_path / "own.jsonl").write_text('{"step": 1, "apples": 1, "pears": 2}\n')
    problem = refusal(tmp_path / "own.jsonl")

    assert "'apples', 'pears'" in problem
    assert "policy/entropy" in problem


def test_an_unknown_format_name_lists_the_formats(tmp_path):
    """``--format`` was mistyped."""
    (tmp_path / "a.log").write_bytes(verl_console(ROWS))
    with pytest.raises(ImportFormatError, match="verl-console"):
        read_log(tmp_path / "a.log", format="verl")


def test_the_format_can_be_overruled(tmp_path):
    """A log that holds two kinds of rows."""
    log = tmp_path / "both.log"
    log.write_bytes(verl_console(ROWS[:2]) + trl_console(ROWS))

    assert sniff(log).name == "verl-console"
    assert len(read_log(log, format="trl-console")[0].records) == 5


def test_a_format_that_does_not_fit_says_what_it_expected(tmp_path):
    """Nothing is invented."""
    (tmp_path / "a.log").write_bytes(verl_console(ROWS))
    with pytest.raises(ImportFormatError, match=r"read as jsonl .*left out"):
        read_log(tmp_path / "a.log", format="jsonl")


def test_a_damaged_gzip_file(tmp_path):
    """Cut off: what is there can still be unpacked by hand."""
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(os.urandom(4000) + verl_console(ROWS))[:-2000])

    assert "zcat" in refusal(tmp_path / "a.log.gz")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    """The reason of the operating system is passed on."""
    (tmp_path / "a.log").write_text("x")

    def denied(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", denied)

    assert refusal(tmp_path / "a.log") == "cannot be read: Permission denied"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([
    b"step:", b"1 - ", b"a:1", b"\n", b"\r", b"{'loss': ", b"0.1", b", 'epoch': 1}", b'{"step": ', b'"data": {', b"}",
    b"10/20 [00:01<00:02]", b" 50%|##| ", b"Global step 3: {", b"run_id,step,metric,value", b",", b"nan", b"-1", b"\x00",
    b"\xff\xfe", b"\x1f\x8b", b'{"log_history": [', b"]", b"null", b'{"log":"', b'","stream":"x"}', b"\x1b[3", b"'", b'"',
]), max_size=30).map(b"".join))  # fmt: skip
def test_any_bytes_are_read_or_refused(tmp_path, content):
    """No other exception, whatever is in the file."""
    log = tmp_path / "any.log"
    log.write_bytes(content)
    try:
        runs = read_log(log)
    except ImportFormatError:
        return

    assert all(record.step >= 0 for run in runs for record in run.records)
    assert all([r.seq for r in run.records] == list(range(1, len(run.records) + 1)) for run in runs)
