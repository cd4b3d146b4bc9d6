"""command: a wish for the live run, and its answer."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Invoke, record_run, strict

from rlwatch.cli import command as module
from rlwatch.cli.command import ANSWERS, UNANSWERED
from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.records import CommandStatus
from rlwatch.store.url import open_store


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A store of one run that is still going on."""
    record_run(open_store(tmp_path / "runs"), "alpha-1", name="seed1", state=None)
    return tmp_path / "runs"


def test_a_command_is_queued_with_who_and_why(runs: Path, invoke: Invoke) -> None:
    """The default is the first published meaning: the optimizer is cleared."""
    result = invoke("command", "seed1", "reset-reference", "--why", "KL saturated", "--store", runs)

    (command,) = open_store(runs).commands("alpha-1")
    assert result.exit_code == 0
    assert result.stdout.startswith("reset-reference queued")
    assert command.command_id in result.stdout
    assert (command.kind, command.args, command.force) == ("reset-reference", {"optimizer": "clear"}, False)
    assert command.why == "KL saturated"
    assert "@" in command.requested_by
    assert command.expires_at == pytest.approx(command.created_at + 600)


def test_options_travel_with_the_command(runs: Path, invoke: Invoke) -> None:
    """And the answer can be read by a script."""
    options = ("--optimizer", "keep", "--force", "--expires", "30", "--format", "json")

    document = strict(invoke("command", "alpha", "reset-reference", *options, "--store", runs).stdout)

    (command,) = open_store(runs).commands("alpha-1")
    assert document["command_id"] == command.command_id
    assert (document["status"], document["force"], document["args"]) == ("queued", True, {"optimizer": "keep"})
    assert command.expires_at == pytest.approx(command.created_at + 30)


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (("save-checkpoint",), {}),
        (("lower-lr", "--scale", "0.3"), {"scale": 0.3, "until": None, "freeze": "no"}),
        (("lower-lr", "--scale", "1", "--until", "5200"), {"scale": 1.0, "until": 5200, "freeze": "no"}),
        (("set-kl-coef", "--value", "0"), {"value": 0.0}),
        (("rollback",), {"to": "last-good"}),
        (("rollback", "--to", "480"), {"to": 480}),
        (("rollback", "--to", "last-good"), {"to": "last-good"}),
        (("set-clip", "--low", "0.1"), {"low": 0.1, "high": None}),
        (("set-is-correction", "--mode", "off"), {"mode": "off", "cap": None}),
        (("hold", "--batches", "4"), {"batches": 4}),
        (("skip-step", "--when", "nonfinite"), {"steps": 1, "when": "nonfinite"}),
        (("undo",), {}),
        (("pause",), {"minutes": 60.0}),
        (("pause", "--minutes", "0.5"), {"minutes": 0.5}),
        (("resume",), {}),
        (("stop",), {"save": "yes"}),
        (("stop", "--no-save"), {"save": "no"}),
    ],
)
def test_every_kind_has_its_options(words: tuple[str, ...], args: object, runs: Path, invoke: Invoke) -> None:
    """Those given travel, the others take their defaults."""
    result = invoke("command", "alpha-1", *words, "--store", runs)

    (command,) = open_store(runs).commands("alpha-1")
    assert result.exit_code == 0
    assert (command.kind, command.args) == (words[0], args)


