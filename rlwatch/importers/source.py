"""Which trainer wrote a log, told from the names of its metrics.

Matters because one name means different things: ``kl`` is k3 in TRL's GRPO and whatever was configured in
OpenRLHF. Names read in the code of the trainers; the first line that matches decides.
"""

from __future__ import annotations

from collections.abc import Iterable

_TELLING: tuple[tuple[str, frozenset[str]], ...] = (
    ("ms-swift", frozenset({"train_speed(iter/s)", "train_speed(s/it)", "memory(GiB)"})),
    (
        "openrlhf",
        frozenset({"actor_grad_norm", "ppo_clip_ratio", "vllm_kl", "rollout/reward_mean", "group_reward_std"}),
    ),
    ("slime", frozenset({"train/pg_loss", "rollout/raw_reward", "train/train_rollout_logprob_abs_diff"})),
    ("prime-rl", frozenset({"mismatch_kl/all/mean", "entropy/all/mean"})),
    ("areal", frozenset({"ppo_actor/task_reward/avg", "ppo_actor/update/entropy/avg"})),
    ("roll", frozenset({"actor/ppo_ratio_clipfrac", "actor/policykl", "critic/entropy/mean"})),
    ("verl", frozenset({"actor/ppo_kl", "actor/pg_loss", "critic/score/mean", "global_seqlen/mean"})),
    ("trl/online_dpo", frozenset({"objective/scores_margin"})),
    ("trl/ppo", frozenset({"policy/approxkl_avg", "objective/rlhf_reward"})),
    ("trl/dpo", frozenset({"rewards/accuracies"})),
    (
        "trl/grpo",
        frozenset({"completions/mean_length", "completion_length", "frac_reward_zero_std", "clip_ratio/region_mean"}),
    ),
)
_TRACKER = "train/"


def source_of(names: Iterable[str], known_source: str = "") -> str:
    """The trainer that uses ``names``; ``known_source`` (what the format told) is kept unless it is made finer.

    >>> source_of(["loss", "frac_reward_zero_std"], "trl")
    'trl/grpo'
    >>> source_of(["loss"])
    ''
    """
    given = set(names)
    given |= {name.removeprefix(_TRACKER) for name in given}
    for source, telling in _TELLING:
        if not telling.isdisjoint(given) and _compatible(source, known_source):
            return source
    return known_source


def _compatible(source: str, known_source: str) -> bool:
    """ms-swift prints as TRL does, since it is built on it; otherwise what the format told stands."""
    return not known_source or source.startswith(known_source) or (source == "ms-swift" and known_source == "trl")
