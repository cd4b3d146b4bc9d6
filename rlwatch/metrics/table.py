# ruff: noqa: E501  (one row of the table is one line or two)
"""The table of metrics, family by family, in the order of every page and document.

A row holds all facts about a metric: name, unit, range and meaning, trainers' names for it (``aliases``), everyday
names in custom training loops (``everyday``), and its position among the charts of its family (``panel``).
"""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, nats, other, proxy, same

# fmt: off


# Table rows of metrics of the machine that a run uses (``system/``), and of its rollout engines (``engine/``).

# ruff: noqa: E501  (one row of the table is one line or two)



# fmt: off

_SAMPLES = "mean since the row before"

MACHINE: tuple[Metric, ...] = (
    fraction("system/cpu/util", Family.SYSTEM, "share of the machine's processors that are busy", aggregator=_SAMPLES, panel=3),
    Metric("system/cpu/process", Family.SYSTEM, "cores", "processors that the training process keeps busy", 0.0, aggregator=_SAMPLES),
    fraction("system/memory/util", Family.SYSTEM, "share of the memory (of the container, where that has less) that is taken and cannot be freed", aggregator=_SAMPLES, panel=4),
    Metric("system/memory/free", Family.SYSTEM, "GiB", "memory that can still be had", 0.0, aggregator=_SAMPLES),
    Metric("system/memory/process", Family.SYSTEM, "GiB", "memory of the training process", 0.0, aggregator=_SAMPLES),
    Metric("system/disk/store/free", Family.SYSTEM, "GiB", "free space where the store lies", 0.0, aggregator=_SAMPLES),
    fraction("system/disk/store/util", Family.SYSTEM, "share of the disk of the store that is used", aggregator=_SAMPLES),
    Metric("system/disk/checkpoints/free", Family.SYSTEM, "GiB", "free space where checkpoints are written", 0.0, aggregator=_SAMPLES, aliases=(
        same("system/ckpt_disk_free_gib", "prime-rl"),), panel=5),
    fraction("system/disk/checkpoints/util", Family.SYSTEM, "share of the disk of the checkpoints that is used", aggregator=_SAMPLES),
    Metric("system/disk/read", Family.SYSTEM, "MiB/s", "read from all disks of the machine", 0.0, aggregator=_SAMPLES),
    Metric("system/disk/write", Family.SYSTEM, "MiB/s", "written to all disks of the machine", 0.0, aggregator=_SAMPLES),
    Metric("system/net/received", Family.SYSTEM, "MiB/s", "received over all networks of the machine", 0.0, aggregator=_SAMPLES),
    Metric("system/net/sent", Family.SYSTEM, "MiB/s", "sent over all networks of the machine", 0.0, aggregator=_SAMPLES),
)
OPEN_MACHINE: tuple[Metric, ...] = (
    Metric("system/gpu/", Family.SYSTEM, "", "of the GPU of that number: `/util` and `/memory` (shares), `/memory_used` (GiB), `/temperature` (°C), `/power` (W), `/throttled` (share of looks at which heat or the power supply held its clock back), `/power_capped` (at which its power limit did)", aggregator=_SAMPLES),
    Metric("system/rank/", Family.SYSTEM, "", "of another rank, by its number: what is measured of rank 0 without it, as `system/rank/3/gpu/0/util`", aggregator=_SAMPLES),
    Metric("time/stage/", Family.SYSTEM, "s", "time in one stage of a step, without the stages within it: `sampling`, `reward`, `logprobs`, `update`, `weight_sync`, `checkpoint`, `evaluation`, or a word of the loop's own", 0.0),
    Metric("time/rank/", Family.SYSTEM, "s", "time that one rank took for its own part of a step, before it waited for the others", 0.0),
)

ENGINE: tuple[Metric, ...] = (
    Metric("engine/running", Family.ENGINE, "requests", "requests that the rollout engines work on", 0.0, aggregator="sum of the engines", aliases=(
        same("inference/agg/num_requests_running/mean", "prime-rl"),), panel=1),
    Metric("engine/waiting", Family.ENGINE, "requests", "requests that wait in the engines' queues", 0.0, aggregator="sum of the engines", aliases=(
        same("inference/agg/num_requests_waiting/mean", "prime-rl"),), panel=2),
    fraction("engine/kv_cache", Family.ENGINE, "share of the engines' KV cache in use; at 1 requests are preempted", aggregator="mean of the engines", aliases=(
        same("inference/agg/kv_cache_usage_perc/mean", "prime-rl"),), panel=3),
    Metric("engine/throughput", Family.ENGINE, "tokens/s", "tokens that the engines generate", 0.0, aggregator="sum of the engines", panel=4),
    Metric("engine/prompt_throughput", Family.ENGINE, "tokens/s", "prompt tokens that the engines take in", 0.0, aggregator="sum of the engines"),
    Metric("engine/preemptions", Family.ENGINE, "1/s", "requests set back because the KV cache was full: their work is done again", 0.0, aggregator="sum of the engines", panel=5),
    fraction("engine/prefix_hits", Family.ENGINE, "prompt tokens found in the prefix cache", aggregator="of the tokens since the look before", aliases=(
        same("inference/agg/prefix_cache_hit_rate/pooled", "prime-rl"),)),
    fraction("engine/spec_accepted", Family.ENGINE, "drafted tokens of speculative decoding that were accepted; it falls as the policy leaves its draft", aggregator="of the tokens since the look before"),
    Metric("engine/failed", Family.ENGINE, "1/s", "requests that were aborted or ended in an error", 0.0, aggregator="sum of the engines"),
    Metric("engine/rollout_failures", Family.ENGINE, "samples", "rollouts left out because they failed", 0.0, aggregator="sum", aliases=(
        same("training/rollout_failure/evicted_samples", "verl"),)),
    Metric("engine/weight_sync", Family.ENGINE, "s", "time in which new weights went to the engines", 0.0, aggregator="sum", aliases=(
        same("perf/weight_sync_s", "trl"), same("time/broadcast_weights", "prime-rl"))),
    Metric("engine/down", Family.ENGINE, "engines", "engines that did not answer", 0.0, aggregator="sum of the engines"),
)


_RESPONSES = "mean of responses' means"
DRAWS = (1, 2, 4, 8, 16, 32, 64)
"""The k of pass@k and all-correct@k."""

