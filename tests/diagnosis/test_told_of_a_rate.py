"""A run that had solved its task, and whose optimizer was given sixty times the rate: that is what is said of it."""

import random

import pytest

import rlwatch
from rlwatch.diagnosis import Confidence, Nature
from rlwatch.records import Severity

FAULT = 30


def solved_and_broken(rate=1.2e-3, seed=0, steps=70):
    """Sums learnt by step 24, answers at the limit of 12 tokens from the first row; the scheduler's log stays as it is."""
    draw, rows = random.Random(seed), []
    for step in range(1, steps + 1):
        broken = step > FAULT
        learnt = min(1.0, step / 10)
        reward = 0.2 + 0.78 * learnt if not broken else (0.5, 0.45, 0.06, 0.0)[min(step - FAULT - 1, 3)]
        reward = min(1.0, max(0.0, reward + (0.0 if reward == 0.0 else draw.gauss(0, 0.03))))
        rows.append(
            {
                "step": step, "reward/mean": reward, "reward/std": 0.3 * (1 - abs(2 * reward - 1)),
                "reward/zero_std_frac": 1.0 if reward in (0.0, 1.0) else 0.5, "learning_rate": 2e-5,
                "optim/lr": rate if step >= FAULT else 2e-5, "len/mean": 12.0, "len/max": 12.0, "len/min": 12.0,
                "len/clipped": 1.0, "optim/grad_norm": (0.0 if reward == 0.0 else 3.0 + draw.gauss(0, 0.3)),
                "policy/entropy": 0.2 if broken else 2.3 - 1.9 * learnt + draw.gauss(0, 0.02),
            }
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_the_rate_that_the_optimizer_held_is_the_cause(seed):
    """Not the answers at the limit, which were there while the reward was 1; and no earlier than it was turned."""
    told = rlwatch.scan(solved_and_broken(seed=seed), source="trl/grpo")
    first = told.diagnosis.causes[0]

    assert (first.knob, first.nature, first.sure) == ("learning_rate", Nature.CAUSE, Confidence.STRONG)
    assert first.title == f"Learning rate x 60 since step {FAULT} (2e-05 to 0.0012)"
    assert min(f.onset_step for f in told.findings if f.severity is Severity.CRITICAL) >= FAULT


def test_without_the_optimizers_rate_no_knob_is_named():
    """The scheduler's log says nothing, and neither does the diagnosis of a knob."""
    rows = [{name: value for name, value in row.items() if name != "optim/lr"} for row in solved_and_broken()]
    told = rlwatch.scan(rows, source="trl/grpo").diagnosis

    assert {cause.knob for cause in told.causes} <= {""}
    assert told.nature is not Nature.CAUSE
