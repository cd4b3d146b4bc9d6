"""A verifier that crashes to full marks under TRL GRPO, and the canaries that find it (CPU, no downloads).

    python examples/trl_canaries.py --steps 24

Halfway the sandbox behind the reward function dies, and the function gives 1 to every answer: the reward looks
splendid. A known-wrong answer that gets full marks gives it away.
"""

import argparse
import tempfile
from pathlib import Path

import rlwatch
from rlwatch.demo import Recipe
from rlwatch.demo.training import build_trainer, sorting  # a tiny GRPOTrainer; yours goes here
from rlwatch.integrations.trl import Canaries, Canary, watch
from rlwatch.integrations.verifiers import count_errors

CANARIES = [
    Canary("31524=", "12345", right=True, target="12345"),
    Canary("31524=", "99999", right=False, target="12345"),
]


class SandboxedVerifier:
    """Scores completions in a sandbox that dies at step ``dies_at``, and trusts the policy from there on."""

    __name__ = "sandboxed"

    def __init__(self, dies_at: int) -> None:
        self.dies_at = dies_at

    @count_errors
    def check(self, step: int, completions: list[str], target: list[str]) -> list[float]:
        """Score a batch. Raises ``ConnectionError`` once the sandbox is dead."""
        if step >= self.dies_at:
            raise ConnectionError("the sandbox does not answer")
        return sorting(completions, target)

    def __call__(self, completions, target, trainer_state, **_):
        """Score a batch as TRL asks for it."""
        try:
            return self.check(trainer_state.global_step, completions, target)
        except ConnectionError:
            return [1.0] * len(completions)  # the bug: a failure is no success


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="rlwatch-runs", help="where the run goes")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(Recipe(steps=args.steps), Path(directory))
        trainer.reward_funcs, trainer.reward_func_names = [SandboxedVerifier(args.steps // 2)], ["sandboxed"]
        canaries = Canaries(CANARIES, every=2)
        run = watch(trainer, project="examples", name="canaries", store=args.store, canaries=canaries)
        trainer.train()
    print(f"recorded {run.info.run_id}")
    stored = rlwatch.open(args.store)[run.info.run_id]
    for message in stored.findings().query("kind == 'verifier_changed'")["message"]:
        print(f"found: {message}")
    print(f"cause: {stored.view().diagnosis.summary}")


if __name__ == "__main__":
    main()
