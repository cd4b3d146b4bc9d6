"""What the command-line tests share: strict JSON, small runs, small logs."""

from __future__ import annotations

import http.server
import json
import threading
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


class Inbox:
    """A webhook's receiver on this machine: keeps what it is sent; ``arrived`` is set by the first message."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.arrived = threading.Event()
        inbox = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                inbox.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()
                inbox.arrived.set()

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
