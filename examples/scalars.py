"""Any loop, any framework: `run.log` the numbers you have. Here REINFORCE on a bandit of 64 arms, without torch.

    python examples/scalars.py             # then: rlwatch show bandit, or rlwatch ui

The learning rate is far too high on purpose: watch the entropy go.
"""

import argparse
import math
import random

import rlwatch


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default=None, help="where the run goes (default: ./rlwatch-runs)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3.0)
    args = parser.parse_args()
    rng = random.Random(0)
    logits = [rng.gauss(0.0, 0.1) for _ in range(64)]
    payoff = [rng.random() for _ in logits]

    with rlwatch.init(project="examples", name="bandit", store=args.store, config={"lr": args.lr}) as run:
        for step in range(args.steps):
            probs = softmax(logits)
            arms = rng.choices(range(64), probs, k=16)
            rewards = [payoff[arm] + rng.gauss(0.0, 0.05) for arm in arms]
            baseline = sum(rewards) / len(rewards)
            gradient = [0.0] * 64
            for arm, reward in zip(arms, rewards, strict=True):
                for i, p in enumerate(probs):
                    gradient[i] += (reward - baseline) * ((i == arm) - p) / len(arms)
            logits = [x + args.lr * g for x, g in zip(logits, gradient, strict=True)]
            run.log(
                {
                    "policy/entropy": -sum(p * math.log(p) for p in probs if p > 0),
                    "policy/vocab_size": 64,
                    "reward/mean": baseline,
                    "optim/grad_norm": math.sqrt(sum(g * g for g in gradient)),
                    "optim/lr": args.lr,
                },
                step=step,
            )
            for command in run.commands():
                command.reject("a bandit has no reference policy", step=step)
    print(f"recorded {run.info.run_id}")


if __name__ == "__main__":
    main()