REWARD: tuple[Metric, ...] = (
    Metric("reward/mean", Family.REWARD, "", "mean reward of the batch", aggregator="sequence mean", aliases=(
        same("reward"), same("critic/score/mean", "verl"), same("rollout/reward_mean", "openrlhf"),
        same("reward/evaluate_response/avg_total_reward", "torchforge"), same("rollout/ep_rew_mean", "sb3"),
        same("rollout/raw_reward", "slime"), same("ppo_actor/task_reward/avg", "areal"), same("reward/avg_raw_reward", "skyrl"),
        same("env/all/reward/total", "tinker"), same("reward/all/mean", "prime-rl"), same("score", "openrlhf"), same("self_distillation/reward_mean", "trl"),
        proxy("accuracy", "nemo-rl", aggregator="mean reward of the prompts that count"), proxy("filtered_reward", "nemo-rl", aggregator="after dynamic sampling"),
        proxy("total_reward", "nemo-rl"), proxy("rewards", "nemo-rl"), proxy("loss/avg_final_rewards", "skyrl", aggregator="after penalties"),
        proxy("rollout/rewards", "slime", aggregator="after normalisation within the group"), proxy("ppo_actor/final_reward/avg", "areal"),
        proxy("critic/rewards/mean", "verl", aggregator="after the KL penalty"), proxy("rewards/chosen", "trl", aggregator="log-ratio to the reference, times beta"),
        proxy("objective/rlhf_reward", "trl", aggregator="less the KL penalty"),
        same("objective/scores", "trl"), same("scores", "torchtune"), same("rewards", "torchtune"), proxy("return", "openrlhf")),
        panel=1, vital=True),
    Metric("reward/std", Family.REWARD, "", "standard deviation of the reward over the batch", 0.0, aliases=(
        same("reward_std"), same("rollout/reward_std", "openrlhf"), same("self_distillation/reward_std", "trl")), panel=2, everyday=("reward std", "r std", "rollout reward std", "reward total std")),
    Metric("reward/max", Family.REWARD, "", "largest reward of the batch", aggregator="maximum", aliases=(
        same("critic/score/max", "verl"), proxy("critic/rewards/max", "verl", aggregator="after the KL penalty"), same("self_distillation/reward_max", "trl")),
        everyday=("reward max", "rollout reward max")),
    Metric("reward/min", Family.REWARD, "", "smallest reward of the batch", aggregator="minimum", aliases=(
        same("critic/score/min", "verl"), proxy("critic/rewards/min", "verl", aggregator="after the KL penalty"), same("self_distillation/reward_min", "trl")),
        everyday=("reward min", "rollout reward min")),
    Metric("reward/group_std", Family.REWARD, "", "standard deviation of the reward within a group (n - 1), mean over responses", 0.0,
           aggregator="sequence mean", aliases=(same("group_reward_std", "openrlhf"), same("self_distillation/group_reward_std_mean", "trl"))),
    fraction("reward/zero_std_frac", Family.REWARD, "samples whose group all got the same reward (no gradient)",
           aggregator="sample fraction", aliases=(
               same("frac_reward_zero_std"), same("self_distillation/flat_group_fraction", "trl"), proxy("frac_reward_zero_std", "trl/rloo", aggregator="after reward clip and KL penalty")),
        panel=3, everyday=("zero std", "zero std fraction", "zero variance fraction", "reward zero std fraction")),
    fraction("reward/zero_std_right_frac", Family.REWARD, "samples whose group is right as a whole (too easy)", aggregator="sample fraction", aliases=(
        same("env/all/by_group/frac_all_good", "tinker", aggregator="groups of one reward, at least 0.5"), same("solve_all/all", "prime-rl"))),
    fraction("reward/zero_std_wrong_frac", Family.REWARD, "samples whose group is wrong as a whole (too hard)", aggregator="sample fraction", aliases=(
        same("env/all/by_group/frac_all_bad", "tinker", aggregator="groups of one reward, below 0.5"), same("solve_none/all", "prime-rl"))),
    fraction("reward/zero_std_other_frac", Family.REWARD, "samples whose group got one reward that is neither right nor wrong",
           aggregator="sample fraction"),
    Metric("reward/groups_right", Family.REWARD, "groups", "groups right as a whole", 0.0, aggregator="sum", aliases=(
        same("rollout/zero_std/count_1", "slime"), same("rollout/zero_std/count_1.0", "slime"))),
    Metric("reward/groups_wrong", Family.REWARD, "groups", "groups wrong as a whole", 0.0, aggregator="sum", aliases=(
        same("rollout/zero_std/count_0", "slime"), same("rollout/zero_std/count_0.0", "slime"))),
    Metric("reward/effective_groups", Family.REWARD, "groups", "groups whose rewards differ, so that they teach something", 0.0, aggregator="sum"),
    Metric("reward/starvation_margin", Family.REWARD, "", "pass rate over 1 - 2^(-1/g), g responses to a prompt: below 1 more than half of the groups are expected to be all wrong (arXiv 2606.18487)", 0.0, aggregator="group sum over sum"),
    *(fraction(f"reward/pass_at_{k}", Family.REWARD, f"chance that of {k} responses to a prompt at least one is right, unbiased",
               aggregator="group mean", aliases=(same(f"passrate/pass@{k}", "slime"), same(f"reward/avg_pass_at_{k}", "skyrl"))) for k in DRAWS),
    *(fraction(f"reward/all_correct_at_{k}", Family.REWARD, f"chance that {k} responses to a prompt are all right, unbiased",
               aggregator="group mean") for k in DRAWS[1:]),
    fraction("reward/unique_answers", Family.REWARD, "distinct extracted answers of a group over its answers", aggregator="group mean"),
    fraction("reward/majority_share", Family.REWARD, "share of a group's answers that are its most frequent one", aggregator="group mean"),
    Metric("reward/answer_entropy", Family.REWARD, "nats", "entropy of the answers of a group", 0.0, aggregator="group mean"),
    Metric("val/score", Family.REWARD, "", "score on held-out prompts, measured now and then", aggregator="evaluation", aliases=(
        same("eval_reward"), proxy("eval/reward"), same("test/env/all/reward/total", "tinker"), same("eval/all/avg_score", "skyrl"),
        same("val/accuracy", "nemo-rl"), same("validation/accuracy", "nemo-rl"))),
    Metric("adv/mean", Family.REWARD, "", "mean advantage", aliases=(
        same("critic/advantages/mean"), same("rollout/advantages", "slime"), same("ppo_actor/advantages/avg", "areal"), same("loss/avg_raw_advantages", "skyrl"),
        same("advantages/mean", "nemo-rl"), same("main/rollout/avg_advantage", "torchforge")), everyday=("advantage",)),
    Metric("adv/std", Family.REWARD, "", "standard deviation of the advantage", 0.0, aliases=(same("main/rollout/std_advantage", "torchforge"),), everyday=("advantage std",)),
    Metric("adv/max", Family.REWARD, "", "largest advantage", aliases=(same("critic/advantages/max"), same("ppo_actor/advantages/max", "areal")), everyday=("advantage max",)),
    Metric("adv/min", Family.REWARD, "", "smallest advantage", aliases=(same("critic/advantages/min"), same("ppo_actor/advantages/min", "areal")), everyday=("advantage min",)),
)
OPEN_REWARD: tuple[Metric, ...] = (
    Metric("val-core/", Family.REWARD, "", "score on one held-out set, as verl names it", aggregator="evaluation"),
    Metric("reward/by_task/", Family.REWARD, "", "mean reward of the responses to one task or data source", aggregator="sequence mean"),
    Metric("reward/part/", Family.REWARD, "", "mean of one part of the reward (format, answer...), by its name", aggregator="sequence mean", aliases=(
        same("rewards/*/mean"), same("rewards/*"), same("gdpo/*/mean", "verl"), same("*_reward", "openrlhf"), same("self_distillation/rewards/*", "trl"),
        same("reward/evaluate_response/avg_*_reward", "torchforge"), same("env/all/format", "tinker"), same("env/all/correct", "tinker"))),
    fraction("verifier/errors/", Family.REWARD, "checks of one reward function that raised: its calls, or those counted inside it by count_errors", aggregator="check fraction"),
    fraction("verifier/timeouts/", Family.REWARD, "checks of one reward function that raised a timeout", aggregator="check fraction"),
    fraction("verifier/absent/", Family.REWARD, "answers that one reward function gave no reward: None or NaN", aggregator="sequence fraction"),
    fraction("verifier/constant/", Family.REWARD, "calls of one reward function in which every answer of the batch got the same reward", aggregator="call fraction"),
    fraction("verifier/full_on_error/", Family.REWARD, "full marks of one reward function given in spite of an exception in the check, where count_errors assigns it to an answer",
             aggregator="sequence fraction"),
    Metric("verifier/seconds/", Family.REWARD, "s", "time of one call of a reward function", 0.0, aggregator="call mean"),
    Metric("verifier/seconds_max/", Family.REWARD, "s", "longest call of a reward function", 0.0, aggregator="maximum"),
    Metric("verifier/canary_right/", Family.REWARD, "", "score of an answer that is known to be right, by function and canary", aggregator="one answer"),
    Metric("verifier/canary_wrong/", Family.REWARD, "", "score of an answer that is known to be wrong, by function and canary", aggregator="one answer"),
    fraction("verifier/canary_failed/", Family.REWARD, "canaries of one reward function that could not be scored: it raised, gave no finite reward, or took too long", aggregator="canary fraction"),
)

# Exploration: entropy and diversity of the policy.

OF_A_DATASET = ("trl/sft", "trl/dpo", "trl/kto", "trl/tpo", "trl/distillation")
"""Trainers whose entropy is that of a dataset's tokens: it falls as they learn, without any exploration."""

EXPLORATION: tuple[Metric, ...] = (
    nats("policy/entropy", Family.EXPLORATION, "full-softmax entropy at rollout temperature", low=0.0, aliases=(
        same("entropy"), same("actor/entropy", "verl", aggregator="loss_agg_mode, old policy"),
        same("entropy/mean"), same("entropy/all/mean", "prime-rl"), same("entropy/all", "prime-rl"), same("ppo_actor/update/entropy/avg", "areal"),
        same("policy/policy_entropy", "skyrl"), proxy("optim/entropy", "tinker", aggregator="mean surprise of the sampled tokens"),
        proxy("approx_entropy", "nemo-rl", aggregator="mean surprise of the sampled tokens"), proxy("rollout/entropy", "slime", aggregator="policy before the update"),
        same("critic/entropy/mean", "roll"), same("policy/entropy_avg", "trl"),
        proxy("actor/entropy_loss", "verl", aggregator="update pass"), proxy("entropy_loss", "openrlhf"),
        proxy("train/entropy_loss", "slime"),
        *(other("entropy", source) for source in OF_A_DATASET)),
        panel=1, vital=True),
    Metric("policy/entropy_coef", Family.EXPLORATION, "", "weight of the entropy bonus", aliases=(same("entropy_coef"),)),
    nats("policy/entropy_pos", Family.EXPLORATION, "entropy of the tokens of positive advantage", low=0.0),
    nats("policy/entropy_neg", Family.EXPLORATION, "entropy of the tokens of negative advantage: it is these that explode", low=0.0),
    nats("policy/entropy_p10", Family.EXPLORATION, "10th percentile of token entropy", low=0.0, panel=2),
    nats("policy/entropy_p90", Family.EXPLORATION, "90th percentile of token entropy", low=0.0, panel=3),
    Metric("policy/vocab_size", Family.EXPLORATION, "tokens", "vocabulary size: entropy cannot exceed its logarithm", 1.0),
    nats("policy/logp_mean", Family.EXPLORATION, "mean log-prob of the sampled tokens", high=0.0,
           aliases=(same("train/log_probs", "slime"), proxy("rollout/log_probs", "slime", aggregator="policy before the update"), same("ppo_actor/update/new_logp/avg", "areal")), everyday=("logp", "log prob", "log probs")),
    Metric("policy/energy", Family.EXPLORATION, "", "realised energy: squared norm of a token's push on the logits, 1 - 2 p + sum of all squared probabilities (arXiv 2602.07078)", 0.0, 2.0),
    Metric("policy/energy_pushed", Family.EXPLORATION, "", "the same times the squared advantage and ratio: a squared gradient norm from the forward pass alone", 0.0),
    Metric("policy/energy_response", Family.EXPLORATION, "", "sum of the realised energy over a response", 0.0, aggregator="sequence mean"),
    Metric("policy/energy_response_max", Family.EXPLORATION, "", "the same, largest", 0.0, aggregator="maximum"),
    nats("policy/logp_min", Family.EXPLORATION, "lowest log-prob of a sampled token", high=0.0, aggregator="minimum"),
    Metric("policy/cov", Family.EXPLORATION, "nats", "covariance c of log-prob and advantage over tokens: a step lowers entropy in proportion to it"),
    Metric("policy/cov_top", Family.EXPLORATION, "nats", "mean c of the 0.2 % of tokens where it is largest", aggregator="mean of the top 0.2 %"),
    fraction("policy/cov_positive", Family.EXPLORATION, "tokens with c > 0, whose update lowers entropy"),
    fraction("policy/cov_candidates", Family.EXPLORATION, "tokens with c within (1, 5) that PPO does not clip: candidates of Clip-Cov"),
)
OPEN_EXPLORATION: tuple[Metric, ...] = (
    nats("policy/entropy_by_task/", Family.EXPLORATION, "mean entropy of the responses to one task or data source", low=0.0,
           aggregator="sequence mean"),
)

# Likelihood displacement: updates that lower the likelihood of the very responses they reward (arXiv 2512.04220).

LIKELIHOOD: tuple[Metric, ...] = (
    nats("lld/logp_positive", Family.EXPLORATION, "mean log-prob of the tokens of responses with a positive advantage", high=0.0),
    nats("lld/displacement", Family.EXPLORATION, "log-prob now less log-prob before the update, on tokens of positive advantage"),
    fraction("lld/displaced_frac", Family.EXPLORATION, "responses of positive advantage that became less likely", aggregator="sequence fraction"),
    fraction("lld/negative_push", Family.EXPLORATION, "share of |A| (1 - p), summed over tokens, that pushes down", aggregator="weighted token fraction"),
    nats("lld/penalty", Family.EXPLORATION, "LLDS penalty: what actions of responses with A >= 0 lost, where the whole action lost", low=0.0),
)

# Distance of the policy from the reference, and from the policy that sampled.

