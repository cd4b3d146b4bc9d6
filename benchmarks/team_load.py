"""A team's store under load: many runs at a step a second, people who look, bursts of token records, and faults.

    python benchmarks/team_load.py                                  # 100 runs x 60 metrics, 4 readers, 5 minutes
    python benchmarks/team_load.py --runs 20 --seconds 60 --faults  # the server killed, stopped, cut off, its disk full

A PostgreSQL of its own on the same machine (fsync off, as in the tests). Runs are real ones of ``rlwatch.init``, ten
in a process, judged and forecast as ever. Every call of ``run.log`` is timed; in the end every row, value and token
record is read back. ``lost``, ``doubled``, ``dropped``, ``raised`` must be 0, or the exit code is 1. ``--beside`` does
the same into directories first, to have something to hold the calls against on a busy machine. The disk that fills up
is a tmpfs, which takes root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from postgres_server import PostgresServer, sql

import rlwatch
from rlwatch.errors import StoreError
from rlwatch.ports import Store
from rlwatch.records import SpikeBatch
from rlwatch.store.postgres.address import read_address
from rlwatch.store.postgres.server import Server
from rlwatch.store.postgres.spool import sync
from rlwatch.store.url import open_store

IN_A_PROCESS = 10
TOKENS = 100_000
"""Rows of a burst of token records."""
Found = dict[str, Any]


def value(run: int, step: int, metric: int) -> float:
    """What was logged there: every number is another."""
    return run * 1e7 + step * 1e3 + metric


def names(metrics: int) -> list[str]:
    known = ["reward", "entropy", "kl", "grad_norm"]
    return [*known, *(f"metric_{place:02d}" for place in range(metrics - len(known)))]


# The processes: trainers, and people who look.


def train(url: str, first: int, count: int, metrics: int, seconds: float, every_s: float) -> Found:
    """``count`` runs in this process, each a step a second; token records of one of them every ``every_s``."""
    logging.disable(logging.CRITICAL)
    runs = [
        rlwatch.init(store=url, run_id=f"run-{first + k}", project="load", system=False, sigterm=False)
        for k in range(count)
    ]
    said, took, raised, bursts = names(metrics), [], 0, dict.fromkeys(range(count), 0)
    waited, preempted = [], []
    tokens, noise = np.arange(TOKENS), np.random.default_rng(first)
    begin = time.monotonic()
    step, burst_at = 0, begin + random.Random(first).uniform(0.0, every_s)
    while time.monotonic() - begin < seconds:
        for k, run in enumerate(runs):
            row = {name: value(first + k, step, metric) for metric, name in enumerate(said)}
            lost, before = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
            try:
                run.log(row, step=step)
            except Exception:
                raised += 1
            took.append(time.perf_counter() - before)
            now = resource.getrusage(resource.RUSAGE_THREAD)
            if now.ru_nvcsw > lost.ru_nvcsw:
                waited.append(took[-1])
            elif now.ru_nivcsw > lost.ru_nivcsw:
                preempted.append(took[-1])
            if time.monotonic() > burst_at:
                burst_at += every_s
                columns = {"sequence": tokens // 1000, "position": tokens % 1000, "ratio": noise.random(TOKENS)}
                try:
                    run.log_spikes(SpikeBatch(step, columns))
                except Exception:
                    raised += 1
                bursts[k] += 1
            due = begin + step + (k + 1) / count
            time.sleep(max(0.0, due - time.monotonic()))
        step += 1
    for run in runs:
        run.finish()
    counted = {name: sum(run.counters[name] for run in runs) for name in ("dropped", "unkept", "bad_records")}
    return {
        "took": took,
        "waited": waited,
        "preempted": preempted,
        "raised": raised,
        "steps": step,
        "bursts": {f"run-{first + k}": n for k, n in bursts.items()},
        **counted,
    }


def look(url: str, seed: int, seconds: float) -> Found:
    """A person with a page: the list, then a run's charts, findings, alerts, commands; the next a second later."""
    logging.disable(logging.CRITICAL)
    chance, store, looks, refused = random.Random(seed), open_store(url), [], 0
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        before = time.monotonic()
        try:
            runs = store.runs()
            if runs:
                run_id = chance.choice(runs).run_id
                shown = store.metric_names(run_id)[:12]
                store.series(run_id, shown, points=240)
                for part in (store.findings, store.alerts, store.commands, store.last_values):
                    part(run_id)
            looks.append((before, time.monotonic() - before))
        except StoreError:
            refused += 1
        time.sleep(1.0)
    return {"looks": looks, "refused": refused}


# Faults


