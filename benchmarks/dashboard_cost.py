"""What the dashboard costs beside a long live run: the first page, a look every few seconds, and twenty people.

    python benchmarks/dashboard_cost.py --steps 100000 --metrics 150 --sessions 20

A run of so many steps is made and goes on. The real server is started; sessions speak its web socket as a browser does
(the page of the run as a whole, where a browser asks for its parts one by one), but draw nothing. CPU and memory are
those of the server's process and its children; bytes are those of the web socket, as sent. ``a look``: a new step, then
the page once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path

import numpy as np
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from rlwatch.metrics import TABLE
from rlwatch.ports import RunWriter
from rlwatch.records import ForecastRecord, RunInfo, StepRecord
from rlwatch.store.url import open_store

PORT = 8977
QUIET_S = 1.0
TOKEN = "benchmark-of-the-dashboard-000000"


def make(root: Path, steps: int, metrics: int) -> tuple[RunWriter, list[str]]:
    """A live run of ``steps`` steps, forecasts too; its writer goes on."""
    names = [one.name for one in TABLE if not one.name.startswith(("forecast/", "grad_layer/"))][: metrics // 2]
    names += [f"mine/m{k:03d}" for k in range(metrics - len(names))]
    writer = open_store(root).open_run(RunInfo("live", project="p", source="trl/grpo", created_at=time.time() - steps))
    rng = np.random.default_rng(0)
    for begin in range(0, steps, 1000):
        rows = (rng.normal(size=(1000, metrics)) * 0.1 + 1).tolist()
        for k, row in enumerate(rows):
            step, now = begin + k, time.time() - steps + begin + k
            record = StepRecord(step, dict(zip(names, row, strict=True)), ts=now, seq=step + 1)
            risk = {"forecast/p20": 0.01, "forecast/p50": abs(row[0]) / 10, "forecast/p100": 0.2, "forecast/risk": 0.1}
            rows[k] = [record, ForecastRecord(step, risk, {}, now, 1, step + 1)]
        writer.write([item for pair in rows for item in pair])
    return writer, names


@dataclass
class Session:
    """One person who looks at the run, and what came over the line."""

    socket: ClientConnection
    answered: bool = False
    received: int = 0

    async def ask(self) -> None:
        """Run the page."""
        message = BackMsg()
        state = message.rerun_script
        state.query_string, state.page_name = "run=live", "run"
        await self.socket.send(message.SerializeToString())

    async def until_quiet(self) -> float:
        """Seconds until the last of the answer came."""
        start = last = time.perf_counter()
        while True:
            try:
                data = await asyncio.wait_for(self.socket.recv(decode=False), QUIET_S if self.answered else 30.0)
            except TimeoutError:
                return last - start
            last = time.perf_counter()
            self.received += len(data)
            self.answered |= ForwardMsg.FromString(data).WhichOneof("type") == "script_finished"


def server(root: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rlwatch.cli", "ui", "--store", str(root), "--port", str(PORT)]
    environment = os.environ | {"RLWATCH_UI_TOKEN": TOKEN}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/_stcore/health", timeout=1).read()
        except OSError:
            time.sleep(0.1)
        else:
            return started
    started.kill()
    raise RuntimeError("the server did not start")


def login() -> str:
    jar = CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(f"http://127.0.0.1:{PORT}/login?token={TOKEN}").read()
    return "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)


def family(pid: int) -> list[int]:
    """The process and its children."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [pid]
    for one in found:
        found += [child for child, parent in pairs if parent == one]
    return found


def used(pid: int) -> tuple[float, float]:
    """CPU seconds and resident MB of the server."""
    cpu = memory = 0.0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found = re.search(r"VmRSS:\s+(\d+)", status)
        memory += int(found[1]) / 1024 if found else 0.0
    return cpu, memory


async def opened(cookie: str) -> Session:
    origin = f"http://127.0.0.1:{PORT}"
    headers = {"Cookie": cookie, "Origin": origin}
    socket = await connect(
        f"ws://127.0.0.1:{PORT}/_stcore/stream",
        additional_headers=headers,
        subprotocols=[Subprotocol("streamlit")],
        max_size=None,
        compression=None,
    )
    return Session(socket)


async def look(session: Session) -> None:
    await session.ask()
    await session.until_quiet()


async def measure(pid: int, writer: RunWriter, names: list[str], steps: int, sessions: int) -> None:
    at = [steps]

    def tick() -> None:
        now, seq = time.time(), at[0] + 1
        writer.write([StepRecord(at[0], dict.fromkeys(names, 1.0 + at[0] % 3 / 10), ts=now, seq=seq)])
        writer.heartbeat(now)
        at[0] += 1

    cookie = login()
    people = []
    for place in range(2):
        tick()
        cpu, _ = used(pid)
        session = await opened(cookie)
        await session.ask()
        seconds = await session.until_quiet()
        word = ("first page of the server", "first page of the next person")[place]
        cell = f"{seconds:.2f} s, {used(pid)[0] - cpu:.2f} s of CPU, {session.received / 1000:,.0f} kB"
        print(f"| {word} | {cell} |", flush=True)
        people.append(session)
    one = people[0]
    before, (cpu, _), looks = one.received, used(pid), 12
    for _ in range(looks):
        tick()
        await look(one)
    each = 1000 * (used(pid)[0] - cpu) / looks
    sent = (one.received - before) / looks / 1000
    print(f"| a look, one person | {each:,.0f} ms of CPU, {sent:,.0f} kB |", flush=True)
    while len(people) < sessions:
        session = await opened(cookie)
        await session.ask()
        await session.until_quiet()
        people.append(session)
    cpu, _ = used(pid)
    for _ in range(3):
        tick()
        await asyncio.gather(*(look(session) for session in people))
    each = 1000 * (used(pid)[0] - cpu) / 3 / len(people)
    print(f"| a look, each of {len(people)} people | {each:,.0f} ms of CPU |")
    print(f"| memory of the server, {len(people)} people | {used(pid)[1]:,.0f} MB |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--metrics", type=int, default=150)
    parser.add_argument("--sessions", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlwatch-dashboard-") as place:
        writer, names = make(Path(place), args.steps, args.metrics)
        process = server(Path(place))
        try:
            print(f"{args.steps:,} steps x {args.metrics} metrics\n\n| | |\n|---|---|")
            asyncio.run(measure(process.pid, writer, names, args.steps, args.sessions))
        finally:
            process.terminate()
            process.wait()
            writer.close()


if __name__ == "__main__":
    main()
