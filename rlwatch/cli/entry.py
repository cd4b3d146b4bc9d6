"""The console script ``rlwatch``: starts even where the ``cli`` extra is missing, to say so."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich")


def missing() -> list[str]:
    """Packages of the ``cli`` extra that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    absent = missing()
    if absent:
        print(
            f"error: the rlwatch command needs {' and '.join(absent)}; run: pip install 'rlwatch-monitor[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    _say_it_in_any_encoding()
    from rlwatch.cli.app import app

    app(prog_name="rlwatch")


def _say_it_in_any_encoding() -> None:
    """A terminal or pipe that cannot show a character gets ``?`` instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
