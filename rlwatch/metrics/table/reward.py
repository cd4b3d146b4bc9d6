# ruff: noqa: E501  (one row of the table is one line or two)
"""Rewards and advantages."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, proxy, same

# fmt: off

ROWS: tuple[Metric, ...] = (
    Metric("reward/mean", Family.REWARD, "", "mean reward of the batch", aggregator="sequence mean", aliases=(
        same("reward"), same("critic/score/mean", "verl"), same("rollout/reward_mean", "openrlhf"),
        same("rollout/raw_reward", "slime"), same("ppo_actor/task_reward/avg", "areal"),
        proxy("critic/rewards/mean", "verl", aggregator="after the KL penalty"), proxy("rewards/chosen", "trl"),
        proxy("objective/scores", "trl"), proxy("return", "openrlhf"))),
    Metric("reward/std", Family.REWARD, "", "standard deviation of the reward over the batch", 0.0, aliases=(
        same("reward_std"), same("rollout/reward_std", "openrlhf"), proxy("group_reward_std", "openrlhf"))),
    Metric("reward/max", Family.REWARD, "", "largest reward of the batch", aliases=(same("critic/score/max", "verl"),)),
    Metric("reward/min", Family.REWARD, "", "smallest reward of the batch", aliases=(same("critic/score/min", "verl"),)),
    fraction("reward/zero_std_frac", Family.REWARD, "samples whose group all got the same reward (no gradient)",
           aggregator="sample fraction", aliases=(same("frac_reward_zero_std"),)),
    Metric("adv/mean", Family.REWARD, "", "mean advantage", aliases=(same("critic/advantages/mean"),)),
    Metric("adv/std", Family.REWARD, "", "standard deviation of the advantage", 0.0),
    Metric("adv/max", Family.REWARD, "", "largest advantage", aliases=(same("critic/advantages/max"),)),
    Metric("adv/min", Family.REWARD, "", "smallest advantage", aliases=(same("critic/advantages/min"),)),
)
# fmt: on
