"""Any Trainer of Hugging Face with one added line (CPU, no downloads).

    python examples/transformers_trainer.py --steps 40

In your own script the line is the same: `watch(trainer, project="my-project")`. For TRL's GRPO and RLOO use
`rlwatch.integrations.trl`, which sees every token too.
"""

import argparse
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from rlwatch.integrations.transformers import watch


class Regression(nn.Module):
    """Two layers; a Trainer takes any model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 1)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.layers[0](x))
        return {"loss": (self.layers[1](hidden).squeeze(-1) - y).square().mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default=None, help="where the run goes (default: ./rlwatch-runs)")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = [{"x": x, "y": x.sum()} for x in torch.randn(256, 8)]
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=Regression(),
            args=TrainingArguments(
                directory, max_steps=args.steps, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True
            ),
            train_dataset=rows,
        )
        run = watch(trainer, project="examples", name="regression", store=args.store)
        trainer.train()
    print(f"recorded {run.info.run_id}")


if __name__ == "__main__":
    main()
