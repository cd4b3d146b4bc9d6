"""Losses and models of ``benchmarks/blame_where.py``: a plant in each is told by verdict, cause and tokens."""

import pytest
from blame_where import CASES, judged

pytestmark = pytest.mark.torch
ALWAYS = {"top-entropy mask (a fifth of the tokens)", "tool calls masked out", "Megatron's names: a layer"}


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_a_plant_is_told_right_wherever_localisation_runs(name):
    """In a loop of one's own, after twelve healthy steps."""
    right, told = judged(CASES[name], seed=0)

    assert right, told
