"""Starts one process for each rank of the scenarios it is told: what is heavy is imported once for all of them.

A line of standard input is a piece of JSON: ``{"scenarios": [[MODULE:FUNCTION, RANKS, FOLDER], ...], "said": FILE,
"environment": {...}}``. They are played one after the other, in a process and a session of their own, whose number is
answered at once, and its status when it has ended. Each rank calls ``FUNCTION(rank, ranks, folder)`` within a gloo
process group, and leaves what it returns as JSON in ``FOLDER/rank<i>.json``; what is said goes to ``FILE``.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parent.parent / room) for room in ("integrations", "gradloc", "localising")),
]
torch.set_num_threads(1)


def run(function, rank, ranks, folder):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GLOO_SOCKET_IFNAME="lo",
    )
    result = function(rank, ranks, folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def start(function, rank, ranks, folder):
    """Fork the process of ``rank``; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run(function, rank, ranks, folder)
        status = 0
    except BaseException:
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def play(where, ranks, folder):
    module, _, name = where.partition(":")
    function = getattr(import_module(module), name)
    pids = [start(function, rank, ranks, folder) for rank in range(ranks)]
    for pid in pids:
        os.waitpid(pid, 0)


def perform(scenarios, said, environment):
    """Fork the process that plays; returns its id."""
    for where, _, _ in scenarios:
        import_module(where.partition(":")[0])
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        with Path(said).open("wb") as out, Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.update(environment)
        for where, ranks, folder in scenarios:
            play(where, ranks, Path(folder))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    for line in sys.stdin:
        pid = perform(**json.loads(line))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitpid(pid, 0)[1]}\n")
        sys.stdout.flush()
