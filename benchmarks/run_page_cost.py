"""Cost of a live look at the page of a long run: ``python benchmarks/run_page_cost.py [STEPS] [METRICS]``.

A run is written, its page drawn by Streamlit's own AppTest, then a step is added before each further look. CPU seconds
are the process's, all of it; kilobytes are the charts' data, as they are sent to a browser.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
KNOWN = (
    "reward", "entropy", "kl", "grad_norm", "mismatch/k3", "clip_ratio/region_mean", "frac_reward_zero_std",
    "reward_std", "completions/mean_length", "num_tokens", "loss", "ratio/max", "policy/entropy_p10",
    "policy/entropy_p90",
)  # fmt: skip
AT_ONCE = 1000
LOOKS = 4


def main(steps: int, metrics: int) -> None:
    """Print what the first look and each later one cost."""
    from rlwatch.records import RunInfo, StepRecord
    from rlwatch.store.url import open_store

    names = (*KNOWN, *(f"mine/{i}" for i in range(metrics - len(KNOWN))))
    with tempfile.TemporaryDirectory() as directory:
        os.environ["RLWATCH_STORE"] = directory
        store = open_store(directory)
        writer = store.open_run(RunInfo("long", project="p", name="long", source="trl/grpo"))
        began, draws = time.time() - steps, np.random.default_rng(0)
        for first in range(0, steps, AT_ONCE):
            rows = draws.normal(size=(min(AT_ONCE, steps - first), metrics)).tolist()
            numbered = enumerate(rows, first + 1)
            writer.write([StepRecord(s, dict(zip(names, row, strict=True)), ts=began + s) for s, row in numbered])
        sys.path.insert(0, str(ROOT / "tests" / "app"))
        import app_world
        from rlwatch_app import layout
        from rlwatch_app.principal import Principal

        layout.principal = lambda: Principal("ann", "operator")
        spent = time.process_time()
        page = app_world.run_page("long")
        print(f"first look: {time.process_time() - spent:.2f} s of CPU")
        for look in range(LOOKS):
            writer.write([StepRecord(steps + look + 1, dict.fromkeys(names, 1.0), ts=time.time())])
            spent = time.process_time()
            page.run()
            sent = sum(len(element.proto.json) for element in page.get("bidi_component"))
            print(f"a step later: {1e3 * (time.process_time() - spent):.0f} ms of CPU, {sent / 1e3:.0f} kB")
        writer.close()
        store.close()


if __name__ == "__main__":
    main(*(int(argument) for argument in (*sys.argv[1:], *(100_000, 150)[len(sys.argv) - 1 :])))
