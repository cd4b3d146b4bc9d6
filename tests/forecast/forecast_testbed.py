"""The modules of ``benchmarks/forecast`` that need torch, and what tests of them share."""

import math

import pytest

torch = pytest.importorskip("torch")
for package in ("pyarrow", "joblib", "rich"):
    pytest.importorskip(package)

from forecast import artefacts, generate, knobs, policy, recipes, statistics, tables, task, training, update  # noqa: E402

__all__ = ["artefacts", "generate", "policy", "recipes", "statistics", "tables", "task", "training", "update"]

Change, Config, Knobs, Policy = knobs.Change, knobs.Config, knobs.Knobs, policy.Policy

SMALL = Knobs(task="copy", k=3, prompts=3, mu=2, lr=5e-3, length_bonus=-1.0)
"""Of a run of an untaught policy: shortness is what it can learn."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def untaught():
    """The state of a policy that nobody taught anything."""
    torch.manual_seed(0)
    return Policy().state_dict()


def table(config, seed=3):
    """Columns of a run from there, NaN as a word so that tables can be compared."""
    columns = training.train(config, seed, untaught())
    return {n: ["nan" if v is not None and math.isnan(v) else v for v in values] for n, values in columns.items()}