def test_the_kinds_are_those_of_the_house() -> None:
    """The command line offers them all."""
    takes = inspect.signature(module.command).parameters

    assert all(name in takes for kind in COMMAND_KINDS.values() for name in kind.args)
    assert all(f"{kind}: " in (module.command.__doc__ or "") for kind in COMMAND_KINDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lower-lr",), "lower-lr needs scale: a number above 0 and at most 1"),
        (("lower-lr", "--scale", "2"), "lower-lr scale=2 is not a number above 0 and at most 1"),
        (("set-kl-coef", "--value", "nan"), "set-kl-coef value=nan is not a number of at least 0"),
        (("hold", "--batches", "2.5"), "hold batches=2.5 is not an integer of at least 0 and at most 1e+06 batches"),
        (("rollback", "--to", "yesterday"), "rollback to='yesterday' is not last-good or the step of a snapshot"),
        (("resume", "--minutes", "3"), "resume has no argument 'minutes'; it takes none"),
        (("pause", "--optimizer", "keep"), "pause has no argument 'optimizer'; it takes: minutes"),
    ],
)
def test_an_option_of_another_kind_or_out_of_range_is_named(
    words: tuple[str, ...], message: str, runs: Path, invoke: Invoke
) -> None:
    """Exit code 2, one line, and no row."""
    result = invoke("command", "alpha-1", *words, "--store", runs)

    assert result.exit_code == 2
    assert message in result.stderr
    assert open_store(runs).commands("alpha-1") == []


@pytest.fixture
def trainer(runs: Path) -> Iterator[dict[str, CommandStatus]]:
    """A thread that claims what is queued and answers as it is told; nothing is answered until then."""
    answer: dict[str, CommandStatus] = {}
    stop = threading.Event()

    def serve() -> None:
        store = open_store(runs)
        while not stop.wait(0.05):
            for command in store.claim("alpha-1", 0.0) if answer else []:
                store.settle("alpha-1", command.command_id, answer["status"], 1.0, step=816, result="KL 0.31 -> 0.00")

    thread = threading.Thread(target=serve)
    thread.start()
    yield answer
    stop.set()
    thread.join()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (CommandStatus.DONE, 0),
        (CommandStatus.REJECTED, 1),
        (CommandStatus.FAILED, 3),
        (CommandStatus.EXPIRED, 4),
        (CommandStatus.CANCELLED, 6),
    ],
)
def test_the_answer_is_waited_for_and_gives_the_exit_code(
    status: CommandStatus, code: int, trainer: dict[str, CommandStatus], runs: Path, invoke: Invoke
) -> None:
    """With the step and the words of the trainer."""
    trainer["status"] = status

    result = invoke("command", "seed1", "reset-reference", "--wait", "30", "--store", runs)

    assert result.exit_code == code
    assert f"reset-reference {status} at step 816: KL 0.31 -> 0.00" in result.stdout


def test_a_command_nobody_claims_expires_with_exit_code_4(runs: Path, invoke: Invoke) -> None:
    """No trainer is there."""
    result = invoke("command", "seed1", "reset-reference", "--expires", "1", "--wait", "30", "--store", runs)

    assert result.exit_code == 4
    assert "expired: no trainer took the command in time" in result.stdout


def test_an_answer_that_does_not_come_is_no_success(runs: Path, invoke: Invoke) -> None:
    """Exit code 5; the command still stands."""
    result = invoke("command", "seed1", "reset-reference", "--wait", "0.2", "--store", runs)

    assert result.exit_code == 5
    assert open_store(runs).commands("alpha-1")[0].status is CommandStatus.QUEUED


def test_the_exit_codes_are_reported(invoke: Invoke) -> None:
    """By --help and by the docs."""
    told = " ".join(invoke("command", "--help").stdout.replace("│", " ").split())
    docs = (Path(__file__).parents[2] / "docs" / "control.md").read_text()

    for code in (*ANSWERS.values(), UNANSWERED):
        assert re.search(rf"\b{code}: ", told)
        assert f"| {code} |" in docs


def test_a_command_is_taken_back_by_the_beginning_of_its_id(runs: Path, invoke: Invoke) -> None:
    """And never carried out; who did it is kept."""
    invoke("command", "seed1", "reset-reference", "--store", runs)
    (queued,) = open_store(runs).commands("alpha-1")

    result = invoke("command", "seed1", "--cancel", queued.command_id[:8], "--why", "a mistake", "--store", runs)
    again = invoke("command", "seed1", "--cancel", queued.command_id, "--store", runs)

    (cancelled,) = open_store(runs).commands("alpha-1")
    assert (result.exit_code, again.exit_code) == (0, 0)
    assert cancelled.status is CommandStatus.CANCELLED
    assert cancelled.result.startswith("cancelled by ")
    assert cancelled.result.endswith(": a mistake")
    assert open_store(runs).claim("alpha-1", 0.0) == []


