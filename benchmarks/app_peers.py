"""What the same runs cost to look at in rlwatch, trackio and TensorBoard: first chart, zoom, new row, bytes, memory.

    python benchmarks/app_peers.py --peers build/app-peers --steps 1000,20000 --runs 1,10

The peers are installed from PyPI into ``--peers``, a virtual environment of their own. Each tool gets runs of the same
numbers in its own format and its own server, and a fresh headless Chromium opens it. ``first chart``: seconds from the
address to the first chart (of what a worker or WebGL draws: until it is there, drawn or not). The other figures are
those of a page at rest: after half a second without a request, or :data:`REST_S` after the first chart. ``kB``: what
the browser was sent until then, over HTTP and web sockets, as it was encoded; ``heap``: that of its scripts;
``server``: resident memory of the server and its children. Medians of ``--looks`` after a first one, which warms the
server. Seconds of a shared machine are to be compared within a table alone; ``load``: the machine's mean of the last
minute, at the end of each row.

``zoom``: milliseconds from the end of a drag over the middle half of the first chart until it is nearer to its picture
in the end than to that before. ``new row``: seconds from the return of the call that logs one more
row, far outside of the range of the others, until the first chart's pixels change, each tool with the switch for live
pages on that it has; at most ``MOST_S``. Both are seen in screenshots, so charts of workers and of WebGL count as well.
"""

from __future__ import annotations

import argparse
import base64
import io
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dashboard_cost import used

from rlwatch.cli.ui import free_port
from rlwatch.ports import Progress
from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store

NAMES = ("reward", "entropy", "kl", "grad_norm", *(f"metric_{place}" for place in range(16)))
"""Names that rlwatch draws at once, and others."""
TOKEN = "benchmark-of-the-dashboard-000000"
PACKAGES = ("trackio", "tensorboard")
WAIT_S = 180.0
MOST_S, ZOOM_S, REST_S = 60.0, 4.0, 8.0
SAME = 0.5
"""Grey levels by which two pictures of one chart may differ."""
FAR = 1000.0
"""Value of the additional rows; all others are about 1."""

CHART = """() => {
  const found = [], walk = (root) => root.querySelectorAll('*').forEach((node) => {
    if (node.shadowRoot) walk(node.shadowRoot);
    if (node.tagName === 'CANVAS' || node.tagName === 'svg') found.push(node);
  });
  walk(document);
  return found.some((node) => {
    const box = node.getBoundingClientRect();
    if (box.width < 150 || box.height < 40 || box.top > innerHeight) return false;
    const long = (path) => (path.getAttribute('d') ?? '').length > 300;
    if (node.tagName === 'svg') return [...node.querySelectorAll('path')].some(long);
    if (!node.width || !node.height) return false;
    let ctx = null;
    try { ctx = node.getContext('2d'); } catch { /* it is drawn by a worker */ }
    if (!ctx) return true;  // drawn by a worker or WebGL, and cannot be asked: it is there
    return ctx.getImageData(0, 0, node.width, node.height).data.some((value) => value > 0);
  });
}"""
"""Whether a chart that can be seen has something drawn in it."""

