# ruff: noqa: E501  (one row of the table is one line or two)
"""One table of metrics: canonical name, unit, range, meaning, and what each trainer calls it.

A record keeps the names its source used. :func:`canonicalise` reads them: a canonical name wins over an
alias that is the same quantity, which wins over a proxy. Nothing is ever rescaled. Sources of the names:
TRL 1.16, verl 0.9.1, OpenRLHF 0.11.2, prime-rl, slime, AReaL and ROLL, read in their code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Family(StrEnum):
    """Failure families, in the order every page and document keeps."""

    REWARD = "Reward"
    EXPLORATION = "Exploration"
    TRUST_REGION = "Trust region"
    OPTIMISATION = "Optimisation"
    MISMATCH = "Engine mismatch"
    ROLLOUTS = "Rollouts"
    SYSTEM = "System"


class Relation(StrEnum):
    """How a trainer's number relates to the canonical one."""

    SAME = "same"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Alias:
    """A trainer's name for a metric. ``source`` is a prefix of the run's source (``""``: any trainer)."""

    name: str
    source: str = ""
    relation: Relation = Relation.SAME
    estimator: str = ""
    aggregator: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One canonical metric. ``low``/``high`` bound its range (inclusive; None: unbounded)."""

    name: str
    family: Family
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    estimator: str = ""
    aggregator: str = "token mean"
    aliases: tuple[Alias, ...] = ()
    title: str = ""


def _same(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    return Alias(name, source, Relation.SAME, estimator, aggregator)


def _proxy(name: str, source: str = "", estimator: str = "", aggregator: str = "") -> Alias:
    return Alias(name, source, Relation.PROXY, estimator, aggregator)


R, X, T, O, E, L, S = Family  # noqa: E741  (one letter a family keeps the table readable)


def _fraction(
    name: str, family: Family, meaning: str, *, aggregator: str = "token fraction", aliases: tuple[Alias, ...] = ()
) -> Metric:
    return Metric(name, family, "fraction", meaning, 0.0, 1.0, aggregator=aggregator, aliases=aliases)


def _nats(
    name: str,
    family: Family,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    estimator: str = "",
    aggregator: str = "token mean",
    aliases: tuple[Alias, ...] = (),
) -> Metric:
    return Metric(name, family, "nats/token", meaning, low, high, estimator, aggregator, aliases)


# fmt: off

TABLE: tuple[Metric, ...] = (
    # -- Reward
    Metric("reward/mean", R, "", "mean reward of the batch", aggregator="sequence mean", aliases=(
        _same("reward"), _same("critic/score/mean", "verl"), _same("rollout/reward_mean", "openrlhf"),
        _same("rollout/raw_reward", "slime"), _same("ppo_actor/task_reward/avg", "areal"),
        _proxy("critic/rewards/mean", "verl", aggregator="after the KL penalty"), _proxy("rewards/chosen", "trl"),
        _proxy("objective/scores", "trl"), _proxy("return", "openrlhf"))),
    Metric("reward/std", R, "", "standard deviation of the reward over the batch", 0.0, aliases=(
        _same("reward_std"), _same("rollout/reward_std", "openrlhf"), _proxy("group_reward_std", "openrlhf"))),
    Metric("reward/max", R, "", "largest reward of the batch", aliases=(_same("critic/score/max", "verl"),)),
    Metric("reward/min", R, "", "smallest reward of the batch", aliases=(_same("critic/score/min", "verl"),)),
    _fraction("reward/zero_std_frac", R, "samples whose group all got the same reward (no gradient)",
           aggregator="sample fraction", aliases=(_same("frac_reward_zero_std"),)),
    Metric("adv/mean", R, "", "mean advantage", aliases=(_same("critic/advantages/mean"),)),
    Metric("adv/std", R, "", "standard deviation of the advantage", 0.0),
    Metric("adv/max", R, "", "largest advantage", aliases=(_same("critic/advantages/max"),)),
    Metric("adv/min", R, "", "smallest advantage", aliases=(_same("critic/advantages/min"),)),
    # -- Exploration
    _nats("policy/entropy", X, "full-softmax entropy at rollout temperature", low=0.0, aliases=(
        _same("entropy"), _same("actor/entropy", "verl", aggregator="loss_agg_mode, old policy"),
        _same("entropy/mean"), _same("entropy/all/mean", "prime-rl"), _same("ppo_actor/update/entropy/avg", "areal"),
        _same("critic/entropy/mean", "roll"), _same("policy/entropy_avg", "trl"),
        _proxy("actor/entropy_loss", "verl", aggregator="update pass"), _proxy("entropy_loss", "openrlhf"),
        _proxy("train/entropy_loss", "slime"))),
    _nats("policy/entropy_p10", X, "10th percentile of token entropy", low=0.0),
    _nats("policy/entropy_p90", X, "90th percentile of token entropy", low=0.0),
    Metric("policy/vocab_size", X, "tokens", "vocabulary size: entropy cannot exceed its logarithm", 1.0),
    _nats("policy/logp_mean", X, "mean log-prob of the sampled tokens", high=0.0,
           aliases=(_same("train/log_probs", "slime"),)),
    _nats("policy/logp_min", X, "lowest log-prob of a sampled token", high=0.0, aggregator="minimum"),
    # -- Trust region
    _nats("policy/kl_ref", T, "KL to the reference policy", estimator="k3", aliases=(
        _same("kl", "trl/grpo", "k3"), _proxy("kl", "trl/rloo", "k1"), _proxy("kl", "openrlhf", "k1|k2|k3"),
        _proxy("objective/kl", "trl", "k1", "sequence sum"), _same("kl", "", "k3"),
        _same("actor/kl_loss", "verl", "kl_loss_type"), _proxy("actor/reward_kl_penalty", "verl"),
        _proxy("critic/kl", "verl"), _same("train/kl_loss", "slime"), _same("kl_ref"), _same("kl_loss"))),
    _nats("policy/kl_ref_k1", T, "KL to the reference, k1 = x, x = log(pi/ref); may be negative"),
    _nats("policy/kl_ref_k2", T, "KL to the reference, k2 = x^2/2", low=0.0),
    _nats("policy/kl_ref_k3", T, "KL to the reference, k3 = exp(-x) - 1 + x", low=0.0),
    _nats("policy/kl_old", T, "k1 between the policy before and during the update", estimator="k1", aliases=(
        _same("actor/ppo_kl", "verl", "k1"), _same("ppo_kl", "", "k1"), _same("train/ppo_kl", "slime"),
        _same("approx_kl"), _same("actor/approxkl", "roll"), _same("policy/approxkl_avg", "trl"))),
    Metric("policy/kl_coef", T, "", "weight of the KL term (beta)", 0.0, aliases=(_same("actor/kl_coef"), _same("beta"))),
    Metric("ratio/mean", T, "", "mean importance ratio pi/pi_old", 0.0, aliases=(_same("ratio"), _same("val/ratio"))),
    Metric("ratio/max", T, "", "largest importance ratio", 0.0, aggregator="maximum"),
    Metric("ratio/min", T, "", "smallest importance ratio", 0.0, aggregator="minimum"),
    _fraction("ratio/ess", T, "effective sample size of raw token ratios over their number"),
    Metric("ratio/seq_mean", T, "", "mean ratio of whole responses, as a sequence-level loss takes it", 0.0, aggregator="sequence mean"),
    Metric("ratio/seq_max", T, "", "largest ratio of a whole response", 0.0, aggregator="maximum"),
    _fraction("ratio/seq_ess", T, "effective sample size of the ratios of responses over their number", aggregator="sequences"),
    _fraction("ratio/clipfrac", T, "tokens whose ratio is clipped", aliases=(
        _same("clip_ratio/region_mean", "", aggregator="token fraction, sign-aware"), _same("actor/pg_clipfrac", "verl"),
        _same("ppo_clip_ratio", "openrlhf"), _same("pg_clipfrac"), _same("train/pg_clipfrac", "slime"),
        _same("actor/ppo_ratio_clipfrac", "roll"), _same("clip_ratio"), _same("policy/clipfrac_avg", "trl"),
        _proxy("cispo_clip_ratio", "trl"))),
    _fraction("ratio/clipfrac_low", T, "tokens clipped below (advantage < 0)", aliases=(
        _same("clip_ratio/low_mean"), _same("actor/ppo_ratio_low_clipfrac", "roll"))),
    _fraction("ratio/clipfrac_high", T, "tokens clipped above (advantage > 0)", aliases=(
        _same("clip_ratio/high_mean"), _same("actor/ppo_ratio_high_clipfrac", "roll"))),
    # -- Optimisation
    Metric("loss/policy", O, "", "policy loss (comparable only within one aggregation mode)", aliases=(
        _same("policy_loss"), _same("actor/pg_loss", "verl"), _same("loss/policy_avg", "trl"), _same("train/pg_loss", "slime"),
        _proxy("loss"), _proxy("actor/loss", "verl"), _proxy("train/loss", "slime"), _proxy("loss/mean", "prime-rl"))),
    Metric("loss/raw", O, "", "loss before any NaN filter of the trainer"),
    Metric("optim/grad_norm", O, "", "global gradient norm before clipping", 0.0, aggregator="last optimizer step", aliases=(
        _same("grad_norm"), _same("actor/grad_norm", "verl", aggregator="mean over mini-batches"),
        _same("actor_grad_norm", "openrlhf"), _same("train/grad_norm"), _same("opt/grad_norm"))),
    Metric("optim/lr", O, "", "learning rate", 0.0, aliases=(
        _same("learning_rate"), _same("lr"), _same("actor/lr", "verl", aggregator="after the scheduler step"),
        _same("actor_lr", "openrlhf"), _same("train/lr-pg_0", "slime"), _same("opt/lr"))),
    _fraction("optim/step_skipped", O, "optimizer steps a float16 loss scaler skipped", aggregator="step fraction"),
    Metric("nonfinite/loss", O, "count", "micro-batches whose loss was NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/logp", O, "tokens", "response tokens whose policy log-prob was NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/old_logp", O, "tokens", "the same for the old policy", 0.0, aggregator="sum"),
    Metric("nonfinite/ref_logp", O, "tokens", "the same for the reference", 0.0, aggregator="sum"),
    Metric("nonfinite/rollout_logp", O, "tokens", "the same for the rollout engine", 0.0, aggregator="sum"),
    Metric("nonfinite/advantage", O, "sequences", "advantages that were NaN or Inf", 0.0, aggregator="sum"),
    Metric("nonfinite/grad", O, "parameters", "parameter tensors with a NaN or Inf gradient", 0.0, aggregator="sum"),
    # -- Engine mismatch (rollout engine against trainer, same weights)
    _nats("mismatch/kl", E, "KL(rollout || trainer) on the sampled tokens", estimator="k1", aliases=(
        _same("rollout_corr/kl", "verl", "k1"), _same("vllm_kl", "openrlhf", "k1"),
        _proxy("ppo_actor/update/behave_approx_kl/avg", "areal"))),
    _nats("mismatch/k3", E, "the same by the k3 estimator", low=0.0, estimator="k3", aliases=(
        _same("rollout_corr/k3_kl", "verl", "k3"), _same("mismatch_kl/all/mean", "prime-rl", "k3"),
        _same("mismatch_k3"), _same("gen_kl_error", "nemo-rl", "k3"),
        _proxy("kl", "trl/async", "k3", "current policy against the sampling one"))),
    _nats("mismatch/logp_absdiff", E, "mean |log trainer - log rollout|", low=0.0, aliases=(
        _same("sampling/sampling_logp_difference/mean"), _same("train/train_rollout_logprob_abs_diff", "slime"),
        _proxy("rollout_corr/log_ppl_abs_diff", "verl", aggregator="sequence mean"))),
    _nats("mismatch/logp_absdiff_max", E, "largest |log trainer - log rollout|", low=0.0, aggregator="maximum",
           aliases=(_same("sampling/sampling_logp_difference/max"),)),
    Metric("mismatch/prob_absdiff", E, "probability", "mean |p trainer - p rollout| (not log-probs)", 0.0, 1.0, aliases=(
        _same("training/rollout_probs_diff_mean", "verl"),)),
    Metric("mismatch/is_ratio", E, "", "mean trainer/rollout weight after truncation or masking", 0.0, aliases=(
        _same("sampling/importance_sampling_ratio/mean"), _same("rollout_corr/rollout_is_mean", "verl"),
        _same("train/tis", "slime"), _same("mismatch/is_ratio_mean"))),
    _fraction("mismatch/ess", E, "effective sample size of raw trainer/rollout weights over their number", aliases=(
        _proxy("rollout_corr/rollout_is_eff_sample_size", "verl", aggregator="after truncation"),)),
    # -- Rollouts
    Metric("len/mean", L, "tokens", "mean response length", 0.0, aliases=(
        _same("completions/mean_length"), _same("response_length/mean", "verl"), _same("completion_length"),
        _same("rollout/response_length_mean", "openrlhf"), _same("response_length", "openrlhf"),
        _same("rollout/response_len/mean", "slime"), _same("tokens/response_length/mean", "roll"))),
    Metric("len/max", L, "tokens", "longest response", 0.0, aggregator="maximum", aliases=(
        _same("completions/max_length"), _same("response_length/max", "verl"))),
    Metric("len/min", L, "tokens", "shortest response", 0.0, aggregator="minimum", aliases=(
        _same("completions/min_length"), _same("response_length/min", "verl"))),
    _fraction("len/clipped", L, "responses cut at the length limit", aggregator="sequence fraction", aliases=(
        _same("completions/clipped_ratio"), _same("response_length/clip_ratio", "verl"), _same("truncated", "openrlhf"),
        _same("rollout/truncated_rate", "openrlhf"), _same("rollout/truncated_ratio", "slime"))),
    _fraction("text/repetition", L, "1 - distinct 3-grams / 3-grams of token ids, mean over responses",
           aggregator="sequence mean", aliases=(_proxy("rollout/repetition_frac", "slime"),)),
    _fraction("text/id0_frac", L, "responses that are at least 90 % token id 0", aggregator="sequence fraction"),
    Metric("tokens/total", L, "tokens", "tokens seen so far", 0.0, aggregator="cumulative", aliases=(
        _same("num_tokens"), _proxy("perf/total_num_tokens", "verl", aggregator="per step"))),
    Metric("staleness/mean", L, "versions", "policy versions between rollout and update", aliases=(
        _same("sample/staleness_mean", "trl"), _same("training/off_policy/trajectory_staleness/mean", "verl"), _same("staleness"))),
    # -- System
    Metric("time/step", S, "s", "duration of a step", 0.0, aliases=(
        _same("step_time"), _same("timing_s/step", "verl"), _same("perf/time_per_step", "verl"),
        _same("timing/step_total", "openrlhf"), _same("time/step"), _same("perf/step_time", "slime"))),
    Metric("rlwatch/dropped", S, "records", "records rlwatch dropped so far", 0.0, aggregator="cumulative"),
    Metric("rlwatch/late", S, "records", "records that came after their step closed", 0.0, aggregator="cumulative"),
    Metric("rlwatch/errors", S, "errors", "errors rlwatch swallowed so far", 0.0, aggregator="cumulative"),
)
# fmt: on

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in TABLE}
LAYER_PREFIX = "grad_layer/"
"""Per-layer gradient norms are ``grad_layer/<layer>``."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How one source name reads: as which metric, and how closely."""

    metric: Metric
    alias: Alias | None

    @property
    def closeness(self) -> int:
        """0: the canonical name; 1: the same quantity; 2: a proxy."""
        if self.alias is None:
            return 0
        return 1 if self.alias.relation is Relation.SAME else 2


