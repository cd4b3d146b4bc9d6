"""Which metric is shown where."""

import numpy as np
import pytest
from rlwatch_app import run_charts
from rlwatch_app.queries import Extent

from rlwatch.metrics import Family


def extents(values):
    return {name: Extent().grown(np.asarray(column, dtype=float)) for name, column in values.items()}


def sections(values, source="trl/grpo"):
    catalogue = run_charts.all_panels(list(values), source)
    found = run_charts.sections(catalogue, extents(values), source)
    return {section.family: section for section in found}


MOVING = [1.0, 2.0, 3.0, 4.0]


def test_families_come_in_their_fixed_order():
    """Whatever the order of names."""
    found = sections({"grad_norm": MOVING, "kl": MOVING, "entropy": MOVING, "reward": MOVING})
    assert list(found) == [Family.REWARD, Family.EXPLORATION, Family.TRUST_REGION, Family.OPTIMISATION]


def test_a_known_metric_is_shown_by_its_canonical_name_and_says_its_own():
    """One vocabulary, and what the trainer calls it."""
    panel = sections({"entropy": MOVING})[Family.EXPLORATION].shown[0]
    assert panel.title == "policy/entropy"
    assert panel.subtitle("trl/grpo") == "nats/token · entropy"


def test_a_proxy_is_called_one():
    """TRL's RLOO logs k1 under the name of k3."""
    panel = sections({"kl": MOVING}, "trl/rloo")[Family.TRUST_REGION].shown[0]
    assert "proxy" in panel.subtitle("trl/rloo")


def test_unknown_metrics_wait_behind_a_click():
    """300 of them do not drown the seven that tell."""
    section = sections({"reward": MOVING, "rewards/format/mean": MOVING, "zzz": MOVING})
    assert [p.name for p in section[Family.REWARD].more] == ["rewards/format/mean"]
    assert [p.name for p in section[Family.SYSTEM].more] == ["zzz"]


def test_a_family_shows_its_telling_metrics_and_keeps_the_rest():
    """The gradient norm before the raw loss, three in all."""
    names = ["loss/raw", "loss/policy", "optim/lr", "optim/grad_norm", "nonfinite/grad"]
    section = sections(dict.fromkeys(names, MOVING))[Family.OPTIMISATION]
    assert [p.canonical for p in section.shown] == ["optim/grad_norm", "loss/policy", "optim/lr"]
    assert [p.canonical for p in section.more] == ["loss/raw", "nonfinite/grad"]


def test_what_is_suspect_is_never_behind_a_click():
    """A metric a finding speaks of, and one that was not finite, are shown as well."""
    values = {f"reward/{n}": MOVING for n in ("mean", "std", "zero_std_frac", "max")}
    values |= {"adv/mean": [1.0, np.nan, 2.0], "adv/std": [0.0] * 5}
    catalogue = run_charts.all_panels(list(values), "")
    (section,) = run_charts.sections(catalogue, extents(values), "", suspects={"reward/max", "adv/std"})
    assert [p.canonical for p in section.shown][3:] == ["reward/max", "adv/mean", "adv/std"]


def test_what_never_changed_is_one_line_of_text():
    """A flat chart says less than its number."""
    section = sections({"learning_rate": [1e-6] * 5, "grad_norm": MOVING})[Family.OPTIMISATION]
    assert [p.canonical for p in section.shown] == ["optim/grad_norm"]
    assert run_charts.unchanging_words(section) == "never changed: optim/lr 1e-06"


def test_a_reward_that_never_changed_is_shown():
    """Stuck at zero is news."""
    assert [p.canonical for p in sections({"reward": [0.0] * 9})[Family.REWARD].shown] == ["reward/mean"]


def test_a_metric_that_is_nan_from_step_one_is_shown():
    """NaN is not constant."""
    section = sections({"kl": [np.nan] * 9, "clip_ratio/region_mean": [np.nan] * 9})[Family.TRUST_REGION]
    assert len(section.shown) == 2


def test_two_names_for_one_metric_are_both_kept():
    """The closer one is the chart, the other is behind the click."""
    section = sections({"entropy": MOVING, "entropy/mean": MOVING})[Family.EXPLORATION]
    assert [p.name for p in section.shown] == ["entropy"]
    assert [p.name for p in section.more] == ["entropy/mean"]


def test_an_unknown_metric_with_a_nan_is_shown_by_itself():
    """Nobody looks for what broke behind a click; the others of its kind wait there."""
    values = {"mine/a": [1.0, np.nan], "mine/b": MOVING}
    catalogue = run_charts.all_panels(list(values), "")
    (section,) = run_charts.sections(catalogue, extents(values), "")
    assert [p.name for p in section.shown] == ["mine/a"]
    assert [p.name for p in section.more] == ["mine/b"]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [("norm", ["grad_norm", "grad_layer/0", "mine/norm"]), ("GRAD clip", ["grad_norm"]), ("nothing", [])],
)
def test_a_search_finds_metrics_by_name_and_meaning(wanted, names):
    """All words of it, in any order; what no chart of a family shows as well."""
    every = ["grad_norm", "grad_layer/0", "mine/norm", "reward"]
    found = run_charts.found_by(every, run_charts.all_panels(every, "trl/grpo"), wanted)
    assert {p.name for p in found} == set(names) - ({"grad_layer/0"} if wanted == "norm" else set())
