"""What a snapshot of weights and optimizer costs the training thread, for a model of 135 million parameters.

    python benchmarks/snapshot_cost.py [--device cuda] [--reps 5] [--step-s 10] [--every 10] [--quick]

A random Llama of SmolLM2's shape in float32 with AdamW: weights and two moments, 1.6 GB. ``thread`` is the time that
the training thread spends in the boundary once memory is used again; ``first`` that of the first, which takes it.
``copied`` is the time until everything is in host memory: on a GPU it passes while training goes on. ``step`` is the
time of an update alone, ``step beside`` of one right after a snapshot began, whose optimizer waits for the copies. The
share is that of the thread in a step of ``--step-s`` seconds: in the step that takes one, and in the mean over
``--every``. ``back`` is a roll-back, with the copy of the state that it undoes. At the end weights and moments that
were put back are compared with those of the snapshot, bit for bit. ``--quick`` is a tiny model: it shows that this
runs, and no figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlwatch.control.policy import RunHealth
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.snapshot_state import Holdings, SideCopier
from rlwatch.integrations.snapshots import SnapshotKeeper, Snapshots

SMOL = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {**SMOL, "vocab_size": 512, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=10.0)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--memory-gb", type=float, default=5.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(TINY if args.quick else SMOL))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    training = Training(model, optimizer, device)
    training.step()
    run: Any = SimpleNamespace(
        measures=True,
        world_size=1,
        rank=0,
        health=RunHealth,
        info=SimpleNamespace(run_id="r"),
        event=lambda *_, **__: None,
    )
    held = Holdings(model, [optimizer])
    keeper = SnapshotKeeper(
        Snapshots(every=1, keep=3, share=1.0, memory_gb=args.memory_gb), lambda: held, ErrorBoundary(run)
    )
    rows = measured(training, keeper, args.reps)
    exact = put_back_exactly(training, keeper, held)
    report(rows, model, keeper, args, exact)


class Training:
    """Updates on random tokens."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.ids = torch.randint(0, 512, (2, 16), device=device)

    def step(self) -> float:
        """Milliseconds of one update, device included."""
        self.wait()
        return timed(self.update)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.wait()


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def measured(training: Training, keeper: SnapshotKeeper, reps: int) -> dict[str, list[float]]:
    """Milliseconds of each of ``reps`` snapshots once the ring is full, whose buffers are used again."""
    names = ("first", "thread", "thread, CPU", "copied", "step", "step beside")
    found: dict[str, list[float]] = {name: [] for name in names}
    full = keeper.settings.keep + 4
    for turn in range(full + reps):
        training.wait()
        begin, cpu = time.perf_counter(), time.thread_time()
        thread = timed(lambda turn=turn: keeper.look(turn))
        cpu = 1e3 * (time.thread_time() - cpu)
        if turn >= full and training.device.type == "cuda":  # on a CPU nothing is under way any more
            found["step beside"].append(timed(training.update))
        keeper.taken[-1].fence.wait()
        if turn == 0:
            found["first"].append(thread)
        elif turn >= full:
            found["thread"].append(thread)
            found["thread, CPU"].append(cpu)
            found["copied"].append(1e3 * (time.perf_counter() - begin))
            found["step"].append(training.step())
    return found


def put_back_exactly(training: Training, keeper: SnapshotKeeper, held: Holdings) -> tuple[bool, float]:
    """Whether the state of a snapshot comes back bit for bit after two updates, and the milliseconds it takes."""
    training.wait()
    keeper.look(1000)
    wanted, fence = SideCopier().copy(held)
    fence.wait()
    training.step(), training.step()
    kept = keeper.fits(keeper.find("1000"))

    def back() -> None:
        before = keeper.now(1002)
        keeper.put_back(kept, before.state(), generators=False)
        training.wait()

    took = timed(back)
    now, fence = SideCopier().copy(held)
    fence.wait()
    same = now.tensors.keys() == wanted.tensors.keys()
    return same and all(torch.equal(now.tensors[name], tensor) for name, tensor in wanted.tensors.items()), took


def report(
    rows: dict[str, list[float]], model: Any, keeper: SnapshotKeeper, args: Any, exact: tuple[bool, float]
) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    size = keeper.taken[-1].nbytes / 2**30
    where = torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{parameters / 1e6:.1f} M parameters, {size:.2f} GiB a snapshot, {where}, torch {torch.__version__}")
    for name, values in rows.items():
        if values:
            print(f"{name}: {statistics.median(values):.1f} ms [{min(values):.1f}-{max(values):.1f}], n={len(values)}")
    once = statistics.median(rows["thread"]) / (1e3 * args.step_s)
    mean = once / args.every
    print(f"share of a step of {args.step_s:g} s that takes one: {once:.3%}; of {args.every} steps: {mean:.4%}")
    print(f"back: {exact[1]:.0f} ms; bit for bit: {exact[0]}")


if __name__ == "__main__":
    main()
