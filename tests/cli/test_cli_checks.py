"""What doctor looks at, each on made-up installations."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlwatch
from rlwatch.cli import doctor
from rlwatch.cli.doctor import CheckStatus

SECRET_URL = "https://hooks.example.com/services/T0SECRET/B1SECRET"


def _distribution(site: Path, name: str, version: str, *requires: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation in which nothing is installed yet."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.setattr(sys, "path", [str(place)])
    return place


def test_this_python_is_fine() -> None:
    """Else these tests would not run."""
    assert doctor.python_check().level is CheckStatus.OK
    assert sys.executable in doctor.python_check().text


def test_an_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is needed."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))

    assert doctor.python_check().level is CheckStatus.FAIL
    assert "3.11" in doctor.python_check().text


@pytest.mark.parametrize(
    ("version", "level", "noted"),
    [
        ("3.23.1", CheckStatus.FAIL, False),
        ("3.40.1", CheckStatus.OK, True),
        ("3.51.2", CheckStatus.OK, True),
        ("3.51.3", CheckStatus.OK, False),
        ("3.53.0", CheckStatus.OK, False),
    ],
)
def test_an_sqlite_with_the_wal_reset_bug_is_noted(version: str, level: CheckStatus, noted: bool) -> None:
    """It is no failure: rlwatch keeps to one writer."""
    check = doctor.sqlite_check(version)

    assert check.level is level
    assert ("WAL-reset" in check.text) is noted


def test_the_namesake_beside_us_fails_with_the_way_out(site: Path) -> None:
    """Both own rlwatch/__init__.py: whoever was installed last wins."""
    assert doctor.namesake_check().level is CheckStatus.OK
    _distribution(site, "rlwatch", "0.3.0")

    check = doctor.namesake_check()

    assert check.level is CheckStatus.FAIL
    assert "0.3.0" in check.text
    assert "pip uninstall -y rlwatch && pip install --force-reinstall --no-deps rlwatch-monitor" in check.text


def test_our_own_distribution_is_not_taken_for_the_namesake(site: Path) -> None:
    """Their names begin alike."""
    _distribution(site, "rlwatch-monitor", rlwatch.__version__)

    assert doctor.namesake_check().level is CheckStatus.OK
    assert doctor.package_check().level is CheckStatus.OK


def test_an_import_that_is_not_the_installed_version_warns(site: Path) -> None:
    """A checkout on the path hides the installed package."""
    assert doctor.package_check().level is CheckStatus.WARN
    _distribution(site, "rlwatch-monitor", "99.0")

    check = doctor.package_check()

    assert check.level is CheckStatus.WARN
    assert "99.0" in check.text
    assert str(Path(rlwatch.__file__).parent) in check.text


def test_each_extra_says_what_it_lacks(site: Path) -> None:
    """Or with which versions it is complete; extras are those the installed distribution names."""
    assert doctor.extras_checks() == []
    _distribution(
        site,
        "rlwatch-monitor",
        "1.0",
        "numpy>=1.26",
        "pydantic>=2.7; extra == 'alerts'",
        "httpx>=0.27; extra == 'alerts'",
        "tenacity>=9.0; extra == 'alerts'",
        "rlwatch-monitor[alerts]; extra == 'cli'",
        "typer>=0.15; extra == 'cli'",
        'rich>=13.9; (python_version >= "3.11") and extra == "cli"',
        "psycopg[binary]>=3.3; extra == 'postgres'",
        "rlwatch-monitor[cli,postgres]; extra == 'all'",
        "ruff>=0.11; extra == 'dev'",
    )
    _distribution(site, "typer", "0.29.1")
    _distribution(site, "rich", "15.0.0")
    _distribution(site, "httpx", "0.28.1")

    checks = {check.name: check for check in doctor.extras_checks()}

    assert checks["extra cli"].level is CheckStatus.OK
    assert checks["extra cli"].text == "typer 0.29.1, rich 15.0.0"
    assert checks["extra alerts"].level is CheckStatus.WARN
    assert checks["extra alerts"].text.startswith("without pydantic, tenacity;")
    assert "pip install 'rlwatch-monitor[alerts]'" in checks["extra alerts"].text
    assert "pip install 'rlwatch-monitor[postgres]'" in checks["extra postgres"].text
    assert sorted(checks) == ["extra alerts", "extra cli", "extra postgres"]


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("trl", "1.16.0", CheckStatus.OK),
        ("trl", "1.0.0", CheckStatus.OK),
        ("trl", "0.29.1", CheckStatus.WARN),
        ("trl", "2.0.0.dev0", CheckStatus.WARN),
        ("verl", "0.9.1", CheckStatus.OK),
        ("verl", "0.10.0", CheckStatus.WARN),
        ("openrlhf", "0.11.2", CheckStatus.OK),
        ("openrlhf", "0.12.0", CheckStatus.WARN),
        ("transformers", "5.23.0", CheckStatus.OK),
        ("transformers", "4.57.6", CheckStatus.WARN),
        ("wandb", "0.31.0", CheckStatus.OK),
        ("wandb", "0.18.7", CheckStatus.WARN),
    ],
)
def test_a_trainer_of_an_unknown_version_warns(name: str, version: str, level: CheckStatus, site: Path) -> None:
    """Its metric names may have changed."""
    _distribution(site, name, version)

    (check,) = doctor.trainer_checks()

    assert (check.name, check.level) == (name, level)
    assert version in check.text


def test_without_a_trainer_the_plain_loop_is_recommended(site: Path) -> None:
    """No trainer is no fault."""
    (check,) = doctor.trainer_checks()

    assert check.level is CheckStatus.OK
    assert "rlwatch.init" in check.text


def test_no_webhook_is_fine() -> None:
    """And says which variable would set one."""
    configuration, check = doctor.webhook_checks(ping=True)

    assert (configuration.level, check.level) == (CheckStatus.OK, CheckStatus.OK)
    assert "RLWATCH_WEBHOOK_URL" in check.text


@pytest.mark.parametrize(("secret", "level"), [("", CheckStatus.WARN), ("s3cret-key", CheckStatus.OK)])
def test_a_webhook_is_named_by_its_host_only(secret: str, level: CheckStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of such an address is a password."""
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", SECRET_URL)
    monkeypatch.setenv("RLWATCH_WEBHOOK_SECRET", secret)

    _, check = doctor.webhook_checks()

    assert check.level is level
    assert "hooks.example.com" in check.text
    assert "SECRET" not in check.text.replace("RLWATCH_WEBHOOK_SECRET", "")
    assert "s3cret" not in check.text


