"""On a GPU: what a loop of one's own is told, what survives its restart, and what LayerClip does, as on the CPU.

The tests are those of the CPU. Without a CUDA device they are skipped, and pytest's summary says so.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from again import again, missing

AGAIN = {
    "integrations/test_torch_commands": (
        "test_after_a_reset_every_estimate_of_kl_is_zero_at_the_next_step",
        "test_the_answer_and_the_event_say_what_was_done",
        "test_kl_before_a_reset_is_that_of_the_last_step_where_the_device_is_behind",
        "test_the_optimizer_is_cleared_or_kept",
        "test_a_reset_of_the_reference_alone_leaves_everything_else_to_the_bit",
        "test_a_checkpoint_is_saved_by_the_loops_own_function",
        "test_the_weight_of_kl_is_set_by_the_loops_own_function",
        "test_the_learning_rate_is_lowered_without_a_schedule",
        "test_the_learning_rate_is_lowered_with_a_schedule",
        "test_a_loop_that_asks_is_stopped_after_a_save",
        "test_a_policy_of_nans_never_becomes_the_reference",
        "test_an_adapter_named_ref_takes_the_weights_of_the_trained_one",
        "test_a_reset_survives_a_restart_neither_lost_nor_repeated",
    ),
    "integrations/test_torch_watcher": (
        "test_the_numbers_are_those_of_the_loop",
        "test_micro_batches_and_one_batch_give_the_same_statistics",
        "test_a_rate_kept_in_a_tensor_is_the_one_of_its_time",
    ),
}
if torch.cuda.is_available():
    globals().update(again(AGAIN))
    pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("loops_on_the_gpu")]
else:

    @pytest.mark.skip(reason="NO CUDA DEVICE: loops on a GPU are not tested here")
    def test_loops_on_a_gpu():
        """Some twenty tests."""


def test_every_test_that_is_to_run_again_is_there():
    """Under the name it has."""
    assert missing(AGAIN) == []
