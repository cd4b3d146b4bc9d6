"""What a room of the nightly needs: a fresh environment, a command with a time limit, and what came of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "nightly"
TESTING = ("pytest", "hypothesis", "pytest-timeout")
QUIET = ("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")


@dataclass
class Outcome:
    """Of one room."""

    name: str
    versions: str = ""
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def row(self) -> str:
        """Of the summary."""
        failed = "<br>".join(self.failed) or "none"
        return f"| {self.name} | {self.versions} | {self.passed} | {self.skipped} | {failed} | {self.seconds:.0f} |"


def cpu_torch(python: str = sys.executable) -> Path:
    """A constraint: the newest torch built for CPUs, where an index serves one for ``python``; it saves gigabytes."""
    path = BUILD / "constraints.txt"
    out = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    found = re.search(r"\b([\d.]+\+cpu)\b", out.stdout)
    path.write_text(f"torch=={found[1]}\n" if found else "")
    return path


def run(command: list[str], limit_s: float, log: Path, *, where: Path = ROOT, **more: str) -> str:
    """Run ``command`` with its output in ``log``; why it did not end well, or an empty string."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }
    with log.open("w") as out:
        try:
            ended = subprocess.run(
                command, cwd=where, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done within {limit_s / 60:g} minutes"
    return f"exit code {ended.returncode}" if ended.returncode else ""


def read(report: Path, outcome: Outcome, ended: str) -> None:
    """Count what pytest reported; without a report that is a failure."""
    if not report.exists():
        outcome.failed.append(f"pytest: {ended or 'no report'}")
        return
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            outcome.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    if ended.startswith("not done"):
        outcome.failed.append(ended)


def last_line(log: Path) -> str:
    """What a program said at last."""
    return (log.read_text().strip().splitlines() or [""])[-1][:200] if log.exists() else ""