def _index() -> dict[str, list[tuple[Metric, Alias]]]:
    index: dict[str, list[tuple[Metric, Alias]]] = {}
    for metric in TABLE:
        for alias in metric.aliases:
            index.setdefault(alias.name, []).append((metric, alias))
    return index


_ALIASES = _index()
_TRACKER_PREFIXES = ("train/", "tap/")


def _matches(alias: Alias, source: str) -> bool:
    return not source or not alias.source or source.startswith(alias.source)


@lru_cache(maxsize=4096)
def resolve(name: str, source: str = "") -> Reading | None:
    """How ``name`` reads in a run of ``source`` (``"trl/grpo"``, ``"verl"``...); None if unknown.

    Dots read as slashes; the ``train/`` prefix trackers add is looked through. An alias of the very
    source wins over one of any trainer.

    >>> resolve("actor/grad_norm", "verl").metric.name
    'optim/grad_norm'
    >>> resolve("kl", "trl/rloo").closeness
    2
    """
    slashed = name.replace(".", "/")
    if slashed in BY_NAME:
        return Reading(BY_NAME[slashed], None)
    candidates = [(m, a) for m, a in (_ALIASES.get(name) or _ALIASES.get(slashed) or ()) if _matches(a, source)]
    if candidates:
        metric, alias = max(candidates, key=lambda pair: len(pair[1].source) if source else -len(pair[1].source))
        return Reading(metric, alias)
    for prefix in _TRACKER_PREFIXES:
        if name.startswith(prefix):
            return resolve(name.removeprefix(prefix), source)
    return None