WRITE_PEERS = """
import json, os, sys
import numpy as np
kind, where, count, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
names = sys.argv[5].split(',')
if kind == "trackio":
    os.environ["TRACKIO_DIR"] = where
    from trackio.sqlite_storage import SQLiteStorage
else:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
if len(sys.argv) > 6:  # one more row of the first run, again for each line of the input
    if kind == "trackio":
        more = lambda step, row: SQLiteStorage.bulk_log(project="bench", run="run-0", metrics_list=[row], steps=[step])
    else:
        writer = EventFileWriter(os.path.join(where, "run-0"), max_queue_size=1)
        def more(step, row):
            made = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
            writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=Summary(value=made)))
            writer.flush()
    print("ready", flush=True)
    for extra, line in enumerate(sys.stdin, 1):
        more(steps + extra, dict.fromkeys(names, float(line)))
        print("written", flush=True)
    sys.exit()
for run in range(count):
    values = np.random.default_rng(run).normal(size=(steps, len(names))).round(6)
    if kind == "trackio":
        for low in range(0, steps, 5000):
            part = values[low:low + 5000].tolist()
            rows = [dict(zip(names, row)) for row in part]
            SQLiteStorage.bulk_log(project="bench", run=f"run-{run}", metrics_list=rows,
                                   steps=list(range(low + 1, low + len(rows) + 1)))
        continue
    writer = EventFileWriter(os.path.join(where, f"run-{run}"), max_queue_size=1000)
    for step, row in enumerate(values.tolist(), 1):
        made = [Summary.Value(tag=name, simple_value=value) for name, value in zip(names, row)]
        writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=Summary(value=made)))
    writer.close()
"""


@dataclass(frozen=True, slots=True)
class Look:
    """One opening of the page."""

    first_s: float
    kilobytes: float
    heap_mb: float
    zoom_ms: float


def install(peers: Path) -> Path:
    """Python of an environment that has the peers."""
    python = peers / "bin" / "python"
    if not python.exists():
        venv.create(peers, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return python


def write_ours(where: Path, count: int, steps: int) -> None:
    """The same runs in a store."""
    store = open_store(where)
    for run in range(count):
        values = np.random.default_rng(run).normal(size=(steps, len(NAMES))).round(6).tolist()
        writer = store.open_run(RunInfo(f"run-{run}", "bench", f"run-{run}", created_at=1.7e9))
        for low in range(0, steps, 5000):
            part = enumerate(values[low : low + 5000], low + 1)
            writer.write([StepRecord(s, dict(zip(NAMES, row, strict=True)), 1.7e9 + s) for s, row in part])
        writer.write([], Progress(judged=writer.last_seq))  # else the dashboard's watchman would judge it
        writer.finish(RunState.FINISHED, "", 1.7e9 + steps)
        writer.close()
    began = time.time() - steps
    values = np.random.default_rng(0).normal(size=(steps, len(NAMES))).round(6).tolist()
    writer = store.open_run(RunInfo("live", "bench", "live", created_at=began))
    for low in range(0, steps, 5000):
        part = enumerate(values[low : low + 5000], low + 1)
        writer.write([StepRecord(s, dict(zip(NAMES, row, strict=True)), began + s) for s, row in part])
    writer.write([], Progress(judged=writer.last_seq))
    writer.close()


@contextmanager
def served(command: Sequence[str | Path], port: int, extra: Mapping[str, str]) -> Iterator[int]:
    """Process id of a server that answers on ``port``; ended afterwards with its children."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env={**os.environ, **extra}, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).read()
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.3)
            else:
                break
        else:
            raise RuntimeError(f"the server did not start: {' '.join(map(str, command))}")
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


PLACE = CHART.replace("return found.some((node) => {", "const shown = found.find((node) => {").replace(
    "\n  });\n}",
    """
  });
  const box = shown?.getBoundingClientRect();
  return box && { x: box.x, y: box.y, width: box.width, height: box.height };
}""",
)
"""Where the first drawn chart is."""


def until_it_changes(page: Any, box: Mapping[str, float], before: bytes, most_s: float) -> float:
    """Return the seconds until the pixels of a part of the page differ from ``before``; infinite if they never do."""
    began = time.perf_counter()
    while time.perf_counter() < began + most_s:
        if page.screenshot(clip=box) != before:
            return time.perf_counter() - began
    return math.inf


def still(page: Any, box: Mapping[str, float]) -> bytes:
    """Return a picture of a part of the page once two in a row are equal."""
    before: bytes = page.screenshot(clip=box)
    for _ in range(40):
        page.wait_for_timeout(250)
        now: bytes = page.screenshot(clip=box)
        if now == before:
            break
        before = now
    return before


def pixels(picture: bytes) -> Any:
    """Return the grey levels of a picture."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(picture)).convert("L"), dtype=np.float64)


