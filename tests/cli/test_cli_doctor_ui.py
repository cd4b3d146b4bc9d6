"""doctor, rules and ui as commands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_helpers import Invoke, record_run, strict
from installations import Installations

import rlwatch
from rlwatch.cli import app_login, doctor, ui
from rlwatch.cli.doctor import CheckStatus
from rlwatch.store.url import open_store

ROOT = Path(rlwatch.__file__).parent.parent


def test_doctor_says_how_everything_is(tmp_path: Path, invoke: Invoke) -> None:
    """A line a thing; nothing fails on the machine that runs the tests."""
    record_run(open_store(tmp_path / "runs"), "r")

    result = invoke("doctor", "--store", tmp_path / "runs")

    assert result.exit_code == 0
    for words in ("python", "sqlite", "namesake", "extra cli", "is writable", "1 readable", "webhook"):
        assert words in result.stdout


def test_doctor_as_json_is_a_list_of_checks(tmp_path: Path, invoke: Invoke) -> None:
    """Looking creates no store."""
    checks = strict(invoke("doctor", "--store", tmp_path / "runs", "--format", "json").stdout)

    assert {check["level"] for check in checks} <= {"ok", "warn"}
    assert {"name", "level", "text"} == set(checks[0])
    assert "will be made by the first run" in next(check["text"] for check in checks if check["name"] == "store")
    assert not (tmp_path / "runs").exists()


def test_doctor_exits_1_if_anything_fails(invoke: Invoke, installed: Installations) -> None:
    """The other checks are still made."""
    installed("rlwatch", "0.3.0")

    result = invoke("doctor", "--format", "json")

    levels = {check["name"]: check["level"] for check in strict(result.stdout)}
    assert result.exit_code == 1
    assert levels["namesake"] == "fail"
    assert levels["store"] == "ok"


def test_a_store_that_cannot_be_opened_fails(tmp_path: Path) -> None:
    """A file is no store."""
    (tmp_path / "file").write_text("x")

    (check,) = doctor.storage_checks(str(tmp_path / "file"))

    assert check.level is CheckStatus.FAIL


def test_unreadable_runs_are_listed_with_their_reasons(tmp_path: Path) -> None:
    """A dozen of them do not fill the screen."""
    store = open_store(tmp_path / "runs")
    for number in range(12):
        record_run(store, f"r{number}", steps=1)
        (tmp_path / "runs" / f"r{number}" / "run.db").write_bytes(b"no database" * 500)

    checks = [check for check in doctor.storage_checks(str(tmp_path / "runs")) if check.name == "runs"]

    assert checks[0].text == "0 readable"
    assert len(checks) == 1 + doctor.MOST_LISTED + 1
    assert all(check.level is CheckStatus.WARN for check in checks[1:])
    assert checks[-1].text == "and 2 more that cannot be read"


@pytest.mark.parametrize(("mode", "level"), [(os.R_OK | os.X_OK, CheckStatus.WARN), (0, CheckStatus.FAIL)])
def test_a_store_that_may_not_be_written_or_read_is_reported(
    mode: int, level: CheckStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may do anything, so permission is made up here."""
    monkeypatch.setattr(os, "access", lambda path, wanted: wanted & mode == wanted)

    checks = {check.name: check for check in doctor.storage_checks(str(tmp_path))}

    assert checks["store"].level is level


