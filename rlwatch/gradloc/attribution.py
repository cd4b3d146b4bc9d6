"""Contributions of all tokens of a step to its gradient norm, by one directional derivative.

With the coefficients ``a = dL/dlogp`` that the backward pass left and the unit gradient ``u``, a token contributes
``c = a <dlogp/dtheta, u>`` (and ``e <dH/dtheta, u>`` with an entropy bonus). All contributions, with that of an
auxiliary loss, sum up to the norm G. Their relative deviation from it is the gap, which checks every result.

They sum up to G because the loss depends on theta only through its outputs: g = sum a dlogp/dtheta + ..., <g, u> = G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn

from rlwatch.gradloc.direction import Direction, displaced, tangent
from rlwatch.gradloc.distributed import Alone, World, sharded_modules
from rlwatch.gradloc.passes import LossPass, Outputs, RecordedPasses, beside_training
from rlwatch.gradloc.report import Method, NotLocalised
from rlwatch.gradloc.rerun import FirstChoice, differentiable_kernels, rerunning, routed, tried

TOLERANCE, TOLERANCE_LOW = 1e-3, 1e-2
"""Largest |gap| of a complete result, if training computes in float32, and in lower precision.

Measured on real trainers: differences in float32 leave 3e-4 at most, so 1e-3 is no rounding any more. In bfloat16 the
gradient itself is that inexact (3.4e-3 at most, which no step improves).
"""
METHODS = (Method.FD, Method.RICHARDSON, Method.JVP)
"""Methods in the order in which they are tried, cheapest first."""
CURVED = 5e-3
"""|gap| of a finite difference above which curvature is the cause, not rounding; then the smaller step is tried
first.
"""
REAL, ALIKE = 0.02, 0.1
"""Limits of a gap that is no numerical error: |gap| above REAL, differing by less than ALIKE of it between steps."""
REPRODUCED, REPRODUCED_LOW = 1e-2, 0.1
"""Largest mean difference of repeated log-probs from training's, nats, in float32 and in lower precision."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """Contributions of all tokens of this rank, and how well those of all ranks explain the gradient.

    Parameters
    ----------
    contributions
        (B, T) for each loss pass, signed, float64, on the CPU, in the unit of the norm; 0 where the loss has no
        coefficient. They are divided by the number of ranks already, so that those of all ranks sum up to the norm.
    aux
        Contribution of the auxiliary losses of all ranks.
    gap
        (sum of all contributions - norm) / norm over all ranks, signed.
    method
        Method of this result: of those tried, the first that was complete, or the one with the smallest gap.
    complete
        True if ``gap`` is within tolerance.
    forwards
        Cost of all methods tried, in forward passes of the whole step without gradient graph.
    notes
        Methods tried before, and their results.
    moved
        Largest difference of a log-prob that was seen on any rank, nats; None for forward-mode differentiation.
    settled
        True if the contributions are right although they do not sum up to the norm: two steps agree on them, and the
        log-probs are those of training. Then the remaining gradient does not come from these tokens.
    entropy
        Part of the contributions of all ranks that comes through the entropies.
    """

    contributions: tuple[Tensor, ...]
    aux: float
    gap: float
    method: Method
    complete: bool
    forwards: int
    notes: tuple[str, ...] = ()
    moved: float | None = None
    settled: bool = False
    entropy: float = 0.0


def attribute(
    model: nn.Module,
    passes: RecordedPasses,
    direction: Direction,
    *,
    world: World | None = None,
    methods: Sequence[Method] = METHODS,
) -> Attribution:
    """Attribute the gradient ``direction`` to the tokens of ``passes``, the recorded forward passes of the step's loss.

    A collective: all ranks of ``world`` call it. ``methods`` are tried in their order until one is complete. The model,
    its gradients and the random state are unchanged afterwards, bit for bit.

    Raises
    ------
    NotLocalised
        If there is nothing to attribute, or no method yields finite numbers; on all ranks alike.
    """
    world = world or Alone()
    trial = _Trial(model, passes.all, direction, world, _scale(model, passes.all, direction, world))
    best: Attribution | None = None
    for method in methods:
        candidate = trial.run(method)
        if candidate is not None and (best is None or candidate.settled or abs(candidate.gap) < abs(best.gap)):
            best = candidate
        if best is not None and (best.complete or best.settled):
            break
    if best is None:
        raise NotLocalised("the contributions of the tokens could not be computed: " + "; ".join(trial.notes))
    return trial.with_notes(best)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Sums over all ranks: S = sum |a|, in the unit of the norm, and the number of tokens."""

    coefficients: float
    tokens: int


