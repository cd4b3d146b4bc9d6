"""TRL GRPO with one added line, on a tiny random model and a toy task (CPU, no downloads).

    python examples/trl_grpo.py --steps 20

In your own script the line is the same: `watch(trainer, project="math-rl")`.
"""

import argparse
import tempfile
from pathlib import Path

from rlwatch.demo import Recipe
from rlwatch.demo.training import build_trainer  # a tiny GRPOTrainer; yours goes here
from rlwatch.integrations.trl import watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default=None, help="where the run goes (default: ./rlwatch-runs)")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(Recipe(steps=args.steps), Path(directory))
        run = watch(trainer, project="examples", name="tiny-grpo", store=args.store)
        trainer.train()
    print(f"recorded {run.info.run_id}")


if __name__ == "__main__":
    main()
