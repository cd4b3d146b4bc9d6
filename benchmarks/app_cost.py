"""What the dashboard costs: opening the list of runs, and each refresh of it, by how many runs the store holds.

    python benchmarks/app_cost.py                       # 10, 100 and 1000 runs of 200 rows x 20 metrics
    python benchmarks/app_cost.py --runs 1000 --rows 2000 --metrics 150 --browser
    python benchmarks/app_cost.py --app ../before/app   # the same stores, under another checkout's app

Every size is a fresh process. `cold` is the page's script over a store this process has not read (everything it imports
is imported before), `refresh` the same when nothing changed, `live` after one run in twenty wrote a row; CPU time and,
in brackets, wall time, the best of three: on a shared machine wall time is its load. `kB` is what the table sends.
`--browser` starts `rlwatch ui`'s server and headless Chromium (`RLWATCH_CHROMIUM`), opens the page in three fresh
contexts, and tells when the first row is drawn; the first of them finds the server cold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
NAMES = ("reward", "entropy", "kl", "grad_norm", "completions/mean_length", "learning_rate")
LIVE = 20
"""One run in so many is live."""


def make(where: Path, count: int, rows: int, metrics: int) -> None:
    """Runs of three projects, five seeds and two settings: live, finished, crashed and collapsed ones."""
    import numpy as np

    from rlwatch.ports import Progress
    from rlwatch.records import Finding, ForecastRecord, RunInfo, RunState, Severity, StepRecord
    from rlwatch.store.url import open_store

    store, rng, now = open_store(where), np.random.default_rng(0), time.time()
    names = [*NAMES, *(f"metric_{k}" for k in range(metrics - len(NAMES)))]
    for k in range(count):
        live, last = k % LIVE == 0, now - (3.0 if k % LIVE == 0 else 3600.0 * (k % 200 + 1))
        config = {"learning_rate": (1e-6, 3e-5)[k % 2], "seed": k % 5, "args": {f"option_{j}": j for j in range(60)}}
        info = RunInfo(f"run-{k:05}", ("math", "code", "agents")[k % 3], f"grpo-{k // 5}-s{k % 5}", "trl/grpo",
                       created_at=last - rows * 5, config=config, tags=("sweep",) if k % 4 == 0 else ())  # fmt: skip
        values = rng.standard_normal((rows, metrics)).tolist()
        writer = store.open_run(info)
        writer.write([StepRecord(s, dict(zip(names, row, strict=True)), last - (rows - s) * 5)
                      for s, row in enumerate(values, 1)])  # fmt: skip
        writer.write([ForecastRecord(rows, {"forecast/p20": 0.1, "forecast/p50": 0.2, "forecast/p100": 0.3},
                                     {"reasons": []}, ts=last, seq=rows)])  # fmt: skip
        if k % 3 == 1:
            writer.write([Finding("entropy_collapse", "entropy_collapse", Severity.CRITICAL, rows // 2, rows // 2 - 5,
                                  "entropy fell", metric="policy/entropy", seq=rows // 2)])  # fmt: skip
        writer.write([], Progress(judged=writer.last_seq))  # else the dashboard's watchman would judge them all
        if live:
            writer.heartbeat(last)
        else:
            writer.finish(RunState.FINISHED if k % 7 else RunState.CRASHED, "" if k % 7 else "out of memory", last)
        writer.close()


def go_on(where: Path) -> None:
    """A new row in every live run, as if its trainer had made a step."""
    from rlwatch.records import RunInfo, RunState, StepRecord
    from rlwatch.store.url import open_store

    store = open_store(where)
    for run in store.runs():
        if run.state is RunState.RUNNING:
            writer = store.open_run(RunInfo(run.run_id))
            writer.write([StepRecord((run.last_step or 0) + 1, dict.fromkeys(NAMES, 0.5), time.time())])
            writer.close()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def opened(app: Path) -> Any:
    """The app's first page as Streamlit's own test harness runs it, and what it imports imported."""
    from streamlit.testing.v1 import AppTest

    spec = spec_from_file_location("rlwatch_app_main", app / "main.py")
    assert spec is not None
    assert spec.loader is not None
    main = module_from_spec(spec)
    spec.loader.exec_module(main)
    main.load_package(app)
    from rlwatch_app import layout  # type: ignore[import-not-found]
    from rlwatch_app.principal import Principal  # type: ignore[import-not-found]

    layout.principal = lambda: Principal("bench", "operator")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["RLWATCH_STORE"] = empty
        AppTest.from_file(str(app / "main.py"), default_timeout=600).run()
    return AppTest.from_file(str(app / "main.py"), default_timeout=600)


def forget() -> None:
    """Let go of all that the app and its stores remember, as a new process would."""
    import streamlit as st

    st.cache_resource.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("rlwatch_app"):
            for kept in list(vars(module).values()):
                if callable(clear := getattr(kept, "cache_clear", None)):
                    clear()


def measure(where: Path, app: Path) -> dict[str, Any]:
    """Seconds of each look at the list of runs."""
    import streamlit as st

    page, found = opened(app), {}
    os.environ["RLWATCH_STORE"] = str(where)
    for name, before in {
        "cold": forget,
        "refresh": lambda: None,
        "live": lambda: go_on(where),
    }.items():
        looks = []
        for _ in range(3):
            before()
            if name == "cold":
                st.cache_data.clear()
            looks.append(timed(page.run))
        found[name] = min(looks)
    assert not page.exception, page.exception
    tables = [json.loads(one.proto.json) for one in page.get("bidi_component") if one.key == "runs"]
    return {**found, "rows": len(tables[0]["rows"]), "kB": len(json.dumps(tables)) / 1000}


def in_browser(where: Path) -> list[float]:
    """Seconds until the first row is drawn, in three fresh contexts."""
    from playwright.sync_api import sync_playwright

    sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests" / "processes")]
    import conftest  # type: ignore[import-not-found]

    found = []
    with conftest.serving(str(where)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=conftest.chromium(), args=["--no-sandbox"])
        for _ in range(3):
            context = browser.new_context(viewport={"width": 1400, "height": 900})
            conftest.log_in(context, address)
            page = context.new_page()
            page.set_default_timeout(120_000)
            began = time.perf_counter()
            page.goto(address, wait_until="commit")  # not until Streamlit's scripts are there
            page.locator(".rlwatch-table tbody tr").first.wait_for()
            found.append(time.perf_counter() - began)
            context.close()
        browser.close()
    return found


def row(count: int, found: dict[str, Any]) -> str:
    """A line of the table."""
    looks = [f"{found[name][0]:.2f} ({found[name][1]:.2f})" for name in ("cold", "refresh", "live")]
    each = f"{1000 * found['cold'][0] / count:.2f}"
    browser = ", ".join(f"{seconds:.2f}" for seconds in found.get("browser", ())) or "-"
    return f"| {count} | " + " | ".join([*looks, each, str(found["rows"]), f"{found['kB']:.0f}", browser]) + " |"


def main() -> None:
    """Print the table, or, in a child, what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="10,100,1000")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--app", type=Path, default=ROOT / "app")
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--keep", type=Path, help="make the stores here, or find them here")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.app.resolve())))
        return
    print("| runs | cold s | refresh s | live s | cold ms a run | rows sent | kB | browser s |\n|" + "---|" * 8)
    with tempfile.TemporaryDirectory() as fresh:
        for count in map(int, options.runs.split(",")):
            where = (options.keep or Path(fresh)) / f"{count}x{options.rows}x{options.metrics}"
            if not where.exists():
                make(where, count, options.rows, options.metrics)
                time.sleep(2.5)  # younger files are not trusted to stay as they are
            child = [sys.executable, __file__, "--measure", str(where), "--app", str(options.app)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(options.app.resolve().parent), str(ROOT)])}
            done = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            found = json.loads(done.stdout.splitlines()[-1])
            print(row(count, found | ({"browser": in_browser(where)} if options.browser else {})), flush=True)


if __name__ == "__main__":
    main()
