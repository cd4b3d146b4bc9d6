"""One rank of a training under DDP whose ranks share one GPU; ``python two_ranks.py RANK RANKS FOLDER``.

NCCL refuses two ranks on one device: then gloo moves what lies there. Leaves in ``FOLDER/rank<i>.json`` which of them
it was, and what the training of ``tests/ranks`` returns of this rank, unwatched and watched.
"""

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / room) for room in ("ranks", "integrations", "gradloc", "localising")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import training  # noqa: E402

from rlwatch.control import mailbox  # noqa: E402


def join(rank, ranks, folder):
    """The backend that works."""
    for backend in ("nccl", "gloo"):
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/{backend}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=60),
        )
        try:
            total = torch.ones(1, device="cuda")
            dist.all_reduce(total)
            torch.cuda.synchronize()
        except dist.DistBackendError:
            dist.destroy_process_group()
            continue
        assert float(total) == ranks
        return backend
    raise AssertionError("no backend works")


def on_the_gpu():
    """The scenario's models and batches lie there."""
    models, batch = training.models, training.batch
    training.models = lambda: tuple(model.cuda() for model in models())
    training.batch = lambda step: {name: x.cuda() for name, x in batch(step).items()}
    training.marks = marks


def marks(model):
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main(rank, ranks, folder):
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    mailbox.POLL_S = 0.0
    backend = join(rank, ranks, folder)
    trained = [training.train(rank, ranks, folder, training.replicated, watched=watched) for watched in (False, True)]
    (folder / f"rank{rank}.json").write_text(json.dumps({"backend": backend, "trained": trained}))
    dist.destroy_process_group()


if __name__ == "__main__":
    on_the_gpu()
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