def canonicalise(metrics: Mapping[str, float], source: str = "") -> tuple[dict[str, float], dict[str, str]]:
    """Canonical name -> value, and canonical name -> the source name it was read from.

    Where several names read as one metric the closest wins (canonical, same, proxy), then the first.
    Names the table does not know are left out; per-layer norms pass through.
    """
    values: dict[str, float] = {}
    origin: dict[str, str] = {}
    best: dict[str, int] = {}
    for name, value in metrics.items():
        reading = resolve(name, source)
        if reading is None:
            if name.startswith(LAYER_PREFIX):
                values[name], origin[name] = value, name
            continue
        canonical = reading.metric.name
        if reading.closeness < best.get(canonical, 99):
            best[canonical] = reading.closeness
            values[canonical], origin[canonical] = value, name
    return values, origin


def known(names: Iterable[str], source: str = "") -> set[str]:
    """The canonical metrics that ``names`` cover."""
    return {reading.metric.name for name in names if (reading := resolve(name, source)) is not None}


def family_of(name: str, source: str = "") -> Family:
    """The family a metric belongs to; unknown ones are guessed by prefix, else ``System``."""
    reading = resolve(name, source)
    if reading is not None:
        return reading.metric.family
    if name.startswith(LAYER_PREFIX):
        return Family.OPTIMISATION
    for prefix, family in _FAMILY_PREFIXES:
        if name.startswith(prefix):
            return family
    return Family.SYSTEM


_FAMILY_PREFIXES: tuple[tuple[str, Family], ...] = (
    ("reward", R),
    ("critic/", R),
    ("val", R),
    ("eval", R),
    ("adv", R),
    ("policy/", T),
    ("ratio/", T),
    ("clip", T),
    ("actor/", O),
    ("optim/", O),
    ("loss", O),
    ("nonfinite/", O),
    ("mismatch/", E),
    ("rollout_corr/", E),
    ("sampling/", E),
    ("training/rollout", E),
    ("completion", L),
    ("response", L),
    ("prompt", L),
    ("len/", L),
    ("text/", L),
    ("tool", L),
    ("num_turns", L),
)
