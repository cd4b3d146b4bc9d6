"""What is printed where: plain for pipes, coloured for people, JSON alone."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from rlwatch.cli import console
from rlwatch.cli.view_text import alert_line, finding_line, print_alert_line
from rlwatch.records import Alert, AlertState, Finding, Severity


class Terminal(io.StringIO):
    """A stream somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 60 columns that knows colours."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


ROWS = [(("critical", "bold red"), "entropy_collapse", "12"), (("ok", "green"), "x" * 300, "3")]


def test_a_piped_table_has_no_colour_no_cut_and_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """So that grep and awk see what is there."""
    console.print_table(("level", "kind", ">step"), ROWS, title="Title")

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Title"
    assert lines[1].split() == ["level", "kind", "step"]
    assert lines[2].split() == ["critical", "entropy_collapse", "12"]
    assert "x" * 300 in lines[3]
    assert [line for line in lines if line != line.rstrip() or "\x1b" in line] == []


def test_numbers_of_a_column_are_aligned_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Where its header says so."""
    console.print_table(("name", ">step"), [("a", "1000"), ("b", "7")])

    assert [line[-4:] for line in capsys.readouterr().out.splitlines()[1:]] == ["1000", "   7"]


def test_a_table_on_a_terminal_is_coloured_and_fits(terminal: Terminal) -> None:
    """Long cells are folded, not cut."""
    with redirect_stdout(terminal):
        console.print_table(("level", "kind", ">step"), ROWS)

    output = terminal.getvalue()
    assert "\x1b[1;31mcritical" in output
    assert output.count("x") == 300


def test_a_line_is_coloured_on_terminals_only(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """``NO_COLOR`` is respected."""
    with redirect_stdout(terminal):
        console.print_text("danger", style="red")
        monkeypatch.setenv("NO_COLOR", "1")
        console.print_text("calm", style="red")

    assert "\x1b[31mdanger" in terminal.getvalue()
    assert "\x1b[31mcalm" not in terminal.getvalue()


def test_text_is_text_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor emoji, nor a command to the terminal."""
    console.print_text("[red]x[/red] :smile: a\x1b[2Jb")
    console.print_table(("[b]h[/b]",), [("[i]c[/i]",)])

    output = capsys.readouterr().out
    assert "[red]x[/red] :smile: a\ufffd[2Jb" in output
    assert "[b]h[/b]" in output
    assert "[i]c[/i]" in output


def test_errors_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is for results."""
    console.errors().print("no")

    assert capsys.readouterr() == ("", "no\n")


def test_a_finding_on_one_line_says_since_when_if_not_since_now() -> None:
    """The onset may lie before the step it was seen at."""
    finding = Finding("d", "kl_drift", Severity.WARNING, 120, 100, "KL\ngrows")

    assert finding_line(finding) == "step 120  warning  kl_drift since 100: KL grows"
    at_once = Finding("d", "kl_drift", Severity.WARNING, 120, 120, "KL grows")
    assert finding_line(at_once) == "step 120  warning  kl_drift: KL grows"


@pytest.mark.parametrize(
    ("state", "resolved_step", "line", "colour"),
    [
        (AlertState.FIRING, None, "step 120  ALERT firing  critical  kl_drift (rule kl)", "\x1b[1;31m"),
        (AlertState.RESOLVED, 150, "step 150  ALERT resolved  critical  kl_drift (rule kl)", "\x1b[32m"),
    ],
)
def test_an_alert_on_one_line_is_dated_and_coloured_by_what_happened(
    state: AlertState, resolved_step: int | None, line: str, colour: str, terminal: Terminal
) -> None:
    """Green when it is over, however bad it was."""
    alert = Alert(
        "a", "r", "kl", "kl_drift", Severity.CRITICAL, state, 100, 120, "KL grows", resolved_step=resolved_step
    )

    with redirect_stdout(terminal):
        print_alert_line(alert, "seed1  ")

    assert alert_line(alert) == line
    assert terminal.getvalue().startswith(f"{colour}seed1  step")
