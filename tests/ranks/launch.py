"""Starts one process for each rank of a scenario: ``python launch.py MODULE:FUNCTION RANKS FOLDER ...``.

Several scenarios run one after the other. What is heavy is imported once, before the ranks are forked. Each calls ``FUNCTION(rank, ranks, folder)`` within a
gloo process group, and leaves what it returns as JSON in ``FOLDER/rank<i>.json``.
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


if __name__ == "__main__":
    for scenario, ranks, folder in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3], strict=True):
        play(scenario, int(ranks), Path(folder))
