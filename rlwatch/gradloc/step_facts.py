"""What of a step is not finite, before anything is run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlwatch.gradloc.broken import Broken, broken
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.tensors.text import id0_share

CHAIN = (
    "parameters", "buffers", "rollout_logp", "rewards", "advantages", "ref_logp", "old_logp", "logp", "coefficient",
    "gradients",
)  # fmt: skip
"""The links in order of time: a broken one breaks those after it."""
DEGENERATE = 0.9
"""A response of which this share is token id 0 was sampled from NaN logits (METHODS, section 10)."""


@dataclass(slots=True)
class StepFacts:
    """Per quantity what is broken: of tensors of the model their names, of tensors of tokens (micro-batch, where)."""

    parameters: list[Broken]
    buffers: list[Broken]
    gradients: list[Broken]
    inside: dict[str, list[tuple[int, Broken]]] = field(default_factory=dict)
    padding: dict[str, list[tuple[int, Broken]]] = field(default_factory=dict)
    id0_frac: float | None = None

    @classmethod
    def of(cls, model: nn.Module, passes: Passes) -> StepFacts:
        """Of gradients as they are held now, and of all micro-batches.

        A buffer may hold -inf rightly (attention masks do): there only NaN counts.
        """
        grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        buffers = [(name, b.masked_fill(~b.isnan(), 0.0)) for name, b in model.named_buffers() if b.is_floating_point()]
        facts = cls(broken(model.named_parameters()), broken(buffers), broken(grads), id0_frac=_id0_frac(passes))
        for k, one in enumerate(passes.all):
            for where, into in ((True, facts.inside), (False, facts.padding)):
                every = quantities(one)
                for found in broken((name, _part(x, one.tokens.mask, where)) for name, x in every):
                    into.setdefault(found.name, []).append((k, found))
        return facts

    def flags(self, passes: Passes, k: int, name: str) -> Tensor:
        """(B, T): which tokens of micro-batch ``k``, inside its mask, have a ``name`` that is not finite."""
        one = passes.all[k]
        values = dict(quantities(one)).get(name)
        mask = one.tokens.mask.bool()
        if values is None:
            return torch.zeros_like(mask)
        bad = ~values.detach().isfinite()
        return (bad if bad.dim() != 1 else bad[:, None]).expand(mask.shape) & mask

    def counts(self) -> dict[str, int]:
        """Elements (of the model: tensors) that are not finite, by quantity; nothing of those that are."""
        counts = Counter({"parameters": len(self.parameters), "buffers": len(self.buffers)})
        counts["gradients"] = len(self.gradients)
        for suffix, found in (("", self.inside), (" (padding)", self.padding)):
            for name, where in found.items():
                counts[name + suffix] += sum(item.count for _, item in where)
        return {name: count for name, count in counts.items() if count}

    def chain(self) -> tuple[str, ...]:
        """Broken links, in order of time."""
        counts = self.counts()
        links = (*CHAIN[:-2], *(name for name in self.inside if name not in CHAIN), *CHAIN[-2:])
        return tuple(name for name in links if name in counts)


def quantities(one: LossPass) -> Iterator[tuple[str, Tensor]]:
    """Every per-token or per-sequence number of a micro-batch, (B, T), (B, 1) or (B,), in order of the chain."""
    tokens = one.tokens
    known = {
        "rollout_logp": tokens.rollout_logp,
        "rewards": one.rewards,
        "advantages": tokens.advantages,
        "ref_logp": tokens.ref_logp,
        "old_logp": tokens.old_logp,
        "logp": tokens.logp,
        "coefficient": one.coefficients.get("logp"),
        "entropy coefficient": one.coefficients.get("entropy"),
        "aux coefficient": one.coefficients.get("aux"),
    }
    for name, values in known.items():
        if values is not None and values.is_floating_point():
            yield name, values


def _part(values: Tensor, mask: Tensor, inside: bool) -> Tensor:
    """``values`` inside or outside the mask, 0 elsewhere; one number of a whole response is inside if any token is."""
    if values.dim() == 0:
        return values if inside else torch.zeros_like(values)
    on = mask.bool()
    rows = on.any(1)
    on = rows if values.dim() == 1 else on if values.shape == on.shape else rows[:, None]
    return torch.where(on if inside else ~on, values.detach(), 0.0)


def _id0_frac(passes: Passes) -> float | None:
    shares = [id0_share(one.tokens.ids, one.tokens.mask) for one in passes.all if one.tokens.ids is not None]
    if not shares:
        return None
    known = [share for part in shares for share in part.tolist() if share == share]  # noqa: PLR0124  (not NaN)
    return sum(share >= DEGENERATE for share in known) / len(known) if known else None
