"""Our rollout-correction report and mismatch statistics against verl 0.9.1's own functions, number for number."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import _compute_rollout_moe_load_balance_metrics_from_counts
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_rejection_mask,
)
from verl.utils.debug.metrics import calculate_debug_metrics

from rlwatch.metrics import BY_NAME, resolve
from rlwatch.tensors.correction import correction_report
from rlwatch.tensors.correction.thresholds import OPTIONS
from rlwatch.tensors.mismatch import core, full
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.1, -0.7, -2.0, -0.3], [-1.2, -0.4, -9, -9]], dtype=D)
ROLL = torch.tensor([[-0.1, -0.5, -1.0, -0.35], [-3.0, -0.5, -9, -9]], dtype=D)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
WEIGHTS = [
    {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
    for level in ("token", "sequence")
    for threshold in (2.0, "3", "0.5_5", "0.2_1.2")
    for normalize in (False, True)
]
REJECTIONS = [
    {"rollout_rs": option, "rollout_rs_threshold": threshold}
    for option in OPTIONS
    for threshold in (("0.5_2.0", 1.5) if option.endswith("k1") else ("0.3", 0.01))
] + [
    {"rollout_rs": "token_k1, seq_max_k3,seq_mean_k1", "rollout_rs_threshold": "2,0.4, 0.9_1.2", "rollout_is": "token"}
]
SETTINGS = [{}, *WEIGHTS, *REJECTIONS]
EXACT = dict.fromkeys(
    (
        *("kl", "k3", "chi2", "ppl_trainer", "ppl_rollout", "ppl_ratio", "log_ppl_trainer", "log_ppl_rollout"),
        *("log_ppl_diff", "log_ppl_diff_max", "log_ppl_diff_min", "log_ppl_absdiff", "seq_chi2"),
        *("prob_absdiff", "prob_absdiff_max", "prob_absdiff_std", "prob_corr"),
    )
)
"""What the live stream measures exactly as verl does, where every response has tokens and no |d| is beyond 20."""


def batch(seed, rows=4, width=7, *, scale=1.0, dtype=D, ragged=True):
    """Log-probs and mask; where ``ragged``, one response is empty and the padding is NaN."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=g, dtype=D)
    roll = old + scale * torch.randn(rows, width, generator=g, dtype=D)
    mask = torch.ones(rows, width, dtype=torch.int64)
    if ragged:
        mask = (torch.rand(rows, width, generator=g) < 0.7).long()
        mask[0, 0], mask[-1] = 1, 0
        old = old.masked_fill(mask == 0, math.nan)
    return old.to(dtype), roll.to(dtype), mask


def both(old, roll, mask, **setting):
    """verl's metrics and ours. Where IcePop leaves no weight at all verl divides by zero: then it has none."""
    ours = {name: value.item() for name, value in correction_report(old, roll, mask, **setting).items()}
    try:
        with patch("torch.distributed.is_initialized", return_value=False):  # as in verl's driver, which calls it
            return compute_rollout_correction_and_rejection_mask(old, roll, mask, **setting)[2], ours
    except ZeroDivisionError:
        assert ours["rollout_corr/rollout_is_eff_sample_size"] == 0
        return {}, ours


def agree(theirs, ours):
    """Each of verl's numbers is ours, to 1e-9; NaN where NaN."""
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-9, abs=1e-9, nan_ok=True)


def hidden(name):
    return name.startswith("rollout_corr/rollout_is_raw_")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_number_of_the_worked_example_is_verls(setting):
    """All names of verl and, but for the raw weights, none beside; 1e-9, for integer and for float masks."""
    for mask in (MASK, MASK.to(D)):
        theirs, ours = both(OLD, ROLL, mask, **setting)

        assert {name for name in ours if not hidden(name)} == set(theirs or ours) - set(filter(hidden, ours))
        agree(theirs, ours)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_number_of_ragged_batches_is_verls(setting):
    """NaN in the padding, a response without a token, weights beyond verl's safety bound."""
    compared = 0
    for seed, scale in enumerate((0.01, 1.0, 5.0, 30.0)):
        theirs, ours = both(*batch(seed, scale=scale), **setting)
        agree(theirs, ours)
        compared += bool(theirs)
    assert compared >= 2


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 5), st.sampled_from(SETTINGS))
def test_every_number_of_any_small_batch_is_verls(seed, rows, width, setting):
    """Down to one token of one response."""
    agree(*both(*batch(seed, rows, width, ragged=rows > 1), **setting))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_single_precision_is_verls_single_precision(setting):
    """As a run computes it."""
    theirs, ours = both(*batch(1, 8, 300, scale=0.1, dtype=torch.float32), **setting)

    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_nan_inside_the_mask_shows_where_verl_shows_it():
    """Same names NaN, same names not."""
    old, roll, mask = batch(3)
    old[0, 0] = math.nan
    for setting in SETTINGS:
        agree(*both(old, roll, mask, **setting))


def test_metrics_from_log_probs_alone_are_the_same_report():
    """What verl's actor logs of the current policy."""
    old, roll, mask = batch(5)
    theirs = compute_rollout_corr_metrics_from_logprobs(old, roll, mask)

    ours = {name: value.item() for name, value in correction_report(old, roll, mask).items()}

    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def debug_metrics(old, roll, mask):
    tensors = {"rollout_log_probs": roll, "old_log_probs": old, "response_mask": mask, "responses": mask}
    return calculate_debug_metrics(DataProto(batch=TensorDict(tensors, batch_size=[len(mask)])))


@pytest.mark.parametrize("fix", [True, False])
def test_the_live_stream_measures_what_verl_measures(fix):
    """Where every response has tokens: each verl name that the table calls the same quantity has our number."""
    old, roll, mask = (OLD, ROLL, MASK) if fix else batch(7, 6, 20, ragged=False)
    theirs, _ = both(old, roll, mask)
    theirs |= debug_metrics(old, roll, mask)
    stats = {**core(b := TokenBatch(logp=old, rollout_logp=roll, mask=mask)), **full(b)}
    compared = {}

    for name, value in theirs.items():
        reading = resolve(name, "verl")
        if reading is not None and reading.closeness == 1:
            compared[reading.metric.name.removeprefix("mismatch/")] = None
            assert stats[reading.metric.name].value().item() == pytest.approx(value, rel=1e-8, abs=1e-8), name
    assert compared == EXACT


def test_every_verl_name_of_the_mismatch_rows_is_a_name_of_verl():
    """Aliases are spelt as verl spells them."""
    logged = set(debug_metrics(OLD, ROLL, MASK))
    for setting in SETTINGS:
        logged |= set(both(OLD, ROLL, MASK, **setting)[0])
    logged |= set(_compute_rollout_moe_load_balance_metrics_from_counts(torch.tensor([[3, 1], [2, 2]])))
    aliases = {
        alias.name
        for name, row in BY_NAME.items()
        for alias in row.aliases
        if name.startswith("mismatch/") and alias.source == "verl"
    }

    assert aliases - logged == set()