TRUST_REGION: tuple[Metric, ...] = (
    nats("policy/kl_ref", Family.TRUST_REGION, "KL to the reference policy", estimator="k3", aliases=(
        same("kl", "trl/grpo", "k3", "token mean, times pi/pi_old with use_bias_correction_kl"), proxy("kl", "trl/rloo", "k1"),
        proxy("kl", "openrlhf", "k1|k2|k3"), proxy("kl", "trl/kto", "k1", "sequence sum of mismatched pairs, at least 0"),
        proxy("objective/kl", "trl", "k1", "sequence sum"), proxy("kl", "torchtune", "k1", "sequence sum"), same("kl", "", "k3"),
        same("actor/kl_loss", "verl", "kl_loss_type"), proxy("actor/reward_kl_penalty", "verl"),
        proxy("critic/kl", "verl"), same("train/kl_loss", "slime"), same("kl_ref"), same("kl_loss"), same("policy/policy_kl", "skyrl"),
        proxy("kl_policy_base", "tinker", "k1", "policy that sampled"), same("kl_penalty", "nemo-rl", "k3"), proxy("rollout/kl", "slime", "k1", "policy before the update"),
        proxy("ppo_actor/kl_rewards/avg", "areal", "k1", "as part of the reward, with its sign and weight"), proxy("loss/avg_kl", "skyrl")),
        panel=1, vital=True),
    nats("policy/kl_ref_k1", Family.TRUST_REGION, "KL to the reference, k1 = x, x = log(pi/ref); may be negative", aliases=(
        proxy("logprobs_diff", "openrlhf", "k1", "token mean, or sequence mean where KL is part of the reward; 0 without a reference"),)),
    nats("policy/kl_ref_k2", Family.TRUST_REGION, "KL to the reference, k2 = x^2/2", low=0.0),
    nats("policy/kl_ref_k3", Family.TRUST_REGION, "KL to the reference, k3 = exp(-x) - 1 + x", low=0.0, panel=2),
    nats("policy/kl_ref_weighted", Family.TRUST_REGION, "k3 times pi/pi_old: unbiased on samples of the old policy", estimator="V3.2"),
    nats("policy/kl_ref_max", Family.TRUST_REGION, "largest k3 of a token", low=0.0, aggregator="maximum"),
    nats("policy/kl_ref_p99", Family.TRUST_REGION, "99th percentile of k3", low=0.0, aggregator="99th percentile"),
    fraction("policy/kl_ref_far", Family.TRUST_REGION, "tokens more than twice or less than half as likely as under the reference"),
    fraction("policy/kl_ref_saturated", Family.TRUST_REGION, "tokens with k3 > 10, where verl clamps it: no gradient pulls them back"),
    fraction("policy/kl_ref_neg_share", Family.TRUST_REGION, "share of the k3 sum that tokens of negative advantage hold", aggregator="share of the sum"),
    fraction("policy/kl_ref_unlikely_share", Family.TRUST_REGION, "share of the k3 sum that tokens hold whose old probability was below 0.1",
           aggregator="share of the sum"),
    nats("policy/kl_old", Family.TRUST_REGION, "k1 between the policy before and during the update", estimator="k1", aliases=(
        same("actor/ppo_kl", "verl", "k1"), same("ppo_kl", "", "k1"), same("train/ppo_kl", "slime"),
        same("approx_kl"), same("actor/approxkl", "roll"), same("policy/approxkl_avg", "trl"), same("ppo_actor/update/approx_kl/avg", "areal"), same("approx_policy_kl", "torchtune"),
        proxy("kl_pre_post_v1", "tinker", "k1", "after the update")), panel=5, everyday=("approxkl", "kl approx", "kl old")),
    Metric("policy/kl_coef", Family.TRUST_REGION, "", "weight of the KL term (beta)", 0.0, aliases=(same("actor/kl_coef"), same("beta"))),
    Metric("policy/clip_range", Family.TRUST_REGION, "", "how far a ratio may be from 1 before it is clipped (epsilon)", 0.0),
    Metric("ratio/mean", Family.TRUST_REGION, "", "mean importance ratio pi/pi_old", 0.0, aliases=(same("ratio"), same("val/ratio"), same("train/ois", "slime", aggregator=_RESPONSES), same("ppo_actor/update/importance_weight/avg", "areal"), same("ratios", "torchtune"),
        same("probs_ratio", "nemo-rl"), same("actor/ratio_mean", "roll")),
        everyday=("ratio", "is ratio", "policy ratio")),
    Metric("ratio/max", Family.TRUST_REGION, "", "largest importance ratio", 0.0, aggregator="maximum", aliases=(
        same("ppo_actor/update/importance_weight/max", "areal"), same("probs_ratio_max", "nemo-rl"), same("actor/ratio_max", "roll")),
        panel=4, everyday=("ratio max", "is ratio max")),
    Metric("ratio/min", Family.TRUST_REGION, "", "smallest importance ratio", 0.0, aggregator="minimum", aliases=(
        same("ppo_actor/update/importance_weight/min", "areal"), same("probs_ratio_min", "nemo-rl"), same("actor/ratio_min", "roll")),
        everyday=("ratio min", "is ratio min")),
    Metric("ratio/p99", Family.TRUST_REGION, "", "99th percentile of token ratios", 0.0, aggregator="99th percentile"),
    nats("ratio/log_absmax", Family.TRUST_REGION, "largest |log ratio| of a token", low=0.0, aggregator="maximum"),
    fraction("ratio/tv", Family.TRUST_REGION, "mean |p - p_old| of the sampled tokens: does not over-react to rare ones as the ratio does (DPPO, arXiv 2602.04879)", aggregator="token mean"),
    fraction("ratio/tv_max", Family.TRUST_REGION, "the same, largest", aggregator="maximum"),
    fraction("ratio/router_token_frac", Family.TRUST_REGION, "tokens sent to other experts in at least one layer than under the policy that the update began with (arXiv 2510.23027)"),
    fraction("ratio/router_layer_frac", Family.TRUST_REGION, "(token, layer) pairs with another set of experts than under that policy", aggregator="token and layer fraction"),
    Metric("ratio/m2", Family.TRUST_REGION, "nats^2", "mean squared log-ratio (M2PO holds it below 0.04)", 0.0),
    Metric("ratio/chi2", Family.TRUST_REGION, "", "<ratio^2> - 1 of raw token ratios"),
    fraction("ratio/ess", Family.TRUST_REGION, "effective sample size of raw token ratios over their number",
        everyday=("ess", "is ess", "effective sample size")),
    fraction("ratio/ess_clipped", Family.TRUST_REGION, "the same of ratios cut at the bounds of the loss's clip: looks healthy when much is cut"),
    Metric("ratio/geo_mean", Family.TRUST_REGION, "", "mean over responses of the geometric mean of their token ratios", 0.0, aggregator="sequence mean"),
    Metric("ratio/geo_max", Family.TRUST_REGION, "", "largest geometric mean of a response", 0.0, aggregator="maximum"),
    Metric("ratio/geo_min", Family.TRUST_REGION, "", "smallest geometric mean of a response", 0.0, aggregator="minimum"),
    fraction("ratio/product_ess", Family.TRUST_REGION, "effective sample size of the products of responses' token ratios over their number", aggregator="sequences"),
    Metric("ratio/log_var_growth", Family.TRUST_REGION, "nats^2/token", "growth of a response's log-ratio variance with its length", aggregator="regression slope"),
    Metric("ratio/seq_mean", Family.TRUST_REGION, "", "mean ratio of whole responses, as a sequence-level loss takes it", 0.0, aggregator="sequence mean"),
    Metric("ratio/seq_max", Family.TRUST_REGION, "", "largest ratio of a whole response", 0.0, aggregator="maximum"),
    fraction("ratio/seq_ess", Family.TRUST_REGION, "effective sample size of the ratios of responses over their number", aggregator="sequences"),
    fraction("ratio/clipfrac", Family.TRUST_REGION, "tokens whose ratio is clipped", aliases=(
        same("clip_ratio/region_mean", "", aggregator="token fraction, sign-aware"), same("actor/pg_clipfrac", "verl"),
        same("ppo_clip_ratio", "openrlhf"), same("pg_clipfrac"), same("train/pg_clipfrac", "slime"), same("train/clip_fraction", "sb3"),
        same("actor/ppo_ratio_clipfrac", "roll"), same("clip_ratio"), same("policy/clipfrac_avg", "trl"),
        proxy("clip_ratio/region_mean", "trl/rloo", aggregator="sequence fraction"), proxy("cispo_clip_ratio", "trl"), proxy("cispo_clip_ratio", "ms-swift"),
        same("ppo_actor/update/clip_ratio/avg", "areal"), same("policy/ppo_clip_ratio", "skyrl"), same("clipfrac", "torchtune"), same("policy/loss_metrics/clip_ratio", "skyrl")),
        panel=3, everyday=("clip fraction", "clipfrac", "ratio clip fraction", "pg clip fraction")),
    fraction("ratio/clipfrac_low", Family.TRUST_REGION, "tokens clipped below (advantage < 0)", aliases=(
        same("clip_ratio/low_mean"), proxy("clip_ratio/low_mean", "trl/rloo", aggregator="sequence fraction"),
        same("actor/ppo_ratio_low_clipfrac", "roll"))),
    fraction("ratio/clipfrac_high", Family.TRUST_REGION, "tokens clipped above (advantage > 0)", aliases=(
        same("clip_ratio/high_mean"), proxy("clip_ratio/high_mean", "trl/rloo", aggregator="sequence fraction"),
        same("actor/ppo_ratio_high_clipfrac", "roll"))),
    fraction("ratio/clipfrac_dual", Family.TRUST_REGION, "tokens beyond the dual clip (advantage < 0, ratio > c)", aliases=(
        proxy("actor/pg_clipfrac_lower", "verl", aggregator="0 where the loss has no dual clip"), same("ppo_actor/update/dual_clip_ratio/avg", "areal"))),
    fraction("offpolicy/masked", Family.TRUST_REGION, "responses that V3.2's off-policy mask drops, at the loss's threshold or 0.5 nats/token",
           aggregator="sequence fraction", aliases=(proxy("train/opsm_clipfrac", "slime", aggregator="sequences, counted"),)),
    fraction("offpolicy/masked_neg", Family.TRUST_REGION, "the same, of responses of negative advantage", aggregator="sequence fraction"),
    nats("ratio/token_kl", Family.TRUST_REGION, "largest divergence of a token in a response (this token against any other, sampling policy || policy), mean over responses", low=0.0, aggregator="sequence mean"),
    fraction("ratio/far_responses", Family.TRUST_REGION, "responses with a token whose divergence is beyond 0.05 nats (arXiv 2512.23075 bounds learning by the largest)", aggregator="sequence fraction"),
    nats("offpolicy/kl_neg_max", Family.TRUST_REGION, "largest mean of log sampling - log policy over a response of negative advantage", aggregator="maximum"),
)

