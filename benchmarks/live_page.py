"""What an open page of a live run costs while nothing happens, and how soon it shows a row.

    python benchmarks/live_page.py [STEPS] [METRICS]

On a directory and on a PostgreSQL server of its own: a run of 900 steps of 60 metrics whose writer lives, its page in
headless Chromium. ``idle``: CPU of the dashboard's process while only heartbeats come, over ``IDLE_S``, as ms a second,
and messages over the page's web sockets. ``seen``: from a row's commit to its step on the page, of ``ROWS`` rows that
come ``APART_S`` apart: median and longest.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread

ROOT = Path(__file__).resolve().parents[1]
IDLE_S, ROWS, APART_S = 40.0, 8, (6.0, 9.0)


def measured(url: str, steps: int, metrics: int) -> None:
    """Print a row for the store."""
    from app_sessions import seconds
    from playwright.sync_api import sync_playwright
    from run_page_cost import KNOWN

    import conftest  # type: ignore[import-not-found]
    from rlwatch.cli import ui
    from rlwatch.cli.app_login import Login, LoginToken, place
    from rlwatch.records import RunInfo, StepRecord
    from rlwatch.store.url import open_store

    names = (*KNOWN, *(f"mine/{i}" for i in range(metrics - len(KNOWN))))

    def rows(first: int, last: int) -> list[StepRecord]:
        return [StepRecord(s, dict.fromkeys(names, s / 7), time.time()) for s in range(first, last)]

    writer = open_store(url).open_run(RunInfo("live", project="p", name="live", source="trl/grpo"))
    writer.write(rows(1, steps))
    over, turn = Event(), Event()
    turn.set()

    def beating() -> None:
        while not over.wait(5.0):
            turn.wait()
            writer.heartbeat(time.time())

    beats = Thread(target=beating)
    at = place("127.0.0.1", ui.free_port("127.0.0.1"))
    login = Login({role: LoginToken(token) for role, token in conftest.TOKENS.items()}, "what sessions are signed with")
    server = ui.start_server(ui.app_script(), at, login, url, quiet=True)
    try:
        assert ui.wait_healthy(server, at.local) is None
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=conftest.chromium(), args=["--no-sandbox"])
            context = browser.new_context(viewport={"width": 1400, "height": 900})
            context.set_default_timeout(180_000)
            conftest.log_in(context, at.local)
            page, sent = context.new_page(), []
            page.on("websocket", lambda socket: socket.on("framereceived", lambda _: sent.append(1)))
            page.goto(f"{at.local}/run?run=live")
            page.locator(".rl-facts").first.wait_for()
            beats.start()
            page.wait_for_timeout(15_000)
            spent, messages = seconds(server.pid), len(sent)
            page.wait_for_timeout(1000 * IDLE_S)
            idle, messages = (seconds(server.pid) - spent) / IDLE_S, len(sent) - messages
            waits = []
            for step in range(steps, steps + ROWS):
                page.wait_for_timeout(1000 * random.uniform(*APART_S))
                turn.clear()
                writer.write(rows(step, step + 1))
                began = time.monotonic()
                turn.set()
                page.wait_for_function(
                    "said => document.querySelector('.rl-facts')?.innerText.includes(said)", arg=f"step {step}"
                )
                waits.append(time.monotonic() - began)
            browser.close()
    finally:
        over.set()
        ui.stop_server(server)
        if beats.ident:
            beats.join()
        writer.close()
    print(
        f"| {url.partition(':')[0]} | {1000 * idle:.1f} | {messages} | {statistics.median(waits):.2f} | "
        f"{max(waits):.2f} |",
        flush=True,
    )


def main(steps: int, metrics: int) -> None:
    """Print a table."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests/browser", "tests/processes", "tests/store", "benchmarks")]
    from postgres_server import PostgresServer  # type: ignore[import-not-found]

    server = PostgresServer()
    print("| store | idle, ms a second | messages meanwhile | seen after, s | longest |\n|---|---|---|---|---|")
    try:
        with tempfile.TemporaryDirectory() as where:
            os.environ["RLWATCH_LOCAL_DIR"] = f"{where}/local"
            measured(f"sqlite://{where}/store", steps, metrics)
            server.start()
            measured(server.url("live"), steps, metrics)
    finally:
        server.remove()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    main(*(int(argument) for argument in (*sys.argv[1:], *("900", "60")[len(sys.argv) - 1 :])))
