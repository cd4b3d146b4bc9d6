"""Mismatch statistics of the taps against TRL 1.16's own sampling/* metrics, through TRL's own correction."""

import pytest
from fake_vllm import install

pytestmark = pytest.mark.torch
RATIO = "sampling/importance_sampling_ratio/"
NO_CAP = 1e6


def steps(watched, mode, cap, floor=None, **engine):
    """(our taps, TRL's row) of each step, sampled by an engine of slightly other weights."""
    _, run = watched(
        before=lambda trainer: install(trainer, **{"noise": 0.02} | engine),
        max_steps=2,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=cap,
        vllm_importance_sampling_clip_min=floor,
    )
    return [(run.taps()[step], row) for step, row in run.rows().items()]


def close(x):
    return pytest.approx(x, rel=1e-4)


def test_raw_token_weights_are_trls_where_nothing_is_cut(watched):
    """Mean and extremes, and the differences of log-probs they come from."""
    for tap, row in steps(watched, "token_truncate", NO_CAP):
        assert tap["mismatch/weight_mean"] == close(row[RATIO + "mean"])
        assert tap["mismatch/weight_max"] == close(row[RATIO + "max"])
        assert tap["mismatch/weight_min"] == close(row[RATIO + "min"])
        assert tap["mismatch/logp_absdiff"] == close(row["sampling/sampling_logp_difference/mean"])
        assert tap["mismatch/logp_absdiff_max"] == close(row["sampling/sampling_logp_difference/max"])
        assert tap["mismatch/weight_max"] > 1.01


def test_raw_weights_of_responses_are_trls_where_nothing_is_cut(watched):
    """The product of a response's token weights."""
    for tap, row in steps(watched, "sequence_mask", NO_CAP):
        assert tap["mismatch/seq_weight_mean"] == close(row[RATIO + "mean"])
        assert tap["mismatch/seq_weight_max"] == close(row[RATIO + "max"])


def test_truncated_weights_are_trls_and_the_share_it_cut_is_known(watched):
    """At a cap of 1.005 some tokens are cut; the raw maximum stays what it was."""
    for tap, row in steps(watched, "token_truncate", 1.005):
        assert tap["mismatch/is_ratio"] == close(row[RATIO + "mean"])
        assert row[RATIO + "max"] == close(1.005)
        assert tap["mismatch/weight_max"] > 1.005
        assert 0 < tap["mismatch/tis_truncated"] < 1


MODES = [
    ("token_truncate", None), ("token_mask", None), ("sequence_truncate", None), ("sequence_mask", None),
    ("token_truncate", 0.9), ("sequence_mask", 0.9),
]  # fmt: skip
ONE_OF_A_KIND = [
    (False, "token_truncate", None), (False, "sequence_mask", 0.9), (True, "token_mask", None), (True, "sequence_truncate", None),
]  # fmt: skip
CASES = [(unscored, *mode) for unscored in (False, True) for mode in MODES]


@pytest.mark.parametrize(
    ("unscored", "mode", "floor"),
    [pytest.param(*case, marks=[] if case in ONE_OF_A_KIND else pytest.mark.thorough) for case in CASES],
)
def test_the_weights_of_the_loss_stand_beside_the_raw_ones(watched, mode, floor, unscored):
    """In every mode of TRL: mean and extremes after the correction, and the raw ones, which are further out."""
    for tap, row in steps(watched, mode, 1.005, floor, unscored=unscored):
        assert tap["mismatch/is_ratio"] == close(row[RATIO + "mean"])
        assert tap["mismatch/is_ratio_max"] == close(row[RATIO + "max"])
        assert tap["mismatch/is_ratio_min"] == close(row[RATIO + "min"])
        assert 0 <= tap["mismatch/is_ratio_std"] <= row[RATIO + "max"]
        raw = "mismatch/seq_weight_max" if mode.startswith("sequence") else "mismatch/weight_max"
        assert tap["mismatch/is_ratio_max"] <= 1.00501
        assert tap[raw] > tap["mismatch/is_ratio_max"]
        assert tap["mismatch/logp_absdiff"] == close(row["sampling/sampling_logp_difference/mean"])
        assert (tap["mismatch/is_zero"] > 0) == (mode.endswith("mask"))


def test_the_default_correction_drops_whole_responses_and_it_shows(watched):
    """sequence_mask: the share of tokens that no longer teach anything is that of the dropped responses."""
    seen = []

    def look(trainer):
        install(trainer, noise=0.02)
        original = trainer._compute_loss

        def compute(model, inputs):
            kept, mask = inputs["importance_sampling_ratio"] != 0, inputs["completion_mask"].bool()
            seen.append(1 - (mask & kept).sum().item() / mask.sum().item())
            return original(model, inputs)

        trainer._compute_loss = compute

    _, run = watched(before=look, max_steps=2, vllm_importance_sampling_clip_max=1.005)

    assert [tap["mismatch/is_zero"] for tap in run.taps().values()] == close(seen)
    assert 0 < max(seen) < 1


def test_without_a_correction_the_raw_mismatch_is_all_there_is(watched):
    """The loss uses no weights, so none are reported."""
    _, run = watched(before=lambda t: install(t, noise=0.02), max_steps=2, vllm_importance_sampling_correction=False)

    for step, tap in run.taps().items():
        assert tap["mismatch/logp_absdiff"] > 0.01
        assert not any(name.startswith("mismatch/is_") for name in tap)
        assert not any(name.startswith("sampling/") for name in run.rows()[step])


def test_an_engine_that_truncates_has_all_of_the_gap_on_one_side(watched):
    """Through TRL's own generation and log-probs: nothing above 0, and a mean weight that is the mass kept."""
    for tap, _ in steps(watched, "token_truncate", NO_CAP, top_k=4, noise=0.0):
        assert tap["mismatch/below_frac"] == 1.0
        assert tap["mismatch/above_share"] == 0.0
        assert tap["mismatch/weight_mean"] < 0.95


def test_the_temperature_of_an_engine_is_measured(watched):
    """Through TRL's own generation, log-probs and entropy."""
    for tap, _ in steps(watched, "token_truncate", NO_CAP, temperature=0.9, noise=0.0):
        assert tap["mismatch/engine_temperature"] == pytest.approx(0.9, rel=0.02)
        assert tap["mismatch/temperature_share"] > 0.9


@pytest.mark.parametrize(
    "mode", ["token_mask", "sequence_truncate", pytest.param("sequence_mask", marks=pytest.mark.thorough)]
)
def test_only_a_cap_on_tokens_is_a_truncation_of_tokens(watched, mode):
    """Masking and whole responses are other corrections: the share that truncation would cut is at the usual cap."""
    for tap, _ in steps(watched, mode, 1.005):
        assert tap["mismatch/tis_truncated"] == 0.0


def test_tokens_the_engine_did_not_score_are_left_out_where_trl_calls_them_1(watched):
    """One token a response has no log-prob; TRL's mean weight counts it as no correction."""
    for tap, row in steps(watched, "token_truncate", NO_CAP, unscored=True):
        scored = 1 - tap["nonfinite/rollout_logp"] / tokens(tap)
        assert row[RATIO + "mean"] == close(scored * tap["mismatch/weight_mean"] + 1 - scored)


def tokens(tap):
    return tap["len/mean"] * 8
