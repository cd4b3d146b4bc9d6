"""A reference reset is due: KL flat, held-out scores behind their best and flat; never in a collapse."""

import math
import random

import pytest
from exact_runs import alarms, always, exact, then, when, worst
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.detectors.context import RunContext
from rlwatch.detectors.trust_region.kl_reference import KLReference, Validation, Vetoes
from rlwatch.records import ClosedStep, Event


def peaks(step, *, top=100, every=10, fall=2e-4):
    """A held-out score every ``every`` steps: it rises to 0.6 at step ``top`` and then falls slowly."""
    if step % every:
        return None
    return 0.3 + 0.3 * min(step / top, 1.0) - fall * max(step - top, 0)


def stalled(kl=0.2, **more):
    """A run whose KL is flat from step 60 on, and whose held-out score has peaked at 100."""
    curves = {"policy/kl_ref": lambda s: kl * min(s / 60.0, 1.0), "val/score": peaks, "reward/mean": always(0.5)}
    return curves | {name.replace("_", "/", 1): curve for name, curve in more.items()}


def test_a_plateau_with_a_stalled_held_out_score_is_due():
    """Four evaluations after the best, once KL has been flat for its rows; told with the gap."""
    found = alarms(KLReference(), exact(stalled(), length=300), "reset_due")
    finding = found["warning"]

    assert list(found) == ["warning"]
    assert 140 <= finding.step <= 200
    assert finding.evidence["held_out_best"] == pytest.approx(0.6)
    assert finding.evidence["held_out"] < 0.6
    assert "below its best of step 100" in finding.message
    assert "a reference reset is due" in finding.message


@pytest.mark.parametrize("every", [1, 5, 10])
def test_coarse_logs_are_judged_alike(every):
    """In rows and in steps."""
    curves = {
        "policy/kl_ref": lambda s: 0.2 * min(s / (60.0 * every), 1.0),
        "val/score": lambda s: peaks(s / every, every=10),
        "reward/mean": always(0.5),
    }

    assert worst(KLReference(), exact(curves, length=300, every=every), "reset_due") == "warning"


@pytest.mark.parametrize(
    "score",
    [
        lambda s: 0.3 + 0.001 * s if s % 10 == 0 else None,
        lambda s: 0.5 if s == 100 else None,
        lambda s: None,
        lambda s: peaks(s, top=270),
    ],
    ids=["still rising", "one evaluation", "none", "best just now"],
)
def test_without_a_stall_no_reset_is_due(score):
    """A score that rises, or nobody measured."""
    assert when(KLReference(), exact(stalled(val_score=score), length=300), "reset_due") == {}


@pytest.mark.parametrize(("kl", "said"), [(0.04, set()), (0.06, {"reset_due"}), (0.5, {"reset_due", "kl_saturation"})])
def test_a_stall_counts_from_a_small_kl(kl, said):
    """Below that no KL term holds anything; from 0.3 flatness alone is told, until the stall says more."""
    watch = KLReference()
    kinds = {f.kind for row in exact(stalled(kl), length=300) for f in watch.update(row)}

    assert kinds - {"kl_drift"} == said


def test_kl_that_still_moves_is_no_plateau():
    """The policy is on its way."""
    moving = stalled() | {"policy/kl_ref": lambda s: 0.01 + 0.002 * s}

    assert when(KLReference(), exact(moving, length=300), "reset_due") == {}


