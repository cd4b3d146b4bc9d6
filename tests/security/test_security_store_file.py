"""What lies beside data is data: a file in a store runs nothing, reads nothing, sends nothing and commands nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from rlwatch.alerts.config import CONFIG_VARIABLE, Config, load_config
from rlwatch.alerts.rules import default_rules
from rlwatch.cli.ui import free_port
from rlwatch.records import OutboxMessage, RunInfo, Severity
from rlwatch.store.url import default_store_url, open_store
from rlwatch.testing.webhook_receiver import WebhookReceiver
from rlwatch.trust import why_not_obeyed

TRAINER = """
import math, sys, rlwatch
run = rlwatch.init(store=sys.argv[1], run_id=sys.argv[2])
run.log({"loss": math.nan, "policy/entropy": math.nan}, step=1)
run.log({"loss": 1.0}, step=2)
run.flush()
run.finish()
"""
TEAM = """
[dashboard]
url = "http://elsewhere.example"

[notify.x]
kind = "command"
argv = ["/bin/sh", "-c", "env > {mark}"]
pass_env = ["READERS_SECRET"]

[notify.webhook]
url = "{url}"
secret = "env:READERS_SECRET"

[[rules]]
name = "non-finite"
kinds = ["nonfinite"]
channels = ["x", "webhook"]

[[actions]]
name = "stop it"
kinds = ["nonfinite"]
do = "stop"
dry_run = false
"""


class Store:
    """A store somebody prepared: a run, a message that waits for the channel ``x``, and the file."""

    def __init__(self, place: Path, url: str) -> None:
        self.mark, self.root = place / "ran", place / "store"
        store = open_store(self.root)
        store.open_run(RunInfo("old", created_at=time.time())).close()
        rows = [
            OutboxMessage(name, "old", "a", name, {"event": "firing", "text": "hello"}, created_at=time.time())
            for name in ("x", "webhook")
        ]
        store.put_alerts([], rows)
        store.close()
        (self.root / "rlwatch.toml").write_text(TEAM.format(mark=self.mark, url=url))


@pytest.fixture
def receiver():
    """Where the file would send everything."""
    with WebhookReceiver() as listening:
        yield listening


@pytest.fixture
def prepared(tmp_path: Path, receiver: WebhookReceiver) -> Store:
    """A store with such a file in its root."""
    return Store(tmp_path, receiver.url)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """An empty working directory."""
    place = tmp_path / "home"
    place.mkdir()
    return place


def environment(**more: str) -> dict[str, str]:
    """Of a reader with a secret, and with nothing of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RLWATCH_")}
    path = os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[2]), *filter(None, sys.path)]))
    return {**kept, "READERS_SECRET": "hush-hush", "PYTHONPATH": path, **more}


