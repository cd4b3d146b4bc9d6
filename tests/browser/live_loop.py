"""A trainer process without a model: steps, a KL that grows, commands taken at a step boundary.

``python live_loop.py STORE DIRECTORY``; ends when ``DIRECTORY/stop`` exists. While ``DIRECTORY/fail`` does, its gradient
is not a number.
"""

import math
import sys
import time
from pathlib import Path

import rlwatch

PACE_S = 0.2


def main(store, directory):
    kl, level = 0.0, 0.3
    with rlwatch.init(project="browser", name="tiny-loop", store=store, source="trl/grpo") as run:
        for step in range(1, 10_000):
            if (directory / "stop").exists():
                return
            kl += 0.02 * (level - kl)
            reward = 0.5 + 0.1 * math.sin(step / 7)
            norm = math.nan if (directory / "fail").exists() else 1.0
            run.log({"reward": reward, "entropy": 1.0, "kl": kl, "policy/kl_ref_k3": kl, "grad_norm": norm}, step=step)
            for command in run.commands():
                run.event("reference_reset", step=step, by=command.command.requested_by, why=command.command.why)
                command.done(f"KL {kl:.3g} -> 0", step=step)
                kl = 0.0
            time.sleep(PACE_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
