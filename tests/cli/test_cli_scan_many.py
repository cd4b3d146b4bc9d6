"""scan: several logs, directories, standard input, addresses; and what continuous integration takes."""

from __future__ import annotations

import functools
import http.server
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from cli_helpers import Invoke, write_log
from typer.testing import CliRunner

from rlwatch.cli.app import app

HEALTHY = {"loss": 0.1, "grad_norm": 0.5, "entropy": 1.2, "reward": 0.3, "kl": 0.01}


def rows(broken: int = 0) -> list[dict[str, float]]:
    """Sixty sound steps, then some with NaN."""
    nan = dict.fromkeys(("grad_norm", "entropy", "kl"), math.nan)
    moving = lambda step: {"reward": 0.3 + 0.01 * (step % 4), "step": step}  # noqa: E731
    return [HEALTHY | (nan if step > 60 else {}) | moving(step) for step in range(1, 61 + broken)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound log, a broken one, checkpoints, and a file that is no log."""
    write_log(tmp_path / "sound.log", rows())
    (tmp_path / "sub").mkdir()
    write_log(tmp_path / "sub" / "broken.log", rows(10))
    (tmp_path / "notes.log").write_text("dear diary\n")
    for number in (9, 80):
        state = tmp_path / "out" / f"checkpoint-{number}" / "trainer_state.json"
        state.parent.mkdir(parents=True)
        history = [{"step": step, "loss": 0.1, "reward": 0.5} for step in range(1, number + 1)]
        state.write_text(json.dumps({"log_history": history, "global_step": number}))
    return tmp_path


def test_a_directory_stands_for_its_logs(folder: Path, invoke: Invoke) -> None:
    """Of checkpoints the newest; what cannot be read is one line."""
    told = invoke("scan", folder, "--format", "json")

    assert {report["run"]: report["steps"] for report in json.loads(told.stdout)} == {
        "sound": 60,
        "broken": 70,
        "out": 80,
    }
    assert told.stderr.count("skipped: ") == 1
    assert "notes.log: no known format" in told.stderr
    assert told.exit_code == 1


def test_where_no_log_can_be_read_the_code_is_2(folder: Path, invoke: Invoke) -> None:
    """Of several each is named."""
    told = invoke("scan", folder / "notes.log", folder / "nothing.log")

    assert told.exit_code == 2
    assert "notes.log" in told.stderr
    assert "nothing.log: no such file" in told.stderr


def test_standard_input_is_a_log(folder: Path) -> None:
    """``kubectl logs trainer-0 | rlwatch scan -``."""
    told = CliRunner().invoke(app, ["scan", "-", "--format", "json"], input=(folder / "sound.log").read_bytes())

    assert json.loads(told.stdout)["steps"] == 60


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    """The folder behind an address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_address_is_fetched(served: str, invoke: Invoke) -> None:
    """What the server refuses is said."""
    assert json.loads(invoke("scan", f"{served}/sound.log", "--format", "json").stdout)["run"] == "sound"
    missing = invoke("scan", f"{served}/nothing.log")
    assert missing.exit_code == 2
    assert "404" in missing.stderr


def test_annotations_of_github_are_one_line_each(folder: Path, invoke: Invoke) -> None:
    """Errors for what was critical, with the characters escaped that end a property."""
    told = invoke("scan", folder / "sub" / "broken.log", "--format", "github")
    error, *_, verdict = told.stdout.splitlines()

    assert error.startswith("::error file=")
    assert "title=broken%3A nonfinite at step 61::non-finite values: " in error
    assert "title=broken%3A verdict::Collapsed at step 61: values became non-finite" in verdict
    assert told.exit_code == 1


def test_junit_fails_what_was_critical(folder: Path, invoke: Invoke) -> None:
    """A suite a run; a sound one has no failure."""
    told = invoke("scan", folder / "sound.log", folder / "sub" / "broken.log", "--format", "junit")
    sound, broken = ET.fromstring(told.stdout).findall("testsuite")

    assert (sound.get("failures"), broken.get("failures")) == ("0", "2")
    assert [case.get("name") for case in broken.findall("testcase[failure]")] == ["verdict", "nonfinite"]


def test_a_log_that_cannot_be_read_is_an_error_of_junit_and_an_annotation(folder: Path, invoke: Invoke) -> None:
    """Beside those that were: a system that reads the report and no stderr must not take it for sound."""
    logs = (folder / "sound.log", folder / "notes.log")
    *_, left_out = ET.fromstring(invoke("scan", *logs, "--format", "junit").stdout).findall("testsuite")
    annotations = invoke("scan", *logs, "--format", "github").stdout.splitlines()

    assert (left_out.get("file"), left_out.get("errors")) == (str(logs[1]), "1")
    (error,) = left_out.findall("testcase/error")
    assert str(error.get("message")).startswith("no known format")
    assert annotations[-1].startswith(f"::warning file={logs[1]},title=not read::no known format")


def test_a_table_of_markdown_has_a_row_a_run(folder: Path, invoke: Invoke) -> None:
    """For a pull request."""
    told = invoke("scan", folder, "--format", "markdown")

    assert sum(line.startswith("| ") for line in told.stdout.splitlines()) == 5
    assert "not read: no known format" in told.stdout
    assert "Collapsed at step 61" in told.stdout
