"""`rlwatch report`: one file, of a run or of a log."""

from pathlib import Path

import pytest
import yaml
from cli_helpers import Invoke, record_run, write_log

from rlwatch.store.url import open_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    record_run(open_store(path), "aaaa1111", name="seed/3 <x>", steps=40)
    return path


def test_a_run_is_written_beside_one(store: Path, invoke: Invoke, tmp_path: Path) -> None:
    """Named after the run, whatever it is called; for nobody else's eyes."""
    result = invoke("report", "aaaa", "--store", store)
    written = tmp_path / "3--x-report.html"

    assert result.exit_code == 0, result.output
    assert written.name in result.stdout
    assert written.read_text().startswith("<!doctype html>")
    assert written.stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_markdown_goes_where_it_is_told(store: Path, invoke: Invoke, tmp_path: Path) -> None:
    """A file, or stdout alone."""
    to_file = invoke("report", "aaaa", "--store", store, "--format", "md", "-o", tmp_path / "r.md")
    to_stdout = invoke("report", "aaaa", "--store", store, "--format", "md", "-o", "-")

    assert to_file.exit_code == to_stdout.exit_code == 0
    assert (tmp_path / "r.md").read_text().startswith("# seed/3 &lt;x&gt;")
    assert to_stdout.stdout.startswith("# seed/3")


def test_a_space_is_a_directory_that_hugging_face_takes(store: Path, invoke: Invoke, tmp_path: Path) -> None:
    """Front matter that YAML reads, and the page itself; nobody's README is written over."""
    result = invoke("report", "aaaa", "--store", store, "--format", "space", "-o", tmp_path / "space")
    _, front, _ = (tmp_path / "space" / "README.md").read_text().split("---\n")

    assert result.exit_code == 0, result.output
    assert yaml.safe_load(front) == {"title": "3--x", "sdk": "static", "pinned": False}
    assert (tmp_path / "space" / "index.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in (tmp_path / "space").iterdir()) == ["README.md", "index.html"]
    assert invoke("report", "aaaa", "--store", store, "--format", "space", "-o", tmp_path / "space").exit_code == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    refused = invoke("report", "aaaa", "--store", store, "--format", "space", "-o", tmp_path / "mine")
    assert (refused.exit_code, (tmp_path / "mine" / "README.md").read_text()) == (2, "mine")


def test_a_log_needs_no_store(invoke: Invoke, tmp_path: Path) -> None:
    """Replayed, then told."""
    rows = [
        {"loss": 0.1, "reward": 0.5 + (n * 7 % 11) / 50, "entropy": 0.6, "grad_norm": 1.0, "epoch": n / 100}
        for n in range(60)
    ]
    log = write_log(tmp_path / "train.log", rows)
    result = invoke("report", log, "-o", tmp_path / "r.html")

    assert result.exit_code == 0, result.output
    assert "No warning or critical findings" in (tmp_path / "r.html").read_text()


def test_an_unknown_run_is_one_line(store: Path, invoke: Invoke) -> None:
    """And exit code 2."""
    result = invoke("report", "zzzz", "--store", store)

    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_file_that_cannot_be_written_is_one_line(store: Path, invoke: Invoke, tmp_path: Path) -> None:
    """A directory that is not there."""
    result = invoke("report", "aaaa", "--store", store, "-o", tmp_path / "no" / "r.html")

    assert result.exit_code == 2
    assert "Traceback" not in result.output