COLLAPSES = {
    "nan": {"loss/policy": lambda s: math.nan if s > 120 else 0.1},
    "entropy collapse": {"policy/entropy": then(0.5, 0.001, 100)},
    "mismatch": {"mismatch/k3": then(1e-4, 0.5, 100)},
    "lost reward": {"reward/mean": then(0.8, 0.1, 100)},
    "garbled": {"text/garbled": then(0.0, 0.3, 100)},
    "id 0": {"text/id0_frac": then(0.0, 0.2, 100)},
    "cut short": {"len/clipped": then(0.1, 1.0, 100)},
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_never_in_a_collapse(name):
    """It would make the bad policy the anchor: neither a reset nor its softer form is mentioned."""
    rows = exact(stalled(0.5) | COLLAPSES[name], length=300)
    watch = KLReference()
    late = {f.kind for row in rows for f in watch.update(row) if row.step >= 150}

    assert not late & {"reset_due", "kl_saturation"}


def test_a_veto_is_over_some_rows_after_its_cause():
    """One NaN that came and went."""
    rows = exact(stalled() | {"loss/policy": lambda s: math.nan if s == 200 else 0.1}, length=300)
    watch = KLReference()
    due = [row.step for row in rows if any(f.kind == "reset_due" for f in watch.update(row))]

    assert {199, 299} <= set(due)
    assert not set(due) & set(range(200, 215))


def test_harmless_events_are_no_veto():
    """A blip of the learning rate in KL and gradient, three rows of hard data, a single spike of KL."""
    noise = random.Random(0)
    blip = {
        "policy/kl_ref": lambda s: 0.2 * min(s / 60.0, 1.0) * (1.6 if 180 <= s < 184 or s == 220 else 1.0),
        "reward/mean": lambda s: (0.3 if 200 <= s < 203 else 0.5) + noise.gauss(0, 0.02),
        "optim/grad_norm": lambda s: 5.0 if 180 <= s < 184 else 0.5,
    }

    assert worst(KLReference(), exact(stalled() | blip, length=300), "reset_due") == "warning"


def test_a_reset_gives_everything_its_time_again():
    """KL begins at zero and the scores anew."""
    watch = KLReference()
    rows = exact(stalled(), length=320)
    before = [f for row in rows[:250] for f in watch.update(row)]
    watch.notice(Event(kind="reference_reset", step=249))
    after = [f for row in rows[250:] for f in watch.update(row) if row.step < 290]

    assert before
    assert after == []


def test_a_rising_score_says_that_no_reset_is_due_yet():
    """KL flat and high, its term most of the loss: told, not warned of."""
    heavy = {"policy/kl_coef": always(0.2), "loss/policy": always(0.01)}
    rising = {"val/score": lambda s: 0.3 + 0.001 * s if s % 10 == 0 else None}
    base = {"policy/kl_ref": always(0.6), "reward/mean": always(0.5)} | heavy

    assert worst(KLReference(), exact(base, length=200), "kl_saturation") == "warning"
    found = alarms(KLReference(), exact(base | rising, length=200), "kl_saturation")
    assert [s for s, f in found.items() if f.step > 60] in ([], ["info"])
    assert "held-out scores still rise" in found["info"].message


def test_scores_of_several_sets_are_taken_together():
    """Under the names the trainer gives them."""
    val = Validation()
    for i in range(8):
        val.update(ClosedStep(step=10 * i, metrics={"val-core/a/acc/mean@1": 0.2 + 0.1 * i, "val-core/b/acc": 0.6}))

    assert val.best == pytest.approx((0.9 + 0.6) / 2)
    assert val.best_step == 70
    assert val.rises()
    assert not val.stalls()


@pytest.mark.parametrize(
    ("scores", "stalls"),
    [
        ([0.3, 0.4, 0.5, 0.6, 0.58, 0.57, 0.56, 0.55], True),
        ([0.3, 0.4, 0.5, 0.6, 0.58, 0.57, 0.56], False),
        ([0.3, 0.9, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75], False),
        ([0.5] * 20, False),
        ([0.3, 0.5, 0.6, 0.62, 0.57, 0.61, 0.56, 0.61, 0.58, 0.6], False),
        ([0.8, 0.9, 0.905, 0.903, 0.902, 0.901, 0.9, 0.9], False),
        ([0.6, 0.3, 0.3, 0.3, 0.3], False),
    ],
    ids=[
        "four after the best",
        "three after",
        "a lucky one on the way up",
        "constant",
        "noise",
        "half a percent",
        "too few",
    ],
)
def test_a_stall_is_a_gap_and_a_flat_slope(scores, stalls):
    """Fewer than four evaluations since the best are chance."""
    val = Validation()
    for i, score in enumerate(scores):
        val.update(ClosedStep(step=10 * i, metrics={"val/score": score}))

    assert val.stalls() is stalls


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats() | st.none(), max_size=40))
def test_any_scores_at_all_are_survived(scores):
    """And never both at once."""
    val = Validation()
    for i, score in enumerate(scores):
        val.update(ClosedStep(step=i, metrics={} if score is None else {"val/score": score}))
        assert not (val.stalls() and val.rises())


def test_vetoes_name_what_they_saw():
    """For whoever asks why."""
    vetoes, company = Vetoes(), RunContext()
    for row in exact({"text/garbled": always(0.5), "mismatch/k3": then(1e-4, 0.5, 20), "len/clipped": always(1.0)}):
        vetoes.update(row)
        company.update(row)

    assert set(vetoes.why(company)) == {"mismatch_growth", "garbled output", "truncated responses"}