def _scale(model: nn.Module, passes: Sequence[LossPass], direction: Direction, world: World) -> _Scale:
    """Sum up over all ranks; raise ``NotLocalised`` if there is nothing to attribute."""
    read = any(one.coefficients for one in passes)
    tokens = sum(int(one.tokens.mask.sum()) for one in passes)
    here = [summed_coefficients(passes) / world.size, float(len(passes)), float(read), float(tokens)]
    there = world.gather(torch.tensor(here, dtype=torch.float64, device="cpu"))
    total = math.fsum(float(rank[0]) for rank in there)
    numbers = {int(rank[1]) for rank in there}
    if not direction.finite:
        raise NotLocalised("the gradient is not finite, so it has no direction")
    if numbers == {0}:
        raise NotLocalised("no loss pass of this step was kept")
    if not any(rank[2] for rank in there):
        raise NotLocalised("no backward of the loss was seen after its log-probs were observed")
    if total == 0:
        raise NotLocalised("the loss depends on no token: all its coefficients are zero")
    if direction.norm == 0:
        raise NotLocalised("the gradient is zero")
    if len(numbers) > 1 and sharded_modules(model):
        raise NotLocalised("the model is sharded and its ranks made different numbers of forward passes")
    return _Scale(total, int(sum(float(rank[3]) for rank in there)))


class _Trial:
    """Trial of methods one after the other, with notes on their results."""

    def __init__(
        self, model: nn.Module, passes: Sequence[LossPass], direction: Direction, world: World, scale: _Scale
    ) -> None:
        self.notes: list[str] = []
        self._forwards = 0
        self._gap = 0.0
        self._model, self._passes, self._direction, self._world = model, passes, direction, world
        self._scale = scale
        self._step = scale.coefficients / direction.norm
        """Length of the step that would change log-probs by 1 nat, on a weighted mean, if they were linear that far."""

    def run(self, method: Method) -> Attribution | None:
        """Return the best result of the method's steps, tried until one is complete.

        The result is None if the method failed, or if nothing it computed is finite.
        """
        best: Attribution | None = None
        for way in self._ways(method):
            candidate = self._one(method, way)
            if candidate is None:
                break
            better = best is None or candidate.settled or abs(candidate.gap) < abs(best.gap)
            best = candidate if better or best is None else best
            if best.complete or best.settled:
                break
        return best

    def _ways(self, method: Method) -> Sequence[Callable[[], Derived]]:
        """Order the steps of a method.

        The one of Richardson's steps that the previous gap suggests comes first: rounding asks for a larger one,
        curvature for a smaller one, and a gap just beyond the tolerance may be either.
        """
        if method is Method.FD:
            return [self._fd]
        if method is Method.JVP:
            return [self._jvp]
        kappas = [KAPPA_RICHARDSON, KAPPA_CURVED]
        return [partial(self._richardson, kappa) for kappa in sorted(kappas, reverse=abs(self._gap) <= CURVED)]

    def _one(self, method: Method, way: Callable[[], Derived]) -> Attribution | None:
        derived, why = tried(way)
        gap, aux, entropy, moved, apart, low, failed = self._agree(derived)
        self._forwards += 2 if derived is None else derived.forwards
        if derived is None or failed or not math.isfinite(gap):
            why = why or ("it failed on another rank" if failed else "the numbers are not finite")
            self.notes.append(f"{method.value}: {why}")
            return None
        before, self._gap = self._gap, gap if method is Method.FD else self._gap
        self.notes.append(f"{method.value}: gap {gap:.1e}")
        complete = abs(gap) <= (TOLERANCE_LOW if low else TOLERANCE)
        seen = None if derived.moved is None else moved
        same = apart <= (REPRODUCED_LOW if low else REPRODUCED) and not routed(self._model)
        settled = not complete and method is Method.RICHARDSON and same and _agree(before, gap)
        return Attribution(
            derived.tokens, aux, gap, method, complete, derived.forwards, moved=seen, settled=settled, entropy=entropy
        )

    def with_notes(self, best: Attribution) -> Attribution:
        """Complete the result with the forwards of all that was tried, and the notes on the other methods."""
        others = tuple(note for note in self.notes if not note.startswith(f"{best.method.value}:"))
        return replace(best, forwards=self._forwards, notes=others)

    def _agree(self, derived: Derived | None) -> tuple[float, float, float, float, float, bool, bool]:
        """Combine the results of all ranks: gap, aux, entropy, moved, apart, low, failed."""
        # One gather of plain numbers: every rank then takes the same branch, whatever failed on one of them.
        here = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        if derived is not None:
            here = [derived.total, derived.aux, derived.entropy, derived.moved or 0.0, derived.apart, derived.low, 0.0]
        ranks = torch.stack(self._world.gather(torch.tensor(here, dtype=torch.float64, device="cpu")))
        total, aux, entropy = ranks[:, :3].sum(0).tolist()
        moved, apart, low, failed = ranks[:, 3:].amax(0).tolist()
        return total / self._direction.norm - 1, aux, entropy, moved, apart, bool(low), bool(failed)

    def _fd(self) -> Derived:
        step = kappa_of(self._scale.tokens) * self._step
        return finite_difference(self._model, self._passes, self._direction, step, ranks=self._world.size)

    def _richardson(self, kappa: float) -> Derived:
        return richardson(self._model, self._passes, self._direction, kappa * self._step, ranks=self._world.size)

    def _jvp(self) -> Derived:
        return forward_mode(self._model, self._passes, self._direction, ranks=self._world.size)