def test_an_address_that_is_none_fails_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone may have put the secret there."""
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", "hunter2-is-my-password")

    _, check = doctor.webhook_checks(ping=True)

    assert check.level is CheckStatus.FAIL
    assert "hunter2" not in check.text


class Receiver(http.server.BaseHTTPRequestHandler):
    """Refuses HEAD, as receivers of webhooks do."""

    def do_HEAD(self) -> None:
        self.send_response(405)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def receiver() -> Iterator[str]:
    """The address of a receiver on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/T0SECRET"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_receiver_that_refuses_head_is_there(receiver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then is it asked, and no message is sent."""
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", receiver)

    _, *checks = doctor.webhook_checks(ping=True)

    assert [check.name for check in checks] == ["webhook", "webhook ping"]
    assert checks[1].level is CheckStatus.OK
    assert "HTTP 405" in checks[1].text


def test_a_receiver_that_is_gone_fails_without_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 1 of this machine answers nobody."""
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", "http://127.0.0.1:1/T0SECRET")

    _, *checks = doctor.webhook_checks(ping=True)

    assert checks[1].level is CheckStatus.FAIL
    assert not [check for check in checks if "T0SECRET" in check.text]


def test_a_wrong_configuration_fails(tmp_path: Path) -> None:
    """The tests run in ``tmp_path``."""
    (tmp_path / "rlwatch.toml").write_text("[rules]\nx = 1 =")

    (check,) = doctor.webhook_checks()

    assert (check.name, check.level) == ("configuration", CheckStatus.FAIL)
    assert "rlwatch.toml" in check.text


def test_a_webhook_whose_address_is_in_an_unset_variable_fails(tmp_path: Path) -> None:
    """Naming the variable."""
    (tmp_path / "rlwatch.toml").write_text('[notify.pager]\nkind = "webhook"\nurl = "env:PAGER_URL"\n')

    _, check = doctor.webhook_checks()

    assert check.level is CheckStatus.FAIL
    assert "PAGER_URL" in check.text


def test_a_webhook_of_the_file_is_named_by_its_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address comes from the variable the file names."""
    monkeypatch.setenv("PAGER_URL", SECRET_URL)
    monkeypatch.setenv("PAGER_SECRET", "s3cret-key")
    (tmp_path / "rlwatch.toml").write_text(
        '[notify.pager]\nkind = "webhook"\nurl = "env:PAGER_URL"\nsecret = "env:PAGER_SECRET"\n'
    )

    _, check = doctor.webhook_checks()

    assert (check.name, check.level) == ("pager", CheckStatus.OK)
    assert check.text == "https://hooks.example.com/[redacted], signed"


def test_channels_other_than_webhooks_are_named_with_the_way_to_try_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their address; one that cannot be built fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rlwatch.toml").write_text('[notify.chat]\nkind = "wecom"\nurl = "env:CHAT"\n')
    monkeypatch.setenv("CHAT", "wecombot://hush-hush")
    described = doctor.webhook_checks(ping=True)[-1]
    monkeypatch.setenv("CHAT", "json://hush-hush")
    broken = doctor.webhook_checks()[-1]

    assert (described.name, described.level) == ("chat", CheckStatus.OK)
    assert "rlwatch alerts test --channel chat" in described.text
    assert broken.level is CheckStatus.FAIL
    assert "hush" not in described.text + broken.text
