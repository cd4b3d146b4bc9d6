"""Which signals move before the reward falls, and which move in healthy runs too?

    python benchmarks/leading_signals.py     plays all runs (minutes), prints the table of docs/leading-signals.md

Faults are planted at step 50 of a tiny GRPO run (:mod:`tiny_world`). A run has failed once the share of right answers
has lost 30 % of its level for three rows. A signal has moved once it is beyond six robust deviations of its rows before
step 50 for three rows. Its lead is the steps from there to the failure; the placebo is the share of healthy runs in
which it moves in the same steps.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tiny_world import Plan, trained

BEGIN, STEPS = 50, 110
FAULTS = [
    Plan("learning rate x 80", at=BEGIN, rate=80.0),
    Plan("learning rate x 30, 8 epochs", at=BEGIN, rate=30.0, epochs=8),
    Plan("learning rate x 50, old weights", at=BEGIN, rate=50.0, stale=20),
    Plan("learning rate x 15, advantages less 3", at=BEGIN, rate=15.0, shift=3.0),
    Plan("entropy bonus 4", at=BEGIN, entropy=4.0),
]
SEEDS, HEALTHY = (0, 1), 6
SIGNALS = (
    "text/control_share", "text/control_prob", "text/control_malformed", "policy/energy", "policy/energy_pushed",
    "policy/energy_response", "optim/grad_agreement", "optim/update_ratio", "optim/update_head", "ratio/tv",
    "ratio/token_kl", "mismatch/kl_entropy", "mismatch/template_ratio", "reward/starvation_margin", "policy/entropy",
    "optim/grad_norm",
)  # fmt: skip
DEVIATIONS, LASTING, LOST = 6.0, 3, 0.3


def lasting(moved: Sequence[bool]) -> int | None:
    """The first place from which ``LASTING`` in a row hold."""
    return next((i for i in range(len(moved) - LASTING + 1) if all(moved[i : i + LASTING])), None)


def moves(values: Sequence[float | None]) -> int | None:
    """The first step from ``BEGIN`` on at which a signal is far from its rows before; None where it never is."""
    before = [value for value in values[15 : BEGIN - 1] if value is not None]
    if len(before) < 10:
        return None
    middle = median(before)
    spread = max(1.4826 * median(abs(value - middle) for value in before), 1e-3 * abs(middle), 1e-9)
    after = [value is not None and abs(value - middle) > DEVIATIONS * spread for value in values[BEGIN - 1 :]]
    place = lasting(after)
    return None if place is None else BEGIN + place


def main() -> None:
    logging.disable(logging.CRITICAL)
    leads: dict[str, list[int | None]] = {name: [] for name in SIGNALS}
    placebo: dict[str, int] = dict.fromkeys(SIGNALS, 0)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for plan in FAULTS:
            for seed in SEEDS:
                result = trained(plan, seed, Path(folder), steps=STEPS)
                level = median(result["truth"][30 : BEGIN - 1])
                place = lasting([value < (1 - LOST) * level for value in result["truth"][BEGIN - 1 :]])
                print(f"{plan.name}, seed {seed}: fails at {None if place is None else BEGIN + place}", flush=True)
                if place is None:
                    continue
                failed += 1
                for name in SIGNALS:
                    first = moves([row.get(name) for row in result["rows"]])
                    leads[name].append(None if first is None else BEGIN + place - first)
        for seed in range(100, 100 + HEALTHY):
            rows = trained(Plan(f"healthy {seed}", at=10**6), seed, Path(folder), steps=STEPS)["rows"]
            for name in SIGNALS:
                placebo[name] += moves([row.get(name) for row in rows]) is not None
    print(f"{failed} of {len(FAULTS) * len(SEEDS)} runs with a fault failed")
    print("| signal | moves before the failure | median lead, steps | moves in healthy runs |\n|---|---|---|---|")
    for name in SIGNALS:
        ahead = [lead for lead in leads[name] if lead is not None and lead > 0]
        lead = f"{median(ahead):g}" if ahead else "-"
        print(f"| `{name}` | {len(ahead)} of {failed} | {lead} | {placebo[name]} of {HEALTHY} |")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