def _agree(before: float, now: float) -> bool:
    """Return True if two gaps agree, and are no error of a finite difference."""
    return abs(now) > REAL and abs(now - before) <= ALIKE * abs(now)


# Contributions: derivatives of the policy's outputs that a loss uses, weighted with the coefficients of the loss.

Parts = Mapping[str, Tensor]
"""Parts of a forward pass's outputs by name, or their derivatives: float64, on the CPU."""


@dataclass(frozen=True, slots=True)
class Derived:
    """Contributions of this rank's tokens to the gradient norm, as one method computed them.

    Parameters
    ----------
    tokens
        (B, T) for each loss pass, float64, on the CPU; 0 where the loss has no coefficient.
    aux
        Contribution of the auxiliary loss.
    moved
        Largest difference of a log-prob between displaced passes, nats; None if the method takes none.
    low
        True if training computes in lower precision than float32.
    forwards
        Cost, in forward passes of the whole step.
    entropy
        Part of ``tokens`` that comes through the entropies.
    apart
        Mean difference of a log-prob from that of training, nats.
    """

    tokens: tuple[Tensor, ...]
    aux: float
    moved: float | None
    low: bool
    forwards: int
    entropy: float = 0.0
    apart: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of the contributions of this rank's tokens and of the auxiliary loss; summed over ranks it is
        the gradient norm if the method is exact.
        """
        return float(sum(part.sum() for part in self.tokens)) + self.aux


def parts_of(one: LossPass, forward: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those outputs in ``forward`` (name -> tensor) that the loss of the micro-batch ``one`` used, in float64,
    on the CPU.
    """
    return {name: part.detach().double().cpu() for name, part in forward.items() if name in one.coefficients}


def usable(coefficient: Tensor) -> Tensor:
    """Return ``coefficient`` (the loss differentiated by an output) in float64, on the CPU, with 0 in place of NaN and
    Inf.

    If gradients are finite, NaN and Inf occur only where nothing flows back: the NaN of a padded position ends at the
    mask.
    """
    known = coefficient.detach().double().cpu()
    return torch.where(known.isfinite(), known, 0.0)


