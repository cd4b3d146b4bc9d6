"""Failures that people reported and rlwatch named in part or not at all, as planted twins: how many are named now?

    python benchmarks/threads.py          plays every twin (minutes) and counts
    python benchmarks/threads.py --page   writes docs/threads.md

A twin is a test that plants the failure, in a tiny training where there is one, and asserts what names it. A thread
without one counts as not named, with the reason.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "threads.md"
LIST = Path(__file__).with_name("threads.toml")


@dataclass(frozen=True)
class Thread:
    """A report. ``twin`` is the test that plants it, ``names`` what it asserts, or why there is no twin."""

    report: str
    hurt: str
    names: str
    twin: str = ""


THREADS = tuple(Thread(**entry) for entry in tomllib.loads(LIST.read_text())["thread"])


def page() -> str:
    named = sum(bool(thread.twin) for thread in THREADS)
    rows = [
        f"| {thread.report} | {thread.hurt} | {thread.names if thread.twin else '-'} | {_where(thread)} |"
        for thread in THREADS
    ]
    return "\n".join(
        [
            "# Reported failures, rebuilt",
            "",
            f"Of 48 public reports of ten months, rlwatch named {len(THREADS)} in part or not at all, by reading.",
            "The table has a planted twin of each for which the quantity exists:",
            f"{named} of {len(THREADS)} are named. The twins are tests, with faults simpler than the reported ones.",
            "A twin that is named does not prove that the reported run would have been.",
            "",
            "`python benchmarks/threads.py` plays them and counts.",
            "",
            "| report | what hurt | what names its twin | twin, or why there is none |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _where(thread: Thread) -> str:
    return f"`{thread.twin.partition('::')[0]}`" if thread.twin else thread.names


def _all_passed(node: str, said: list[str]) -> bool:
    """True if every case of a test was run and passed."""
    words = [line.split()[:2] for line in said if line.startswith(("PASSED ", "FAILED ", "ERROR "))]
    ends = [word for word, case in words if case == node or case.startswith(f"{node}[")]
    return bool(ends) and set(ends) == {"PASSED"}


def main() -> None:
    if sys.argv[1:] == ["--page"]:
        PAGE.write_text(page())
        return
    nodes = list(dict.fromkeys(thread.twin for thread in THREADS if thread.twin))
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-n", "2", "-p", "no:cacheprovider", *nodes]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    passed = {node: _all_passed(node, said) for node in nodes}
    for node, ended in passed.items():
        print("named    " if ended else "NOT named", node)
    named = [thread for thread in THREADS if thread.twin and passed[thread.twin]]
    print(f"{len(named)} of {len(THREADS)} are named; without a twin: {sum(not t.twin for t in THREADS)}")


if __name__ == "__main__":
    main()
