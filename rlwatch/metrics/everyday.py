"""Names that people give metrics in tables and loops of their own: ``grad``, ``avg_reward``, ``responseLength``...

Read last, where no trainer's name fits, and only of a run whose trainer is not known: TRL's reward trainer logs a
``mean_reward`` too, of pairs that nobody sampled. A name is taken as the set of its words, so that ``reward_mean``,
``mean/reward`` and ``MeanReward`` are one. What may mean two things (``clipped``: responses or ratios? ``k3``: to which
policy?) is not here: better unknown, and said to be, than wrong.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_SAID_BEFORE = frozenset({"mean", "batch", "metrics", "train"})
"""Words that say what every series here is."""
_ONE_WORD = {
    **dict.fromkeys(("avg", "average"), "mean"),
    **dict.fromkeys(("rewards", "return", "returns"), "reward"),
    **dict.fromkeys(("gradient", "gradients"), "grad"),
    **dict.fromkeys(("completion", "completions", "responses", "resp", "output", "generation", "gen"), "response"),
    **dict.fromkeys(("len", "lengths"), "length"),
    **dict.fromkeys(("frac", "rate", "share"), "fraction"),
    **dict.fromkeys(("advantages", "adv"), "advantage"),
    "reference": "ref",
    "divergence": "div",
    "importance": "is",
    "acc": "accuracy",
    **dict.fromkeys(("eval", "validation", "test"), "val"),
    **dict.fromkeys(("logprob", "logprobs", "logps"), "logp"),
    "perplexity": "ppl",
    "truncation": "truncated",
}
NAMES: dict[str, tuple[str, ...]] = {
    "reward/mean": ("reward", "episode reward", "reward score", "score", "accuracy"),
    "reward/std": ("reward std", "r std"),
    "reward/max": ("reward max",),
    "reward/min": ("reward min",),
    "reward/zero_std_frac": ("zero std", "zero std fraction", "zero variance fraction", "reward zero std fraction"),
    "val/score": ("val reward", "val accuracy", "val score"),
    "adv/mean": ("advantage",),
    "adv/std": ("advantage std",),
    "adv/max": ("advantage max",),
    "adv/min": ("advantage min",),
    "policy/entropy": ("entropy", "token entropy", "policy entropy", "actor entropy"),
    "policy/logp_mean": ("logp", "log prob", "log probs"),
    "policy/kl_ref": ("kl", "kl div", "kl ref", "kl ref div", "policy kl ref", "actor kl loss"),
    "policy/kl_old": ("approxkl", "kl approx", "kl old"),
    "ratio/mean": ("ratio", "is ratio", "policy ratio"),
    "ratio/max": ("ratio max", "is ratio max"),
    "ratio/min": ("ratio min", "is ratio min"),
    "ratio/ess": ("ess", "is ess", "effective sample size"),
    "ratio/clipfrac": ("clip fraction", "clipfrac", "ratio clip fraction", "pg clip fraction"),
    "optim/grad_norm": (
        "grad",
        "grad norm",
        "gradnorm",
        "gnorm",
        "global grad norm",
        "policy grad norm",
        "grad norm total",
    ),
    "optim/lr": ("lr", "learning rate"),
    "loss/policy": ("policy loss", "pg loss", "actor loss", "loss"),
    "len/mean": ("length", "response length"),
    "len/max": ("length max", "response length max"),
    "len/min": ("length min", "response length min"),
    "len/clipped": ("truncated", "truncated fraction", "response truncated", "response truncated fraction"),
    "text/repetition": ("repetition", "repetition fraction"),
    "mismatch/logp_absdiff": ("logp abs diff", "logp absdiff", "log prob abs diff"),
    "mismatch/logp_absdiff_max": ("logp abs diff max", "logp absdiff max", "log prob abs diff max"),
    "mismatch/log_ppl_absdiff": ("log ppl abs diff", "log ppl absdiff", "ppl abs diff"),
    "mismatch/kl": ("mismatch kl", "rollout kl", "rollout trainer kl", "vllm kl", "sglang kl"),
    "mismatch/k3": ("mismatch k 3", "mismatch k 3 kl", "rollout k 3", "rollout k 3 kl"),
    "mismatch/is_ratio": ("is weight",),
    "mismatch/ppl_trainer": ("trainer ppl", "training ppl"),
    "mismatch/ppl_rollout": ("rollout ppl",),
    "time/step": ("step time", "step seconds", "step duration"),
}
"""Canonical metric -> names of it, the least far-fetched first."""


def words(name: str) -> frozenset[str]:
    """What a name says: its words in lower case, in one form, without those that say nothing.

    >>> sorted(words("train/AvgGradientNorm"))
    ['grad', 'norm']
    """
    said = [_ONE_WORD.get(word, word) for word in (part.lower() for part in _WORD.findall(name))]
    return frozenset(word for word in said if word not in _SAID_BEFORE)


def _index() -> dict[frozenset[str], tuple[str, int]]:
    return {words(name): (metric, i) for metric, names in NAMES.items() for i, name in enumerate(names)}


_BY_WORDS = _index()


def everyday(name: str) -> tuple[str, int] | None:
    """The canonical metric that ``name`` most likely means, and how far-fetched that is (0: least); None if unknown.

    >>> everyday("MeanReward"), everyday("resp_len"), everyday("clipped")
    (('reward/mean', 0), ('len/mean', 1), None)
    """
    return _BY_WORDS.get(words(name))
