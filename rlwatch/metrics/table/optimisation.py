# ruff: noqa: E501  (one row of the table is one line or two)
"""The loss, the gradient, and what in them is not a number."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, proxy, same

# fmt: off

ROWS: tuple[Metric, ...] = (
    Metric("loss/policy", Family.OPTIMISATION, "", "policy loss (comparable only within one aggregation mode)", aliases=(
        same("policy_loss"), same("actor/pg_loss", "verl"), same("loss/policy_avg", "trl"), same("train/pg_loss", "slime"),
        proxy("loss"), proxy("actor/loss", "verl"), proxy("train/loss", "slime"), proxy("loss/mean", "prime-rl"))),
    Metric("loss/raw", Family.OPTIMISATION, "", "loss before any NaN filter of the trainer"),
    Metric("optim/grad_norm", Family.OPTIMISATION, "", "global gradient norm before clipping", 0.0, aggregator="last optimizer step", aliases=(
        same("grad_norm"), same("actor/grad_norm", "verl", aggregator="mean over mini-batches"),
        same("actor_grad_norm", "openrlhf"), same("train/grad_norm"), same("opt/grad_norm"))),
    Metric("optim/grad_norm_max", Family.OPTIMISATION, "", "largest global gradient norm of several optimizer steps in one step", 0.0, aggregator="maximum"),
    Metric("optim/lr", Family.OPTIMISATION, "", "learning rate", 0.0, aliases=(
        same("learning_rate"), same("lr"), same("actor/lr", "verl", aggregator="after the scheduler step"),
        same("actor_lr", "openrlhf"), same("train/lr-pg_0", "slime"), same("opt/lr"))),
    Metric("optim/layers_clipped", Family.OPTIMISATION, "layers", "layers that layer-wise clipping scaled down", 0.0, aggregator="last optimizer step"),
    fraction("optim/clip_scale_min", Family.OPTIMISATION, "smallest factor that layer-wise clipping scaled a layer by (1: none)", aggregator="last optimizer step"),
    fraction("optim/step_skipped", Family.OPTIMISATION, "optimizer steps skipped because a gradient was not finite (float16 loss scaler, verl)", aggregator="step fraction"),
    Metric("layers/rise", Family.OPTIMISATION, "times", "largest rise of a layer's gradient norm over its own level, relative to the median layer's", 1.0, estimator="level: median of the last 50 rows", aggregator="maximum over layers"),
    Metric("layers/spiking", Family.OPTIMISATION, "layers", "layers whose gradient norm is far above its own level, relative to the other layers'", 0.0, aggregator="count"),
    Metric("layers/heterogeneity", Family.OPTIMISATION, "", "1 - mean pairwise correlation of the layers' gradient norms over the last 50 rows: 0 in step, 1 unrelated", 0.0, 2.0, estimator="Pearson", aggregator="mean over pairs of layers"),
    fraction("layers/participation", Family.OPTIMISATION, "how evenly the squared gradient norm is spread over the L layers: 1 evenly, 1/L on one layer", aggregator="(sum n^2)^2 / (L sum n^4)"),
    fraction("layers/max_share", Family.OPTIMISATION, "largest share of one layer in the squared gradient norm", aggregator="maximum over layers"),
    Metric("nonfinite/loss", Family.OPTIMISATION, "count", "micro-batches whose loss was NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/logp", Family.OPTIMISATION, "tokens", "response tokens whose policy log-prob was NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/old_logp", Family.OPTIMISATION, "tokens", "the same for the old policy", 0.0, aggregator="sum"),
    Metric("nonfinite/ref_logp", Family.OPTIMISATION, "tokens", "the same for the reference", 0.0, aggregator="sum"),
    Metric("nonfinite/rollout_logp", Family.OPTIMISATION, "tokens", "the same for the rollout engine", 0.0, aggregator="sum"),
    Metric("nonfinite/advantage", Family.OPTIMISATION, "sequences", "advantages that were NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/reward", Family.OPTIMISATION, "sequences", "rewards that were NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/grad", Family.OPTIMISATION, "parameters", "parameter tensors with a NaN or Inf gradient", 0.0, aggregator="sum"),
)
OPEN: tuple[Metric, ...] = (
    Metric("grad_layer/", Family.OPTIMISATION, "", "gradient norm of one layer before clipping", 0.0, aggregator="last optimizer step"),
)
# fmt: on