def contributions(one: LossPass, derivative: Parts) -> Tensor:
    """Return the contributions (B, T) of one micro-batch's tokens to the gradient norm: a * dlogp + e * dH.

    a and e are the recorded coefficients dL/dlogp and dL/dentropy of the micro-batch ``one``. ``derivative`` has the
    derivatives of log-prob and entropy along the gradient. The result is 0 where the coefficients are 0, whatever
    ``derivative`` is.
    """
    total = torch.zeros(one.shape, dtype=torch.float64, device="cpu")
    for name in ("logp", "entropy"):
        if name in derivative:
            weight = usable(one.coefficients[name])
            total += torch.where(weight == 0, 0.0, weight * derivative[name])
    return total


def aux_contribution(one: LossPass, derivative: Parts) -> float:
    """Return the contribution of the model's auxiliary loss to the gradient norm: its coefficient times its derivative
    along the gradient.

    0 without an auxiliary loss.
    """
    return float(usable(one.coefficients["aux"]) * derivative["aux"]) if "aux" in derivative else 0.0


def summed_coefficients(passes: Sequence[LossPass]) -> float:
    """Return S = sum |a| + sum |e| + |x| over all ``passes`` (micro-batches): the coefficients of log-probs, entropies
    and auxiliary loss.

    S sets the step size of finite differences.
    """
    return float(sum(usable(c).abs().sum() for one in passes for c in one.coefficients.values()))


# Contributions by finite differences: forward passes with the weights moved a little along the gradient.
#
# The step is chosen by the intended change of log-probs, not by the length of the weights. Along the unit gradient sum
# a dlogp = h G, so with h = kappa S / G, S = sum |a|, the mean |dlogp| weighted with |a| is at least kappa.

# A central difference errs by h^2 / 6 times the third derivative (curvature), and by about eps |logp| / h (rounding).
# Of steps tried from 1e-5 to 1 nat float32 is at its best between 1e-3 and 3e-2; both errors rise beyond.
KAPPA = 3e-3
"""Step in nats at which rounding (float32) and curvature both stay below 3e-4 of the norm, among the steps tried."""
MANY, LEAST_KAPPA = 1000, 5e-4
"""Number of tokens from which the step shrinks, and its smallest size in nats.

The gradients of many tokens cancel, so that S / G grows with the root of their number, and with it the change of single
log-probs.
"""
KAPPA_RICHARDSON = 2e-2
"""The larger of the two steps of Richardson's method, nats: extrapolation removes the curvature, so that rounding
decides.
"""
KAPPA_CURVED = 1e-3
"""The larger of the two steps, nats, if extrapolation does not remove the curvature (attended zero vectors)."""


def kappa_of(tokens: int) -> float:
    """Return the step of a finite difference, in nats, for a step of training with this many ``tokens``."""
    return max(LEAST_KAPPA, KAPPA * math.sqrt(MANY / max(MANY, tokens)))


def finite_difference(
    model: nn.Module, passes: Sequence[LossPass], direction: Direction, step: float, *, ranks: int = 1
) -> Derived:
    """Return the contributions of tokens to the gradient norm, by a central difference with ``step``, a length in the
    space of the parameters.

    ``passes``: recorded micro-batches of this rank. ``ranks`` is the number of ranks whose mean the gradient is. For a
    mixture of experts a third pass, with unmoved weights, decides which expert a token goes to.
    """
    choices = [FirstChoice() if routed(model) else nullcontext() for _ in passes]
    with rerunning(model) as precision:

        def at(step: float) -> list[Parts]:
            with displaced(model, direction, step, precision):
                return [_forward_parts(one, choice) for one, choice in zip(passes, choices, strict=True)]

        # Before anything moves, so that the expert each token goes to is the one that training's forward chose.
        if routed(model):
            at(0.0)
        ahead, behind = at(step), at(-step)
    slopes = [_difference_quotient(a, b, 2 * step) for a, b in zip(ahead, behind, strict=True)]
    moved = [float((a["logp"] - b["logp"]).abs().max()) / 2 for a, b in zip(ahead, behind, strict=True) if "logp" in a]
    apart = [_apart(one, a, b) for one, a, b in zip(passes, ahead, behind, strict=True) if "logp" in a]
    return Derived(
        tuple(contributions(one, slope) / ranks for one, slope in zip(passes, slopes, strict=True)),
        sum(aux_contribution(one, slope) for one, slope in zip(passes, slopes, strict=True)) / ranks,
        max(moved, default=0.0),
        precision.low,
        forwards=3 if routed(model) else 2,
        entropy=_of_entropy(passes, slopes) / ranks,
        apart=max(apart, default=0.0),
    )


