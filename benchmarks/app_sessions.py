"""Memory and CPU of the dashboard's server by how many people look.

    python benchmarks/app_sessions.py [STEPS] [METRICS]

A live run (100,000 steps of 150 metrics) goes on by a row every two seconds; headless Chromium opens its page in a
fresh context for every other session, and the list of runs for the rest. ``MB`` is what the server's process holds
(``VmRSS``), at the end of ``WATCHED_S`` seconds in which all of them look on; ``CPU`` its share of a core meanwhile,
and ``ms a look`` the same by five seconds and session.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SESSIONS = (1, 5, 10, 20)
WATCHED_S, ROW_S, AT_ONCE = 30.0, 2.0, 1000
CALM = 30
"""Finished runs beside the live one."""


def make(where: str, steps: int, metrics: int) -> tuple[str, ...]:
    """The store; the names of the live run's metrics."""
    from run_page_cost import KNOWN

    from rlwatch.records import RunInfo, RunState, StepRecord
    from rlwatch.store.url import open_store

    store, draws, now = open_store(where), np.random.default_rng(0), time.time()
    names = (*KNOWN, *(f"mine/{i}" for i in range(metrics - len(KNOWN))))
    for k in range(CALM + 1):
        count = 500 if k else steps
        writer = store.open_run(RunInfo(f"run-{k}", project="p", name=f"seed-{k}", source="trl/grpo"))
        for first in range(0, count, AT_ONCE):
            rows = draws.normal(size=(min(AT_ONCE, count - first), metrics)).tolist()
            numbered = enumerate(rows, first + 1)
            writer.write([StepRecord(s, dict(zip(names, row, strict=True)), now - count + s) for s, row in numbered])
        if k:
            writer.finish(RunState.FINISHED, "", now)
        writer.close()
    return names


def going_on(where: str, names: tuple[str, ...], steps: int, over: Event) -> None:
    """A row every :data:`ROW_S` seconds, until it is over."""
    from rlwatch.records import RunInfo, StepRecord
    from rlwatch.store.url import open_store

    writer = open_store(where).open_run(RunInfo("run-0"))
    while not over.wait(ROW_S):
        steps += 1
        writer.write([StepRecord(steps, dict.fromkeys(names, 0.5), time.time())])
        writer.heartbeat(time.time())
    writer.close()


def megabytes(pid: int) -> float:
    """Memory that the process holds."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def seconds(pid: int) -> float:
    """CPU time of the process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main(steps: int, metrics: int) -> None:
    """Print a row for each number of sessions."""
    from playwright.sync_api import sync_playwright

    sys.path[:0] = [str(ROOT / folder) for folder in ("tests/browser", "tests/processes", "benchmarks")]
    import conftest  # type: ignore[import-not-found]
    from rlwatch.cli import ui
    from rlwatch.cli.app_login import Login, LoginToken, place

    with tempfile.TemporaryDirectory() as where, sync_playwright() as playwright:
        names, over = make(where, steps, metrics), Event()
        writing = Thread(target=going_on, args=(where, names, steps, over))
        writing.start()
        at = place("127.0.0.1", ui.free_port("127.0.0.1"))
        login = Login(
            {role: LoginToken(token) for role, token in conftest.TOKENS.items()}, "what sessions are signed with"
        )
        server = ui.start_server(ui.app_script(), at, login, where, quiet=True)
        try:
            problem = ui.wait_healthy(server, at.local)
            assert problem is None, problem
            browser = playwright.chromium.launch(executable_path=conftest.chromium(), args=["--no-sandbox"])
            print("| sessions | MB | CPU | ms a look |\n|---|---|---|---|")
            for wanted in range(1, max(SESSIONS) + 1):
                context = browser.new_context(viewport={"width": 1400, "height": 900})
                context.set_default_timeout(180_000)
                conftest.log_in(context, at.local)
                page = context.new_page()
                page.goto(f"{at.local}/run?run=run-0" if wanted % 2 else at.local)
                page.locator(".u-over" if wanted % 2 else ".rlwatch-table tbody tr").first.wait_for()
                if wanted not in SESSIONS:
                    continue
                spent, began = seconds(server.pid), time.monotonic()
                page.wait_for_timeout(1000 * WATCHED_S)
                share = (seconds(server.pid) - spent) / (time.monotonic() - began)
                print(
                    f"| {wanted} | {megabytes(server.pid):.0f} | {share:.0%} | {5000 * share / wanted:.0f} |",
                    flush=True,
                )
            browser.close()
        finally:
            over.set()
            writing.join()
            ui.stop_server(server)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    main(*(int(argument) for argument in (*sys.argv[1:], *("100000", "150")[len(sys.argv) - 1 :])))
