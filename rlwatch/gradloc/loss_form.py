"""Form of the loss, deduced from its coefficients: how it uses advantage, ratio, importance weight and KL term.

``a = dL/dlogp`` of ordinary losses is a sum of two terms, each a product of a few known numbers,

    a = -w A r^(token, response or none) v^(token, response or none) / length^(0, 1 or -1)  +  k K(ref - logp),

with a weight ``w`` of the policy term and ``k`` of the KL term that all tokens share. Clipped tokens lack the first
term. The form that explains most tokens, and its weights, are found without knowledge of the trainer. So a KL penalty
is blamed only if there is one, and a ratio only as far as the loss uses it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlwatch.gradloc.passes import LossPass
from rlwatch.tensors.masked import widen

COLUMNS = (
    "coefficient", "advantage", "ratio", "response ratio", "product ratio", "weight", "response weight", "gap",
    "length",
)  # fmt: skip
"""Numbers of a token from which a loss is computed. Logarithms are in nats; NaN = not known.

They are dL/dlogp and the advantage; log-ratios to the old policy, of the token, their mean and their sum over its
response; log importance weights (old policy against rollout engine), of the token and their mean; the reference's
log-prob minus the policy's; and the number of tokens in its response.
"""
BOUND = 30.0
"""Largest exponent that is used, nats."""
SAMPLED = 32
"""Number of tokens of a micro-batch that are kept of a healthy step."""


def columns_of(one: LossPass) -> Tensor:
    """Return the inputs of the loss for each token of the micro-batch ``one``: (COLUMNS, B, T), NaN outside the mask,
    on its device.

    Waits for nothing.
    """
    tokens, on = one.tokens, one.tokens.mask.bool()
    lengths = on.sum(1, keepdim=True).clamp(min=1)

    def apart(above: Tensor | None, below: Tensor | None) -> Tensor | None:
        if above is None or below is None:
            return None
        return torch.where(on, (widen(above) - widen(below)).float(), 0.0)

    ratio, weight = apart(tokens.logp, tokens.old_logp), apart(tokens.trainer_logp, tokens.rollout_logp)
    known = {
        "coefficient": one.coefficient().detach().float(),
        "advantage": None if tokens.token_advantages is None else widen(tokens.token_advantages).float(),
        "ratio": ratio,
        "response ratio": None if ratio is None else ratio.sum(1, keepdim=True) / lengths,
        "product ratio": None if ratio is None else ratio.sum(1, keepdim=True),
        "weight": weight,
        "response weight": None if weight is None else weight.sum(1, keepdim=True) / lengths,
        "gap": apart(tokens.ref_logp, tokens.logp),
        "length": lengths.float(),
    }
    nothing = torch.full((1, 1), torch.nan, device=on.device)
    whole = [(nothing if known[name] is None else known[name]).expand(on.shape) for name in COLUMNS]  # type: ignore[union-attr]
    return torch.where(on, torch.stack(whole), torch.nan)


def sample_of(one: LossPass, most: int = SAMPLED) -> Tensor:
    """Return the inputs of the loss for some tokens spread over the micro-batch ``one``: (at most ``most``, COLUMNS),
    on its device.

    Every call returns the same tokens. Rows of NaN are no tokens.
    """
    whole = columns_of(one).flatten(1)
    order = torch.arange(whole.shape[1], device=whole.device)
    spread = torch.where(one.tokens.mask.bool().flatten(), (order * 40503) % 65521, -1)
    chosen = spread.topk(min(most, spread.numel())).indices
    return whole[:, chosen].T.contiguous()


def tokens_of(passes: Sequence[LossPass]) -> np.ndarray:
    """Return the inputs of the loss (N, COLUMNS) for every token inside the masks whose coefficient is finite, float64.

    It waits for the device.
    """
    tables = [columns_of(one).flatten(1).T.double().cpu().numpy() for one in passes]
    table = np.concatenate(tables) if tables else np.zeros((0, len(COLUMNS)))
    return np.asarray(table[np.isfinite(table[:, 0])])


@dataclass(frozen=True, slots=True)
class Shape:
    """Formula of a loss without its weights: factors of the policy term, and kind of the KL term.

    Factors are names of :data:`COLUMNS`, ``""`` for none. ``kl`` is ``k3`` (1 - exp(gap)), ``k2`` (-gap) or ``k3
    ratio`` (-ratio * gap, TRL's unbiased one). ``per_length`` is the power of the response's length by which the term
    is divided.
    """

    ratio: str = ""
    weight: str = ""
    per_length: int = 0
    kl: str = ""

    @property
    def cost(self) -> float:
        """Return a penalty that is larger for formulas with more factors, so that of equally good ones the plainest is
        chosen.
        """
        ratios = {"ratio": 0.0, "": 0.005, "response ratio": 0.01, "product ratio": 0.015}
        return ratios[self.ratio] + 0.02 * bool(self.weight) + 0.003 * abs(self.per_length) + 0.02 * bool(self.kl)

    def log_weight(self, table: np.ndarray) -> np.ndarray:
        """Return the logarithm of ratio times importance weight for each token in ``table``, (N,), nats."""
        total = np.zeros(len(table))
        for name in (self.ratio, self.weight):
            if name:
                total = total + table[:, COLUMNS.index(name)]
        return np.clip(total, -BOUND, BOUND)

    def policy(self, table: np.ndarray) -> np.ndarray:
        """Return the policy term with weight 1 for each token in ``table``, (N,)."""
        return np.asarray(-table[:, COLUMNS.index("advantage")] * np.exp(self.log_weight(table)) / self.lengths(table))

    def lengths(self, table: np.ndarray) -> np.ndarray:
        """Return the divisor of each token's coefficient, (N,): a power of its response's length.

        The result is ones if coefficients are not divided.
        """
        return np.asarray(table[:, COLUMNS.index("length")] ** float(self.per_length))

    def penalty(self, table: np.ndarray) -> np.ndarray:
        """Return the KL term with weight 1 for each token in ``table``, (N,)."""
        gap = np.clip(table[:, COLUMNS.index("gap")], -BOUND, BOUND)
        if self.kl == "k3":
            return np.asarray(-np.expm1(gap))
        if self.kl == "k2":
            return np.asarray(-gap)
        if self.kl == "k3 ratio":
            return np.asarray(-gap * np.exp(np.clip(table[:, COLUMNS.index("ratio")], -BOUND, BOUND)))
        return np.zeros(len(table))


def _shapes(table: np.ndarray) -> Iterator[Shape]:
    """Iterate over shapes whose numbers are known and differ from those of simpler shapes."""
    varies = {
        name: bool(np.isfinite(column).all() and np.abs(column).max(initial=0.0) > 1e-6)
        for name, column in zip(COLUMNS, table.T, strict=True)
    }
    lengths = table[:, COLUMNS.index("length")]
    ratios = ["", *(name for name in ("ratio", "response ratio", "product ratio") if varies[name])]
    weights = ["", *(name for name in ("weight", "response weight") if varies[name])]
    kls = ["", *(("k3", "k2") if varies["gap"] else ()), *(("k3 ratio",) if varies["gap"] and varies["ratio"] else ())]
    per = [0, 1, -1] if np.ptp(lengths) > 0 else [0]
    for ratio, weight, length, kl in itertools.product(ratios, weights, per, kls):
        yield Shape(ratio, weight, length, kl)


@dataclass(frozen=True, slots=True)
class LossForm:
    """Formula of a loss (``shape``) with its weights: ``policy`` of the policy term, ``kl`` of the KL term.

    ``unexplained`` is the share of tokens that the form does not explain: the mean of their share by number and their
    share by coefficient.
    """

    shape: Shape
    policy: float
    kl: float
    unexplained: float

    def parts(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the policy term's and the KL term's part of each coefficient dL/dlogp, (N,) each; they sum up to the
        coefficient.

        ``table`` (N, COLUMNS): inputs of the loss for N tokens.
        """
        kl = np.nan_to_num(self.kl * self.shape.penalty(table))
        return table[:, 0] - kl, kl

    def as_plain(self) -> dict[str, Any]:
        """Return the formula of the loss with its weights as JSON values, which :meth:`from_plain` reads."""
        return asdict(self)

    @classmethod
    def from_plain(cls, body: Mapping[str, Any]) -> LossForm:
        """Build the formula of the loss with its weights from ``body``, which :meth:`as_plain` returned."""
        return cls(**{**body, "shape": Shape(**body["shape"])})


BELIEVED = 0.3
"""Largest unexplained share of a form that is accepted."""
TOLERANCE = 0.03
"""Relative error of a coefficient that counts as explained: coefficients are exact except for rounding and soft
clips.
"""
LEAST = 6
"""Smallest number of tokens from which a form is deduced."""
MOST = 384
"""Largest number of tokens on which shapes are compared: the largest coefficients, and others spread over the step."""


def fitted(table: np.ndarray) -> LossForm | None:
    """Return the formula of the loss that best explains the coefficients of the tokens in ``table`` (N, COLUMNS); None
    if none explains them.
    """
    chosen = _chosen(table)
    known = np.isfinite(chosen[:, COLUMNS.index("advantage")]) if len(chosen) else np.zeros(0, dtype=bool)
    chosen = chosen[known]
    if np.count_nonzero(chosen[:, 0]) < LEAST:
        return None
    found = [form for shape in _shapes(chosen) if (form := fit(shape, chosen)) is not None]
    best = min(found, key=lambda form: form.unexplained + form.shape.cost, default=None)
    return best if best is not None and best.unexplained <= BELIEVED else None


def forms_of(tables: Sequence[np.ndarray]) -> list[LossForm | None]:
    """Return the form of the loss in each micro-batch; ``tables`` (N, COLUMNS) hold the tokens of each.

    All have one form, or one shape with different weights if the loss is normalised by micro-batch. None: unknown.
    """
    whole = fitted(np.concatenate(tables)) if tables else None
    if whole is not None or len(tables) < 2:
        return [whole] * len(tables)
    each = [fitted(table) for table in tables]
    best = min((form for form in each if form is not None), key=lambda form: form.unexplained, default=None)
    return [
        None if form is None or best is None else fit(best.shape, table)
        for form, table in zip(each, tables, strict=True)
    ]


def _chosen(table: np.ndarray) -> np.ndarray:
    if len(table) <= MOST:
        return table
    order = np.argsort(-np.abs(table[:, 0]), kind="stable")
    top, others = order[: MOST // 3], np.sort(order[MOST // 3 :])
    spread = others[np.linspace(0, len(others) - 1, MOST - len(top)).astype(np.int64)]
    return np.asarray(table[np.concatenate([top, spread])])


PAIRS, SINGLES = 48, 16
"""Number of pairs of tokens, and of single tokens, whose weights are tried on all tokens."""


def fit(shape: Shape, table: np.ndarray) -> LossForm | None:
    """Return ``shape`` with the weights that explain most tokens of ``table``; None if no candidate is finite.

    Candidate weights are those that explain some single tokens or pairs of tokens exactly.
    """
    a, p, k = table[:, 0], shape.policy(table), shape.penalty(table)
    if not (np.isfinite(p).all() and np.isfinite(k).all()):
        return None
    weights = _proposed(a, p, k, kl=bool(shape.kl))
    weights = weights[np.isfinite(weights).all(1) & (weights[:, 0] >= 0) & (weights[:, 1] >= 0)]
    if not len(weights):
        return None
    scores = _unexplained(a, p, k, weights)
    best = int(scores.argmin())
    return LossForm(shape, float(weights[best, 0]), float(weights[best, 1]), float(scores[best]))


def _proposed(a: np.ndarray, p: np.ndarray, k: np.ndarray, *, kl: bool) -> np.ndarray:
    """Return (M, 2) pairs of weights."""
    draw = np.random.default_rng(0)  # a generator of its own: no other random state changes
    pushed = np.flatnonzero(a)
    largest = pushed[np.argsort(-np.abs(a[pushed]), kind="stable")[: SINGLES // 2]]
    single = np.concatenate([largest, draw.choice(pushed, SINGLES)])
    zero = np.zeros(len(single))
    with np.errstate(all="ignore"):
        proposals = [np.column_stack([a[single] / p[single], zero])]
        if kl:
            i, j = draw.choice(pushed, PAIRS), draw.choice(pushed, PAIRS)
            i[: len(largest)] = largest
            determinant = p[i] * k[j] - p[j] * k[i]
            both = [(a[i] * k[j] - a[j] * k[i]) / determinant, (p[i] * a[j] - p[j] * a[i]) / determinant]
            proposals += [np.column_stack(both), np.column_stack([zero, a[single] / k[single]])]
    return np.concatenate(proposals)


def _unexplained(a: np.ndarray, p: np.ndarray, k: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return (M,) for each pair of weights; a token is explained with its policy term, or clipped without it."""
    size = np.abs(a)
    unit = TOLERANCE * np.maximum(size, 0.05 * np.median(size[size > 0]))
    penalty = weights[:, 1:] * k
    whole = np.abs(a - weights[:, :1] * p - penalty)
    off = np.minimum(np.minimum(whole, np.abs(a - penalty)) / unit, 1.0)
    return np.asarray(off @ (0.5 / len(a) + 0.5 * size / size.sum()))


def weight_of(form: LossForm, samples: Sequence[np.ndarray]) -> tuple[list[float], list[float]]:
    """Return the weights of the policy term and of the KL term in earlier steps, from their kept ``samples`` (n,
    COLUMNS).

    ``form``: formula of the loss, whose weights are sought.
    """
    found = []
    for sample in samples:
        known = sample[np.isfinite(sample[:, 0]) & np.isfinite(sample[:, COLUMNS.index("advantage")])]
        again = fit(form.shape, known) if np.count_nonzero(known[:, 0]) >= LEAST else None
        if again is not None and again.unexplained <= BELIEVED:
            found.append(again)
    return [form.policy for form in found if form.policy], [form.kl for form in found if math.isfinite(form.kl)]
