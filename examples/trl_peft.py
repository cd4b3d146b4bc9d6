"""TRL GRPO of a LoRA adapter with one added line, on a tiny random model and a toy task (CPU, no downloads).

    python examples/trl_peft.py --steps 20

The reference is the model without its adapter. Told `rlwatch command RUN reset-reference`, rlwatch freezes a copy of
the adapter as the new one. A few completions are kept as text, to be read in the dashboard.
"""

import argparse
import random
import tempfile
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from rlwatch.demo import training
from rlwatch.demo.training import character_tokenizer, random_policy, saved_and_loaded
from rlwatch.integrations.trl import watch


def build_trainer(directory: Path, steps: int) -> GRPOTrainer:
    """A tiny trainer; yours goes here."""
    tokenizer = character_tokenizer()
    prompts = [{"prompt": text, "target": training.answer(text)} for text in training.prompts(256, random.Random(0))]
    return GRPOTrainer(
        model=saved_and_loaded(random_policy(tokenizer), tokenizer, directory / "policy"),
        reward_funcs=training.sorting,
        args=GRPOConfig(
            output_dir=str(directory / "output"),
            max_steps=steps,
            learning_rate=1e-2,
            per_device_train_batch_size=16,
            num_generations=8,
            num_iterations=2,
            max_completion_length=training.LONGEST,
            beta=0.05,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default=None, help="where the run goes (default: ./rlwatch-runs)")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(Path(directory), args.steps)
        run = watch(trainer, project="examples", name="tiny-lora", store=args.store, completions=True)
        trainer.train()
    print(f"recorded {run.info.run_id}")


if __name__ == "__main__":
    main()
