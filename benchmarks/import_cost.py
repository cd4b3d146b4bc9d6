"""What reading a large log costs, beside the source's own reader: seconds and peak memory, a fresh process each.

    python benchmarks/import_cost.py [--reps 3] [--share 1.0] [--only aim]

Three logs are written to a temporary directory: 100 MB of verl's console, an event file of a million scalars, a wandb
file of 20,000 steps. verl has no reader: a loop over the lines with one regular expression stands for it. wandb's is
its own protocol's messages behind a frame reader in Python, since wandb itself ships none any more. ``--share`` makes
all of them smaller. A fourth is written where it is asked for and where aim and pandas are installed: a repository of
Aim with 20,000 steps, which takes minutes; its reader is the query of its SDK, into DataFrames.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

BLOCK, HEAD = 32768, 7


def write_verl(path: Path, share: float) -> None:
    rng = random.Random(0)
    names = [f"{family}/{name}" for family in ("actor", "critic", "perf", "timing_s") for name in "abcdefghijklmnop"]
    names += ["actor/entropy", "actor/grad_norm", "critic/score/mean", "response_length/mean", "actor/ppo_kl"]
    noise = "(WorkerDict pid=7) generated: " + "lorem ipsum dolor sit amet " * 40 + "\n"
    with path.open("w") as log:
        step = 0
        while log.tell() < 100e6 * share:
            step += 1
            log.write(f"(TaskRunner pid=9) step:{step} - " + " - ".join(f"{n}:{rng.random()}" for n in names) + "\n")
            log.write(noise * 8)


def write_events(path: Path, share: float) -> None:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(logdir=str(path))
    names = ["entropy", "grad_norm", "reward", "kl", "loss", *(f"m{i}" for i in range(45))]
    for step in range(int(20_000 * share)):
        for name in names:
            writer.add_scalar(f"train/{name}", step * 0.5, step)
    writer.close()


def write_wandb(path: Path, share: float) -> None:
    from wandb.proto import wandb_internal_pb2 as wandb

    names = ["entropy", "grad_norm", "reward", "kl", "loss", *(f"m{i}" for i in range(45))]
    rng, out = random.Random(0), bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for step in range(int(20_000 * share)):
        record = wandb.Record()
        for name, value in {
            "train/global_step": step,
            "_step": step,
            **{f"train/{n}": rng.random() for n in names},
        }.items():
            record.history.item.add(nested_key=[name], value_json=json.dumps(value))
        append(out, record.SerializeToString())
    path.write_bytes(out)


def write_aim(path: Path, share: float) -> None:
    import aim

    rng = random.Random(0)
    names = ["entropy", "grad_norm", "reward", "kl", "loss", *(f"m{i}" for i in range(25))]
    run = aim.Run(repo=str(path), system_tracking_interval=None, capture_terminal_logs=False)
    for step in range(int(20_000 * share)):
        run.track({name: rng.random() for name in names}, step=step)
    run.close()
    reindex = [str(Path(sys.executable).with_name("aim")), "storage", "--repo", str(path), "reindex"]
    subprocess.run(reindex, input=b"y\n", capture_output=True, check=True)  # a query finds nothing before


def append(out: bytearray, record: bytes) -> None:
    """One record in frames, with its checksums."""
    first = True
    while first or record:
        room = BLOCK - len(out) % BLOCK
        if room < HEAD:
            out += bytes(room)
            room = BLOCK
        part, record = record[: room - HEAD], record[room - HEAD :]
        kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not record]
        out += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
        first = False


def with_rlwatch(path: Path) -> int:
    from rlwatch.importers import read_log

    return sum(len(record.metrics) for run in read_log(path) for record in run.records)


def with_lines(path: Path) -> int:
    pair, count = re.compile(r"([\w/]+):([-+.\deE]+)"), 0
    kept = []
    with path.open() as log:
        for line in log:
            if " - " in line:
                kept.append({name: float(value) for name, value in pair.findall(line.partition("step:")[2]) if value})
                count += len(kept[-1])
    return count


def with_tensorboard(path: Path) -> int:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return sum(len(read.Scalars(tag)) for tag in read.Tags()["scalars"])


def with_messages(path: Path) -> int:
    from wandb.proto import wandb_internal_pb2 as wandb

    kept = []
    for frame in frames(path.read_bytes()):
        record = wandb.Record()
        record.ParseFromString(frame)
        kept.append(
            {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        )
    return sum(map(len, kept))


def frames(data: bytes) -> Iterator[bytes]:
    at, whole = HEAD, bytearray()
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):
            yield bytes(whole)
            whole.clear()


def with_aim(path: Path) -> int:
    from aim import Repo
    from aim.sdk.types import QueryReportMode

    found = Repo(str(path)).query_metrics("", report_mode=QueryReportMode.DISABLED)
    return sum(map(len, [metric.dataframe() for run in found.iter_runs() for metric in run]))


READERS: dict[str, Callable[[Path], int]] = {
    "rlwatch": with_rlwatch, "lines": with_lines, "tensorboard": with_tensorboard, "messages": with_messages,
    "aim": with_aim,
}  # fmt: skip
LOGS: dict[str, tuple[str, str, Callable[[Path, float], None], str]] = {
    "console": ("verl's console, 100 MB", "train.log", write_verl, "lines"),
    "events": ("event file, 1,000,000 scalars", "board", write_events, "tensorboard"),
    "wandb": ("wandb file, 20,000 steps of 50 metrics", "run-a.wandb", write_wandb, "messages"),
    "aim": ("repository of Aim, 20,000 steps of 30 metrics", "project", write_aim, "aim"),
}
USUAL = ("console", "events", "wandb")
CALLED = {
    "rlwatch": "rlwatch",
    "lines": "a loop over lines",
    "tensorboard": "EventAccumulator",
    "messages": "wandb's messages",
    "aim": "Aim's query, to DataFrames",
}


def measured(reader: str, path: Path) -> tuple[float, float, int]:
    """CPU seconds, peak MB and values of one reading in a fresh process."""
    out = subprocess.run(
        [sys.executable, __file__, "--read", reader, str(path)], capture_output=True, text=True, check=True
    )
    seconds, peak, values = json.loads(out.stdout.splitlines()[-1])
    return seconds, peak, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--only", action="append", choices=LOGS, help="a log; may be given again")
    parser.add_argument("--read", nargs=2, metavar=("READER", "PATH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        began = time.process_time()
        values = READERS[args.read[0]](Path(args.read[1]))
        status = Path("/proc/self/status").read_text()  # ru_maxrss would know of the process that started this one
        peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        print(json.dumps([time.process_time() - began, peak, values]))
        return
    print("| log | reader | values | CPU s | peak MB |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for title, name, write, own in (LOGS[log] for log in args.only or USUAL):
            path = Path(folder) / name
            write(path, args.share)
            for reader in ("rlwatch", own):
                rows = [measured(reader, path) for _ in range(args.reps)]
                seconds, peak = (statistics.median(row[at] for row in rows) for at in (0, 1))
                print(f"| {title} | {CALLED[reader]} | {rows[0][2]:,} | {seconds:.1f} | {peak:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