def _apart(one: LossPass, ahead: Parts, behind: Parts) -> float:
    """Return the mean difference between training's log-probs and the middle of those ahead and behind."""
    on = one.tokens.mask.bool().cpu()
    gaps = (((ahead["logp"] + behind["logp"]) / 2 - one.tokens.logp.detach().double().cpu()).abs())[on]
    return float(gaps.nan_to_num(0.0).mean()) if gaps.numel() else 0.0


def _of_entropy(passes: Sequence[LossPass], slopes: Sequence[Parts]) -> float:
    """Return the sum of the contributions through the entropies."""
    pairs = [(one, slope) for one, slope in zip(passes, slopes, strict=True) if "entropy" in slope]
    return float(sum(contributions(one, {"entropy": slope["entropy"]}).sum() for one, slope in pairs))


def richardson(
    model: nn.Module, passes: Sequence[LossPass], direction: Direction, step: float, *, ranks: int = 1
) -> Derived:
    """Return the contributions of tokens to the gradient norm, by two central differences, with ``step`` and half of
    it, extrapolated to 0.

    The error is of fourth order. The arguments are those of :func:`finite_difference`.
    """
    # D(h) = D + c h^2 + O(h^4), so (4 D(h/2) - D(h)) / 3 has no h^2. Each contribution is extrapolated for itself, and
    # the rounding of D(h/2) is made 4/3 as large: which is why the larger step here is 7 times that of a single
    # difference.
    coarse = finite_difference(model, passes, direction, step, ranks=ranks)
    fine = finite_difference(model, passes, direction, step / 2, ranks=ranks)
    tokens = tuple((4 * f - c) / 3 for f, c in zip(fine.tokens, coarse.tokens, strict=True))
    return replace(
        coarse,
        tokens=tokens,
        aux=(4 * fine.aux - coarse.aux) / 3,
        entropy=(4 * fine.entropy - coarse.entropy) / 3,
        forwards=coarse.forwards + fine.forwards,
    )


def _forward_parts(one: LossPass, choice: AbstractContextManager[object]) -> Parts:
    one.random.restore()
    with choice:
        return parts_of(one, one.forward().parts())


def _difference_quotient(ahead: Parts, behind: Parts, distance: float) -> dict[str, Tensor]:
    return {name: (part - behind[name]) / distance for name, part in ahead.items()}


# Contributions by forward-mode differentiation: one pass with dual numbers, exact up to rounding.
#
# It needs a forward derivative of every operation. Fused attention, grouped experts and custom functions have none.
# The first two are replaced temporarily, the third by :attr:`LossPass.differentiable`.
#
# It runs in the precision of training. So it explains the gradient as training computed it, with most of its rounding.
# Differences have to be taken in float32, and show that rounding as a gap.


def forward_mode(model: nn.Module, passes: Sequence[LossPass], direction: Direction, *, ranks: int = 1) -> Derived:
    """Return the contributions of tokens to the gradient norm, by forward-mode differentiation along ``direction``.

    ``passes``: recorded micro-batches of this rank. ``ranks`` is the number of ranks whose mean the gradient is.

    Raises
    ------
    RuntimeError, NotImplementedError
        Raised by torch if an operation has no forward derivative.
    """
    # Tangents are the raw gradients, as they lie in .grad: no second copy of them. The derivative is linear in the
    # tangent, so it is divided by their length afterwards.
    scale = 1 / (direction.length * ranks)
    with rerunning(model, wide=False) as precision, differentiable_kernels(model), tangent(model, direction, precision):
        slopes = [_derivatives(one) for one in passes]
    return Derived(
        tuple(contributions(one, slope) * scale for one, slope in zip(passes, slopes, strict=True)),
        sum(aux_contribution(one, slope) for one, slope in zip(passes, slopes, strict=True)) * scale,
        None,
        precision.low,
        forwards=2,
        entropy=_of_entropy(passes, slopes) * scale,
    )


def _derivatives(one: LossPass) -> Parts:
    """Compute derivatives, along the direction, of the parts that the loss used."""
    one.random.restore()
    with fwad.dual_level():
        parts = (one.differentiable or one.forward)().parts()
        return parts_of(one, {name: _tangent(part) for name, part in parts.items()})