# The loss, the gradient, and what in them is not a number.

OPTIMISATION: tuple[Metric, ...] = (
    Metric("loss/policy", Family.OPTIMISATION, "", "policy loss (comparable only within one aggregation mode)", aliases=(
        same("policy_loss"), same("actor/pg_loss", "verl"), same("loss/policy_avg", "trl"), same("train/pg_loss", "slime"),
        same("policy/policy_loss", "skyrl"), same("ppo_actor/update/actor_loss/avg", "areal"), proxy("policy/final_loss", "skyrl"),
        proxy("loss"), proxy("Training Loss", "trl"), proxy("actor/loss", "verl"), proxy("train/loss", "slime"), proxy("loss/mean", "prime-rl"), proxy("rl_trainer/avg_loss", "torchforge"), same("train/policy_gradient_loss", "sb3"), same("self_distillation/policy_loss", "trl")),
        panel=3),
    Metric("loss/raw", Family.OPTIMISATION, "", "loss before any NaN filter of the trainer"),
    Metric("optim/grad_norm", Family.OPTIMISATION, "", "global gradient norm before clipping", 0.0, aggregator="last optimizer step", aliases=(
        same("grad_norm"), same("actor/grad_norm", "verl", aggregator="mean over mini-batches"), same("grad norm"),
        same("actor_grad_norm", "openrlhf"), same("train/grad_norm"), same("opt/grad_norm"), same("policy/raw_grad_norm", "skyrl"), same("policy/grad_norm", "skyrl"),
        same("ppo_actor/update/grad_norm", "areal"), same("ppo_actor/grad_norm", "areal"), same("train/actor-grad_norm", "slime")),
        panel=1, vital=True),
    Metric("optim/grad_norm_max", Family.OPTIMISATION, "", "largest global gradient norm of several optimizer steps in one step", 0.0, aggregator="maximum"),
    Metric("optim/lr", Family.OPTIMISATION, "", "learning rate", 0.0, aliases=(
        same("learning_rate"), same("lr"), same("actor/lr", "verl", aggregator="after the scheduler step"), same("learning rate"), same("rl_trainer/learning_rate", "torchforge"),
        same("actor_lr", "openrlhf"), same("train/lr-pg_0", "slime"), same("opt/lr"), same("policy/policy_lr", "skyrl"), same("ppo_actor/update/lr", "areal"),
        same("ppo_actor/lr", "areal")), panel=5, everyday=("lr", "learning rate")),
    Metric("optim/lr_max", Family.OPTIMISATION, "", "largest learning rate of several parameter groups", 0.0),
    Metric("optim/loss_scale", Family.OPTIMISATION, "", "factor of the loss in float16", 0.0, aliases=(same("loss_scale"), same("loss scale"))),
    Metric("optim/layers_clipped", Family.OPTIMISATION, "layers", "layers that layer-wise clipping scaled down", 0.0, aggregator="last optimizer step"),
    fraction("optim/clip_scale_min", Family.OPTIMISATION, "smallest factor that layer-wise clipping scaled a layer by (1: none)", aggregator="last optimizer step"),
    Metric("optim/update_norm", Family.OPTIMISATION, "", "norm of the change of all weights in an optimizer step, from a sample of each tensor or shard (FSDP2); not measured under FSDP1 and ZeRO-3", 0.0, aggregator="last optimizer step"),
    Metric("optim/update_ratio", Family.OPTIMISATION, "", "the same over the norm of the weights; 1e-4 to 1e-3 is usual from scratch, far less in RL", 0.0, aggregator="last optimizer step"),
    Metric("optim/update_head", Family.OPTIMISATION, "", "relative change of the layer that gives the logits over the median layer's (arXiv 2605.19425)", 0.0, aggregator="last optimizer step"),
    fraction("optim/step_skipped", Family.OPTIMISATION, "optimizer steps skipped because a gradient was not finite (float16 loss scaler, verl)", aggregator="step fraction"),
    Metric("optim/grad_agreement", Family.OPTIMISATION, "", "mean product of the gradients of two micro-batches over their mean square, of a sample of elements: 1 equal, 0 nothing in common (noise), below 0 they cancel", -1.0, 1.0, aggregator="pairs of micro-batches"),
    Metric("layers/rise", Family.OPTIMISATION, "times", "largest rise of a layer's gradient norm over its own level, relative to the median layer's", 1.0, estimator="level: median of the last 50 rows", aggregator="maximum over layers",
        panel=2),
    Metric("layers/spiking", Family.OPTIMISATION, "layers", "layers whose gradient norm is far above its own level, relative to the other layers'", 0.0, aggregator="count"),
    Metric("layers/heterogeneity", Family.OPTIMISATION, "", "1 - mean pairwise correlation of the layers' gradient norms over the last 50 rows: 0 in step, 1 unrelated", 0.0, 2.0, estimator="Pearson", aggregator="mean over pairs of layers",
        panel=4),
    fraction("layers/participation", Family.OPTIMISATION, "how evenly the squared gradient norm is spread over the L layers: 1 evenly, 1/L on one layer", aggregator="(sum n^2)^2 / (L sum n^4)"),
    fraction("layers/max_share", Family.OPTIMISATION, "largest share of one layer in the squared gradient norm", aggregator="maximum over layers"),
    Metric("nonfinite/loss", Family.OPTIMISATION, "count", "micro-batches whose loss was NaN or Inf", 0.0, aggregator="sum", aliases=(same("loss/nan_count", "prime-rl"),)),
    Metric("nonfinite/logp", Family.OPTIMISATION, "tokens", "response tokens whose policy log-prob was NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/old_logp", Family.OPTIMISATION, "tokens", "the same for the old policy", 0.0, aggregator="sum"),
    Metric("nonfinite/ref_logp", Family.OPTIMISATION, "tokens", "the same for the reference", 0.0, aggregator="sum"),
    Metric("nonfinite/rollout_logp", Family.OPTIMISATION, "tokens", "the same for the rollout engine", 0.0, aggregator="sum"),
    Metric("nonfinite/advantage", Family.OPTIMISATION, "sequences", "advantages that were NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/reward", Family.OPTIMISATION, "sequences", "rewards that were NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/grad", Family.OPTIMISATION, "parameters", "parameter tensors with a NaN or Inf gradient", 0.0, aggregator="sum"),
)
# The value head of PPO: its loss, how well it predicts, and what it learns from.

CRITIC: tuple[Metric, ...] = (
    Metric("critic/value_loss", Family.CRITIC, "", "loss of the value head (squared error, halved by some)", 0.0, aliases=(
        same("critic/vf_loss", "verl"), same("loss/value_avg", "trl"), same("train/value_loss", "slime"), same("train/critic-value_loss", "slime"), same("critic_loss", "openrlhf"),
        same("ppo_critic/update/value_loss/avg", "areal"), same("ppo_critic/update/loss/avg", "areal"), same("critic/critic_loss", "skyrl"),
        same("critic/loss", "roll"), same("value_loss"), same("vf_loss"), same("train/value_loss", "sb3")), panel=1, everyday=("value loss", "vf loss", "critic loss", "value function loss")),
    Metric("critic/explained_var", Family.CRITIC, "", "share of the variance of the returns that the values explain: 1 all, 0 none, below 0 worse than their mean", None, 1.0, aliases=(
        same("critic/vf_explained_var", "verl"), same("explained_variance"), same("explained_var")),
        panel=2, everyday=("explained variance", "explained var", "vf explained var", "value explained variance")),
    fraction("critic/value_clipfrac", Family.CRITIC, "values whose update is clipped", aliases=(
        same("critic/vf_clipfrac", "verl"), same("val/clipfrac_avg", "trl"), same("train/value_clipfrac", "slime"), same("train/critic-value_clipfrac", "slime"), same("critic/values_clipfrac", "skyrl"),
        same("ppo_critic/update/clip_ratio/avg", "areal"), same("vf_clipfrac")),
        panel=4, everyday=("vf clip fraction", "value clip fraction", "vf clipfrac", "value clipfrac", "values clipfrac", "critic clip fraction")),
    Metric("critic/value_mean", Family.CRITIC, "", "mean value predicted", aliases=(
        same("critic/values/mean", "verl"), proxy("critic/vpred_mean", "verl", aggregator="update pass"), same("critic/values_mean", "skyrl"),
        same("values", "openrlhf"), same("rollout/values", "slime"), same("critic/values/mean", "roll"), same("ppo_critic/update/values/avg", "areal")),
        panel=3, everyday=("value", "values", "critic value", "vpred", "value estimate")),
    Metric("critic/value_max", Family.CRITIC, "", "largest value predicted", aggregator="maximum", aliases=(same("critic/values/max"),)),
    Metric("critic/value_min", Family.CRITIC, "", "smallest value predicted", aggregator="minimum", aliases=(same("critic/values/min"),)),
    Metric("critic/returns_mean", Family.CRITIC, "", "mean return: what the values are to predict", aliases=(
        same("critic/returns/mean"), same("rollout/returns", "slime"), same("ppo_actor/returns/avg", "areal"))),
    Metric("critic/returns_max", Family.CRITIC, "", "largest return", aggregator="maximum", aliases=(same("critic/returns/max"),)),
    Metric("critic/returns_min", Family.CRITIC, "", "smallest return", aggregator="minimum", aliases=(same("critic/returns/min"),)),
    Metric("critic/grad_norm", Family.CRITIC, "", "gradient norm of the value head's model before clipping", 0.0, aggregator="last optimizer step", aliases=(
        same("critic_grad_norm", "openrlhf"), same("train/critic-grad_norm", "slime"), same("ppo_critic/update/grad_norm", "areal"),
        same("critic/raw_grad_norm", "skyrl")), panel=5, everyday=("critic grad norm", "value grad norm")),
    Metric("critic/lr", Family.CRITIC, "", "learning rate of the value head", 0.0, aliases=(
        same("critic_lr", "openrlhf"), same("train/critic-lr-pg_0", "slime"), same("ppo_critic/update/lr", "areal"), same("critic/critic_lr", "skyrl")),
        everyday=("critic lr", "critic learning rate")),
)
OPEN_OPTIMISATION: tuple[Metric, ...] = (
    Metric("update_layer/", Family.OPTIMISATION, "", "norm of the change of one layer's weights in an optimizer step, over their norm: of a sample of 512 elements of each tensor", 0.0, aggregator="last optimizer step"),
    Metric("grad_layer/", Family.OPTIMISATION, "", "gradient norm of one layer before clipping", 0.0, aggregator="last optimizer step"),
)

