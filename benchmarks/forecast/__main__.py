"""A corpus of runs that fail and runs that do not, to fit and judge forecasts of crashes on.

python -m benchmarks.forecast --help
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its module `statistics` would hide the standard one

from forecast.commands import app  # noqa: E402

if __name__ == "__main__":
    app(prog_name="python -m benchmarks.forecast")
