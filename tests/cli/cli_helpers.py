"""What the command-line tests share: strict JSON, small runs, small logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

from rlwatch.ports import Store
from rlwatch.records import RunInfo, RunState, StepRecord

Invoke = Callable[..., Result]

NOW = 1_750_000_000.0


def strict(text: str) -> Any:
    """``text`` parsed by a reader that knows no NaN and no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"not strict JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


def record_run(
    store: Store,
    run_id: str,
    *,
    name: str = "",
    project: str = "default",
    steps: int = 5,
    state: RunState | None = RunState.FINISHED,
    **metrics: float,
) -> None:
    """A small run in the store; with ``state=None`` its writer just lets go, as a killed one would."""
    values = {"reward": 0.5, "entropy": 1.25, "kl": 0.01, "grad_norm": 0.75} | metrics
    info = RunInfo(run_id=run_id, project=project, name=name, source="trl/grpo", created_at=NOW, host="node7", pid=42)
    writer = store.open_run(info)
    writer.write([StepRecord(step, values, ts=NOW + step, seq=step) for step in range(1, steps + 1)])
    if state is not None:
        writer.finish(state, "", NOW + steps)
    writer.close()


def write_log(path: Path, lines: list[dict[str, Any]]) -> Path:
    """A log as TRL prints it: one Python dictionary a line."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
