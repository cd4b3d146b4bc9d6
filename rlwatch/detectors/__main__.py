"""Write ``index.json`` from the classes that it describes: ``python -m rlwatch.detectors [--check]``."""

from __future__ import annotations

import json
import sys
from typing import Any

from rlwatch.detectors.base import BaseDetector
from rlwatch.detectors.index import FILE, entries

FOLLOWED = ("update", "listen", "arrival", "notice")
"""Methods that concern rows without a metric of the detector, and events."""


def index() -> str:
    """Return the text of the index: JSON, one line for each detector by its path."""
    made = {entry.path: (entry, entry.load()) for entry in entries()}
    fed = {kind for _, of in made.values() if not _waits(of) for kind in _shared(of)}
    lines = [
        f"  {json.dumps(path)}: {json.dumps(_described(of, waits=_waits(of) and _shared(of) <= fed))}"
        for path, (_, of) in made.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _described(made: Any, *, waits: bool) -> dict[str, Any]:
    described = {"name": made.name, "requires": made.requires}
    return described | {"reads": made.reads, "families": made.families, "waits": True} if waits else described


def _waits(made: Any) -> bool:
    """Return whether rows without a metric of the detector, and events, do not concern it."""
    if any(getattr(made, name) is not getattr(BaseDetector, name) for name in FOLLOWED):
        return False
    return made.measured is BaseDetector.measured or bool(made.families)


def _shared(made: Any) -> set[type]:
    """Return the types of what the detector shares: an early detector must share it, too, to be fed with every row."""
    one = made()
    return {type(getattr(one, name)) for name in one.shares}


def main(arguments: list[str]) -> int:
    """Rewrite the index if it is out of date; with ``--check`` in ``arguments`` only report it.

    Returns the exit code: 1 if ``--check`` found it out of date, else 0.
    """
    text, check = index(), "--check" in arguments
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        return 0
    if not check:
        FILE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{'out of date' if check else 'written'}: {FILE.name}\n")
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
