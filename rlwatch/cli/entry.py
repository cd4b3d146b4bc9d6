"""The console script ``rlwatch``; without the ``cli`` extra it prints how to install that."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich")


def missing() -> list[str]:
    """Return the packages of the ``cli`` extra that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def main() -> None:
    """Run the ``rlwatch`` command line and end the process with its exit code."""
    absent = missing()
    if absent:
        print(
            f"error: the rlwatch command needs {' and '.join(absent)}; run: pip install 'rlwatch-monitor[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    _replace_unencodable()
    from rlwatch.cli.app import app

    app(prog_name="rlwatch")


def _replace_unencodable() -> None:
    """Replace characters that the encoding of stdout or stderr lacks by ``?``, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