def told(args: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What a process says; it must end."""
    return subprocess.run(
        [sys.executable, "-P", *args],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def nothing_happened(prepared: Store, receiver: WebhookReceiver) -> bool:
    """No program ran and no message came."""
    return not prepared.mark.exists() and not receiver.received


def test_watching_a_store_runs_nothing_of_it(prepared: Store, receiver: WebhookReceiver, elsewhere: Path):
    """Nor sends anything to where it says; what was refused is said in one line."""
    done = told(["-m", "rlwatch.cli", "watch", str(prepared.root), "--once"], elsewhere)

    assert nothing_happened(prepared, receiver)
    assert done.returncode in (0, 1), done.stderr
    said = [line for line in done.stderr.splitlines() if "not obeyed" in line]
    assert len(said) == 1
    for refused in ("[notify.x]", "[notify.webhook]", "[[actions]]", "[dashboard]"):
        assert refused in said[0]
    assert [row.status for row in open_store(prepared.root).outbox()] == ["pending", "pending"]


def test_a_trainer_runs_nothing_of_its_store(prepared: Store, receiver: WebhookReceiver, elsewhere: Path):
    """It says so once, is not raised into, alerts as usual, and no command comes of the file."""
    done = told(["-c", TRAINER, str(prepared.root), "new"], elsewhere)
    store = open_store(prepared.root)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not obeyed") == 1
    assert nothing_happened(prepared, receiver)
    assert [alert.kind for alert in store.alerts("new")] == ["nonfinite"]
    assert store.commands("new") == []


@pytest.mark.parametrize("inside", [False, True])
def test_the_dashboard_runs_nothing_of_its_store(
    inside: bool, prepared: Store, receiver: WebhookReceiver, elsewhere: Path
):
    """Also where its owner stands in the store, with Python files and a ``.streamlit`` in it."""
    for name in ("streamlit.py", "typer.py", "sitecustomize.py", "altair.py"):
        (prepared.root / name).write_text(f"open({str(prepared.mark)!r}, 'w')\n")
    (prepared.root / ".streamlit").mkdir()
    (prepared.root / ".streamlit" / "config.toml").write_text('[server]\nbaseUrlPath = "theirs"\n')
    port = free_port("127.0.0.1")
    where = ["--store", "." if inside else str(prepared.root), "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "rlwatch.cli", "ui", *where],
        cwd=prepared.root if inside else elsewhere,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        from rlwatch.cli.ui import wait_healthy

        problem = wait_healthy(server, f"http://127.0.0.1:{port}")
    finally:
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=60)

    assert problem is None, said  # at its own address: their baseUrlPath is not obeyed
    assert said.count("not obeyed") == 1
    assert nothing_happened(prepared, receiver)


def test_standing_in_the_store_makes_its_file_no_configuration(prepared: Store, receiver: WebhookReceiver):
    """``cd STORE; rlwatch watch .``, which finds it in the working directory."""
    told(["-m", "rlwatch.cli", "watch", ".", "--once"], prepared.root)
    told(["-m", "rlwatch.cli", "watch", str(prepared.root), "--once"], prepared.root / "old")
    told(["-m", "rlwatch.cli", "alerts", "test", "--store", "."], prepared.root)

    assert nothing_happened(prepared, receiver)


@pytest.mark.parametrize("how", ["--config", CONFIG_VARIABLE])
def test_a_file_that_is_named_is_obeyed_wherever_it_lies(how: str, prepared: Store, elsewhere: Path):
    """It is the user's then: the program runs, with the variable it may see."""
    file = str(prepared.root / "rlwatch.toml")
    named = ["--config", file] if how == "--config" else []
    variables = {CONFIG_VARIABLE: file} if how == CONFIG_VARIABLE else {}
    told(["-m", "rlwatch.cli", "watch", str(prepared.root), "--once", *named], elsewhere, **variables)

    assert "READERS_SECRET=hush-hush" in prepared.mark.read_text()


def test_ones_own_file_in_the_working_directory_is_obeyed(prepared: Store, elsewhere: Path):
    """As ever; the one in the store is not looked at."""
    (elsewhere / "rlwatch.toml").write_text((prepared.root / "rlwatch.toml").read_text())
    done = told(["-m", "rlwatch.cli", "watch", str(prepared.root), "--once"], elsewhere)

    assert prepared.mark.exists()
    assert "not obeyed" not in done.stderr


def test_doctor_and_rules_say_what_is_refused(prepared: Store, elsewhere: Path):
    """Before anybody wonders why nothing comes."""
    looked = told(["-m", "rlwatch.cli", "doctor", "--store", str(prepared.root)], elsewhere)
    tested = told(["-m", "rlwatch.cli", "rules", "test"], prepared.root)

    assert "not obeyed: [notify.x]" in looked.stdout
    assert "not obeyed: [notify.x]" in tested.stdout
    assert tested.returncode == 1


class TestWhoseFileItIs:
    """:func:`rlwatch.trust.why_not_obeyed`."""

    def test_ones_own(self, tmp_path: Path):
        """In a directory without runs."""
        (tmp_path / "rlwatch.toml").write_text("")

        assert why_not_obeyed(tmp_path / "rlwatch.toml", tmp_path / "runs") == ""

    @pytest.mark.parametrize("place", [".", "run", "deep/er"])
    def test_in_a_store_or_below_it_is_data(self, place: str, tmp_path: Path):
        """Whoever it belongs to."""
        file = tmp_path / place / "rlwatch.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

        assert "store" in why_not_obeyed(file, tmp_path)

    def test_in_another_store_or_a_run_too(self, tmp_path: Path):
        """Not only in the one that is opened."""
        (tmp_path / "run").mkdir()
        for place in (tmp_path, tmp_path / "run"):
            (place / "rlwatch.toml").touch()
        (tmp_path / "run" / "run.db").touch()

        assert "store" in why_not_obeyed(tmp_path / "rlwatch.toml", tmp_path / "elsewhere")
        assert "store" in why_not_obeyed(tmp_path / "run" / "rlwatch.toml", None)

    def test_links_change_nothing(self, tmp_path: Path):
        """A link to the store's file, a link in the store to one's own file, a link to the store."""
        store, home = tmp_path / "store", tmp_path / "home"
        store.mkdir()
        home.mkdir()
        (store / "theirs.toml").touch()
        (home / "own.toml").touch()
        (home / "rlwatch.toml").symlink_to(store / "theirs.toml")
        (store / "rlwatch.toml").symlink_to(home / "own.toml")
        (tmp_path / "link").symlink_to(store)

        for file in (home / "rlwatch.toml", store / "rlwatch.toml", tmp_path / "link" / "theirs.toml"):
            assert "store" in why_not_obeyed(file, tmp_path / "link"), file

    def test_one_that_everybody_may_write_is_nobodys(self, tmp_path: Path):
        """As ssh has it."""
        (tmp_path / "rlwatch.toml").touch()
        (tmp_path / "rlwatch.toml").chmod(0o666)

        assert "everybody" in why_not_obeyed(tmp_path / "rlwatch.toml")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_another_users_is_not_obeyed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """In ``/tmp``, say; unless it is whoever called sudo."""
        (tmp_path / "rlwatch.toml").touch()
        os.chown(tmp_path / "rlwatch.toml", 12345, 12345)

        assert "another user (uid 12345)" in why_not_obeyed(tmp_path / "rlwatch.toml")
        monkeypatch.setenv("SUDO_UID", "12345")
        assert why_not_obeyed(tmp_path / "rlwatch.toml") == ""


class TestWhatAStoresFileMayTune:
    """It cannot keep back what is critical, and is never an error."""

    @pytest.fixture
    def tuned(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """The configuration where ``text`` lies in the store's root."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv(CONFIG_VARIABLE, raising=False)

        def loaded(text: str) -> Config:
            (tmp_path / "runs").mkdir(exist_ok=True)
            (tmp_path / "runs" / "rlwatch.toml").write_text(text)
            return load_config(store_root=tmp_path / "runs", env={})

        return loaded

    def test_thresholds_and_rules_of_its_own(self, tuned):
        """A team's patience, and one more rule."""
        config = tuned(
            '[[rules]]\nname = "kl"\nfor_steps = 50\nmin_severity = "warning"\nlabels = { team = "rl" }\n'
            'channels = ["oncall"]\n[[rules]]\nname = "more"\nkinds = ["kl_drift"]\nchannels = ["oncall"]\n'
            "[notify.oncall]\nkind = 'webhook'\nurl = 'https://h/x'\n"
        )
        rules = {rule.name: rule for rule in config.rules}

        assert (rules["kl"].for_steps, rules["kl"].labels) == (50, {"team": "rl"})
        assert rules["kl"].channels == ("console", "webhook", "oncall")
        assert rules["more"].kinds == ("kl_drift",)
        assert config.channel_names == ("console",)
        assert "not obeyed: [notify.oncall]." in config.refused

    @pytest.mark.parametrize(
        "text",
        [
            "default_rules = false",
            "forecast = false",
            '[[rules]]\nname = "{name}"\nkinds = ["no_such"]\nchannels = []\nfor_steps = 1000000000',
            '[[rules]]\nname = "{name}"\nfor_steps = 1000000000\nfor_critical = 1000000000\nmin_severity = "critical"',
            '[[rules]]\nname = "{name}"\ndetectors = ["nobody"]\nexcept_kinds = ["nonfinite"]\nseverity = "info"',
            '[[quiet_hours]]\nfrom = "00:00"\nto = "23:59"\nlet_through = "critical"',
            '[[inhibit]]\nwhen = ["zero_variance"]\nmin_severity = "info"',
            '[grouping]\nby = "project"\nwait_s = 3600',
        ],
    )
    def test_whatever_it_says_what_is_critical_is_reported_as_by_default(self, text: str, tuned):
        """To the same channels, as soon, and nothing else holds it back."""
        for usual in default_rules():
            policy = tuned(text.replace("{name}", usual.name)).policy
            rule = {rule.name: rule for rule in policy.rules}[usual.name]

            assert set(usual.channels) <= set(rule.channels)
            assert rule.wait(Severity.CRITICAL) <= usual.wait(Severity.CRITICAL)
            assert (rule.severity, rule.detectors, rule.except_kinds) == (None, (), usual.except_kinds)
            assert set(usual.kinds) <= set(rule.kinds)
            assert (policy.quiet_hours, policy.inhibitions, policy.grouping) == (
                Config().policy.quiet_hours,
                Config().policy.inhibitions,
                Config().policy.grouping,
            )

    @pytest.mark.parametrize(
        "text",
        [
            "rules = 1",
            "x = [[[[",
            "x = " + "[" * 20_000,
            "x = " + "9" * 10_000,
            'rules = [1, "two"]',
            '[[rules]]\nname = "a"\nescalate_after_steps = 5\nescalate_severity = "critical"',
            '[[rules]]\nname = "other"\nescalate_after_steps = 5\nescalate_severity = "critical"',
            "# " + "x" * 70_000,
            '[notify.x]\nkind = "command"\nargv = ["/no/such/program"]',
            '[notify.x]\nkind = "webhook"\nurl = "env:NOT_SET"',
        ],
    )
    def test_one_that_is_wrong_is_no_error_and_the_defaults_apply(self, text: str, tuned):
        """A typo of one member must not stop the trainings of all."""
        config = tuned(text)

        assert {rule.name for rule in default_rules()} <= {rule.name for rule in config.rules}
        assert config.refused
        assert "\n" not in config.refused

    def test_it_does_not_send_runs_elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """``[store] url`` of a file in a store: here, or not at all."""
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.db").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("RLWATCH_STORE", raising=False)
        found = []
        for url in ("/attacker", "../up", "sqlite:///attacker", "."):
            Path("rlwatch.toml").write_text(f"[store]\nurl = {json.dumps(url)}\n")
            found.append(default_store_url())

        assert found == ["./rlwatch-runs"] * 3 + ["."]


def test_a_link_laid_in_a_store_overwrites_nothing(tmp_path: Path):
    """Whoever may write a team's store lays the files of a run to come, or a watch's position, over somebody's file."""
    victim, log = tmp_path / "precious", tmp_path / "train.log"
    victim.write_text("precious")
    log.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)))
    (tmp_path / "store" / "mine").mkdir(parents=True)
    (tmp_path / "store" / "mine" / "run.lock").symlink_to(victim)
    for run in ("other", "log"):
        (tmp_path / "store" / run).mkdir()
        for name in ("run.journal-0", "run.journal-1", ".run.db.new"):
            (tmp_path / "store" / run / name).symlink_to(victim)
    (tmp_path / "store" / ".watch").mkdir()
    (tmp_path / "store" / ".watch" / "log.new").symlink_to(victim)
    for run in ("mine", "other"):
        told(["-c", TRAINER, str(tmp_path / "store"), run], tmp_path)
    told(["-m", "rlwatch.cli", "watch", str(log), "--store", "store", "--run-id", "log", "--once"], tmp_path)

    assert victim.read_text() == "precious"


