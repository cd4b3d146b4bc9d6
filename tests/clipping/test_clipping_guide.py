"""The guide to layer-wise clipping says what the code does."""

import re
from pathlib import Path

import pytest

from rlwatch import clipping
from rlwatch.clipping.rules import RULES, By
from rlwatch.metrics import BY_NAME

pytestmark = pytest.mark.torch
GUIDE = (Path(__file__).parents[2] / "docs" / "layer-clip.md").read_text()


def test_every_rule_is_in_the_guide_with_its_name_and_real_defaults():
    """As the calls in its table make them."""
    for name, make in RULES.items():
        assert f'`"{name}"`' in GUIDE
        assert f"`{type(make()).__name__}(" in GUIDE
    for call in ("LayerMedian(k=4, floor=0.1, window=64, warmup=16)", "ZClip(threshold=2.5, alpha=0.97, warmup=25)"):
        assert call in GUIDE
        assert eval(call, vars(clipping)) == eval(call.split("(")[0] + "()", vars(clipping))
    adagc = "AdaGC(relative=1.05, absolute=1.0, beta=0.98, warmup=100)"
    assert adagc in GUIDE
    assert eval(adagc, vars(clipping)) == clipping.AdaGC()


def test_every_grouping_and_metric_in_the_guide_is_one():
    """And every grouping is named."""
    assert all(f'"{by}"' in GUIDE for by in By)
    named = set(re.findall(r"`(optim/[a-z_]+)`", GUIDE))
    assert {"optim/layers_clipped", "optim/clip_scale_min"} <= named <= set(BY_NAME)


def test_it_says_that_the_published_rule_is_not_public():
    """Plainly."""
    assert "is not public, and nothing here claims to be it" in GUIDE
    assert "not public" in clipping.__doc__
