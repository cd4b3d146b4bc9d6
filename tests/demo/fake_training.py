"""Stands in for the training: the same command line and environment, curves from a formula, no torch.

Everything on rlwatch's side is real: store, detectors, alerts, webhook, commands.
"""

import sys
import time
from pathlib import Path

import rlwatch
from rlwatch.control.policy import veto_reset_reference
from rlwatch.demo import Recipe

DEADLINE_S = 60.0
RESET_AT, STRAINED_AT, COLLAPSE_AT, STEPS = 100, 170, 180, 320


def row(step, reset):
    since = step if reset is None else step - reset - 1
    metrics = {
        "reward": 0.1 + 0.4 * min(1.0, step / 90) + 0.01 * (step % 3),
        "entropy": 1.4 - 0.9 * min(1.0, step / 150),
        "kl": 0.45 * min(1.0, since / 10),
        "grad_norm": 1.0 + 0.1 * (step % 2),
        "frac_reward_zero_std": 0.02,
        "learning_rate": Recipe().learning_rate_at(step),
        "mismatch/k3": 0.002 + 0.0002 * (step % 4),
        "mismatch/logp_absdiff": 0.03 + 0.002 * (step % 3),
        "policy/kl_old": 0.004 + 0.0005 * (step % 5),
        "ratio/ess": 0.98 - 0.002 * (step % 3),
    }
    if step > STRAINED_AT:
        metrics["mismatch/k3"] *= 1.4 ** min(step - STRAINED_AT, 14)
    if step > COLLAPSE_AT:
        left = max(0.0, 1 - (step - COLLAPSE_AT) / 40)
        metrics |= {"reward": metrics["reward"] * left, "entropy": 0.5 * left**3, "frac_reward_zero_std": 1 - left}
    return metrics


class Control:
    """Answers as a trainer would: refuses in a collapse, else does it."""

    def __init__(self, run):
        self.run, self.answered, self.reset = run, 0, None

    def obey(self, step):
        for command in self.run.commands():
            self.answered += 1
            veto = veto_reset_reference(self.run.health(), force=command.force)
            if veto is not None:
                command.reject(veto, step=step)
                continue
            command.done("KL 0.45 -> 0", step=step)
            self.run.event("reference_reset", step)
            self.reset = step

    def wait_for(self, count, step):
        """A real training takes its time; a fake must wait until ``count`` commands were answered."""
        end = time.monotonic() + DEADLINE_S
        while self.answered < count:
            if time.monotonic() > end:
                sys.exit(f"only {self.answered} commands by step {step}")
            time.sleep(0.02)
            self.obey(step)


def main():
    store, config_file, directory, _ = sys.argv[1:]
    assert Path(directory).is_dir()
    run = rlwatch.init(project="demo", name="fake", store=store, config_file=config_file, source="trl/grpo")
    control = Control(run)
    for step in range(1, STEPS + 1):
        run.log(row(step, control.reset), step=step)
        run.flush()
        control.obey(step)
        control.wait_for({RESET_AT: 1, STEPS - 20: 2}.get(step, 0), step)
    run.finish()


if __name__ == "__main__":
    main()