class _Program:
    """What runs if it is unpickled."""

    def __init__(self, module: str, name: str, argument: str) -> None:
        self.what = (module, name, argument)

    def pickled(self) -> bytes:
        """As a pickle of protocol 4 calls a function with a text."""
        parts = [b"\x8c" + bytes((len(text.encode()),)) + text.encode() for text in self.what]
        return b"\x80\x04" + parts[0] + parts[1] + b"\x93" + parts[2] + b"\x85R."


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("where", [("os", "system"), ("rlwatch.monitor.checkpoint", "os.system")])
def test_a_forged_checkpoint_runs_nothing(
    where: tuple[str, str], ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is not opened without the user's own seal, and with one it still calls nothing but what judges."""
    from rlwatch.monitor import checkpoint
    from rlwatch.monitor.engine import Monitor
    from rlwatch.ports import Checkpoint

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    key = checkpoint.own_key()
    assert key is not None
    body = zlib.compress(_Program(*where, f"touch {tmp_path / 'ran'}").pickled())
    bare = Checkpoint(1, 1, 0, "us", body)
    forged = replace(bare, body=checkpoint.seal(key if ours else b"x" * 32, bare) + body)

    assert not checkpoint.opened(forged, Monitor(run_id="r", source=""))
    assert not (tmp_path / "ran").exists()