class Faults:
    """What happens to the server meanwhile; ``windows`` are from when until when it was not well."""

    def __init__(self, server: PostgresServer, disk: Path | None) -> None:
        self._server, self._disk = server, disk
        self.windows: list[tuple[str, float, float]] = []

    def happen(self, seconds: float) -> None:
        """All of them, spread over the time there is."""
        kinds = [self.killed, self.stopped, self.cut, *([self.full] if self._disk else [])]
        for kind in kinds:
            time.sleep(seconds / (2 * len(kinds)))
            begin = time.monotonic()
            told = kind(seconds / (4 * len(kinds)))
            self.windows.append((told, begin, time.monotonic()))
            time.sleep(seconds / (4 * len(kinds)))

    def killed(self, lasts_s: float) -> str:
        """``-m immediate`` while rows are being copied in."""
        with sql(self._server.url()) as db:
            until, copies = time.monotonic() + 10.0, 0
            copying = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'COPY%' AND state = 'active'"
            while not copies and time.monotonic() < until:
                copies = db.execute(copying).fetchone()[0]
            self._server.stop(signal.SIGQUIT)
        time.sleep(min(lasts_s, 5.0))
        self._server.start()
        return f"killed amid {copies} COPY"

    def stopped(self, lasts_s: float) -> str:
        """In its tracks: connections stay open, and nobody answers."""
        self._server.pause()
        time.sleep(min(lasts_s, 30.0))
        self._server.go_on()
        return "stopped"

    def cut(self, lasts_s: float) -> str:
        """Every connection, again and again."""
        until, times = time.monotonic() + min(lasts_s, 10.0), 0
        cutting = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rlwatch'"
        while time.monotonic() < until:
            with sql(self._server.url()) as db:
                times += len(db.execute(cutting).fetchall())
            time.sleep(1.0)
        return f"{times} connections cut"

    def full(self, lasts_s: float) -> str:
        """The server's disk has no room; it may die of that, and is started again once there is some."""
        assert self._disk is not None
        filler = self._disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        said = "nothing"
        try:
            with sql(self._server.url()) as db:
                db.execute("CREATE TABLE probe AS SELECT random() FROM generate_series(1, 1000000)")
        except psycopg.Error as error:
            said = str(error).splitlines()[0]
        time.sleep(min(lasts_s, 20.0))
        filler.unlink()
        process = self._server.process
        time.sleep(1.0)
        died = process is None or process.poll() is not None
        if died:
            self._server.start()
        return f"disk full (it says: {said}{', and died of it' if died else ''})"


# All of it


def counted(store: Store, done: list[Found], metrics: int) -> Found:
    """What is there, held against what was logged: rows, values, token records."""
    found = {"rows": 0, "lost": 0, "doubled": 0, "wrong": 0, "tokens": 0, "tokens_lost": 0, "tokens_doubled": 0}
    said = names(metrics)
    for one in done:
        for run_id, bursts in one["bursts"].items():
            number = int(run_id.removeprefix("run-"))
            records = [record for record in store.records(run_id) if said[0] in record.metrics]
            steps = [record.step for record in records]
            found["rows"] += len(steps)
            found["doubled"] += len(steps) - len(set(steps))
            found["lost"] += len(set(range(one["steps"])) - set(steps))
            true = (
                all(record.metrics.get(name) == value(number, record.step, m) for m, name in enumerate(said))
                for record in records
            )
            found["wrong"] += sum(not each for each in true)
            batches = [len(batch.columns["ratio"]) for batch in store.spikes(run_id)]
            found["tokens"] += sum(batches)
            found["tokens_lost"] += max(0, bursts - len(batches)) * TOKENS + sum(TOKENS - n for n in batches)
            found["tokens_doubled"] += max(0, len(batches) - bursts) * TOKENS
    return found


def load(
    url: str, args: argparse.Namespace, during: Callable[[], None] | None = None
) -> tuple[list[Found], list[Found]]:
    """Trainers and people until the time is over; what each told."""
    with tempfile.TemporaryDirectory(prefix="rlwatch-told-") as told:
        started: list[tuple[Path, subprocess.Popen[bytes]]] = []

        def start(*words: object) -> None:
            out = Path(told, str(len(started)))
            command = [sys.executable, __file__, "--child", str(out), *map(str, words)]
            started.append((out, subprocess.Popen(command)))

        for first in range(0, args.runs, IN_A_PROCESS):
            count = min(IN_A_PROCESS, args.runs - first)
            start("train", url, first, count, args.metrics, args.seconds, args.burst_every * args.runs / count)
        trainers = len(started)
        for seed in range(args.readers):
            start("look", url, seed, args.seconds)
        if during is not None:
            during()
        found: list[Found] = []
        for out, process in started:
            if process.wait(args.seconds + 900.0) != 0:
                raise SystemExit(f"a process ended with {process.returncode}")
            found.append(json.loads(out.read_text()))
        return found[:trainers], found[trainers:]


def left_shipped(local: Path) -> int:
    """Ship what trainers left on the node; how many spools would not go."""
    server_of = lambda url: Server(read_address(url), patience_s=30.0, lock_wait_s=5.0, hurried=False)  # noqa: E731
    return len(sync(local, server_of)[1])