# The rollout engine against the trainer: the same weights, two sets of log-probs.
#
# Throughout, d = log trainer - log rollout of a sampled token, and its weight is exp(d), raw unless a row notes
# otherwise.

_ANY_BAND = "at the run's own threshold, of tokens or of responses"
_EMPTY = "sequence mean; a response without tokens counts as perplexity 1"

_LEVEL: tuple[Metric, ...] = (
    nats("mismatch/kl", Family.MISMATCH, "KL(rollout || trainer) on the sampled tokens", estimator="k1", aliases=(
        same("rollout_corr/kl", "verl", "k1"), same("vllm_kl", "openrlhf", "k1"),
        proxy("ppo_actor/update/behave_approx_kl/avg", "areal"), same("optim/kl_sample_train_v1", "tinker", "k1")),
        panel=2, everyday=("mismatch kl", "rollout trainer kl", "vllm kl", "sglang kl")),
    nats("mismatch/k3", Family.MISMATCH, "the same by the k3 estimator", low=0.0, estimator="k3", aliases=(
        same("rollout_corr/k3_kl", "verl", "k3"), same("rollout_correction/k3_kl", "", "k3"), same("mismatch_kl/all/mean", "prime-rl", "k3"), same("mismatch_kl/all", "prime-rl", "k3"),
        same("mismatch_k3"), same("gen_kl_error", "nemo-rl", "k3"), same("Generation KL Error", "", "k3"), same("train_rollout_kl", "", "k3", _RESPONSES),
        proxy("kl", "trl/async", "k3", "current policy against the sampling one")),
        panel=1, everyday=("mismatch k 3", "mismatch k 3 kl", "rollout k 3", "rollout k 3 kl")),
    nats("mismatch/logp_absdiff", Family.MISMATCH, "mean |log trainer - log rollout|", low=0.0, aliases=(
        same("sampling/sampling_logp_difference/mean"), same("train/train_rollout_logprob_abs_diff", "slime", "", _RESPONSES),
        same("policy/rollout_train_logprobs_abs_diff_mean", "skyrl"), same("ppo_actor/update/logp_abs_diff/avg", "areal"), same("self_distillation/server_logprob_abs_diff", "trl")),
        panel=3, everyday=("logp abs diff", "logp absdiff", "log prob abs diff")),
    nats("mismatch/logp_absdiff_max", Family.MISMATCH, "largest |log trainer - log rollout|", low=0.0, aggregator="maximum",
           aliases=(same("sampling/sampling_logp_difference/max"), same("ppo_actor/update/logp_abs_diff/max", "areal")), everyday=("logp abs diff max", "logp absdiff max", "log prob abs diff max")),
    nats("mismatch/logp_absdiff_p99", Family.MISMATCH, "99th percentile of |log trainer - log rollout|", low=0.0, aggregator="99th percentile"),
    Metric("mismatch/kl_entropy", Family.MISMATCH, "", "k3 between trainer and rollout engine over the policy's entropy, both summed over tokens", 0.0, aggregator="sum over sum"),
    Metric("mismatch/m2", Family.MISMATCH, "nats^2", "mean squared log trainer - log rollout", 0.0),
    Metric("mismatch/mult_prob_error", Family.MISMATCH, "", "mean factor exp|d| between the two probabilities of a token; trouble where it trends past 1.01 to 1.02", 1.0,
           aliases=(same("token_mult_prob_error", "nemo-rl"),)),
    Metric("mismatch/prob_absdiff", Family.MISMATCH, "probability", "mean |p trainer - p rollout| (not log-probs)", 0.0, 1.0, aliases=(
        same("training/rollout_probs_diff_mean", "verl"),)),
    Metric("mismatch/prob_absdiff_max", Family.MISMATCH, "probability", "largest |p trainer - p rollout|", 0.0, 1.0, aggregator="maximum", aliases=(
        same("training/rollout_probs_diff_max", "verl"),)),
    Metric("mismatch/prob_absdiff_std", Family.MISMATCH, "probability", "standard deviation of |p trainer - p rollout|", 0.0, 1.0, aggregator="token deviation",
           aliases=(same("training/rollout_probs_diff_std", "verl"),)),
    Metric("mismatch/prob_corr", Family.MISMATCH, "", "Pearson's correlation of p trainer and p rollout", -1.0, 1.0, aggregator="tokens", aliases=(
        same("training/rollout_actor_probs_pearson_corr", "verl"),)),
)

_WEIGHTS: tuple[Metric, ...] = (
    Metric("mismatch/weight_mean", Family.MISMATCH, "", "mean raw weight trainer/rollout: 1 but for noise", 0.0, aliases=(
        same("sampling_importance_ratio", "nemo-rl", aggregator="token mean; older versions truncate first"),
        same("train/tis", "slime", aggregator=_RESPONSES), same("importance_ratio/mean", "prime-rl"))),
    Metric("mismatch/weight_max", Family.MISMATCH, "", "largest raw weight", 0.0, aggregator="maximum"),
    Metric("mismatch/weight_min", Family.MISMATCH, "", "smallest raw weight", 0.0, aggregator="minimum"),
    Metric("mismatch/is_ratio", Family.MISMATCH, "", "mean trainer/rollout weight after truncation or masking", 0.0, aliases=(
        same("sampling/importance_sampling_ratio/mean"), same("rollout_corr/rollout_is_mean", "verl"),
        same("mismatch/is_ratio_mean"), same("rollout_correction/is_weight_mean"), same("ppo_actor/update/behave_imp_weight/avg", "areal"),
        same("policy/tis_imp_ratio", "skyrl"), same("policy/is_ratio_mean", "skyrl"), same("policy/loss_metrics/is_ratio_mean", "skyrl")), everyday=("is weight",)),
    Metric("mismatch/is_ratio_max", Family.MISMATCH, "", "largest weight after truncation or masking", 0.0, aggregator="maximum", aliases=(
        same("sampling/importance_sampling_ratio/max"), same("rollout_corr/rollout_is_max", "verl"), same("policy/is_ratio_max", "skyrl"),
        same("policy/loss_metrics/is_ratio_max", "skyrl"), same("ppo_actor/update/behave_imp_weight/max", "areal"))),
    Metric("mismatch/is_ratio_min", Family.MISMATCH, "", "smallest weight after truncation or masking", 0.0, aggregator="minimum", aliases=(
        same("sampling/importance_sampling_ratio/min"), same("rollout_corr/rollout_is_min", "verl"), same("policy/is_ratio_min", "skyrl"),
        same("policy/loss_metrics/is_ratio_min", "skyrl"), same("ppo_actor/update/behave_imp_weight/min", "areal"))),
    Metric("mismatch/is_ratio_std", Family.MISMATCH, "", "standard deviation of the weights after truncation or masking", 0.0, aggregator="token deviation",
           aliases=(same("rollout_corr/rollout_is_std", "verl"),)),
    fraction("mismatch/is_zero", Family.MISMATCH, "tokens whose weight the run's own correction sets to 0: they teach nothing"),
    fraction("mismatch/ess", Family.MISMATCH, "effective sample size of raw trainer/rollout weights over their number", aliases=(
        proxy("rollout_corr/rollout_is_eff_sample_size", "verl", aggregator="after truncation"),
        proxy("rollout_correction/ess", aggregator="after truncation on both sides")), panel=4),
    fraction("mismatch/ess_truncated", Family.MISMATCH, "the same of weights truncated at the run's cap or 2: looks healthy when much is cut"),
    Metric("mismatch/chi2", Family.MISMATCH, "", "<weight^2> - 1 of raw token weights; a sample's may be below 0", -1.0, aliases=(
        same("rollout_corr/chi2_token", "verl", aggregator="weights clamped at exp(20)"),
        same("rollout_correction/chi2_token", aggregator="weights clamped at exp(20)"))),
    fraction("mismatch/tis_truncated", Family.MISMATCH, "tokens whose weight truncated importance sampling would cut, at the run's cap or 2", aliases=(
        proxy("rollout_corr/rollout_is_ratio_fraction_high", "verl", aggregator=_ANY_BAND),
        proxy("rollout_correction/clipped_frac", aggregator="in the run's own mode, at its threshold"),
        proxy("train/tis_clipfrac", "slime", aggregator="of both sides, or of IcePop"))),
    fraction("mismatch/icepop_masked", Family.MISMATCH, "tokens whose weight lies outside [0.5, 5]: falls while the gap widens, so read it together with logp_absdiff", aliases=(
        proxy("rollout_corr/rollout_is_oob_ratio", "verl", aggregator=_ANY_BAND),
        proxy("is_oob_ratio", "nemo-rl", aggregator=_ANY_BAND), proxy("is_filter_ratio", "openrlhf", aggregator=_ANY_BAND),
        proxy("is_masked/mean", "prime-rl", aggregator=_ANY_BAND), proxy("is_masked/all/mean", "prime-rl", aggregator=_ANY_BAND))),
    nats("mismatch/icepop_entropy", Family.MISMATCH, "entropy of those tokens", low=0.0),
)

_KINDS: tuple[Metric, ...] = (
    nats("mismatch/k3_reverse", Family.MISMATCH, "k3 with the roles exchanged, unweighted: huge where the trainer finds a token impossible", low=0.0, estimator="k3", aliases=(
        same("policy_kl_error", "nemo-rl", "k3"),)),
    nats("mismatch/kl_reverse", Family.MISMATCH, "KL(trainer || rollout), weighted because the rollout engine sampled", low=0.0, estimator="weighted k3"),
    nats("mismatch/js", Family.MISMATCH, "Jensen-Shannon divergence of trainer and rollout", low=0.0, aliases=(
        same("js_divergence_error", "nemo-rl"),)),
    nats("mismatch/binary_kl", Family.MISMATCH, "KL(rollout || trainer) of this token against any other", low=0.0),
)

