"""Cures of a spike: the gradient norm that a step would have had with a changed loss (clipped, masked, corrected,
rescaled).

A change of the loss is a change of coefficients, ``a`` to ``a'``. With the gradient g that training holds, the norm
would have been ``||g + sum (a' - a) dlogp/dtheta||``. It is computed exactly, by a backward pass of the changed
responses alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from rlwatch.gradloc.culprits import HostPass
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.distributed import World, reshard, sharded_modules
from rlwatch.gradloc.loss_form import COLUMNS
from rlwatch.gradloc.passes import LossPass, RecordedPasses, beside_training, run_again
from rlwatch.gradloc.report import Cure
from rlwatch.gradloc.rerun import tried
from rlwatch.tensors.gradnorm import shard_of

RATIO_CAP = 3.0
"""Value at which ratios are clipped: the usual cap of dual-clip PPO."""
WEIGHT_CAP = 2.0
"""Value at which importance weights are truncated."""
RESPONSE_CAP = 1.22
"""Geometric mean of a response's ratios above which it is masked: e^0.2."""
GAP_CAP = 3.0
"""Value at which log-ratios to the reference are clipped, nats."""

Keep = Callable[[HostPass], tuple[np.ndarray, np.ndarray]]
"""Function that returns the factors by which a cure scales the policy's and the KL term's part of each coefficient (B,
T).
"""


def scaled(policy: float, kl: float = 1.0) -> Keep:
    """Return a change of the loss that multiplies the policy term and the KL term of all tokens by constant factors.

    The result is a function that returns, for a micro-batch, the factors (B, T) of both terms.
    """
    return lambda host: (np.full(host.mask.shape, policy), np.full(host.mask.shape, kl))


UNCHANGED = scaled(1.0)
"""Change that leaves all coefficients as they are."""


def masked(places: Sequence[np.ndarray], hosts: Sequence[HostPass]) -> Keep:
    """Return a change of the loss that drops the tokens where ``places`` is True, (B, T) for each micro-batch in
    ``hosts``.
    """
    where = {id(host): place for host, place in zip(hosts, places, strict=True)}

    def keep(host: HostPass) -> tuple[np.ndarray, np.ndarray]:
        kept = np.where(where[id(host)], 0.0, 1.0)
        return kept, kept

    return keep


def clipped_advantages(cap: float) -> Keep:
    """Return a change of the loss that clips advantages to [-cap, cap]."""

    def keep(host: HostPass) -> tuple[np.ndarray, np.ndarray]:
        size = np.abs(_column(host, "advantage"))
        return np.where(size > cap, cap / np.maximum(size, 1e-300), 1.0), np.ones(host.mask.shape)

    return keep


def clipped_ratios(cap: float, name: str = "ratio") -> Keep:
    """Return a change of the loss that drops the policy term of tokens whose ratio in the column ``name`` is above
    ``cap``.

    A clipped loss is constant above the cap, so that these tokens have no gradient.
    """

    def keep(host: HostPass) -> tuple[np.ndarray, np.ndarray]:
        return np.where(_column(host, name) > math.log(cap), 0.0, 1.0), np.ones(host.mask.shape)

    return keep


def truncated_weights(cap: float, name: str = "weight") -> Keep:
    """Return a change of the loss that truncates importance weights in the column ``name`` at ``cap``.

    It has an effect if the loss uses the weights as they are or truncates them at a higher cap.
    """

    def keep(host: HostPass) -> tuple[np.ndarray, np.ndarray]:
        over = np.maximum(_column(host, name) - math.log(cap), 0.0)
        if host.form is not None and host.loss is not None:  # a cap of the loss has taken a part of it already
            shape, table = host.form.shape, np.moveaxis(host.loss, 0, -1)[host.mask]
            policy, _ = host.form.parts(table)
            with np.errstate(all="ignore"):
                seen = np.log(np.abs(policy) / np.abs(host.form.policy * shape.policy(table)))
            total = np.zeros(host.mask.shape)
            total[host.mask] = np.nan_to_num(seen, neginf=0.0, posinf=0.0)
            over = np.maximum(over + np.minimum(total, 0.0), 0.0)
        return np.exp(-over), np.ones(host.mask.shape)

    return keep