@pytest.mark.parametrize(("free", "warned"), [(300 << 20, True), (2 << 30, False)])
def test_a_disk_that_is_nearly_full_is_warned_of(
    free: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store is still to be made."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    told = [check.text for check in doctor.storage_checks(str(tmp_path / "runs")) if check.name == "disk"]

    assert bool(told) is warned
    assert all("300 MiB are free" in text for text in told)


def test_a_network_file_system_is_warned_of(tmp_path: Path) -> None:
    """With what is slower there."""
    mounts = f"1 1 0:1 / {tmp_path} rw - nfs4 server:/x rw\n"

    checks = {check.name: check for check in doctor.storage_checks(str(tmp_path / "runs"), mounts)}

    assert checks["file system"].level is CheckStatus.WARN
    assert "nfs4" in checks["file system"].text
    assert "commands take seconds to a minute" in checks["file system"].text


def test_a_memory_store_is_not_looked_for_on_disk() -> None:
    """It has no place."""
    assert [check.level for check in doctor.storage_checks("memory://doctor")] == [CheckStatus.OK, CheckStatus.OK]


def test_the_written_rules_pass_the_test_and_change_nothing(tmp_path: Path, invoke: Invoke) -> None:
    """What init writes says what the defaults say."""
    default = invoke("rules", "test")
    written = invoke("rules", "init")
    ours = invoke("rules", "test")

    assert (default.exit_code, written.exit_code, ours.exit_code) == (0, 0, 0)
    assert "wrote rlwatch.toml" in written.stdout
    assert "nonfinite" in ours.stdout
    assert ours.stdout.splitlines()[0] == "rlwatch.toml"
    rules = [line for line in default.stdout.splitlines() if " console, webhook" in line]
    assert rules == [line for line in ours.stdout.splitlines() if " console, webhook" in line]
    assert rules


def test_rules_init_never_overwrites(tmp_path: Path, invoke: Invoke) -> None:
    """Somebody's rules are in it."""
    (tmp_path / "mine.toml").write_text("# mine")

    result = invoke("rules", "init", tmp_path / "mine.toml")

    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert (tmp_path / "mine.toml").read_text() == "# mine"


def test_a_rule_that_can_never_fire_is_warned_of(tmp_path: Path, invoke: Invoke) -> None:
    """A kind nobody reports: exit code 1."""
    (tmp_path / "rlwatch.toml").write_text('[[rules]]\nname = "typo"\nkinds = ["entropy_colapse"]\n')

    result = invoke("rules", "test")

    assert result.exit_code == 1
    assert "did you mean 'entropy_collapse'" in result.stdout


@pytest.mark.parametrize("content", ["[[rules]]\nkinds = 3\n", "not toml at all ="])
def test_a_wrong_file_is_refused(content: str, tmp_path: Path, invoke: Invoke) -> None:
    """Exit code 2, the file named."""
    (tmp_path / "bad.toml").write_text(content)

    for arguments in (("rules", "test", tmp_path / "bad.toml"), ("rules", "test", tmp_path / "none.toml")):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert str(arguments[2]) in result.stderr


def test_a_missing_streamlit_is_one_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setitem(sys.modules, "streamlit", None)

    result = invoke("ui", "--check")

    assert result.exit_code == 2
    assert "pip install 'rlwatch-monitor[app]'" in result.stderr


def test_a_port_in_use_is_one_line(invoke: Invoke) -> None:
    """Before streamlit is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        result = invoke("ui", "--port", taken.getsockname()[1])

    assert result.exit_code == 2
    assert "choose another --port" in result.stderr


def test_the_dashboard_starts_is_healthy_and_stops(tmp_path: Path, invoke: Invoke) -> None:
    """The real one, on a free port."""
    result = invoke("ui", "--check", "--store", tmp_path / "runs")

    assert result.exit_code == 0, result.output
    assert "healthy" in result.stdout


def test_a_dashboard_that_does_not_start_exits_1_with_what_it_said(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words, on stderr."""
    command = [sys.executable, "-c", "raise SystemExit('the reason')"]
    monkeypatch.setattr(ui, "server_command", lambda script: command)

    result = invoke("ui", "--check", "--store", tmp_path / "runs")

    assert result.exit_code == 1
    assert "the server ended with code 1" in result.stderr
    assert "the reason" in result.stderr


def test_the_dashboard_prints_a_link_a_role_and_dies_with_its_command(tmp_path: Path) -> None:
    """The links let in; nothing else printed does, and a stranger gets the login page."""
    port = ui.free_port("127.0.0.1")
    command = [sys.executable, "-u", "-m", "rlwatch.cli", "ui", "--port", str(port), "--store", str(tmp_path)]
    environment = {**os.environ, "RLWATCH_STATE_DIR": str(tmp_path / "state")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )
    try:
        url = f"http://127.0.0.1:{port}"
        assert ui.wait_healthy(process, url) is None
        assert ui.refuses_strangers(url) is None
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()

    assert process.returncode == 0
    links = re.findall(
        r"(operator|viewer) +reads(?: and commands)? +(http://127\.0\.0\.1:\d+/login\?token=\S{43})\n", said
    )
    assert [role for role, _ in links] == ["operator", "viewer"]
    assert len({link for _, link in links}) == 2
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_beyond_loopback_without_tls_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    """On stderr, with the two ways out; a token that was set is not printed."""
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("RLWATCH_UI_TOKEN", "correct horse battery")
    monkeypatch.setattr(ui, "_serve", lambda *given: 0)
    port = str(ui.free_port("127.0.0.1"))

    plain = invoke("ui", "--host", "0.0.0.0", "--port", port, "--store", tmp_path / "runs")
    proxied = invoke(
        "ui",
        "--port",
        port,
        "--store",
        tmp_path / "runs",
        "--behind-proxy",
        "127.0.0.1",
        "--public-url",
        "https://gpu.example.org/rl",
    )

    assert "plain HTTP on a network" in plain.stderr
    assert "docs/dashboard.md" in plain.stderr
    assert "ssh -L" in plain.stderr
    assert (proxied.exit_code, proxied.stderr) == (0, "")
    assert "https://gpu.example.org/rl/  (token: RLWATCH_UI_TOKEN)" in proxied.stdout
    assert "https://gpu.example.org/rl/login?token=" in proxied.stdout
    assert "correct horse" not in plain.output + proxied.output


@pytest.mark.parametrize(
    ("mode", "level", "words"),
    [
        (None, CheckStatus.OK, "first rlwatch ui"),
        (0o600, CheckStatus.OK, "by you alone"),
        (0o644, CheckStatus.FAIL, "chmod 600"),
    ],
)
def test_doctor_says_whether_sessions_are_safe(
    mode: int | None, level: CheckStatus, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secret they are signed with is the user's alone, or `rlwatch ui` will not start."""
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(tmp_path))
    if mode is not None:
        app_login.session_secret()
        app_login.secret_path().chmod(mode)

    check = doctor.login_check()

    assert (check.level, words in check.text) == (level, True)


def test_doctor_tells_a_token_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `rlwatch ui` would."""
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("RLWATCH_UI_TOKEN", "1234")

    assert "RLWATCH_UI_TOKEN has 4 characters" in doctor.login_check().text
