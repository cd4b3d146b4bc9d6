"""On a GPU: what a trainer of TRL or ``transformers`` is told, resumes, evaluates and clips, as on the CPU.

The tests are those of the CPU. Without a CUDA device they are skipped, and pytest's summary says so.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from again import again, missing

AGAIN = {
    "integrations/test_trl_control": (
        "test_a_lowered_rate_lasts_under_a_real_schedule",
        "test_a_lowered_rate_changes_the_weights_as_a_smaller_rate_would",
        "test_the_kl_coefficient_is_what_the_loss_uses_from_then_on",
        "test_a_checkpoint_is_saved_at_the_step_the_answer_names",
        "test_stop_ends_training_in_good_order",
        "test_a_paused_trainer_goes_on_where_it_was",
    ),
    "integrations/test_trl_reset": (
        "test_after_a_reset_every_kl_estimate_is_zero_at_the_next_step",
        "test_rloo_is_reset_too",
        "test_the_answer_and_the_event_say_what_was_done",
        "test_kl_before_a_reset_is_that_of_the_last_step_where_the_device_is_behind",
        "test_keeping_the_optimizer_changes_no_rollout_and_no_weight_before_the_next_loss",
        "test_a_policy_of_nans_never_becomes_the_reference",
        "test_adapters_are_reset_to_adapters",
    ),
    "integrations/test_trl_kept": (
        "test_a_resumed_run_is_the_run_that_was_never_interrupted",
        "test_a_lowered_rate_outlives_the_process",
        "test_a_kl_coefficient_that_was_set_outlives_the_process",
    ),
    "integrations/test_trl_taps": (
        "test_taps_agree_with_the_trainers_own_numbers",
        "test_rloo_reports_tokens_and_ratios_of_whole_responses",
        "test_rloo_kl_is_read_where_its_responses_are_scored",
        "test_evaluation_is_recorded_but_not_tapped",
        "test_infinite_rewards_show_although_trl_rewrites_their_advantages",
    ),
    "integrations/test_trl_generation": (
        "test_completions_are_kept_with_their_rewards_and_advantages",
        "test_the_kl_of_a_completion_is_kept_where_there_is_a_reference",
        "test_evaluation_generations_are_neither_measured_nor_kept",
        "test_rloo_generations_are_measured_too",
    ),
    "integrations/test_trl_gradients": (
        "test_gradients_are_read_before_clipping",
        "test_without_clipping_gradients_are_read_all_the_same",
    ),
    "integrations/test_transformers_watch": (
        "test_training_is_bit_identical_to_training_unwatched",
        "test_gradients_are_those_before_clipping",
        "test_a_nan_loss_is_seen_where_the_log_reassures",
        "test_a_live_trainer_saves_slows_down_and_stops_on_command",
    ),
    "clipping/test_clipping_trainers": (
        "test_a_rule_that_never_binds_changes_no_bit_of_training",
        "test_layers_come_before_the_global_clip_and_the_log_has_the_norm_before_both",
        "test_watching_sees_gradients_before_clipping_in_either_order",
        "test_watching_changes_no_bit_of_clipped_training",
        "test_a_resumed_run_is_the_run_that_was_never_interrupted",
    ),
}
if torch.cuda.is_available():
    globals().update(again(AGAIN))
    pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("trainers_on_the_gpu")]
else:

    @pytest.mark.skip(reason="NO CUDA DEVICE: trainers on a GPU are not tested here")
    def test_trainers_on_a_gpu():
        """Some fifty tests."""


def test_every_test_that_is_to_run_again_is_there():
    """Under the name it has."""
    assert missing(AGAIN) == []
