"""What alert delivery loses when receivers fail and processes are killed: one line a scenario, exit code 1 if anything.

Usage: python benchmarks/delivery_faults.py
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "alerts"))

from delivery_scenarios import scenarios, table


def main() -> int:
    logging.disable(logging.CRITICAL)
    tolls = [scenario() for scenario in scenarios().values()]
    print(table(tolls))
    return int(any(toll.lost or toll.other_keys for toll in tolls))


if __name__ == "__main__":
    raise SystemExit(main())
