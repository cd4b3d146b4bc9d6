"""How the command line fails: one line on stderr and an exit code, never a traceback for a known error."""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from rlwatch.cli.console import errors
from rlwatch.cli.wording import clean
from rlwatch.errors import RLWatchError

UNREADABLE = 2
"""Exit code: the input, the store or the request is wrong."""

INTERRUPTED = 130
"""Exit code: Ctrl-C, as shells count it (128 + SIGINT)."""


def debugging() -> bool:
    """``RLWATCH_DEBUG=1`` asks for tracebacks."""
    return os.environ.get("RLWATCH_DEBUG", "").lower() not in {"", "0", "false", "no"}


def complain(error: BaseException | str) -> None:
    """Print ``error: ...`` in red on stderr, as one line."""
    text = " ".join(clean(str(error)).split()) or type(error).__name__
    errors().print(f"error: {text}", style="red", soft_wrap=True)


class FailingInOneLine(TyperGroup):
    """A command group that turns known errors into a line and exit code 2.

    Known are :class:`RLWatchError` and what the operating system refuses (``OSError``); anything else is a
    bug of ours and keeps its traceback. A closed pipe is left to typer, which is quiet about it.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise
        except (RLWatchError, OSError) as error:
            if debugging():
                raise
            complain(error)
            raise typer.Exit(UNREADABLE) from error
