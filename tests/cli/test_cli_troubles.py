"""The usual troubles of docs/install.md: each is made here, and doctor names it by the line that the page gives."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_helpers import record_run
from test_cli_checks import _distribution

from rlwatch import plugins
from rlwatch.cli import doctor
from rlwatch.cli.doctor import CheckStatus, DoctorCheck
from rlwatch.store.url import open_store

PAGE = Path(__file__).parents[2] / "docs" / "install.md"
Trouble = Callable[[Path, pytest.MonkeyPatch], Sequence[DoctorCheck]]


@pytest.fixture(autouse=True)
def _forget_plugins() -> Iterator[None]:
    """What a test installs is there for no other."""
    yield
    plugins.reload()


def site(home: Path, monkeypatch: pytest.MonkeyPatch, *distributions: tuple[str, ...]) -> None:
    """An installation of these alone."""
    for name, version, *requires in distributions:
        _distribution(home / "site", name, version, *requires)
    monkeypatch.setattr(sys, "path", [str(home / "site")])


def namesake(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    site(home, monkeypatch, ("rlwatch", "0.5.1"))
    return [doctor.namesake_check()]


def hidden(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    site(home, monkeypatch, ("rlwatch-monitor", "99.0"))
    return [doctor.package_check()]


def extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    site(home, monkeypatch, ("rlwatch-monitor", "1.0", "psycopg>=3.3; extra == 'postgres'"))
    return doctor.extras_checks()


def trainer(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    site(home, monkeypatch, ("trl", "0.9.0"))
    return doctor.trainer_checks()


def verl(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    site(home, monkeypatch, ("verl", "0.9.1"))
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(home / "state"))
    return doctor.verl_checks()


def store(home: Path, _monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    (home / "file").write_text("x")
    return doctor.storage_checks(str(home / "file"))


def network(home: Path, _monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    return doctor.storage_checks(str(home / "runs"), f"1 1 0:1 / {home} rw - nfs4 server:/x rw\n")


def disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    return doctor.storage_checks(str(home / "runs"))


def damaged(home: Path, _monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    record_run(open_store(home / "runs"), "r", steps=1)
    (home / "runs" / "r" / "run.db").write_bytes(b"no database" * 500)
    return doctor.storage_checks(str(home / "runs"))


def configuration(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    (home / "rlwatch.toml").write_text("[rules.entropy]\nafter = 'soon'\n")
    monkeypatch.setenv("RLWATCH_CONFIG", str(home / "rlwatch.toml"))
    return doctor.webhook_checks()


def address(_home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", "hooks.example.com/x")
    return doctor.webhook_checks()


def nobody(_home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", f"http://127.0.0.1:{port}/x")
    return doctor.webhook_checks(ping=True)


def plugin(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    _distribution(home / "site", "odd-detectors", "1.0")
    (home / "site" / "odd_detectors-1.0.dist-info" / "entry_points.txt").write_text(
        "[rlwatch.detectors]\nodd = no_such_module:Odd\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(home / "site")])
    monkeypatch.delenv("RLWATCH_PLUGINS", raising=False)
    plugins.reload()
    return doctor.plugin_checks()


def tokens(home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(home / "state"))
    monkeypatch.setenv("RLWATCH_UI_TOKEN", "short")
    return [doctor.login_check()]


def variable(_home: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[DoctorCheck]:
    monkeypatch.setenv("RLWATCH_STOR", "/runs")
    monkeypatch.setenv("RLWATCH_OF_MY_OWN", "x")
    return doctor.variable_checks(os.environ)


TROUBLES: dict[str, tuple[Trouble, ...]] = {
    "namesake": (namesake,), "rlwatch": (hidden,), "extra ...": (extra,), "trl": (trainer,), "verl plugin": (verl,),
    "store": (store,), "file system": (network,), "disk": (disk,), "runs": (damaged,), "configuration": (configuration,),
    "channels": (address,), "webhook ping": (nobody,), "plugin ...": (plugin,), "dashboard": (tokens,), "variable": (variable,),
}  # fmt: skip
BESIDE = {"verl", "verl heartbeat"}
"""Lines of the same trouble."""


def test_every_trouble_of_the_page_is_made_here():
    """Ten and more."""
    table = PAGE.read_text(encoding="utf-8").partition("## The usual troubles")[2]
    lines = [re.findall(r"`([^`]+)`", row.split("|")[2]) for row in table.splitlines() if row.startswith("| ")][1:]

    assert len(lines) >= 10
    assert {name for row in lines for name in row} == {*TROUBLES, *BESIDE}


@pytest.mark.parametrize(("line", "makes"), [(line, one) for line, made in TROUBLES.items() for one in made])
def test_doctor_finds_each(line: str, makes: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As more than fine, by the name that the page gives, and in more words than the name."""
    name = line.removesuffix("...")
    found = [check for check in makes(tmp_path, monkeypatch) if check.level is not CheckStatus.OK]

    assert any(check.name.startswith(name) and len(check.text) > 20 for check in found), found