def _tangent(part: Tensor) -> Tensor:
    """Return the tangent of one part; zeros if it does not depend on the weights that have a gradient."""
    derivative = fwad.unpack_dual(part).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(part) if derivative is None else derivative


# Contributions through training's own backward pass, if that is not the derivative of the forward pass.
#
# A straight-through estimator rounds in the forward pass and passes gradients on as if it had not. Other custom
# functions clip or scale gradients. There a difference of forward passes, and a forward derivative, are not the
# derivative that training used. The backward pass itself is linear in its input, g(v) = sum v dlogp/dtheta as training
# has it. So the derivative of <g(v), u> by v, taken at the coefficients, yields every token's contribution: one
# backward pass through a backward pass.


PARTS = ("logp", "entropy")
"""Outputs that belong to tokens."""


def reverse_mode(model: nn.Module, passes: Sequence[LossPass], direction: Direction, *, ranks: int = 1) -> Derived:
    """Return the contributions of tokens to the gradient norm, by a backward pass through training's backward pass.

    ``passes``: recorded micro-batches of this rank. It runs response by response if these can run alone. ``ranks`` is
    the number of ranks whose mean the gradient is. It takes the memory of the graph of one backward pass of a response
    (or of a micro-batch that cannot be divided).

    Raises
    ------
    RuntimeError, NotImplementedError
        Raised by torch if the backward of an operation has no derivative itself.
    """
    units = [(p, direction.gradients[name]) for name, p in model.named_parameters() if name in direction.gradients]
    scale = 1 / (direction.length * ranks)
    with beside_training(model), differentiable_kernels(model):
        tables = [_of_pass(one, units) for one in passes]
    tokens = tuple(sum(table.values(), torch.zeros((), device="cpu")) * scale for table in tables)
    entropy = sum(float(table["entropy"].sum()) for table in tables if "entropy" in table) * scale
    low = any(p.dtype in (torch.bfloat16, torch.float16) for p, _ in units)
    return Derived(tokens, 0.0, None, low, forwards=6, entropy=entropy)


def _of_pass(one: LossPass, units: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Compute (B, T) of each part that the loss used, in the unit of squared gradients."""
    used = [name for name in PARTS if name in one.coefficients]
    table = {name: torch.zeros(one.shape, dtype=torch.float64, device="cpu") for name in used}
    alone = one.divides is True and not one.drew
    for rows in [[row] for row in range(one.shape[0])] if alone else [None]:
        one.random.restore()
        forward = one.differentiable or one.forward
        outputs = forward() if rows is None else forward(rows)
        for name, values in _of_rows(one, outputs, rows, units).items():
            where = slice(None) if rows is None else rows
            table[name][where, : values.shape[1]] = values
    return table


def _of_rows(
    one: LossPass, outputs: Outputs, rows: Sequence[int] | None, units: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Compute (rows, T) of each part: coefficient times the derivative of its gradient along the direction."""
    parts = {n: part for n, part in outputs.parts().items() if n in PARTS and n in one.coefficients}
    fed = {}
    for name, part in parts.items():
        coefficient = usable(one.coefficients[name]) if rows is None else usable(one.coefficients[name])[list(rows)]
        fed[name] = coefficient[:, : part.shape[1]].to(part).requires_grad_()
    gradients = torch.autograd.grad(
        list(parts.values()), [p for p, _ in units], list(fed.values()), create_graph=True, allow_unused=True
    )
    pairs = [(g, unit) for g, (_, unit) in zip(gradients, units, strict=True) if g is not None]
    along = sum(((g.float() * unit.float()).sum() for g, unit in pairs), torch.zeros((), device="cpu"))
    if not along.requires_grad:
        return {name: torch.zeros(weights.shape, dtype=torch.float64, device="cpu") for name, weights in fed.items()}
    slopes = torch.autograd.grad(along, list(fed.values()), allow_unused=True)
    return {
        name: (weights.detach() * (torch.zeros_like(weights) if slope is None else slope)).double().cpu()
        for (name, weights), slope in zip(fed.items(), slopes, strict=True)
    }
