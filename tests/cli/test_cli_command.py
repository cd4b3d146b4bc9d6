"""command: a wish for the live run, and its answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Invoke, record_run, strict

from rlwatch.cli.command import Kind
from rlwatch.control.kinds import KINDS
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
        (("lower-lr", "--scale", "0.3"), {"scale": 0.3, "until": None}),
        (("lower-lr", "--scale", "1", "--until", "5200"), {"scale": 1.0, "until": 5200}),
        (("set-kl-coef", "--value", "0"), {"value": 0.0}),
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
    assert [kind.value for kind in Kind] == list(KINDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lower-lr",), "lower-lr needs scale: a number above 0 and at most 1"),
        (("lower-lr", "--scale", "2"), "lower-lr scale=2.0 is not a number above 0 and at most 1"),
        (("set-kl-coef", "--value", "nan"), "set-kl-coef value=nan is not a number of at least 0"),
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


@pytest.mark.parametrize(("status", "code"), [(CommandStatus.DONE, 0), (CommandStatus.REJECTED, 1)])
def test_the_answer_is_waited_for_and_gives_the_exit_code(
    status: CommandStatus, code: int, trainer: dict[str, CommandStatus], runs: Path, invoke: Invoke
) -> None:
    """With the step and the words of the trainer."""
    trainer["status"] = status

    result = invoke("command", "seed1", "reset-reference", "--wait", "30", "--store", runs)

    assert result.exit_code == code
    assert f"reset-reference {status} at step 816: KL 0.31 -> 0.00" in result.stdout


def test_a_command_nobody_claims_expires_with_exit_code_1(runs: Path, invoke: Invoke) -> None:
    """No trainer is there."""
    result = invoke("command", "seed1", "reset-reference", "--expires", "1", "--wait", "30", "--store", runs)

    assert result.exit_code == 1
    assert "expired: no trainer claimed it in time" in result.stdout


def test_a_run_that_is_over_is_pointed_out(tmp_path: Path, invoke: Invoke) -> None:
    """The command is queued all the same: the run may be resumed."""
    record_run(open_store(tmp_path / "runs"), "alpha-1")

    result = invoke("command", "alpha-1", "reset-reference", "--store", tmp_path / "runs")

    assert result.exit_code == 0
    assert "not live" in result.stdout


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
