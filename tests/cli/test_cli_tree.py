"""The tree of commands: every command and option explains itself; failing is one line and a code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.testing
from cli_helpers import Invoke
from typer.main import get_command

import rlwatch
from rlwatch.cli import console, entry
from rlwatch.cli.app import app
from rlwatch.errors import ConfigError

ROOT = Path(rlwatch.__file__).parent.parent
COMMANDS = (
    "demo",
    "ui",
    "serve",
    "scan",
    "watch",
    "import",
    "plugins",
    "runs",
    "edit",
    "purge",
    "audit",
    "show",
    "diff",
    "alerts",
    "command",
    "replay",
    "names",
    "export",
    "doctor",
    "rules",
    "report",
    "rescue",
    "forecast",
    "db",
    "token",
    "sync",
)
WITH_JSON = (
    "scan",
    "import",
    "runs",
    "edit",
    "audit",
    "show",
    "diff",
    "alerts list",
    "alerts test",
    "alerts dead",
    "command",
    "replay",
    "names",
    "doctor",
)
TREE: Any = get_command(app)


def _walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    yield " ".join(path) or "rlwatch", command
    for name, child in getattr(command, "commands", {}).items():
        yield from _walk(child, (*path, name))


ALL = dict(_walk(TREE))


def test_the_commands_are_those_the_documents_name() -> None:
    """No more, no less."""
    assert set(TREE.commands) == set(COMMANDS)


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_help_and_an_example_that_begins_with_its_name(name: str) -> None:
    """In the epilog, ready to be copied."""
    command = ALL[name]
    own = "rlwatch" if name == "rlwatch" else f"rlwatch {name}"

    assert len(command.help or "") > 20
    assert f"  {own}" in (command.epilog or "").split("Examples:")[1]


@pytest.mark.parametrize("name", ALL)
def test_every_option_and_argument_has_help(name: str) -> None:
    """A sentence, with its full stop."""
    parameters = [p for p in ALL[name].params if "completion" not in (p.name or "")]

    assert [p.name for p in parameters if len(getattr(p, "help", None) or "") < 10] == []


@pytest.mark.parametrize("name", WITH_JSON)
def test_what_a_script_may_read_can_be_had_as_json(name: str) -> None:
    """Under the same option everywhere."""
    assert [p.name for p in ALL[name].params if "--format" in p.opts] == ["output"]


@pytest.mark.parametrize("name", ALL)
def test_help_is_printed_for_every_command(name: str, invoke: Invoke) -> None:
    """By both spellings."""
    path = [] if name == "rlwatch" else name.split()

    for flag in ("--help", "-h"):
        result = invoke(*path, flag)
        assert result.exit_code == 0
        assert "Examples:" in result.stdout


def test_the_version_is_printed_alone(invoke: Invoke) -> None:
    """For scripts."""
    assert invoke("--version").stdout == f"rlwatch {rlwatch.__version__}\n"


def test_an_unknown_command_exits_2(invoke: Invoke) -> None:
    """As a wrong option does."""
    assert invoke("scna").exit_code == 2
    assert invoke("runs", "--frmat", "json").exit_code == 2


def test_help_imports_nothing_heavy() -> None:
    """It must come at once; the packages the options themselves need are allowed."""
    heavy = ("numpy", "torch", "streamlit", "httpx", "rlwatch.store", "rlwatch.monitor", "rlwatch.importers")
    code = (
        "import sys\nfrom rlwatch.cli.entry import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stderr.strip() == "[]"
    assert "scan" in done.stdout


def test_without_the_extra_one_line_says_what_to_install() -> None:
    """A Python without site-packages has neither typer nor rich."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rlwatch.cli.entry import main; main()"

    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == ("error: the rlwatch command needs typer and rich; run: pip install 'rlwatch-monitor[cli]'\n")


def test_the_module_runs_like_the_script() -> None:
    """``python -m rlwatch.cli``."""
    done = subprocess.run(
        [sys.executable, "-m", "rlwatch.cli", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert done.stdout == f"rlwatch {rlwatch.__version__}\n"


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark(tmp_path: Path) -> None:
    """Not a UnicodeEncodeError."""
    done = subprocess.run(
        [sys.executable, "-m", "rlwatch.cli", "show", "λ", "--store", str(tmp_path)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii:strict", "PATH": "/usr/bin:/bin"},
    )

    assert done.returncode == 2
    assert done.stderr.startswith(b"error: no run '?'")


def _tree_that(raises: BaseException) -> typer.Typer:
    """A command line whose only command fails."""
    tree = typer.Typer(cls=console.FailingInOneLine, pretty_exceptions_enable=False)

    @tree.command()
    def fail() -> None:
        raise raises

    @tree.command()
    def other() -> None:
        """So that there are sub-commands."""

    return tree


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("line one\n  line two \x1b[2J[bold]"),
        PermissionError(13, "Permission denied", "/secret/log"),
    ],
)
def test_a_known_error_is_one_line_on_stderr(error: Exception) -> None:
    """With line breaks and control characters taken out, and read as text, not as markup."""
    result = typer.testing.CliRunner().invoke(_tree_that(error), ["fail"])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr
    assert "Permission denied" in result.stderr or "line one line two" in result.stderr
    assert "Permission denied" in result.stderr or "[bold]" in result.stderr


def test_a_long_message_is_not_wrapped() -> None:
    """A script that greps for it finds it whole."""
    result = typer.testing.CliRunner().invoke(_tree_that(ConfigError("word " * 200)), ["fail"])

    assert result.stderr.count("\n") == 1


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """``RLWATCH_DEBUG=0`` does not."""
    tree = _tree_that(ConfigError("no"))
    monkeypatch.setenv("RLWATCH_DEBUG", "1")
    assert isinstance(typer.testing.CliRunner().invoke(tree, ["fail"]).exception, ConfigError)

    monkeypatch.setenv("RLWATCH_DEBUG", "0")
    assert typer.testing.CliRunner().invoke(tree, ["fail"]).exit_code == 2


def test_a_bug_keeps_its_traceback() -> None:
    """Hiding it would help nobody."""
    result = typer.testing.CliRunner().invoke(_tree_that(ZeroDivisionError("bug")), ["fail"])

    assert isinstance(result.exception, ZeroDivisionError)


def test_ctrl_c_exits_130() -> None:
    """As shells expect, and without a word."""
    result = typer.testing.CliRunner().invoke(_tree_that(KeyboardInterrupt()), ["fail"])

    assert (result.exit_code, result.output) == (130, "")


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    """``rlwatch runs | head -1`` must not end in a traceback."""
    line = f"{sys.executable} -m rlwatch.cli runs --format json --store {tmp_path} | true"

    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.stderr == ""


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is missing."""
    monkeypatch.setitem(sys.modules, "rich", None)

    assert entry.missing() == ["rich"]
