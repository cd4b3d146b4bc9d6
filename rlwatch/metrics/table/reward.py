# ruff: noqa: E501  (one row of the table is one line or two)
"""Rewards, what groups of responses to one prompt say, and advantages."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, proxy, same

# fmt: off

DRAWS = (1, 2, 4, 8, 16, 32, 64)
"""The k of pass@k and all-correct@k."""

ROWS: tuple[Metric, ...] = (
    Metric("reward/mean", Family.REWARD, "", "mean reward of the batch", aggregator="sequence mean", aliases=(
        same("reward"), same("critic/score/mean", "verl"), same("rollout/reward_mean", "openrlhf"),
        same("rollout/raw_reward", "slime"), same("ppo_actor/task_reward/avg", "areal"),
        proxy("critic/rewards/mean", "verl", aggregator="after the KL penalty"), proxy("rewards/chosen", "trl", aggregator="log-ratio to the reference, times beta"),
        same("objective/scores", "trl"), proxy("return", "openrlhf"))),
    Metric("reward/std", Family.REWARD, "", "standard deviation of the reward over the batch", 0.0, aliases=(
        same("reward_std"), same("rollout/reward_std", "openrlhf"))),
    Metric("reward/max", Family.REWARD, "", "largest reward of the batch", aggregator="maximum", aliases=(same("critic/score/max", "verl"),)),
    Metric("reward/min", Family.REWARD, "", "smallest reward of the batch", aggregator="minimum", aliases=(same("critic/score/min", "verl"),)),
    Metric("reward/group_std", Family.REWARD, "", "standard deviation of the reward within a group (n - 1), mean over responses", 0.0,
           aggregator="sequence mean", aliases=(same("group_reward_std", "openrlhf"),)),
    fraction("reward/zero_std_frac", Family.REWARD, "samples whose group all got the same reward (no gradient)",
           aggregator="sample fraction", aliases=(
               same("frac_reward_zero_std"), proxy("frac_reward_zero_std", "trl/rloo", aggregator="after reward clip and KL penalty"))),
    fraction("reward/zero_std_right_frac", Family.REWARD, "samples whose group is right as a whole (too easy)", aggregator="sample fraction"),
    fraction("reward/zero_std_wrong_frac", Family.REWARD, "samples whose group is wrong as a whole (too hard)", aggregator="sample fraction"),
    fraction("reward/zero_std_other_frac", Family.REWARD, "samples whose group got one reward that is neither right nor wrong",
           aggregator="sample fraction"),
    Metric("reward/groups_right", Family.REWARD, "groups", "groups right as a whole", 0.0, aggregator="sum", aliases=(
        same("rollout/zero_std/count_1", "slime"), same("rollout/zero_std/count_1.0", "slime"))),
    Metric("reward/groups_wrong", Family.REWARD, "groups", "groups wrong as a whole", 0.0, aggregator="sum", aliases=(
        same("rollout/zero_std/count_0", "slime"), same("rollout/zero_std/count_0.0", "slime"))),
    Metric("reward/effective_groups", Family.REWARD, "groups", "groups whose rewards differ, so that they teach something", 0.0, aggregator="sum"),
    *(fraction(f"reward/pass_at_{k}", Family.REWARD, f"chance that of {k} responses to a prompt at least one is right, unbiased",
               aggregator="group mean", aliases=(same(f"passrate/pass@{k}", "slime"),)) for k in DRAWS),
    *(fraction(f"reward/all_correct_at_{k}", Family.REWARD, f"chance that {k} responses to a prompt are all right, unbiased",
               aggregator="group mean") for k in DRAWS[1:]),
    fraction("reward/unique_answers", Family.REWARD, "distinct extracted answers of a group over its answers", aggregator="group mean"),
    fraction("reward/majority_share", Family.REWARD, "share of a group's answers that are its most frequent one", aggregator="group mean"),
    Metric("reward/answer_entropy", Family.REWARD, "nats", "entropy of the answers of a group", 0.0, aggregator="group mean"),
    Metric("val/score", Family.REWARD, "", "score on held-out prompts, measured now and then", aggregator="evaluation", aliases=(
        same("eval_reward"), proxy("eval/reward"))),
    Metric("adv/mean", Family.REWARD, "", "mean advantage", aliases=(same("critic/advantages/mean"),)),
    Metric("adv/std", Family.REWARD, "", "standard deviation of the advantage", 0.0),
    Metric("adv/max", Family.REWARD, "", "largest advantage", aliases=(same("critic/advantages/max"),)),
    Metric("adv/min", Family.REWARD, "", "smallest advantage", aliases=(same("critic/advantages/min"),)),
)
OPEN: tuple[Metric, ...] = (
    Metric("val-core/", Family.REWARD, "", "score on one held-out set, as verl names it", aggregator="evaluation"),
    Metric("reward/by_task/", Family.REWARD, "", "mean reward of the responses to one task or data source", aggregator="sequence mean"),
)
# fmt: on
