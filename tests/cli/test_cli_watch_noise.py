"""A log that is followed: a critical alert that was sent stays, whatever is printed among the rows after it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from rlwatch.cli import watch_log
from rlwatch.cli.import_log import NamedLog, log_id
from rlwatch.records import AlertState, Severity
from rlwatch.store.url import open_store

BROKEN_AT, STEPS = 61, 90
CONSOLE = "step {step} | reward {reward} | kl {kl} | entropy {entropy}\n"


def row(step: int) -> dict[str, float]:
    """Of a training that collapses and stays so."""
    bad, wiggle = step >= BROKEN_AT, 0.01 * math.sin(7.3 * step)
    return {
        "step": step,
        "reward": 0.0 if bad else round(0.5 + wiggle, 4),
        "kl": round((3.0 if bad else 0.02) + wiggle / 10, 4),
        "entropy": round((3.0 if bad else 0.6) + wiggle, 4),
    }


SOUND = {"reward": 0.6, "kl": 0.02, "entropy": 0.6}
"""As before it broke."""
NOISE = {
    "sampled text": "Step 1: reward = 0.6, kl = 0.02\nStep 2: reward = 0.6\nSo entropy = 0.6 and reward: 1\n",
    "text like rows": CONSOLE.format(step=2, **SOUND) + CONSOLE.format(step=3, **SOUND),
    "a traceback": 'Traceback (most recent call last):\n  File "a.py", line 3\n    reward = 0.6\nValueError: step 7\n',
    "an evaluation": "Evaluation at step {step}: reward = 0.9, kl = 0.01\n",
    "an evaluation of its own count": "eval step 3 | reward 0.9 | kl 0.01 | entropy 0.6\n",
    "rows ahead": CONSOLE.format(step=5000, **SOUND),
    "two rows ahead": CONSOLE.format(step=5000, **SOUND) + CONSOLE.format(step=5001, **SOUND),
    "JSON: a few rows back": "".join(json.dumps({"step": step, **SOUND}) + "\n" for step in (1, 2)),
    "JSON: an evaluation ahead": json.dumps({"step": 5000, "reward": 0.9, "accuracy": 0.9}) + "\n",
    "JSON: an evaluation of its own count": json.dumps({"type": "eval", "step": 3, "reward": 0.9}) + "\n",
}


def pieces(noise: str, form: str) -> Iterator[str]:
    """The log, a row at a time, cut in the middle of a line; ``noise`` goes on to its end."""
    kept = ""
    for step in range(1, STEPS + 1):
        line = json.dumps(row(step)) + "\n" if form == "json" else CONSOLE.format(**row(step))
        whole = kept + line + (noise.replace("{step}", str(step)) if step % 4 == 0 or step > STEPS - 2 else "")
        kept = whole[-9:]
        yield whole[:-9]
    yield kept


@pytest.mark.parametrize("name", NOISE)
def test_no_alert_that_was_sent_is_resolved_by_lines_that_turn_out_to_be_no_rows(tmp_path: Path, name: str) -> None:
    """Looked at after each piece: once a critical alert fires it fires to the end, and the run is of one attempt."""
    log, store = tmp_path / "run.log", str(tmp_path / "runs")
    config = tmp_path / "rlwatch.toml"
    config.write_text("forecast = false\n")
    left = pieces(NOISE[name], "json" if name.startswith("JSON") else "console")
    log.write_text("".join(next(left) for _ in range(20)))
    critical: list[set[str]] = []

    def grow() -> None:
        piece = next(left, None)
        critical.append(firing(store, log))
        if piece is None:
            raise KeyboardInterrupt
        with log.open("a") as file:
            file.write(piece)

    watch_log.follow(NamedLog(log), store, config, grow)

    found = open_store(store)
    states = [alert.state for alert in found.alerts() if alert.severity is Severity.CRITICAL]
    assert critical[-1]
    assert all(before <= after for before, after in pairwise(critical))
    assert AlertState.RESOLVED not in states
    records = [record for record in found.records(log_id(log)) if "reward" in record.metrics]
    assert {record.attempt for record in records} == {1}
    assert {record.step: record.metrics["reward"] for record in records if record.step <= STEPS - 2} == {
        step: row(step)["reward"] for step in range(1, STEPS - 1)
    }


def firing(store: str, log: Path) -> set[str]:
    """Ids of the critical alerts that fire now."""
    alerts = open_store(store).alerts() if (Path(store) / log_id(log)).is_dir() else []
    return {
        alert.alert_id for alert in alerts if alert.severity is Severity.CRITICAL and alert.state is AlertState.FIRING
    }
