"""Recognise trainers' metric names that rlwatch does not use, with the reason; all other names are unknown.

The patterns apply only to names that no row of the metric table covers, so they may be broad; the first match counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from rlwatch.patterns import lazy_pattern

SPEED, MACHINES = "speed", "machine load"
PART = "part of the reward"
SETTING, AUXILIARY_LOSS = "setting", "auxiliary loss"
COUNT, BATCH = "counter", "batch composition"
NOT_LEARNING = frozenset({SPEED, MACHINES, COUNT, BATCH})
"""Reasons given for metrics that do not measure how the policy learns."""
_HELD_OUT = r"^(?:eval|val|val-core|val-aux|validation|test|heldout)(?:[/_]|$)"
_REASONS: tuple[tuple[str, str], ...] = (
    (
        _HELD_OUT + r"|(?:^|[/_])pass_?k$|(?:^|/)(?:best|worst|maj)@|^rollouter/validate",
        "held-out evaluation",
    ),
    (r"(?:reward_?model|^rm)(?:[/_].*)?_loss$|^reward_loss$", AUXILIARY_LOSS),
    (r"^reward_?(?:coef|coeff|weight|scale|scaling|clip|threshold|target)s?$", SETTING),
    (
        r"^rewards?[/_].+|^gdpo/|^self_distillation/rewards/|baseline_reward|/histogram$|non_score_reward|_reward_fn|reward_func"
        r"|^(?:rlhf_reward|kl_reward|successes)$",
        PART,
    ),
    (
        r"rewards_(?:chosen|rejected)|(?:accuracies|margins?|rejected|chosen)$|^logps/|center_rewards",
        "preference-pair metric",
    ),
    (r"distill|teacher|student|(?:^|[/_])opd|^sdar/|rlsd|fipo|draft_", "distillation metric"),
    (
        r"(?:^|[/_])(?:timing(?:_s|_per_token_ms)?|time|perf|timer?s)(?:[/_]|$)|_(?:time|s|sec|secs|seconds|ms|min)$"
        r"|runtime|elapsed|per_sec|per_second|throughput|tok(?:ens)?[/_]s(?:_|$)|tflops|flops|mfu|utilization|speed"
        r"|^profiling/|duration|idle|weight_sync|policy_training|reward_calculation|exposed_generation|^generation(?:_[a-z]+)?$"
        r"|speculat|spec_accept",
        SPEED,
    ),
    (
        r"^(?:system|inference)/|memory|_gi?b$|gpu|cuda|kv_cache|num_requests|prefix_cache|num_ranks|fleet_health"
        r"|disk|cpu_|temperature$|(?:queue|mq)_size$|active_tasks|concurrent_samples|^checkpoint_engine/|^separate_async/",
        MACHINES,
    ),
    (
        r"^(?:progress|sampling_client)/|(?:^|[/_])(?:epochs?|episodes?|steps?|global_step|iteration|percentage|examples|total_steps"
        r"|current_steps|timestamp|rows)$|(?:^|[/_])(?:num|total|n|count|cumulative)_|_(?:total|count|index|so_far)$"
        r"|batch_size|group_size|inflight|global_valid|_mask_sum$|^_|trajectories$|size_bytes|policy_version"
        r"|num_questions|num_rollouts|(?:required|generated|staleness)_samples$|global_tokens$|processed|param_version",
        COUNT,
    ),
    (
        r"prompt[/_]?(?:length|len)|(?:^|[/_])ob_tokens|seqlen|seq_len|packing|pad_frac|row_|^batch/|microbatch|balance"
        r"|per_worker|per_step$|forwarded_tokens|masked_token|num_branches|num_total_tokens|token_counts|minmax_diff",
        BATCH,
    ),
    (r"^objective/entropy$", "response-level entropy (grows with length)"),
    (r"tool|(?:^|[/_])(?:branch|assistant_messages|turns?)(?:[/_]|$)|malformed", "tool use"),
    (
        r"(?:^|[/_])(?:coef|coeff|beta|eps|threshold|lambda|cliprange(?:_low|_high)?|alpha|phi|temperature|top_p|top_k)$"
        r"|_coeff?$|_phase$|loss_normali[sz]e|_override_active$|phi_seq|lr[-_]pg|(?:^|[/_])lr$|_enabled$",
        SETTING,
    ),
    (
        r"^aux_loss$|aux_loss|mtp_loss|z_loss|routed_expert|/moe|^moe|ce_loss|perplexity$",
        AUXILIARY_LOSS,
    ),
    (
        r"filter_groups|dynamic_(?:filter|sampling)|evicted|discarded|masked_seqs|^pool/|_valid$|rollout_failure|sample_mask"
        r"|data_loss|skipped_batches|dropped",
        "sample filtering",
    ),
    (
        r"(?:^|[/_])(?:min|max|sum|var|p\d\d|std|median)(?:_(?:terminated_)?length)?$|ratio_var|_(?:low_min|high_max)$"
        r"|/(?:low_min|high_max)$|probs_ratio_clamped|(?:min|max)_terminated_length|[a-z]_mean_length$",
        "min, max or spread of a metric used by its mean",
    ),
    (
        r"kl_ent_ratio|tis_abs|ref_log_probs|rollout_log_probs|_probs_diff|prob_diff|seq_mult_prob_error|kl_common"
        r"|kl_sample_train_v2|kl_pre_post_v2|contain_eos|update_successful|version_stats|advantages?_abs|trajectory_s"
        r"|entropy/|mismatch_kl/|mult_prob_error_plot|lead_steps|^variance_proxy/|(?:min|max|avg)_vio/|env/all|env/[^/]+/"
        r"|^rollout_correction/(?:kl|chi2_seq)$",
        "covered by another metric",
    ),
)
_PATTERNS = tuple((lazy_pattern(pattern), reason) for pattern, reason in _REASONS)
_IMPORTANT = lazy_pattern(
    r"reward|score|entropy|kl|grad|loss|ratio|clip|len|adv|value|stale|accura|logp|prob", re.IGNORECASE
)
LONGEST = 500


def unjudged(name: str, *, whole: bool = True) -> str:
    """Return the reason why a recognised metric name is not used; empty for an unknown name.

    ``whole`` is True if the total reward of the run is known; otherwise a part of it may be its only reward.

    >>> unjudged("timing_s/gen"), unjudged("my_own_score")
    ('speed', '')
    >>> unjudged("reward_of_tests"), unjudged("reward_of_tests", whole=False)
    ('part of the reward', '')
    """
    if len(name) > LONGEST:
        return ""
    reason = _reason(name)
    return "" if reason == PART and not whole else reason


@lru_cache(maxsize=4096)
def _reason(name: str) -> str:
    plain = name.removeprefix("train/").removeprefix("train_")
    return next((reason for pattern, reason in _PATTERNS if pattern.search(plain)), "")


def foremost(names: Iterable[str]) -> list[str]:
    """Return the metric ``names``, with those first that sound like measures of learning, then alphabetically.

    >>> foremost(["apples", "my_kl"])
    ['my_kl', 'apples']
    """
    return sorted(names, key=lambda name: (_IMPORTANT.search(name) is None, name))