def quantiles(done: list[Found]) -> str:
    """How long calls took, and those whose thread neither waited (a lock, the interpreter's) nor lost its core."""
    taken, waited, preempted = (
        sorted(t for one in done for t in one[name]) for name in ("took", "waited", "preempted")
    )
    kept = sorted((Counter(taken) - Counter(waited) - Counter(preempted)).elements())
    p50, p99, own = (1e6 * some[int(len(some) * q)] for some, q in ((taken, 0.5), (taken, 0.99), (kept, 0.99)))
    return (
        f"p50 {p50:,.0f} us, p99 {p99:,.0f} us, max {1e3 * taken[-1]:,.1f} ms of {len(taken):,} calls; "
        f"{len(waited)} waited, {len(preempted)} lost their core, p99 of the others {own:,.0f} us"
    )


def looked(people: list[Found], windows: list[tuple[str, float, float]]) -> str:
    """How long a look took, while the server was well and at all."""
    every = [(at, took) for one in people for at, took in one["looks"]]
    well = [took for at, took in every if not any(begin - took <= at <= end for _, begin, end in windows)]
    told = (
        f"p50 {1e3 * statistics.median(well):,.0f} ms, worst {1e3 * max(well):,.0f} ms of {len(well)} looks"
        if well
        else "-"
    )
    during = [took for at, took in every if any(begin - took <= at <= end for _, begin, end in windows)]
    worst = f"; during faults {len(during)}, worst {max(during):,.1f} s" if during else ""
    return f"{told}{worst}; {sum(one['refused'] for one in people)} refused in words"


@contextlib.contextmanager
def own_server(args: argparse.Namespace) -> Iterator[tuple[PostgresServer, Path | None]]:
    """A server with its data in a small file system, where there are faults and we may make one."""
    with tempfile.TemporaryDirectory(prefix="rlwpg") as place, contextlib.ExitStack() as undo:
        disk = Path(place) if args.faults and os.getuid() == 0 else None
        if disk is not None:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={args.disk_mb}m", "tmpfs", disk], check=True)
            undo.callback(subprocess.run, ["umount", "-l", disk], check=False)
        Path(place).chmod(0o755)
        data = Path(place, "cluster")
        data.mkdir()
        server = PostgresServer(directory=data, also={"max_connections": 4 * args.runs + 50, "shared_buffers": "128MB"})
        undo.callback(server.stop, signal.SIGQUIT)
        server.start()
        yield server, disk


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        out, what, url, *numbers = sys.argv[2:]
        found = (
            train(url, *map(int, numbers[:3]), *map(float, numbers[3:]))
            if what == "train"
            else look(url, int(numbers[0]), float(numbers[1]))
        )
        Path(out).write_text(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--metrics", type=int, default=60)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument(
        "--burst-every", type=float, default=10.0, help="seconds between bursts of 100,000 token records"
    )
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--disk-mb", type=int, default=1500, help="of the server's disk, where it is to fill up")
    parser.add_argument("--beside", action="store_true", help="the same into directories, first")
    args = parser.parse_args()
    size = f"{args.runs} runs x {args.metrics} metrics, {args.readers} readers, {args.seconds:g} s"
    print(f"{size}; load of the machine {os.getloadavg()[0]:.1f}")
    if args.beside:
        with tempfile.TemporaryDirectory(prefix="rlwatch-load-") as place:
            done, people = load(place, args)
            print(f"directory   run.log {quantiles(done)}")
            print(f"            a look {looked(people, [])}")
            print(f"            {json.dumps(counted(open_store(place), done, args.metrics))}")
    with own_server(args) as (server, disk), tempfile.TemporaryDirectory(prefix="rlwatch-local-") as local:
        os.environ["RLWATCH_LOCAL_DIR"] = local
        url = server.url("load")
        open_store(url).open_run(rlwatch.records.RunInfo("first")).close()  # makes the tables
        faults = Faults(server, disk)
        done, people = load(url, args, (lambda: faults.happen(args.seconds)) if args.faults else None)
        unsent = left_shipped(Path(local))
        result = counted(open_store(url), done, args.metrics) | {"unsent": unsent}
        result |= {name: sum(one[name] for one in done) for name in ("raised", "dropped", "unkept", "bad_records")}
        with contextlib.suppress(psycopg.Error), sql(url) as db:
            result["server_mb"] = round(db.execute("SELECT pg_database_size('postgres')").fetchone()[0] / 1e6)
    print(f"PostgreSQL  run.log {quantiles(done)}")
    print(f"            a look {looked(people, faults.windows)}")
    for kind, begin, end in faults.windows:
        print(f"            {kind}, {end - begin:.1f} s")
    if args.faults and disk is None:
        print("            a full disk was not tried: it takes root")
    print(f"            {json.dumps(result)}")
    bad = ("lost", "doubled", "wrong", "tokens_lost", "tokens_doubled", "unsent", "raised", "dropped", "unkept")
    if any(result[name] for name in bad):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
