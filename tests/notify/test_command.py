"""A program of the user's as a channel: what it gets, what it may see, and how it can fail."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from pathlib import Path

import pytest
from message_examples import MESSAGE, message_with

from rlwatch.errors import ConfigError
from rlwatch.notify.command import CommandNotifier
from rlwatch.notify.registry import build_notifier
from rlwatch.ports import Delivery
from rlwatch.testing.notifier_contract import NEVER_S, NotifierContract, a_message, assert_no_secret, in_time

SECRET = "contract-s3cret-value"


def python(code: str, *args: str, **more: object) -> CommandNotifier:
    return CommandNotifier([sys.executable, "-S", "-c", code, *args], **more)


class TestCommand(NotifierContract):
    """With a secret among its arguments, which it prints."""

    secrets = (SECRET,)

    @pytest.fixture
    def notifier(self):
        return CommandNotifier(["sh", "-c", f"cat; echo {SECRET} >&2", SECRET])


def test_the_message_comes_as_json_on_standard_input(tmp_path: Path):
    """With its id in the body and in the environment."""
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['RLWATCH_DELIVERY'] + sys.stdin.read())"
    delivery = python(code, str(tmp_path / "got")).deliver(MESSAGE)

    got = (tmp_path / "got").read_text()
    assert delivery == Delivery(ok=True, reason="exit code 0")
    assert got.startswith("m-0123456789{")
    assert json.loads(got.removeprefix("m-0123456789")) == {**MESSAGE.payload, "message_id": "m-0123456789"}


def test_of_the_environment_it_sees_only_what_it_is_let(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A trainer's environment holds keys."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("PAGER_TOKEN", "for the pager")
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    python(code, str(tmp_path / "seen"), pass_env=["PAGER_TOKEN"]).deliver(MESSAGE)

    seen = json.loads((tmp_path / "seen").read_text())
    assert "WANDB_API_KEY" not in seen
    assert seen["PAGER_TOKEN"] == "for the pager"
    assert seen["RLWATCH_EVENT"] == "firing"


def test_no_shell_reads_a_message(tmp_path: Path):
    """Not its text, not the event in its environment."""
    hostile = message_with(event=f"$(touch {tmp_path}/pwned)", alert={"message": f"`touch {tmp_path}/pwned`\0"})

    assert CommandNotifier(["cat", f"; touch {tmp_path}/pwned", "-"]).deliver(hostile).ok is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [("exit 3", "exit code 3"), ("kill -9 $$", "ended by signal 9"), (f"echo {SECRET}; exit 1", "exit code 1")],
)
def test_a_program_that_fails_is_tried_again(code: str, reason: str, caplog: pytest.LogCaptureFixture):
    """With its number; what it printed is not kept."""
    caplog.set_level(logging.DEBUG)
    notifier = CommandNotifier(["sh", "-c", code])
    delivery = notifier.deliver(a_message(text="x" * 500_000))

    assert delivery == Delivery(ok=False, reason=reason)
    assert_no_secret((SECRET,), repr(notifier), caplog.text)


def ends(process: int) -> bool:
    """Whether it has ended, or does soon: a signal takes its time where everything is busy."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    with os.fdopen(handle, "rb"):
        return bool(select.select([handle], [], [], NEVER_S)[0])


def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path: Path):
    """Also one that reads nothing of a long message."""
    script = f"(while :; do :; done) & echo $! > {tmp_path}/child; wait"
    notifier = CommandNotifier(["sh", "-c", script], total_s=0.3)
    delivery = in_time(lambda: notifier.deliver(a_message(text="x" * 500_000)))

    assert (delivery.ok, delivery.retryable) == (False, True)
    assert ends(int((tmp_path / "child").read_text()))


def test_a_program_that_has_gone_is_an_outcome(tmp_path: Path):
    """Uninstalled while the run goes on."""
    program = tmp_path / "page"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    notifier = CommandNotifier([str(program)])
    program.unlink()

    assert notifier.deliver(MESSAGE) == Delivery(False, "the program could not be started: FileNotFoundError")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"argv": []},
        {"argv": "rm -rf hush"},
        {"argv": ["/nowhere/page", "hush"]},
        {"argv": ["cat", 5]},
        {"argv": ["cat", "hush"], "total_s": 0.0},
    ],
)
def test_wrong_settings_are_refused_without_the_arguments(options: dict):
    """A line for a shell is no program."""
    with pytest.raises(ConfigError, match="'page'") as error:
        build_notifier("command", "page", options)

    assert "hush" not in str(error.value)


def test_only_the_program_is_shown():
    """Arguments may be secrets."""
    assert repr(CommandNotifier(["/bin/cat", SECRET], name="page")) == "CommandNotifier(name='page', program='cat')"