def test_what_a_trainer_holds_is_cancelled_by_it(runs: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have begun: only it knows. Without its word the exit code is 5, with that of one that was done 1."""
    monkeypatch.setattr(module, "CANCEL_S", 0.2)
    invoke("command", "seed1", "reset-reference", "--store", runs)
    store = open_store(runs)
    (claimed,) = store.claim("alpha-1", 0.0)

    asked = invoke("command", "seed1", "--cancel", claimed.command_id, "--store", runs)
    assert store.commands("alpha-1")[0].status is CommandStatus.CANCELLING
    store.settle("alpha-1", claimed.command_id, CommandStatus.DONE, 1.0, step=816, result="KL 0.31 -> 0.00")
    late = invoke("command", "seed1", "--cancel", claimed.command_id, "--store", runs)

    assert (asked.exit_code, late.exit_code) == (5, 1)
    assert "reset-reference cancelling" in asked.stdout
    assert "reset-reference done at step 816" in late.stdout


@pytest.mark.parametrize("words", [("--cancel", "nosuch"), ("--cancel", ""), (), ("stop", "--cancel", "x")])
def test_what_cannot_be_cancelled_is_refused_with_what_can(words: tuple[str, ...], runs: Path, invoke: Invoke) -> None:
    """Exit code 2, and the open commands."""
    invoke("command", "seed1", "pause", "--store", runs)
    result = invoke("command", "seed1", *words, "--store", runs)

    assert result.exit_code == 2
    assert ("still open: " in result.stderr and "(pause)" in result.stderr) or "either KIND" in result.stderr
    assert [each.status for each in open_store(runs).commands("alpha-1")] == [CommandStatus.QUEUED]


def test_a_trainer_that_was_killed_is_said_to_be_dead(tmp_path: Path, invoke: Invoke) -> None:
    """By the list, by the run's page, and to whoever asks something of it. A real process, killed."""
    code = (
        "import os, socket, sys, time\n"
        "from rlwatch.records import RunInfo, StepRecord\n"
        "from rlwatch.store.url import open_store\n"
        "past = time.time() - 30\n"
        "run = RunInfo('r', created_at=past, host=socket.gethostname(), pid=os.getpid())\n"
        "writer = open_store(sys.argv[1]).open_run(run)\n"
        "writer.write([StepRecord(1, {'kl': float('nan')}, past, seq=1)])\n"
        "writer.heartbeat(past)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    root = tmp_path / "runs"
    with subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            lived = strict(invoke("runs", "--store", root, "--format", "json").stdout)["runs"][0]["status"]
        finally:
            process.kill()
    listed = strict(invoke("runs", "--store", root, "--format", "json").stdout)["runs"][0]["status"]
    shown = invoke("show", "r", "--store", root).stdout
    asked = invoke("command", "r", "reset-reference", "--store", root)

    assert (lived, listed) == ("running", "dead")
    assert shown.splitlines()[0] == "r  dead"
    assert asked.exit_code == 0
    assert "the trainer is dead since " in asked.stderr


def test_a_run_that_is_over_is_pointed_out(tmp_path: Path, invoke: Invoke) -> None:
    """The command is queued all the same: the run may be resumed."""
    record_run(open_store(tmp_path / "runs"), "alpha-1")

    result = invoke("command", "alpha-1", "reset-reference", "--store", tmp_path / "runs")

    assert result.exit_code == 0
    assert "the run has finished: a command waits until a trainer resumes the run, or expires" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("alpha-1", "make-coffee"),
        ("alpha-1", "reset-reference", "--optimizer", "shred"),
        ("alpha-1", "reset-reference", "--expires", "0"),
        ("omega", "reset-reference"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_written(
    arguments: tuple[str, ...], runs: Path, invoke: Invoke
) -> None:
    """Exit code 2."""
    assert invoke("command", *arguments, "--store", runs).exit_code == 2
    assert open_store(runs).commands("alpha-1") == []
