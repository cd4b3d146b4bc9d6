"""Our mismatch statistics against verl 0.9.1's own functions, number for number."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("verl")

from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import _compute_rollout_moe_load_balance_metrics_from_counts
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.debug.metrics import calculate_debug_metrics

from rlwatch.metrics import BY_NAME, resolve
from rlwatch.tensors.mismatch import observe_mismatch, observe_mismatch_detail
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.1, -0.7, -2.0, -0.3], [-1.2, -0.4, -9, -9]], dtype=D)
ROLL = torch.tensor([[-0.1, -0.5, -1.0, -0.35], [-3.0, -0.5, -9, -9]], dtype=D)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
OPTIONS = [
    *(f"{per}_k{k}" for per in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
]
"""verl's rejection rules."""
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


def batch(seed, rows, width):
    """Log-probs and a full mask."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=g, dtype=D)
    roll = old + torch.randn(rows, width, generator=g, dtype=D)
    return old, roll, torch.ones(rows, width, dtype=torch.int64)


def verls(old, roll, mask, **setting):
    """Its metrics by name; none where IcePop leaves no weight at all, which it divides by."""
    try:
        with patch("torch.distributed.is_initialized", return_value=False):  # as in verl's driver, which calls it
            return compute_rollout_correction_and_rejection_mask(old, roll, mask, **setting)[2]
    except ZeroDivisionError:
        return {}


def debug_metrics(old, roll, mask):
    tensors = {"rollout_log_probs": roll, "old_log_probs": old, "response_mask": mask, "responses": mask}
    return calculate_debug_metrics(DataProto(batch=TensorDict(tensors, batch_size=[len(mask)])))


@pytest.mark.parametrize("fix", [True, False])
def test_the_live_stream_measures_what_verl_measures(fix):
    """Where every response has tokens: each verl name that the table calls the same quantity has our number."""
    old, roll, mask = (OLD, ROLL, MASK) if fix else batch(7, 6, 20)
    theirs = verls(old, roll, mask)
    theirs |= debug_metrics(old, roll, mask)
    stats = {**observe_mismatch(b := TokenBatch(logp=old, rollout_logp=roll, mask=mask)), **observe_mismatch_detail(b)}
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
        logged |= set(verls(OLD, ROLL, MASK, **setting))
    logged |= set(_compute_rollout_moe_load_balance_metrics_from_counts(torch.tensor([[3, 1], [2, 2]])))
    aliases = {
        alias.name
        for name, row in BY_NAME.items()
        for alias in row.aliases
        if name.startswith("mismatch/") and alias.source == "verl"
    }

    assert aliases - logged == set()