def clipped_gaps(cap: float) -> Keep:
    """Return a change of the loss that clips the KL term's log-ratios to the reference to [-cap, cap], in nats."""

    def keep(host: HostPass) -> tuple[np.ndarray, np.ndarray]:
        kept = np.ones(host.mask.shape)
        if host.form is not None and host.loss is not None:
            table = np.moveaxis(host.loss, 0, -1)[host.mask]
            cut = table.copy()
            at = COLUMNS.index("gap")
            cut[:, at] = np.clip(cut[:, at], -cap, cap)
            # Where a gap is cut, the term is flat in the log-prob: k3 - gap - 1 of a constant has no gradient.
            kept[host.mask] = np.where(cut[:, at] != table[:, at], 0.0, 1.0)
        return np.ones(host.mask.shape), kept

    return keep


def _column(host: HostPass, name: str) -> np.ndarray:
    """Return (B, T) of a column of :data:`COLUMNS`, 0 where not known."""
    if host.loss is None:
        return np.zeros(host.mask.shape)
    return np.where(host.mask, np.nan_to_num(host.loss[COLUMNS.index(name)]), 0.0)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change of the loss whose effect on the gradient norm is to be computed.

    ``keep`` returns, for the tokens of one pass, the factors by which the change scales the coefficients of the policy
    term and the KL term. ``entropy`` is the factor of the entropies' coefficients, for all tokens or, as a function,
    for each. With ``only`` all other terms of the loss are dropped. ``kind``, ``value`` and ``action`` describe the
    change as in :class:`~rlwatch.gradloc.report.Cure`.
    """

    kind: str
    value: float | None
    action: str
    keep: Keep = UNCHANGED
    only: bool = False
    entropy: float | Keep = 1.0


@dataclass(frozen=True, slots=True)
class Through:
    """Part of the step's gradient that comes through log-probs and entropies, computed by training's backward pass.

    ``norm`` is its own norm (NaN if several ranks hold whole gradients), ``along`` its component along the whole
    gradient.
    """

    norm: float
    along: float


@dataclass(slots=True)
class InterventionCatalog:
    """Computation of the effect of changes of the loss on one step.

    A collective: all ranks make the same proposals in order. ``backwards`` counts the backward passes of responses that
    were run.
    """

    model: nn.Module
    passes: RecordedPasses
    hosts: Sequence[HostPass]
    direction: Direction
    world: World
    backwards: int = 0
    notes: list[str] = field(default_factory=list)
    _through: Through | None = None

    def cure(self, proposal: Proposal) -> Cure | None:
        """Return the gradient norm that the step would have had with the change ``proposal`` of the loss; None if it
        cannot be computed or changes nothing.
        """
        before = self.direction.norm
        if proposal.only:
            through = self.through()
            if through is None or not math.isfinite(through.norm):
                return None
            return Cure(proposal.kind, proposal.value, proposal.action, before, through.norm)
        changes = self._changes(proposal)
        changed = any(change is not None for change in changes)
        ranks = self.world.sum(torch.tensor(float(changed), dtype=torch.float64, device="cpu"))
        if not float(ranks):
            return None
        if not self.together and self.world.size > 1 and float(ranks) > 1:
            return None  # gradients of several ranks would have to travel
        runs = changed or self.together
        after, why = tried(lambda: self._square(changes)) if runs else (0.0, "")
        whole = self._sum(math.nan if after is None else after) ** 0.5
        if why:
            self.notes.append(f"cures: {why}")
        if not math.isfinite(whole):
            return None
        return Cure(proposal.kind, proposal.value, proposal.action, before, whole)

    @property
    def together(self) -> bool:
        """Return True if all ranks must take part in each backward pass (FSDP2), each of which leaves them shards of
        the gradient.
        """
        return bool(sharded_modules(self.model))

    def _sum(self, here: float) -> float:
        return float(self.world.sum(torch.tensor(here, dtype=torch.float64, device="cpu")))

    def _changes(self, proposal: Proposal) -> list[np.ndarray | None]:
        """Return the changes (2, B, T) of each pass; None for a pass without any.

        The first is added to the coefficients, the second is the factor added to those of the entropies.
        """
        found: list[np.ndarray | None] = []
        for host in self.hosts:
            policy, kl = parts_of(host)
            kept = proposal.keep(host)
            change = np.where(host.mask, (kept[0] - 1) * policy + (kept[1] - 1) * kl, 0.0)
            left = proposal.entropy(host)[0] if callable(proposal.entropy) else proposal.entropy
            both = np.stack([change, np.where(host.mask, left - 1.0, 0.0)])
            if not np.any(host.columns.get("entropy_coefficient", 0.0)):
                both[1] = 0.0
            found.append(both if np.any(both) else None)
        return found

    def through(self) -> Through | None:
        """Run one backward pass of all tokens, and cache the result.

        Return None if the part of the gradient through tokens is unknown.
        """
        if self._through is None:
            here, why = tried(self._alone)
            self.notes += [f"through the tokens: {why}"] if why else []
            square, along = (math.nan, math.nan) if here is None else here
            square = self._sum(square) if self.world.size == 1 or self.together else math.nan
            self._through = Through(square**0.5, self._sum(along))
        return self._through if self._through is not None and math.isfinite(self._through.along) else None

    def _alone(self) -> tuple[float, float]:
        """Return squared norm, and part along the gradient, of this rank's part of what comes through the tokens."""
        kept = [np.where(host.mask, sum(parts_of(host)), 0.0) for host in self.hosts]
        added = self._added(
            [np.stack([one, host.mask.astype(float)]) for one, host in zip(kept, self.hosts, strict=True)]
        )
        squares = math.fsum(float(part.norm(dtype=torch.float32)) ** 2 for part in added.values())
        held = ((part, self._counted(self.direction.gradients[name])) for name, part in added.items())
        along = math.fsum(float((part * there.float()).sum()) for part, there in held if there is not None)
        return squares, along / self.direction.length

    def _square(self, changes: Sequence[np.ndarray | None]) -> float:
        """Return this rank's part of the squared norm of the gradient with the changes."""
        added, unit = self._added(changes), self.direction.norm / self.direction.length
        squares = 0.0
        for name, gradient in self.direction.gradients.items():
            here = self._counted(gradient)
            if here is None:
                continue
            whole = here.float() * unit
            whole = whole + added[name] if name in added else whole
            squares += float(whole.norm(dtype=torch.float32)) ** 2
        return squares

    def _added(self, changes: Sequence[np.ndarray | None]) -> dict[str, Tensor]:
        """Return the gradient that the changes add to each parameter (mean over ranks); of shards the local ones."""
        named = [(name, p) for name, p in self.model.named_parameters() if name in self.direction.gradients]
        if self.together:
            return self._added_together(changes, named)
        total: list[Tensor | None] = [None] * len(named)
        with beside_training(self.model):
            for one, change in zip(self.passes.all, changes, strict=True):
                if change is not None:
                    self._add(one, change, named, total)
        found = zip(named, total, strict=True)
        return {name: part / self.world.size for (name, _), part in found if part is not None}

    def _added_together(
        self, changes: Sequence[np.ndarray | None], named: Sequence[tuple[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Run the ordinary backwards that make FSDP2 reduce gradients, each on all ranks, with zeros where need be."""
        ranks = [int(count) for count in self.world.gather(torch.tensor([len(changes)], device="cpu"))]
        with beside_training(self.model):
            for _, parameter in named:
                parameter.grad = None
            for k in range(max(ranks)):
                change = changes[k] if k < len(changes) else None
                if self._sum(float(change is not None)):
                    self._backward(self.passes.all[k if k < len(changes) else 0], change)
            reshard(self.model)
            found = {name: self._counted(p.grad) for name, p in named if p.grad is not None}
        return {name: part.float() for name, part in found.items() if part is not None}

    def _counted(self, gradient: Tensor) -> Tensor | None:
        """Return the part that counts on this rank: all, or a DTensor's shard if no rank before this one has it."""
        held = gradient.detach()
        if hasattr(held, "to_local"):
            return shard_of(held)
        return held if not self.together or self.world.rank == 0 else None

    def _backward(self, one: LossPass, change: np.ndarray | None) -> None:
        """Run one backward of all of ``one`` into ``.grad``."""
        outputs = run_again(one)
        parts = {name: part for name, part in outputs.parts().items() if part.requires_grad}
        given = {name: torch.zeros_like(part) for name, part in parts.items()}
        if change is not None:
            given["logp"] = _weights(torch.as_tensor(change[0], device="cpu"), None, outputs.logp)
            if np.any(change[1]) and "entropy" in given and "entropy" in one.coefficients:
                given["entropy"] = _of_entropies(one, change).to(given["entropy"])
        torch.autograd.backward(list(parts.values()), [given[name] for name in parts])
        self.backwards += 1

    def _add(
        self,
        one: LossPass,
        change: np.ndarray,
        named: Sequence[tuple[str, Tensor]],
        total: list[Tensor | None],
    ) -> None:
        """Add the gradient of the changed responses, one by one where that can be done."""
        rows, entropy = np.flatnonzero(np.any(change, axis=(0, 2))).tolist(), np.any(change[1])
        # Random numbers that were drawn for all are drawn again for all: one pass, where single ones would take two.
        for row in rows if one.divides is True and not one.drew else [None]:
            outputs = run_again(one, None if row is None else [row])
            parts, weighed = [outputs.logp], [_weights(torch.as_tensor(change[0], device="cpu"), row, outputs.logp)]
            if entropy and outputs.entropy is not None and "entropy" in one.coefficients:
                parts.append(outputs.entropy)
                weighed.append(_weights(_of_entropies(one, change), row, outputs.entropy))
            gradients = torch.autograd.grad(parts, [p for _, p in named], weighed, allow_unused=True)
            self.backwards += 1
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    before = total[i]
                    total[i] = gradient.detach().float() if before is None else before + gradient.detach()


def _of_entropies(one: LossPass, change: np.ndarray) -> Tensor:
    """Return (B, T) added to the coefficients of the entropies."""
    held = one.coefficient("entropy")
    return held * torch.as_tensor(change[1], device="cpu").to(held)


def _weights(values: Tensor, row: int | None, part: Tensor) -> Tensor:
    """Return the part of ``values`` (B, T) for a ``part`` of a forward pass: of all sequences, or of one of them."""
    if row is not None and len(part) == 1:
        values = values[[row], : part.shape[1]]
    elif row is not None:
        values = torch.zeros_like(values).index_copy_(0, torch.tensor([row], device=values.device), values[[row]])
    return values.to(part)


def parts_of(host: HostPass) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of the policy term and of the KL term in each coefficient dL/dlogp of the micro-batch ``host``,
    (B, T) each.

    All is the policy term's if the formula of the loss is not known.
    """
    whole = np.where(host.mask, np.nan_to_num(host.columns.get("coefficient", np.zeros(host.mask.shape))), 0.0)
    if host.form is None or host.loss is None:
        return whole, np.zeros_like(whole)
    policy, kl = whole.copy(), np.zeros_like(whole)
    policy[host.mask], kl[host.mask] = host.form.parts(np.moveaxis(host.loss, 0, -1)[host.mask])
    return policy, kl
