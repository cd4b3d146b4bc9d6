"""You log to wandb already: one added line, and rlwatch watches what you log.

    python examples/tee_wandb.py           # offline: needs no account

The policy of this made-up training collapses on purpose. What rlwatch finds goes back to wandb: as an alert, and
as the metric `rlwatch/entropy_collapse`.
"""

import argparse
import math
import random
import tempfile

import wandb

import rlwatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default=None, help="where the run goes (default: ./rlwatch-runs)")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    rng = random.Random(0)

    tee = rlwatch.tee_wandb(store=args.store, send_back=True)  # the added line

    with tempfile.TemporaryDirectory() as directory:
        with wandb.init(project="examples", name="collapse", mode="offline", dir=directory, config={"lr": 1e-6}) as run:
            for step in range(args.steps):
                sane = 1 / (1 + math.exp((step - 0.6 * args.steps) / 2))
                run.log(
                    {
                        "train/global_step": step,
                        "train/entropy": 0.01 + sane * rng.gauss(0.7, 0.02),
                        "train/reward": sane * rng.gauss(0.5, 0.05),
                        "train/grad_norm": rng.gauss(1.0, 0.1),
                    }
                )
                if tee.run:  # a real training takes its time: a step is judged when the next one begins
                    tee.run.flush()
        wandb.teardown()
    print(f"recorded {tee.run.info.run_id}")


if __name__ == "__main__":
    main()
