"""From a URL to a store."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlwatch.clock import ManualClock
from rlwatch.errors import ConfigError, StoreURLError
from rlwatch.records import RunInfo
from rlwatch.store.memory import forget
from rlwatch.store.url import default_store_url, open_store
from rlwatch.testing.store_run_contract import fill, steps


@pytest.mark.parametrize("name", ["runs", "runs with space", "100%", "what?", "a#b", "é%20", "percent%41"])
def test_a_stores_url_opens_the_same_store(tmp_path: Path, name: str):
    """Whatever the directory is called."""
    fill(open_store(tmp_path / name), steps(1))
    url = open_store(str(tmp_path / name)).url

    assert url.startswith("sqlite:///")
    assert len(open_store(url).records("run")) == 1
    assert open_store(url).url == url
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_relative_and_home_paths_are_understood(tmp_path: Path, monkeypatch):
    """As a shell user writes them; a later chdir does not move the store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store = open_store("runs/x")
    monkeypatch.chdir("/")

    assert store.url == f"sqlite://{tmp_path}/runs/x"
    assert open_store("~/runs").url == f"sqlite://{tmp_path}/home/runs"


def test_the_default_is_the_environments_or_here(monkeypatch, tmp_path: Path):
    """An empty variable is none."""
    monkeypatch.setenv("RLWATCH_STORE", "memory://from-env")
    assert (default_store_url(), open_store().url) == ("memory://from-env", "memory://from-env")
    for unset in (lambda: monkeypatch.setenv("RLWATCH_STORE", ""), lambda: monkeypatch.delenv("RLWATCH_STORE")):
        unset()
        assert default_store_url() == "./rlwatch-runs"
    monkeypatch.chdir(tmp_path)
    assert open_store().url == f"sqlite://{tmp_path}/rlwatch-runs"


@pytest.mark.parametrize(
    "url",
    ["clickhouse://ann:secret@db/runs", "http://ann:secret@host", "s3://secret", "sqlit:///secret", "mysql:secret"],
)
def test_an_unknown_scheme_names_those_there_are(url: str):
    """And never what follows: it may hold a password."""
    with pytest.raises(
        StoreURLError, match=r"a directory, sqlite:///absolute/path, postgresql://user@host/database or memory://name"
    ) as failure:
        open_store(url)
    assert url.split(":", maxsplit=1)[0] in str(failure.value)
    assert "secret" not in str(failure.value)
    assert isinstance(failure.value, ConfigError)


@pytest.mark.parametrize("url", ["", "  ", "sqlite:runs", "sqlite://runs", "sqlite:", "memory:", "memory:x"])
def test_half_a_url_is_refused(url: str):
    """Rather than taken for a directory of that name."""
    with pytest.raises(StoreURLError, match="sqlite:///"):
        open_store(url)


def test_a_file_or_a_single_run_is_no_store(tmp_path: Path):
    """With what would be one."""
    fill(open_store(tmp_path), steps(1))
    with pytest.raises(StoreURLError, match="is a file"):
        open_store(tmp_path / "run" / "run.db")
    with pytest.raises(StoreURLError, match=f"one run; the store is the one above it: {tmp_path}"):
        open_store(tmp_path / "run")


def test_memory_stores_of_a_name_are_one_until_forgotten():
    """Other names are other stores."""
    first = open_store("memory://url-test")
    fill(first, steps(1))

    assert len(open_store("memory://url-test").runs()) == 1
    assert open_store("memory://url-test-2").runs() == []
    forget("url-test")
    assert open_store("memory://url-test").runs() == []
    assert len(first.runs()) == 1
    forget("url-test")
    forget("url-test")


@pytest.mark.parametrize("url", ["memory://clocked", None])
def test_the_clock_is_the_callers(tmp_path: Path, url: str | None):
    """Creation, first heartbeat."""
    store = open_store(url or tmp_path, clock=ManualClock(5.0))
    store.open_run(RunInfo("run")).close()

    assert (store.run("run").created_at, store.run("run").heartbeat_at) == (5.0, 5.0)
    forget("clocked")


def test_importing_the_url_module_loads_no_backend():
    """``import rlwatch`` reaches it on first use only, and a memory store needs no files."""
    code = (
        "import sys; from rlwatch.store.url import open_store; "
        "print([m for m in ('sqlite3', 'numpy', 'torch', 'rlwatch.store.memory') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.strip() == "[]"


def test_the_file_in_the_working_directory_names_the_store(tmp_path, monkeypatch):
    """Behind the environment; a file that is wrong, or says nothing of the store, changes nothing."""
    monkeypatch.delenv("RLWATCH_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rlwatch.toml"
    file.write_text('[store]\nurl = "memory://of-the-file"\n')
    assert open_store().url == "memory://of-the-file"
    monkeypatch.setenv("RLWATCH_STORE", "memory://from-env")
    assert default_store_url() == "memory://from-env"
    monkeypatch.delenv("RLWATCH_STORE")
    for text in ("[store\n", "store = 3\n", "[store]\nurl = 3\n", "dashboard_url = 'x'\n"):
        file.write_text(text)
        assert default_store_url() == "./rlwatch-runs"
