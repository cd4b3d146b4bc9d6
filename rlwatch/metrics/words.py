"""Guess the metric that a name in everyday words means, as custom tables and training loops have them.

There are two ways from words to a metric. The table lists names (``everyday``), which are compared as sets of words.
The six main metrics (roles) on which the judgement of a run depends also have a grammar: a noun (*reward*, *entropy*,
*kl*...) and modifiers that do not change the quantity. Each modifier has a cost, so that the plainest name wins. With
any other word the name means something else (``reward_std``, ``reward_model_loss``, ``kl_coef``, ``max_length``): no
metric is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_EMPTY_WORDS = frozenset({"mean", "batch", "metrics", "train", "losses", "charts", "scalars", "learner"})
"""Words that fit every series, and so distinguish none."""
_ONE_WORD = {
    **dict.fromkeys(("avg", "average", "averaged"), "mean"),
    **dict.fromkeys(("rewards", "rew", "rews", "rwd"), "reward"),
    **dict.fromkeys(("returns", "ret"), "return"),
    **dict.fromkeys(("gradient", "gradients", "grads"), "grad"),
    **dict.fromkeys(
        ("completion", "completions", "responses", "resp", "output", "outputs", "generation", "generations", "gen"),
        "response",
    ),
    "generated": "response",
    **dict.fromkeys(("len", "lens", "lengths"), "length"),
    **dict.fromkeys(("frac", "rate", "share"), "fraction"),
    **dict.fromkeys(("pct", "percentage"), "percent"),
    **dict.fromkeys(("advantages", "adv"), "advantage"),
    "reference": "ref",
    **dict.fromkeys(("divergence", "kld"), "div"),
    "importance": "is",
    **dict.fromkeys(("acc", "accuracies"), "accuracy"),
    **dict.fromkeys(("eval", "evaluation", "validation", "test", "valid", "dev", "heldout", "holdout"), "val"),
    **dict.fromkeys(("logprob", "logprobs", "logps"), "logp"),
    "perplexity": "ppl",
    "truncation": "truncated",
    "training": "train",
    "tokens": "token",
    **dict.fromkeys(("tok", "toks"), "token"),
    "ent": "entropy",
    "pol": "policy",
    "ans": "answer",
    "sampled": "sample",
    "init": "base",
    "scores": "score",
    **dict.fromkeys(("solved", "solves"), "solve"),
    **dict.fromkeys(("wins", "won"), "win"),
    **dict.fromkeys(("passes", "passed"), "pass"),
    **dict.fromkeys(("successes", "successful"), "success"),
    **dict.fromkeys(("episodes", "episodic", "ep", "epi"), "episode"),
    **dict.fromkeys(("samples",), "sample"),
    **dict.fromkeys(("iter", "iteration"), "step"),
    "metric": "metrics",
    "steps": "step",
    "entropies": "entropy",
}


@lru_cache(maxsize=4096)
def stems(name: str) -> frozenset[str]:
    """Return the words of a metric name as a set, in lower case, with synonyms in one form.

    >>> sorted(stems("train/AvgGradientNorm"))
    ['grad', 'mean', 'norm', 'train']
    """
    return frozenset(in_order(name))


def in_order(name: str) -> list[str]:
    """Return the words of a metric name in their order, in lower case, with synonyms in one form."""
    return [
        _ONE_WORD.get(word, word) for word in (part.lower() for part in _WORD.findall(name.replace("%", " percent")))
    ]


def words_of(name: str) -> frozenset[str]:
    """Return the words of a metric name as :func:`stems` does, without words such as "mean" that fit every series.

    >>> sorted(words_of("train/AvgGradientNorm"))
    ['grad', 'norm']
    """
    return stems(name) - _EMPTY_WORDS


# The grammar of the six roles. Costs only order the names of one run that mean the same metric.

_ALGORITHMS = ("rl", "grpo", "ppo", "dapo", "rloo", "gspo", "reinforce")
_LOGGED = (*sorted(_EMPTY_WORDS - {"batch"}), "stats", "log", "logs", "summary", "performance")
_CONTEXT = dict.fromkeys((*_LOGGED, "batch", "step", "per", "at", "epoch", "online", *_ALGORITHMS), 0)
"""Words for the averaged unit, or for the place of logging."""
_ACTOR = dict.fromkeys(("policy", "actor", "agent", "model", "pi"), 1)
_SUM = (
    "total",
    "overall",
    "final",
    "sum",
    "combined",
    "aggregate",
    "aggregated",
    "composite",
    "full",
    "weighted",
    "all",
)
_WHOLE = dict.fromkeys((*_SUM, "whole", "net", "cumulative", "cum", "global"), 5)
"""Words for a sum of parts, which is used if nothing plainer is logged."""
_SMOOTHED = dict.fromkeys(("running", "moving", "ma", "ema", "smoothed", "smooth", "rolling", "window", "recent"), 12)
_WINDOWS = frozenset({"10", "20", "25", "50", "100", "200", "500", "1000"})
"""Usual numbers of rows in a moving mean."""
_FURTHEST = 18
"""Most that the modifiers of a noun cost: nouns are 20 apart."""


@dataclass(frozen=True, slots=True)
class Role:
    """One of the main metrics of a run, such as the reward, and the grammar of its names in everyday words.

    Attributes
    ----------
    metric
        Canonical name of the metric.
    nouns
        Set of words -> cost; a name has all words of one of the sets.
    modifiers
        Word -> cost; words that may accompany any of the nouns.
    """

    metric: str
    nouns: Mapping[frozenset[str], int]
    modifiers: Mapping[str, int]

    def cost(self, words: frozenset[str]) -> int | None:
        """Return the distance of the words of a name from the plainest name (0); None if they mean something else."""
        costs = []
        for noun, cost in self.nouns.items():
            rest = words - noun
            if noun <= words and all(word in self.modifiers for word in rest):
                costs.append(cost + min(_FURTHEST, sum(self.modifiers[word] for word in rest)))
        return min(costs, default=None)


def _nouns(costs: Mapping[str, int]) -> dict[frozenset[str], int]:
    return {frozenset(words.split()): cost for words, cost in costs.items()}


_REWARD_MEAN = "reward/mean"
_AS_GIVEN = ("unscaled", "unnormalized", "unnormalised", "unshaped", "undiscounted")
_REWARD = Role(
    _REWARD_MEAN,
    _nouns({"reward": 0, "return": 22, "score": 40}),
    {
        **(_CONTEXT | _WHOLE | _SMOOTHED | {"policy": 1, "actor": 1, "agent": 1, "episode": 1, "score": 2}),
        **dict.fromkeys(
            ("rollout", "sample", "response", "trajectory", "traj", "sequence", "group", "raw", *_AS_GIVEN), 3
        ),
        "data": 4,
        "env": 8,
        "environment": 8,
        "task": 8,
        "rm": 8,
    },
)
_LETTER = Role(_REWARD_MEAN, _nouns({"r": 20}), _CONTEXT | _WHOLE | {"episode": 1})
_OUTCOMES = ("success", "solve", "win", "pass", "correct")
_OUTCOME = Role(
    _REWARD_MEAN,
    _nouns(
        {"accuracy": 60, "exact match": 70, "pass 1": 84}
        | {f"{outcome} {of}": 80 for outcome in _OUTCOMES for of in ("fraction", "percent", "mean")}
    ),
    {
        **(_CONTEXT | _SMOOTHED | {"overall": 3, "total": 3, "policy": 1, "agent": 1, "episode": 1}),
        **dict.fromkeys(("rollout", "sample", "response", "answer", "fraction", "percent", "task", "problem"), 3),
    },
)
_ENTROPY = Role(
    "policy/entropy",
    _nouns({"entropy": 0}),
    _CONTEXT | _ACTOR | {"token": 1, "response": 2, "rollout": 2, "action": 3, "sample": 3, "nats": 3},
)
_KL = Role(
    "policy/kl_ref",
    _nouns({"kl": 0, "div kl": 0}),
    {
        **({word: 0 for word in _CONTEXT if word != "ppo"} | _ACTOR),
        "token": 2,
        "response": 3,
        "loss": 6,
        **dict.fromkeys(("div", "ref", "to", "from", "vs", "base", "sft"), 1),
    },
)
_LENGTH = Role(
    "len/mean",
    _nouns({"length": 0, "response token": 5, "new token": 5, "token per sample": 8}),
    {
        **dict.fromkeys((*_LOGGED, *_ALGORITHMS, "per"), 0),
        "policy": 1,
        "response": 1,
        "token": 2,
        "rollout": 3,
        "sample": 3,
        "new": 3,
        "answer": 5,
    },
)
_GRADIENT = Role(
    "optim/grad_norm",
    _nouns(
        {"grad norm": 0, "grad norm l 2": 0, "gradnorm": 0, "gnorm": 1, "g norm": 1, "grad": 4, "grad l 2": 4}
        | {f"grad norm {when} {clip}": 1 for when in ("pre", "before") for clip in ("clip", "clipping")}
        | {"total norm": 8, "global norm": 8}
    ),
    {
        **(_CONTEXT | _ACTOR | {"preclip": 1, "unclipped": 1, "lora": 2}),
        **dict.fromkeys(("global", "total", "raw", "optim", "optimizer", "opt", "all"), 1),
    },
)
_LOSS = Role(
    "loss/policy",
    _nouns(
        {
            f"{of} {loss}": 0
            for of in ("policy", "pg", "actor", "surrogate", "surr", "pi")
            for loss in ("loss", "losses")
        }
        | {f"{of} loss": 5 for of in _ALGORITHMS}
        | {"loss": 10}
    ),
    {
        **(_CONTEXT | _ACTOR | {"grad": 1, "clip": 1, "clipped": 1, "surrogate": 1}),
        **dict.fromkeys(("total", "overall", "full", "final", "combined", "sum", "objective"), 4),
    },
)
ROLES = (_REWARD, _LETTER, _OUTCOME, _ENTROPY, _KL, _LENGTH, _GRADIENT, _LOSS)
HELD_OUT = "val"


@lru_cache(maxsize=4096)
def role_of(name: str) -> tuple[str, int] | None:
    """Return the main metric (or ``val/score``) that a name means, and the name's distance from the plainest; None if
    none.

    >>> role_of("reward_overall"), role_of("avg_gen_tokens"), role_of("eval_reward")
    (('reward/mean', 5), ('len/mean', 5), ('val/score', 0))
    >>> [role_of(name) for name in ("reward_std", "reward_model_loss", "kl_coef", "max_length", "R2")]
    [None, None, None, None, None]
    """
    words = stems(name)
    if words & (_SMOOTHED.keys() | {"last"}) or ("mean" in words and not words.isdisjoint(_WINDOWS)):
        words = frozenset(word for word in words if not word.isdigit()) - {"last"} | {"window"}
    if HELD_OUT in words:
        costs = [role.cost(words - {HELD_OUT}) for role in (_REWARD, _OUTCOME)]
        return next((("val/score", cost) for cost in costs if cost is not None), None)
    found = ((role.metric, cost) for role in ROLES if (cost := role.cost(words)) is not None)
    return next(found, None)


# A reward under a custom name, used if a run logs no other.

ONLY_REWARD = 50
"""Distance of a guess that the only reward of a run is the total one; less than that of an accuracy."""
NO_REWARDS = frozenset((
    "std", "var", "variance", "stdev", "sd", "max", "min", "median", "quantile", "p", "best", "worst", "top",
    "highest", "lowest", "peak", "loss", "model", "coef", "coeff", "coefficient", "weight", "weights", "scale",
    "scaling", "factor", "baseline", "target", "threshold", "clip", "clipped", "gap", "margin", "margins", "diff",
    "difference", "delta", "change", "kl", "entropy", "norm", "normalized", "normalised", "standardized",
    "standardised", "whitened", "z", "advantage", "count", "num", "n", "time", "seconds", "s", "hack", "hacking",
    "chosen", "rejected", "zero", "nonzero", "fraction", "percent", "ratio", "error", "nan", "pred", "predicted",
    "expected", "noise", "improvement", "gain", "trend", "slope", "corr", "correlation", "lr", "rate", "fn",
    "func", "version", "temperature", "cap", "limit", "floor", "compute", "calculation", "previous", "prev",
    "old", "initial", "first",
))  # fmt: skip
"""Words in names of statistics about rewards that are not the mean reward."""
_OF_A_PART = frozenset((
    "format", "length", "style", "penalty", "bonus", "shaping", "shaped", "intrinsic", "tag", "xml", "think",
    "thinking", "reasoning", "brevity", "repetition", "language", "win", "success", "correct", "failed",
    "failure", "fail", "positive", "negative", "random", "human", "teacher", "critic", "opponent", "ref", "base",
    "value", "values", "greedy", "parse", "parsing", "syntax", "nll", "component", "part", "parts", "efficiency",
    "turn", "tool", "by",
))  # fmt: skip
"""Words in names of a part of the reward, or of a reward under a condition or of another model."""


def only_reward(names: Iterable[str]) -> str | None:
    """Return the only one of a run's ``names`` that contains "reward", and so may be its total reward.

    None if there are several, which may be parts of one reward or rewards of two policies, or if it names a part.
    "reward" must be the last word, apart from words for the averaged unit: ``reward_budget`` is a budget.

    >>> only_reward(["loss", "wordle_reward", "wordle_reward_std"]), only_reward(["attack_reward", "defend_reward"])
    ('wordle_reward', None)
    """
    candidates = {name: words for name in names if "reward" in (words := stems(name)) and HELD_OUT not in words}
    rewards = {name: words for name, words in candidates.items() if not words & NO_REWARDS}
    if len({frozenset(words - _CONTEXT.keys()) for words in rewards.values()}) != 1:
        return None
    name, words = next(iter(rewards.items()))
    ends_in = [word for word in in_order(name) if word not in _CONTEXT][-1:]
    unfit = words & _OF_A_PART or any(word.isdigit() for word in words)
    return None if unfit or ends_in != ["reward"] else name