_PLACES: tuple[Metric, ...] = (
    fraction("mismatch/factor2_frac", Family.MISMATCH, "tokens whose two probabilities differ by more than a factor of 2"),
    fraction("mismatch/overconfident_frac", Family.MISMATCH, "tokens the rollout engine held above 0.9 and the trainer below 0.5"),
    nats("mismatch/diff_p00", Family.MISMATCH, "mean d of tokens the trainer gives a probability below 0.1"),
    nats("mismatch/diff_p10", Family.MISMATCH, "mean d of tokens of trainer probability 0.1 to 0.5"),
    nats("mismatch/diff_p50", Family.MISMATCH, "mean d of tokens of trainer probability 0.5 to 0.9"),
    nats("mismatch/diff_p90", Family.MISMATCH, "mean d of tokens of trainer probability 0.9 or more"),
    Metric("mismatch/absdiff_per_1k", Family.MISMATCH, "nats/1,000 tokens", "growth of |d| along a response", aggregator="regression slope"),
    fraction("mismatch/below_frac", Family.MISMATCH, "tokens whose log-prob is at or below the engine's in the trainer: nearly all where sampling is truncated"),
    fraction("mismatch/above_share", Family.MISMATCH, "share of the sum of |d| that lies above 0: 0 of truncated sampling, about 0.5 of noise", aggregator="sum over sum"),
    Metric("mismatch/logp_slope", Family.MISMATCH, "", "slope of d on the mean of both log-probs: 0 where they spread alike, above 0 where the engine is flatter", aggregator="regression slope"),
    Metric("mismatch/logp_corr", Family.MISMATCH, "", "Pearson's correlation of the two: near 1 or -1 where a temperature explains d", -1.0, 1.0, aggregator="tokens"),
    Metric("mismatch/engine_temperature", Family.MISMATCH, "", "temperature of the engine over that of the trainer, to first order: 1 where they agree", 0.0, aggregator="regression"),
    fraction("mismatch/temperature_share", Family.MISMATCH, "share of the squared d that this temperature explains", aggregator="sum over sum"),
    Metric("mismatch/late_ratio", Family.MISMATCH, "", "|d| over 1 - p in the second half of responses over the same in the first: above 1 it grows along them", 0.0, aggregator="sum over sum"),
    Metric("mismatch/template_ratio", Family.MISMATCH, "", "|d| over 1 - p at the first token of responses, at control tokens and after them, over the same elsewhere: far above 1 where trainer and engine apply another template or tokenizer", 0.0, aggregator="sum over sum"),
    fraction("mismatch/template_share", Family.MISMATCH, "share of the sum of |d| that lies at these tokens", aggregator="sum over sum"),
    Metric("mismatch/absdiff_per_version", Family.MISMATCH, "nats/token/version", "growth of |d| with the policy versions between rollout and update", aggregator="regression slope"),
    Metric("mismatch/bias_pos", Family.MISMATCH, "advantage", "mean of -(weight - 1) A over tokens of positive advantage: what the mismatch does to their gradient"),
    Metric("mismatch/bias_neg", Family.MISMATCH, "advantage", "the same of negative advantage"),
    Metric("mismatch/adv_corr", Family.MISMATCH, "", "Pearson's correlation of d and the advantage", -1.0, 1.0, aggregator="tokens"),
)

