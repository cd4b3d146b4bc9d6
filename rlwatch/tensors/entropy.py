"""Compute the exact entropy of the next-token distribution in a workspace of fixed size, and what lowers it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.error_boundary import described, raised_by
from rlwatch.tensors.advantages import Sides
from rlwatch.tensors.importance import clipped_sides
from rlwatch.tensors.masked import difference, exponential, indicator, keep, masked_mean, shared, widen
from rlwatch.tensors.mergeable import Mean, Paired, Quantile, Stat, Stats, cat
from rlwatch.tensors.tokens import TokenBatch, tokens_of

logger = logging.getLogger("rlwatch")

COLUMNS = 8192
"""Vocabulary entries of a tile."""
CPU_TILE, DEVICE_TILE = 2**17, 2**24
"""Elements of a tile: small enough for a core's cache; large enough that launching kernels does not dominate."""
SAME = 1e-4
"""Nats by which the kernel's sums may differ from PyTorch's: a hundred times their rounding."""
_ZERO = -1e4
"""Its exp is 0 in float32 and float64, and unlike -inf the product with that 0 is 0."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """Softmax sums over the vocabulary for n rows of logits.

    ``top`` (n,): the largest logit. ``log_total`` (n,): log sum exp(t) with t = (logit - top) / temperature.
    ``entropy`` (n,): in nats. ``collision`` (n,): sum of the squared probabilities, NaN unless requested.
    """

    top: Tensor
    log_total: Tensor
    entropy: Tensor
    collision: Tensor

    def logp(self, rows: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """Return log-probs (n,) in nats of the entries ``ids`` (n,) of ``rows`` (n, V); NaN for ids outside it."""
        known = (ids >= 0) & (ids < rows.shape[-1])
        chosen = rows.gather(-1, ids.clamp(0, rows.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        return torch.where(known, (widen(chosen) - self.top) / temperature - self.log_total, torch.nan)


Sums = tuple[Tensor, Tensor, Tensor, Tensor]


class FusedSums:
    """The Triton kernel that computes softmax sums on a GPU in one pass over the logits, until it fails once.

    ``load`` returns the module of the kernel. Triton is missing on many machines, and may refuse a device, or to
    compile, at its first use.
    """

    def __init__(self, load: Callable[[], ModuleType] | None = None) -> None:
        self._load = load or _kernel
        self._compared = False
        self.unusable: str | None = None

    def reads(self, rows: Tensor) -> bool:
        """Return True if the kernel is for logits like ``rows`` (n, V), and has not failed yet."""
        side_by_side = rows.stride(-1) == 1 and rows.numel() > 0
        return self.unusable is None and rows.is_cuda and rows.dtype is not torch.float64 and side_by_side

    def sums_of(self, rows: Tensor, temperature: float, *, collision: bool) -> Sums | None:
        """Return the fields of a :class:`Softmax` of ``rows``; None if the kernel does not work here, with one
        warning.
        """
        sums: list[Sums] = []
        error = raised_by(lambda: sums.append(self._computed(rows, temperature, collision=collision)))
        if error is not None:  # of Triton, a compiler or a driver
            self.unusable = described(error)
            logger.warning("entropy from logits is computed by PyTorch in tiles: no Triton kernel (%s)", self.unusable)
            return None
        return sums[0]

    def _computed(self, rows: Tensor, temperature: float, *, collision: bool) -> Sums:
        if not self._compared:
            self._compare(rows)
        sums: Sums = self._load().sums_of(rows.detach(), temperature, _ZERO, collision=collision)
        return sums

    def _compare(self, like: Tensor) -> None:
        """Compare the kernel with PyTorch on a few rows, which waits for the device once, as compiling does.

        Raises ``ArithmeticError`` if they differ.
        """
        self._compared = True
        rows = torch.linspace(-9.0, 9.0, 30_000, device=like.device).view(3, -1).to(like.dtype)
        rows[1, :5_000] = -torch.inf
        ours = self._load().sums_of(rows, 1.0, _ZERO, collision=True)
        theirs = _of_block(rows, COLUMNS, 1.0, collision=True)
        gaps = [(one - other).abs().amax() for one, other in zip(ours, theirs, strict=True)]
        gap = float(torch.stack(gaps).amax())
        if not gap <= SAME:
            raise ArithmeticError(f"its sums differ from PyTorch's by {gap:.1g}")


def _kernel() -> ModuleType:
    from rlwatch.tensors import softmax_kernel  # at its first use: Triton takes half a second to import

    return softmax_kernel


FUSED = FusedSums()


def softmax_of(rows: Tensor, *, temperature: float = 1.0, tile: int | None = None, collision: bool = False) -> Softmax:
    """Return the softmax sums of ``rows`` (n, V) / ``temperature``; ``tile``: number of elements widened at a time.

    ``collision``: whether to compute the sum of the squared probabilities as well.

    Raises ``ValueError`` for a temperature or a tile that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if tile is not None and tile < 1:
        raise ValueError(f"a tile must hold at least 1 element, got {tile}")
    sums = FUSED.sums_of(rows, temperature, collision=collision) if tile is None and FUSED.reads(rows) else None
    if sums is not None:
        return Softmax(*sums)
    size = tile or (CPU_TILE if rows.device.type == "cpu" else DEVICE_TILE)
    columns = min(COLUMNS, size, rows.shape[-1])
    every = torch.split(rows.detach(), max(1, size // columns))
    parts = [_of_block(block, columns, temperature, collision=collision) for block in every]
    return Softmax(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _of_block(
    rows: Tensor, columns: int, temperature: float, *, collision: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # With t = (z - max z) / temperature and Z = sum exp(t): p = exp(t) / Z, so H = -sum p log p = log Z - sum t exp(t)
    # / Z. Two sums over the vocabulary, none of them of log p, and exp(t) <= 1 whatever the logits are.
    top = widen(rows.amax(-1, keepdim=True))
    total, moment, squares = (torch.zeros_like(top[:, 0]) for _ in range(3))
    for part in torch.split(rows, columns, -1):
        below = part - top
        if temperature != 1:
            below /= temperature
        below.clamp_(min=_ZERO)
        weight = below.exp()
        total += weight.sum(-1)
        moment += below.mul_(weight).sum(-1)
        if collision:
            squares += weight.square_().sum(-1)
    log_total = total.log()
    met = squares / total.square() if collision else torch.full_like(total, torch.nan)
    return top[:, 0], log_total, log_total - moment / total, met


def blocks(logits: Tensor) -> Iterator[Tensor]:
    """Iterate over the rows of ``logits`` (..., V) in order, as tensors (n, V) that share its memory."""
    try:
        yield logits.view(-1, logits.shape[-1])
    except RuntimeError:
        for part in logits.unbind(0):
            yield from blocks(part)


# Exact entropy of the next-token distribution.


def token_entropy(logits: Tensor, *, temperature: float = 1.0, tile: int | None = None) -> Tensor:
    """Return H = -sum p log p of softmax(``logits`` / ``temperature``), in nats, within [0, ln V].

    ``logits`` (..., V) of any floating dtype, padded or jagged; the result has shape (...), float32 or float64. Only
    ``tile`` elements are widened at a time. A logit of -inf (a token that cannot be sampled) contributes nothing; a row
    with NaN, +inf or nothing but -inf is NaN. Keeps no graph. Raises ``ValueError`` for a temperature or a tile that is
    not positive.

    >>> round(token_entropy(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)).item(), 12)
    0.83239558184
    """
    if logits.is_nested:
        return _jagged(token_entropy(logits.values(), temperature=temperature, tile=tile), logits)
    with torch.no_grad():
        parts = [softmax_of(rows, temperature=temperature, tile=tile).entropy for rows in blocks(logits)]
        return torch.cat(parts).view(logits.shape[:-1])


def token_logp_entropy(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the tokens ``ids`` (...) under softmax(``logits`` / ``temperature``), and its entropy, both
    (...).

    The log-probs are those of ``log_softmax`` and ``gather``, in nats, <= 0; NaN for an id outside [0, V), such as the
    -100 that marks padding. Otherwise as :func:`token_entropy`.
    """
    logp, entropy, _ = _of_tokens(logits, ids, temperature, tile, collision=False)
    return logp, entropy


def token_logp_entropy_collision(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, tile: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and entropy as :func:`token_logp_entropy` does, and the sum of the squared probabilities; all
    (...).

    All three are computed in one pass over ``logits`` (..., V). Raises ``ValueError`` for a temperature or a tile that
    is not positive.
    """
    return _of_tokens(logits, ids, temperature, tile, collision=True)


def _of_tokens(
    logits: Tensor, ids: Tensor, temperature: float, tile: int | None, *, collision: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if logits.is_nested:
        flat_ids = ids.values() if ids.is_nested else ids.flatten()
        flat = _of_tokens(logits.values(), flat_ids, temperature, tile, collision=collision)
        return _jagged(flat[0], logits), _jagged(flat[1], logits), _jagged(flat[2], logits)
    with torch.no_grad():
        rows = list(blocks(logits))
        parts = [softmax_of(block, temperature=temperature, tile=tile, collision=collision) for block in rows]
        pieces = torch.split(ids.flatten(), [block.shape[0] for block in rows])
        each = zip(parts, rows, pieces, strict=True)
        chosen = torch.cat([part.logp(block, piece, temperature) for part, block, piece in each])
        entropy, met = (torch.cat([getattr(part, name) for part in parts]) for name in ("entropy", "collision"))
        return chosen.view(ids.shape), entropy.view(ids.shape), met.view(ids.shape)


def _jagged(values: Tensor, like: Any) -> Tensor:
    """``values`` (n,) as the jagged tensor with the rows of ``like``."""
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def observe_entropy(batch: TokenBatch) -> Stats:
    """Return ``policy/entropy`` (nats), and its mean over tokens of positive and of negative advantage.

    Exploding entropy grows almost wholly from tokens of negative advantage. Empty if the batch has no entropy.
    """
    batch = tokens_of(batch)
    if batch.entropy is None:
        return {}
    stats: Stats = {"policy/entropy": Mean.of(batch.entropy, batch.mask)}
    if batch.token_advantages is not None:
        sides = Sides.of(batch.token_advantages, batch.mask)
        stats["policy/entropy_pos"] = Mean.of(sides.known(batch.entropy), sides.positive)
        stats["policy/entropy_neg"] = Mean.of(sides.known(batch.entropy), sides.negative)
    return stats


def observe_entropy_quantiles(batch: TokenBatch) -> Stats:
    """Return ``policy/entropy_p10`` and ``policy/entropy_p90`` (nats), which need sorting; empty without entropy."""
    batch = tokens_of(batch)
    if batch.entropy is None:
        return {}
    return {
        "policy/entropy_p10": Quantile.of(batch.entropy, batch.mask, 0.1),
        "policy/entropy_p90": Quantile.of(batch.entropy, batch.mask, 0.9),
    }


# Covariance of log-prob and advantage: what drives entropy down (Cui et al., arXiv 2505.22617).
#
# With c_t = (log p_t - <log p>)(A_t - <A>) over the tokens the loss counts, a policy-gradient step changes entropy by
# about minus the step size times <c>. A few tokens carry most of it (of Qwen2.5-7B at step 1 the top 0.2 % have a
# mean c_t of 3.1, all together 0.003); Clip-Cov and KL-Cov hold just those back.
#
# Why: for softmax logits z, dH/dz_a = -p_a (log p_a + H), and a natural policy gradient moves z_a by eta (A_a - <A>).
# Multiplied and summed over actions that is -eta Cov(log p, A) under the policy, of which the mean product of
# deviations over sampled tokens is an estimate. (The plain gradient weighs each action by p_a once more.)


TOP = 0.002
"""Fraction of tokens that count as the top in covariance: what KL-Cov holds back in a 7B model."""
BOUNDS = (1.0, 5.0)
"""Covariances between which a token is a candidate of Clip-Cov, as published and by verl's defaults."""


def _largest(c: Tensor, mask: Tensor, fraction: float) -> tuple[torch.return_types.topk, Tensor]:
    """Return the largest values of ``c`` (at least as many as are wanted), and a mask of those that are wanted.

    Wanted is the share ``fraction`` of the elements inside ``mask``, at least one.
    """
    # floor(fraction n) needs n, which only the device knows. So as many as would be needed if nothing was masked are
    # taken, and those beyond the true number are switched off. float64: 0.002 n must not round across a whole number.
    top = keep(c, mask, -torch.inf).flatten().topk(min(c.numel(), max(1, int(c.numel() * fraction))))
    n = mask.bool().sum()
    exact = n.to(torch.float32 if n.device.type == "mps" else torch.float64) * fraction
    return top, torch.arange(len(top.values), device=n.device) < exact.floor().clamp(min=1)


def _mean_of_largest(c: Tensor, times: Tensor, fraction: float) -> Tensor:
    """Return the mean of the largest values of ``c`` (N,), each of which counts ``times`` (N,) times.

    Averaged is the share ``fraction`` of all counts, at least one.
    """
    top = c.topk(min(len(c), max(1, int(float(times.sum()) * fraction))))  # as if each counted once: more than enough
    weights = times[top.indices]
    wanted = (times.sum() * fraction).floor().clamp(min=1)
    taken = (wanted - (weights.cumsum(0) - weights)).clamp(min=0).minimum(weights)
    return (torch.where(taken > 0, top.values, 0.0) * taken).sum() / taken.sum()


@dataclass(frozen=True, slots=True)
class Covariance(Paired):
    """Covariance of log-prob and advantage over n tokens (divided by n, not n - 1)."""

    @override
    def value(self) -> Tensor:
        return self.xy / self.count


@dataclass(frozen=True, slots=True)
class Pairs(Stat):
    """Base of statistics that need the covariance terms c_t of all tokens together: pairs are kept until the step ends.

    ``logp`` and ``masks`` hold one (B, T) tensor for each micro-batch, ``advantages`` one that broadcasts to it;
    ``means`` cover all their tokens. A pair of the i-th micro-batch represents ``every[i]`` pairs, 1 unless they were
    thinned. c_t is the product of a token's deviations from the means of log-prob and advantage.
    """

    means: Covariance
    logp: tuple[Tensor, ...]
    advantages: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    every: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, logp: Tensor, advantages: Tensor, mask: Tensor) -> Self:
        """Keep the pairs of ``logp`` (B, T) and ``advantages`` (B, T) or (B, 1) inside ``mask`` (B, T)."""
        means = Covariance.of(logp, advantages, mask)
        return cls(means.count, means, (widen(logp),), (widen(advantages),), (mask.bool(),))

    @override
    def merge(self, other: Self) -> Self:
        both: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in (*self._kept(), "every")}
        return replace(self, count=self.count + other.count, means=self.means.merge(other.means), **both)

    @override
    def compact(self, most: int) -> Self:
        """Return the statistic with at most ``most`` pairs, evenly spaced in the order of c_t; all are NaN if one
        was.
        """
        # In the order of c_t under this rank's means, which are close to the common ones: what is read of the pairs are
        # tails and counts of c_t, and evenly spaced order statistics keep both to within every / n.
        if max(self.every) > 1:
            return self
        c, mask = self.products()
        every = -(-len(c) // most)
        if every <= 1:
            return self
        order, n = keep(c, mask, -torch.inf).argsort(descending=True), mask.sum()
        first = torch.arange(0, len(c), every, device=c.device)
        chosen = order[(first + (every - 1) // 2).minimum((n - 1).clamp(min=0))]
        fewer: dict[str, Any] = {name: (column[chosen],) for name, column in self.columns().items()}
        return replace(self, **fewer | {"masks": (first < n,), "every": (every,)})

    def products(self) -> tuple[Tensor, Tensor]:
        """Return c_t and mask of all tokens, (N,)."""
        # About the means over all micro-batches, which is why pairs are kept: c_t of a token changes with the others.
        return _products(self.means, self.logp, self.advantages), _column(self.masks, self.logp)

    def columns(self) -> dict[str, Tensor]:
        """Return field name -> column (N,) of all kept pairs."""
        return {name: _column(getattr(self, name), self.logp) for name in self._kept()}

    def times(self, mask: Tensor) -> Tensor | None:
        """Return the number of pairs that each kept pair represents, (N,), 0 outside ``mask``; None if all are 1."""
        if max(self.every, default=1) == 1:
            return None
        counts = [x.new_full((x.numel(),), n, dtype=torch.float64) for x, n in zip(self.logp, self.every, strict=True)]
        return keep(torch.cat(counts), mask, 0.0)

    def _kept(self) -> list[str]:
        return [f.name for f in fields(self) if f.name not in ("count", "means", "every")]

    def _fraction(self, flags: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of ``flags`` (N,) over all pairs inside ``mask``."""
        times = self.times(mask)
        if times is None:
            return masked_mean(flags, mask)
        return ((keep(flags, mask, 0.0) * times).sum() / times.sum()).to(flags.dtype)


@shared
def _column(pieces: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Tensor:
    return cat([piece.expand_as(x).flatten() for piece, x in zip(pieces, like, strict=True)])


@shared
def _products(means: Covariance, logp: tuple[Tensor, ...], advantages: tuple[Tensor, ...]) -> Tensor:
    x, y = _column(logp, logp) - means.mean_x, _column(advantages, logp) - means.mean_y
    return x * y


@dataclass(frozen=True, slots=True)
class TopCovariance(Pairs):
    """Mean of the largest covariance terms c_t, those of the fraction :data:`TOP` of tokens."""

    @override
    def value(self) -> Tensor:
        c, mask = self.products()
        if not c.numel():
            return c.new_full((), torch.nan)
        times = self.times(mask)
        if times is None:
            top, chosen = _largest(c, mask, TOP)
            mean = torch.where(chosen, top.values, 0.0).sum() / chosen.sum()
        else:
            mean = _mean_of_largest(keep(c, mask, -torch.inf), times, TOP).to(c.dtype)
        return torch.where(keep(c, mask, 0.0).isnan().any(), torch.nan, mean)


@dataclass(frozen=True, slots=True)
class PositiveCovariance(Pairs):
    """Fraction of tokens with a positive covariance term c_t of log-prob and advantage."""

    @override
    def value(self) -> Tensor:
        c, mask = self.products()
        return self._fraction(indicator(c > 0, c), mask)


@dataclass(frozen=True, slots=True)
class ClipCovCandidates(Pairs):
    """Fraction of tokens that Clip-Cov draws from: c_t between :data:`BOUNDS`, and not clipped by PPO already.

    verl's loss ``clip_cov`` drops the gradient of floor(2e-4 N) of them, chosen at random (at least one, if there is
    one). ``clipped`` holds one (B, T) bool for each micro-batch.
    """

    clipped: tuple[Tensor, ...] = ()

    @override
    def value(self) -> Tensor:
        (c, mask), (low, high) = self.products(), BOUNDS
        clipped = _column(self.clipped, self.logp)
        return self._fraction(indicator((c > low) & (c < high) & ~clipped, c), mask)


def observe_covariance(batch: TokenBatch) -> Stats:
    """Return ``policy/cov``, the covariance of log-prob and advantage, in nats times the advantage's unit.

    Empty if the batch has no advantages.
    """
    batch = tokens_of(batch)
    a = batch.token_advantages
    return {} if a is None else {"policy/cov": Covariance.of(batch.logp, a, batch.mask)}


def observe_top_covariance(batch: TokenBatch) -> Stats:
    """Return ``policy/cov_top``, ``cov_positive`` and ``cov_candidates``: which tokens carry the covariance.

    Empty if the batch has no advantages.
    """
    batch = tokens_of(batch)
    a = batch.token_advantages
    if a is None:
        return {}
    top = TopCovariance.of(batch.logp, a, batch.mask)
    same = top.count, top.means, top.logp, top.advantages, top.masks, top.every
    return {
        "policy/cov_top": top,
        "policy/cov_positive": PositiveCovariance(*same),
        "policy/cov_candidates": ClipCovCandidates(*same, clipped=(_clipped(batch, a),)),
    }


def _clipped(batch: TokenBatch, advantages: Tensor) -> Tensor:
    if batch.old_logp is None or batch.clip is None:
        return torch.zeros_like(batch.mask, dtype=torch.bool)
    ratio = exponential(difference(batch.logp, batch.old_logp))
    below, above = clipped_sides(ratio, advantages, *batch.clip)
    return below | above