def zoomed(page: Any) -> float:
    """Return the milliseconds from the end of a drag over the middle half of the first chart until it is zoomed in.

    That is the first picture that is nearer to the one in the end than to the one before: some tools zoom while the
    mouse is still down, others refine the line later.
    """
    box = page.evaluate(PLACE)
    inside = {"x": box["x"] + 60, "y": box["y"] + 5, "width": box["width"] - 75, "height": box["height"] - 30}
    middle = inside["y"] + 0.5 * inside["height"]
    before = pixels(still(page, inside))
    page.mouse.move(inside["x"] + 0.25 * inside["width"], middle)
    page.mouse.down()
    page.mouse.move(inside["x"] + 0.7 * inside["width"], middle + 0.3 * inside["height"], steps=5)
    began, frames = time.perf_counter(), []
    page.mouse.move(inside["x"] + 0.75 * inside["width"], middle + 0.3 * inside["height"])
    page.mouse.up()
    while time.perf_counter() < began + ZOOM_S:
        frames.append((time.perf_counter() - began, page.screenshot(clip=inside)))
    page.mouse.move(2, 2)
    final = pixels(still(page, inside))
    if np.abs(final - before).mean() < SAME:
        return math.inf
    near = (at for at, one in frames if np.abs(pixels(one) - final).mean() < np.abs(pixels(one) - before).mean())
    return 1000 * next(near, math.inf)


def rest(page: Any) -> None:
    """Wait until a page has asked for nothing for half a second."""
    from playwright.sync_api import Error

    with suppress(Error):
        page.wait_for_load_state("networkidle", timeout=1000 * REST_S)


def look(browser: Any, address: str, login: str) -> Look:
    """Open the page in a fresh context until its first chart is drawn."""
    context = browser.new_context(viewport={"width": 1500, "height": 1000})
    if login:
        context.request.get(login, max_redirects=0)
    page, sizes = context.new_page(), []
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    session.on("Network.webSocketFrameReceived", lambda event: sizes.append(_frame(event["response"])))
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    while not page.evaluate(CHART):  # asked from outside: the pages' content policy lets no script wait for it
        if time.perf_counter() > began + WAIT_S:
            raise RuntimeError(f"no chart at {address} within {WAIT_S:g} s")
        page.wait_for_timeout(50)
    first = time.perf_counter() - began
    rest(page)
    kilobytes, heap = sum(sizes) / 1000, session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
    zoom = zoomed(page)
    context.close()
    return Look(first, kilobytes, heap, zoom)