_RESPONSE: tuple[Metric, ...] = (
    Metric("mismatch/seq_weight_mean", Family.MISMATCH, "", "mean of the products of responses' raw weights", 0.0, aggregator="sequence mean"),
    Metric("mismatch/seq_weight_max", Family.MISMATCH, "", "largest product of a response's raw weights", 0.0, aggregator="maximum"),
    fraction("mismatch/seq_ess", Family.MISMATCH, "effective sample size of those products over the number of responses", aggregator="sequences"),
    Metric("mismatch/seq_chi2", Family.MISMATCH, "", "<product^2> - 1 of the products of responses' raw weights", -1.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/chi2_seq", "verl", aggregator="sequence mean; log-weights clamped at 20"),)),
    fraction("mismatch/seq_rejected", Family.MISMATCH, "responses whose product of weights lies outside [0.5, 2]", aggregator="sequence fraction", aliases=(
        proxy("rollout_corr/rollout_rs_seq_sum_k1_seq_masked_fraction", "verl", aggregator="at the run's own threshold"),
        proxy("rollout_corr/rollout_rs_seq_masked_fraction", "verl", aggregator="responses with any token rejected by any rule"))),
    fraction("mismatch/geo_rejected", Family.MISMATCH, "responses whose geometric mean of weights lies outside [0.999, 1.001]", aggregator="sequence fraction", aliases=(
        proxy("rollout_corr/rollout_rs_seq_mean_k1_seq_masked_fraction", "verl", aggregator="at the run's own threshold"),)),
    Metric("mismatch/ppl_trainer", Family.MISMATCH, "", "perplexity of responses to the trainer", 0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/training_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/training_ppl")),
        everyday=("trainer ppl", "training ppl")),
    Metric("mismatch/ppl_rollout", Family.MISMATCH, "", "perplexity of responses to the rollout engine", 0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/rollout_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/rollout_ppl")), everyday=("rollout ppl",)),
    Metric("mismatch/ppl_ratio", Family.MISMATCH, "", "perplexity to the trainer over that to the rollout engine", 0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/ppl_ratio", "verl", aggregator=_EMPTY), same("rollout_correction/ppl_ratio"))),
    nats("mismatch/log_ppl_trainer", Family.MISMATCH, "log perplexity of responses to the trainer", aggregator="sequence mean", aliases=(
        same("rollout_corr/training_log_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/training_log_ppl"))),
    nats("mismatch/log_ppl_rollout", Family.MISMATCH, "log perplexity of responses to the rollout engine", aggregator="sequence mean", aliases=(
        same("rollout_corr/rollout_log_ppl", "verl", aggregator=_EMPTY), same("rollout_correction/rollout_log_ppl"))),
    nats("mismatch/log_ppl_diff", Family.MISMATCH, "log perplexity to the trainer minus that to the rollout engine: above 0 the trainer is less confident", aggregator="sequence mean", aliases=(
        same("rollout_corr/log_ppl_diff", "verl", aggregator=_EMPTY), same("rollout_correction/log_ppl_diff"))),
    nats("mismatch/log_ppl_diff_max", Family.MISMATCH, "largest such difference of a response", aggregator="maximum", aliases=(
        same("rollout_corr/log_ppl_diff_max", "verl", aggregator="maximum"), same("rollout_correction/log_ppl_diff_max"))),
    nats("mismatch/log_ppl_diff_min", Family.MISMATCH, "smallest such difference of a response", aggregator="minimum", aliases=(
        same("rollout_corr/log_ppl_diff_min", "verl", aggregator="minimum"), same("rollout_correction/log_ppl_diff_min"))),
    nats("mismatch/log_ppl_absdiff", Family.MISMATCH, "mean size of such a difference", low=0.0, aggregator="sequence mean", aliases=(
        same("rollout_corr/log_ppl_abs_diff", "verl", aggregator=_EMPTY), same("rollout_correction/log_ppl_abs_diff")),
        everyday=("log ppl abs diff", "log ppl absdiff", "ppl abs diff")),
    Metric("mismatch/seq_m2", Family.MISMATCH, "nats^2/token", "squared log-weights of responses per token of theirs: equals m2 where errors of tokens do not add up", 0.0, aggregator="sum over sum"),
    Metric("mismatch/log_var_growth", Family.MISMATCH, "nats^2/token", "growth of a response's log-weight variance with its length", aggregator="regression slope"),
)

_ROUTING: tuple[Metric, ...] = (
    fraction("mismatch/routing_token_frac", Family.MISMATCH, "tokens sent to other experts in at least one layer"),
    fraction("mismatch/routing_layer_frac", Family.MISMATCH, "(token, layer) pairs with another set of experts", aggregator="token and layer fraction"),
    Metric("mismatch/routing_layers", Family.MISMATCH, "layers", "layers in which a token went to other experts", 0.0),
    nats("mismatch/routing_absdiff", Family.MISMATCH, "mean |d| of the tokens sent to other experts", low=0.0),
    Metric("mismatch/routing_ratio", Family.MISMATCH, "", "|d| over 1 - p of tokens after one that went to other experts, over the same of the others: far above 1 where the router is what differs", 0.0, aggregator="sum over sum"),
    Metric("mismatch/moe_avg_vio", Family.MISMATCH, "", "mean size of load violations: load of an expert times the number of experts, less 1", 0.0,
           aggregator="mean over experts and layers", aliases=(same("rollout/moe/avg_vio/avg", "verl"),)),
    Metric("mismatch/moe_max_vio", Family.MISMATCH, "", "load violation of the busiest expert: 0 when all are equally busy", 0.0,
           aggregator="maximum over experts, mean over layers", aliases=(same("rollout/moe/max_vio/avg", "verl"), same("max_vio/mean", "prime-rl"))),
    Metric("mismatch/moe_worst_vio", Family.MISMATCH, "", "the same in the layer where it is largest", 0.0, aggregator="maximum over experts and layers",
           aliases=(same("rollout/moe/max_vio/max", "verl"),)),
)

_DIGEST: tuple[Metric, ...] = (
    fraction("mismatch/weights_differ", Family.MISMATCH, "tensors of the rollout engine that are not the trainer's after a weight sync, of those compared: 0 where the sync works", aggregator="tensor fraction"),
    fraction("mismatch/weights_compared", Family.MISMATCH, "share of the trainer's weights in tensors that were compared, a sample of each", aggregator="element fraction"),
    Metric("mismatch/weights_distance", Family.MISMATCH, "", "largest distance of such a tensor, over the norm of the trainer's", 0.0, aggregator="maximum"),
    fraction("mismatch/adapter_missing", Family.MISMATCH, "adapted tensors of which the rollout engine holds the base weights", aggregator="tensor fraction"),
)

MISMATCH: tuple[Metric, ...] = (*_LEVEL, *_WEIGHTS, *_KINDS, *_PLACES, *_RESPONSE, *_ROUTING, *_DIGEST)
OPEN_MISMATCH: tuple[Metric, ...] = (
    fraction("mismatch/weights_differ/", Family.MISMATCH, "compared elements of one layer that differ in the rollout engine after a weight sync", aggregator="element fraction"),
)

# Samples: lengths, text, staleness.

ROLLOUTS: tuple[Metric, ...] = (
    Metric("len/mean", Family.ROLLOUTS, "tokens", "mean response length", 0.0, aliases=(
        same("completions/mean_length"), same("response_length/mean", "verl"), same("completion_length"),
        same("rollout/response_length_mean", "openrlhf"), same("response_length", "openrlhf"),
        same("rollout/response_len/mean", "slime"), same("response_lengths", "torchtune"), same("tokens/response_length/mean", "roll"), same("generate/avg_num_tokens", "skyrl"),
        same("policy/response_length", "skyrl"), same("mean_gen_tokens_per_sample", "nemo-rl"), same("decode_len/all/mean", "prime-rl"),
        proxy("env/all/ac_tokens_per_turn", "tinker", aggregator="mean of turns"), proxy("ppo_actor/seq_len/avg", "areal", aggregator="with the prompt"),
        proxy("total_length", "openrlhf", aggregator="with the prompt"), proxy("seq_len/all/mean", "prime-rl", aggregator="with the prompt"),
        proxy("mean_total_tokens_per_sample", "nemo-rl", aggregator="with the prompt"), proxy("sample/trained_tokens_mean", "trl", aggregator="tokens that are trained on"),
        proxy("response_length_non_aborted/mean", "verl", aggregator="without aborted responses"), proxy("train_seq_len", "trl", aggregator="with the prompt")),
        panel=1),
    Metric("len/max", Family.ROLLOUTS, "tokens", "longest response", 0.0, aggregator="maximum", aliases=(
        same("completions/max_length"), same("response_length/max", "verl"), same("rollout/response_len/max", "slime"), same("generate/max_num_tokens", "skyrl"),
        same("decode_len/all/max", "prime-rl"), proxy("response_length_non_aborted/max", "verl", aggregator="without aborted responses"),
        same("tokens/response_length/max", "roll")), everyday=("length max", "response length max")),
    Metric("len/min", Family.ROLLOUTS, "tokens", "shortest response", 0.0, aggregator="minimum", aliases=(
        same("completions/min_length"), same("response_length/min", "verl"), same("rollout/response_len/min", "slime"), same("generate/min_num_tokens", "skyrl"),
        proxy("response_length_non_aborted/min", "verl", aggregator="without aborted responses"),
        same("tokens/response_length/min", "roll")), everyday=("length min", "response length min")),
    Metric("len/p50", Family.ROLLOUTS, "tokens", "median response length", 0.0, aggregator="quantile", aliases=(
        same("rollout/response_len/median", "slime"),)),
    Metric("len/p90", Family.ROLLOUTS, "tokens", "90th percentile of the response length", 0.0, aggregator="quantile"),
    Metric("len/p99", Family.ROLLOUTS, "tokens", "99th percentile of the response length", 0.0, aggregator="quantile"),
    Metric("len/tail_ratio", Family.ROLLOUTS, "", "99th percentile of the response length over the median", 1.0, aggregator="quantile"),
    Metric("len/max_over_mean", Family.ROLLOUTS, "", "longest response over the mean: what a synchronous batch waits for", 1.0, aggregator="maximum"),
    fraction("len/gini", Family.ROLLOUTS, "Gini coefficient of the response lengths: 0 all equal", aggregator="sequences"),
    fraction("len/bubble", Family.ROLLOUTS, "1 - mean / longest response: least share of idle slots while a batch is generated", aggregator="sequences"),
    fraction("len/clipped", Family.ROLLOUTS, "responses cut at the length limit", aggregator="sequence fraction", aliases=(
        same("completions/clipped_ratio"), same("response_length/clip_ratio", "verl"), same("truncated", "openrlhf"),
        same("rollout/truncated_rate", "openrlhf"), same("rollout/truncated_ratio", "slime"), same("response_clip_ratio", "openrlhf"),
        same("is_truncated/all/mean", "prime-rl"), same("is_truncated/mean", "prime-rl"), same("completions/truncated_fraction", "trl"),
        proxy("response_length_non_aborted/clip_ratio", "verl", aggregator="without aborted responses")),
        panel=2, everyday=("response clip ratio", "response clip fraction", "response clipped ratio", "clipped ratio", "truncated", "truncated fraction", "response truncated", "response truncated fraction")),
    Metric("len/terminated_mean", Family.ROLLOUTS, "tokens", "mean length of the responses that were not cut", 0.0, aliases=(
        proxy("completions/mean_terminated_length", aggregator="0 where none terminated"),)),
    fraction("len/empty", Family.ROLLOUTS, "responses without a token", aggregator="sequence fraction", aliases=(
        same("response/aborted_ratio", "verl"),)),
    Metric("len/entropy_corr", Family.ROLLOUTS, "", "correlation of a response's length with its mean entropy", -1.0, 1.0, aggregator="sequences"),
    Metric("len/budget_used", Family.ROLLOUTS, "", "response tokens over the token budget of an iteration", 0.0, aggregator="sum"),
    fraction("partial/frac", Family.ROLLOUTS, "responses carried over from an earlier iteration", aggregator="sequence fraction", aliases=(
        same("fully_async/partial/partial_ratio", "verl"), same("rollout/weight_version/mixed_version_ratio", "slime"))),
    Metric("partial/retention_mean", Family.ROLLOUTS, "iterations", "iterations a response was carried over", 0.0, aggregator="sequence mean"),
    Metric("partial/retention_max", Family.ROLLOUTS, "iterations", "most iterations a response was carried over", 0.0, aggregator="maximum",
           aliases=(proxy("fully_async/partial/max_partial_span", "verl"),)),
    fraction("text/repetition", Family.ROLLOUTS, "1 - distinct 3-grams / 3-grams of token ids, mean over responses", aggregator="sequence mean",
        panel=3, everyday=("repetition", "repetition fraction")),
    fraction("text/distinct_1", Family.ROLLOUTS, "distinct token ids / token ids of a response", aggregator="sequence mean"),
    fraction("text/distinct_2", Family.ROLLOUTS, "distinct 2-grams / 2-grams of token ids of a response", aggregator="sequence mean"),
    fraction("text/loop_cover", Family.ROLLOUTS, "share of a response that one block repeated in a row covers", aggregator="sequence mean"),
    fraction("text/tail_loop", Family.ROLLOUTS, "the same for a block the response ends in", aggregator="sequence mean"),
    fraction("text/looping_frac", Family.ROLLOUTS, "responses at least half covered by one repeated block", aggregator="sequence fraction"),
    fraction("text/id0_frac", Family.ROLLOUTS, "responses that are at least 90 % token id 0", aggregator="sequence fraction"),
    Metric("text/id0_run", Family.ROLLOUTS, "tokens", "longest run of token id 0 in a response", 0.0, aggregator="maximum"),
    fraction("text/control_share", Family.ROLLOUTS, "sampled tokens that are control tokens (of templates, tools, thinking)"),
    fraction("text/control_prob", Family.ROLLOUTS, "mean probability of these tokens under the policy", aggregator="control tokens"),
    fraction("text/control_malformed", Family.ROLLOUTS, "responses whose tags (of tools, thinking) do not pair up", aggregator="sequence fraction"),
    fraction("text/eos_missing", Family.ROLLOUTS, "responses whose last token ends no sequence", aggregator="sequence fraction", aliases=(
        same("ppo_actor/no_eos_ratios/avg", "areal"), same("ppo_actor/no_eos_ratio/avg", "areal"))),
    fraction("text/group_agreement", Family.ROLLOUTS, "pairs of responses to one prompt that agree, over the first 64 positions both have",
           aggregator="pairs of tokens"),
    Metric("text/zlib_ratio", Family.ROLLOUTS, "", "bytes of sampled text over its zlib-compressed bytes: prose 2 to 3, loops far more", 0.0,
           aggregator="sampled sequence mean"),
    Metric("text/zlib_ratio_max", Family.ROLLOUTS, "", "the same, largest", 0.0, aggregator="sampled maximum"),
    fraction("text/repetition_frac", Family.ROLLOUTS, "sampled texts of more than 10,000 characters whose last 10,000 compress more than tenfold",
           aggregator="sampled sequence fraction", aliases=(same("rollout/repetition_frac", "slime", aggregator="every sequence"),)),
    fraction("text/garbled", Family.ROLLOUTS, "sampled characters that are U+FFFD, control, private-use, unassigned or surrogate",
           aggregator="sampled sequence mean"),
    fraction("text/replacement", Family.ROLLOUTS, "sampled characters that are U+FFFD, the replacement of undecodable bytes",
           aggregator="sampled sequence mean"),
    Metric("text/script_switches", Family.ROLLOUTS, "per 100 characters", "changes between writing systems within sampled text", 0.0, 100.0,
           aggregator="sampled sequence mean"),
    fraction("text/retok_exact", Family.ROLLOUTS, "sampled responses whose ids encode(decode(ids)) gives back", aggregator="sampled sequence fraction"),
    fraction("text/retok_naive", Family.ROLLOUTS, "positions at which encode(decode(ids)) differs; one early shift makes the rest differ",
           aggregator="sampled sequence mean"),
    Metric("text/retok_edit", Family.ROLLOUTS, "edits/token", "Levenshtein distance of encode(decode(ids)) over the sampled ids", 0.0,
           aggregator="sampled sequence mean"),
    Metric("text/retok_first", Family.ROLLOUTS, "tokens", "position of the first difference, among the responses that differ", 0.0,
           aggregator="sampled sequence mean"),
    Metric("text/retok_growth", Family.ROLLOUTS, "tokens", "ids after encode(decode(ids)) less the sampled ones", aggregator="sampled sequence mean"),
    fraction("text/turn_prefix_kept", Family.ROLLOUTS, "turns whose prompt begins with the ids of the turn before", aggregator="sampled turn fraction"),
    fraction("tokens/environment_frac", Family.ROLLOUTS, "tokens of responses that the environment wrote"),
    fraction("tokens/environment_leak", Family.ROLLOUTS, "tokens the environment wrote that the loss counts: should be 0"),
    Metric("tokens/total", Family.ROLLOUTS, "tokens", "tokens seen so far", 0.0, aggregator="cumulative", aliases=(
        same("num_tokens"), proxy("perf/total_num_tokens", "verl", aggregator="per step"))),
    Metric("staleness/mean", Family.ROLLOUTS, "versions", "policy versions between rollout and update", aliases=(
        same("sample/staleness_mean", "trl"), same("training/off_policy/trajectory_staleness/mean", "verl"), same("staleness"), same("off_policy/mean", "prime-rl"),
        same("async/staleness_mean"), same("avg_trajectory_age", "nemo-rl"), same("ppo_actor/update/version_stats/sample_staleness_theta_avg", "areal"),
        same("ppo_actor/update/version_stats/sample_staleness_avg", "areal"), same("version/sample_staleness_avg"),
        proxy("ppo_actor/update/version_stats/sample_staleness_proximal_avg", "areal", aggregator="to the proximal policy")),
        panel=4, everyday=("staleness", "policy lag", "off policy steps", "staleness steps")),
    Metric("staleness/updates", Family.ROLLOUTS, "updates", "optimizer updates between rollout and this update: versions times updates of a batch, and the updates of this batch so far", 0.0, aggregator="sequence mean"),
    Metric("staleness/max", Family.ROLLOUTS, "versions", "the same, of the oldest response", aggregator="maximum", aliases=(
        same("Max. Off-Policy Level"), same("sample/staleness_max", "trl"), same("training/off_policy/trajectory_staleness/max", "verl"), same("off_policy/max", "prime-rl"),
        same("async/staleness_max"), same("max_trajectory_policy_age", "nemo-rl"), same("ppo_actor/update/version_stats/sample_staleness_theta_max", "areal"),
        same("version/sample_staleness_max")), everyday=("staleness max",)),
    fraction("staleness/stale_frac", Family.ROLLOUTS, "samples of an earlier policy than the one that is updated", aggregator="sample fraction", aliases=(
        same("async/staleness_ratio", "skyrl", aggregator="group fraction"),
        same("ppo_actor/update/version_stats/stale_token_fraction", "areal", aggregator="token fraction")),
        everyday=("stale fraction", "staleness fraction", "staleness ratio", "stale ratio", "off policy fraction", "off policy ratio")),
    Metric("staleness/in_flight_mean", Family.ROLLOUTS, "versions", "versions that came while a response was generated", 0.0, aggregator="sequence mean", aliases=(
        same("off_policy/in_flight/mean", "prime-rl"),)),
    Metric("staleness/in_flight_max", Family.ROLLOUTS, "versions", "the same, largest", 0.0, aggregator="maximum", aliases=(same("off_policy/in_flight/max", "prime-rl"),)),
    Metric("staleness/in_queue_mean", Family.ROLLOUTS, "versions", "versions that came while a finished response waited", 0.0, aggregator="sequence mean", aliases=(
        same("off_policy/in_queue/mean", "prime-rl"),)),
    Metric("staleness/in_queue_max", Family.ROLLOUTS, "versions", "the same, largest", 0.0, aggregator="maximum", aliases=(same("off_policy/in_queue/max", "prime-rl"),)),
    Metric("staleness/dropped", Family.ROLLOUTS, "samples", "samples dropped because they were too old", 0.0, aggregator="since the last row", aliases=(
        same("off_policy/dropped", "prime-rl"), same("training/off_policy/evicted_samples", "verl"),
        proxy("sample/dropped_stale_total", "trl", aggregator="so far"))),
    Metric("staleness/queue", Family.ROLLOUTS, "samples", "finished samples that wait for an update", 0.0, aliases=(
        same("sample/rollout_queue_size", "trl"), same("buffer_size", "nemo-rl")), aggregator="sum", everyday=("rollout queue size", "queue size")),
    Metric("staleness/queue_wait", Family.ROLLOUTS, "s", "time a finished sample waited for its update", 0.0, aggregator="sequence mean", aliases=(
        same("sample/time_in_queue_s", "trl"),)),
    Metric("staleness/worst_mean", Family.ROLLOUTS, "versions", "the same as the mean, from the first version a response was sampled under", aliases=(
        same("training/off_policy/trajectory_staleness_worst/mean", "verl"),)),
    Metric("staleness/spans_mean", Family.ROLLOUTS, "versions", "policy versions a response was sampled under", 1.0, aggregator="sequence mean", aliases=(
        same("training/off_policy/trajectory_spans/mean", "verl"),)),
    Metric("staleness/spans_max", Family.ROLLOUTS, "versions", "most policy versions a response was sampled under", 1.0, aggregator="maximum", aliases=(
        same("training/off_policy/trajectory_spans/max", "verl"),)),
    Metric("rollout/temperature", Family.ROLLOUTS, "", "temperature that responses are sampled at", 0.0, aggregator="last"),
    Metric("batch/responses", Family.ROLLOUTS, "responses", "responses of a step", 0.0, aggregator="sum", aliases=(
        same("train/global_batch_size", "slime"),)),
    Metric("batch/group", Family.ROLLOUTS, "responses", "responses to a prompt", 0.0, aggregator="group mean"),
    Metric("turns/mean", Family.ROLLOUTS, "turns", "turns of a conversation", 0.0, aggregator="sequence mean", aliases=(same("num_turns/mean", "verl"), same("training/num_turns/mean", "verl"), same("env/all/turns_per_episode", "tinker"), same("num_turns/all/mean", "prime-rl"),
        same("num_turns", "ms-swift"), same("effective/num_turns/mean", "prime-rl"))),
    Metric("turns/max", Family.ROLLOUTS, "turns", "turns of the longest conversation", 0.0, aggregator="maximum", aliases=(same("num_turns/max", "verl"), same("training/num_turns/max", "verl"))),
)
OPEN_ROLLOUTS: tuple[Metric, ...] = (
    nats("turns/entropy/", Family.ROLLOUTS, "mean entropy of the policy's tokens in one turn of a conversation, the last one all later ones", low=0.0),
    nats("turns/absdiff/", Family.ROLLOUTS, "mean |log trainer - log rollout| of these tokens", low=0.0),
    Metric("tool/calls/", Family.ROLLOUTS, "calls", "calls of a tool", 0.0, aggregator="sum"),
    fraction("tool/errors/", Family.ROLLOUTS, "calls of a tool that failed", aggregator="call fraction"),
    fraction("tool/error_kinds/", Family.ROLLOUTS, "calls of a tool that failed with one kind of error, as tool.kind", aggregator="call fraction"),
    fraction("tool/timeouts/", Family.ROLLOUTS, "calls of a tool that timed out", aggregator="call fraction"),
    Metric("tool/seconds/", Family.ROLLOUTS, "s", "time of one call of a tool", 0.0, aggregator="call mean"),
    Metric("tool/seconds_max/", Family.ROLLOUTS, "s", "longest call of a tool", 0.0, aggregator="maximum"),
    Metric("len/by_task/", Family.ROLLOUTS, "tokens", "mean length of the responses to one task or data source", 0.0, aggregator="sequence mean"),
)

# Time, rlwatch's own counters, and its forecast.

SYSTEM: tuple[Metric, ...] = (
    Metric("time/step", Family.SYSTEM, "s", "duration of a step", 0.0, aliases=(
        same("step_time"), same("timing_s/step", "verl"), same("perf/time_per_step", "verl"),
        same("timing/step_total", "openrlhf"), same("time/step"), same("perf/step_time", "slime"), same("timing/step", "skyrl"), same("time/total", "tinker"),
        same("total_step_time", "nemo-rl"), same("perf/step_s", "trl")),
        panel=1, everyday=("step elapsed", "step time", "step seconds", "step duration")),
    Metric("time/throughput", Family.SYSTEM, "tokens/s", "tokens of prompts and responses processed per second (per GPU, where the trainer logs it so)", 0.0,
           aggregator="sum", aliases=(same("perf/throughput", "verl"),)),
    fraction("time/rollout_idle", Family.SYSTEM, "share of the time in which the rollout engines waited", aggregator="time fraction", aliases=(
        same("fully_async/rollouter/idle_ratio", "verl"),)),
    Metric("rlwatch/dropped", Family.SYSTEM, "records", "records rlwatch dropped so far", 0.0, aggregator="cumulative", panel=2),
    Metric("rlwatch/bad_values", Family.SYSTEM, "values", "values that were no numbers and were left out so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/bad_records", Family.SYSTEM, "records", "records that could not be taken so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/bad_calls", Family.SYSTEM, "calls", "calls that could not be understood so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/skipped", Family.SYSTEM, "calls", "work left out so far because its tap was switched off", 0.0, aggregator="cumulative"),
    Metric("rlwatch/unkept", Family.SYSTEM, "records", "records that were not in the journal before they were stored so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/shed", Family.SYSTEM, "", "token records, completions, values and rows given up so far for want of room while the store took nothing", 0.0, aggregator="cumulative"),
    Metric("rlwatch/completions_left_out", Family.SYSTEM, "texts", "texts left out so far for want of the run's budget of bytes", 0.0, aggregator="cumulative"),
    Metric("rlwatch/late", Family.SYSTEM, "records", "records that came after their step closed", 0.0, aggregator="cumulative"),
    Metric("rlwatch/records", Family.SYSTEM, "records", "records since the last new step", 0.0, aggregator="sum"),
    Metric("rlwatch/records_usual", Family.SYSTEM, "records", "most records an earlier step had", 0.0, aggregator="maximum"),
    Metric("rlwatch/ranks", Family.SYSTEM, "ranks", "ranks whose share of the batch is in the step's statistics", 1.0),
    fraction("rlwatch/measured_share", Family.SYSTEM, "share of a step's tokens that were measured one by one, where a step was too large for all"),
    Metric("rlwatch/refused", Family.SYSTEM, "inputs", "inputs that did not fit and were left out so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/errors", Family.SYSTEM, "errors", "errors rlwatch swallowed so far", 0.0, aggregator="cumulative"),
    fraction("forecast/p20", Family.SYSTEM, "chance that a failure begins within 20 steps", aggregator="forecast"),
    fraction("forecast/p50", Family.SYSTEM, "chance that a failure begins within 50 steps", aggregator="forecast"),
    fraction("forecast/p100", Family.SYSTEM, "chance that a failure begins within 100 steps", aggregator="forecast"),
    Metric("forecast/risk", Family.SYSTEM, "", "how far the forecast is beyond its threshold: an alarm from 1", 0.0, aggregator="forecast"),
    Metric("forecast/steps_to", Family.SYSTEM, "steps", "expected steps until a limit is reached", 0.0, aggregator="forecast"),
    Metric("forecast/error", Family.SYSTEM, "steps", "how far out straight lines to that limit were so far", 0.0, aggregator="forecast"),
)
# fmt: on

TABLE: tuple[Metric, ...] = (
    *REWARD,
    *EXPLORATION,
    *LIKELIHOOD,
    *TRUST_REGION,
    *OPTIMISATION,
    *CRITIC,
    *MISMATCH,
    *ROLLOUTS,
    *ENGINE,
    *SYSTEM,
    *MACHINE,
)

OPEN: tuple[Metric, ...] = (
    *OPEN_REWARD,
    *OPEN_EXPLORATION,
    *OPEN_OPTIMISATION,
    *OPEN_MISMATCH,
    *OPEN_ROLLOUTS,
    *OPEN_MACHINE,
)
"""Open families: metrics whose members a run names itself, such as its layers and tasks. The name of a row is the
prefix of its members. In an alias ``*`` matches the member's name; without ``*`` the last part of the alias is the
member's name.
"""