def row_seen(
    browser: Any, address: str, login: str, tool: str, command: Sequence[str | Path], extra: Mapping[str, str]
) -> float:
    """Return the median seconds until the first chart shows one more row; ``command`` writes one for each line."""
    context = browser.new_context(viewport={"width": 1500, "height": 1000})
    if login:
        context.request.get(login, max_redirects=0)
    page = context.new_page()
    page.goto(address, wait_until="commit")
    while not page.evaluate(CHART):
        page.wait_for_timeout(50)
    if tool == "tensorboard":  # without this choice its pages load nothing again; 15 s is its shortest period
        page.evaluate(
            "localStorage.setItem('_tb_global_settings', "
            "JSON.stringify({autoReload: true, autoReloadPeriodInMs: 15000}))"
        )
        page.reload()
        while not page.evaluate(CHART):
            page.wait_for_timeout(50)
    rest(page)
    box = page.evaluate(PLACE)
    found = []
    with subprocess.Popen(
        command, env={**os.environ, **extra}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        for place in range(3):
            before = still(page, box)
            print((1 + place) * FAR, file=writer.stdin, flush=True)
            writer.stdout.readline()
            found.append(until_it_changes(page, box, before, MOST_S))
        writer.stdin.close()
    context.close()
    return statistics.median(found)


MORE = """
import sys, time
from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store
store = open_store(sys.argv[1])
writer = store.open_run(RunInfo("live", "bench", "live", created_at=1.7e9))
steps, names = int(sys.argv[2]), sys.argv[3].split(",")
writer.heartbeat(time.time())
print("ready", flush=True)
for extra, line in enumerate(sys.stdin, 1):
    writer.write([StepRecord(steps + extra, dict.fromkeys(names, float(line)), time.time())])
    print("written", flush=True)
"""
"""Writes rows of our live run."""


def _frame(response: Mapping[str, Any]) -> int:
    data = response["payloadData"]
    return len(base64.b64decode(data)) if response["opcode"] == 2 else len(data)


def measured(
    tool: str, python: Path, place: Path, size: tuple[int, int], looks: int, browser: Any
) -> tuple[Look, float, float]:
    """Median of the looks, the seconds until a new row is seen, and the server's memory in MB after the looks."""
    count, steps = size
    where, port = place / f"{tool}-{count}-{steps}", free_port("127.0.0.1")
    address, login, extra = f"http://127.0.0.1:{port}/", "", {}
    if tool == "rlwatch":
        write_ours(where, count, steps)
        command: list[str | Path] = [sys.executable, "-m", "rlwatch.cli", "ui", "--store", where, "--port", str(port)]
        extra, login = {"RLWATCH_UI_TOKEN": TOKEN}, f"{address}login?token={TOKEN}"
        address += "run?run=run-0"
    else:
        where.mkdir()
        sizes = [str(count), str(steps), ",".join(NAMES)]
        subprocess.run([python, "-c", WRITE_PEERS, tool, where, *sizes], check=True, stdout=subprocess.DEVNULL)
        if tool == "trackio":
            extra = {"TRACKIO_DIR": str(where), "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
            show = "import trackio; trackio.show(project='bench', open_browser=False, block_thread=True)"
            command, address = [python, "-c", show], f"{address}?project=bench"
        else:
            command = [
                python,
                "-m",
                "tensorboard.main",
                "--logdir",
                where,
                "--port",
                str(port),
                "--reload_interval",
                "1",
            ]
    with served(command, port, extra) as pid:
        found = [look(browser, address, login) for _ in range(looks + 1)][1:]
        memory = used(pid)[1]
        if tool == "rlwatch":
            more: list[str | Path] = [sys.executable, "-c", MORE, where, str(steps), ",".join(NAMES)]
            address = address.replace("run-0", "live")
        else:
            more = [python, "-c", WRITE_PEERS, tool, where, *sizes, "more"]
        row_s = row_seen(browser, address, login, tool, more, extra)
    columns = zip(*((one.first_s, one.kilobytes, one.heap_mb, one.zoom_ms) for one in found), strict=True)
    return Look(*map(statistics.median, columns)), row_s, memory


def main() -> None:
    """Print a row a tool and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("build/app-peers"))
    parser.add_argument("--steps", default="1000,20000,100000")
    parser.add_argument("--runs", default="1")
    parser.add_argument("--looks", type=int, default=3)
    parser.add_argument("--tools", default="rlwatch,trackio,tensorboard")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    python = install(options.peers.resolve())
    print(
        "| runs | steps | tool | first chart, s | zoom, ms | new row, s | kB | heap, MB | server, MB | load |\n|"
        + "---|" * 10
    )
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        path = os.environ.get("RLWATCH_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        for count in map(int, options.runs.split(",")):
            for steps in map(int, options.steps.split(",")):
                for tool in options.tools.split(","):
                    one, row_s, memory = measured(tool, python, Path(place), (count, steps), options.looks, browser)
                    figures = f"{one.first_s:.2f} | {one.zoom_ms:.0f} | {row_s:.2f} | {one.kilobytes:,.0f}"
                    figures += f" | {one.heap_mb:.1f} | {memory:,.0f} | {os.getloadavg()[0]:.0f}"
                    print(f"| {count} | {steps:,} | {tool} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
