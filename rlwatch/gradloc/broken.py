"""Search for tensors of a step that hold NaN or an infinity: those in memory, and those between modules when it is
repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.gradloc.passes import LossPass, RecordedPasses, run_again
from rlwatch.tensors.degeneration import id0_share
from rlwatch.tensors.transfer import moved


@dataclass(frozen=True, slots=True)
class Broken:
    """A tensor of ``shape`` with ``count`` non-finite elements, the first at ``index``.

    For a DTensor these describe this rank's shard.
    """

    name: str
    count: int
    index: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...] = ()


def broken_among(named: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> list[Broken]:
    """Return the tensors in ``named`` that hold NaN or an infinity, in order.

    Waits for the device once, and once for each such tensor.
    """
    pairs = named.items() if isinstance(named, Mapping) else named
    here = [(name, local(tensor)) for name, tensor in pairs]
    here = [(name, tensor) for name, tensor in here if tensor.numel()]
    if not here:
        return []
    home = here[0][1].device
    counts = torch.stack([moved((~tensor.isfinite()).sum(), home) for _, tensor in here]).tolist()
    return [
        Broken(name, count, first_index(~tensor.isfinite()), dtype_name(tensor), tuple(tensor.shape))
        for (name, tensor), count in zip(here, counts, strict=True)
        if count
    ]


def dtype_name(tensor: Tensor) -> str:
    """Return the name of the tensor's type, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, detached."""
    whole = tensor.detach()
    to_local = getattr(whole, "to_local", None)
    return whole if to_local is None else to_local()


def first_index(flags: Tensor) -> tuple[int, ...]:
    """Return the index of the first True in ``flags``, which has at least one; waits for the device."""
    at = int(flags.flatten().byte().argmax())
    index: list[int] = []
    for size in reversed(flags.shape):
        at, place = divmod(at, size)
        index.append(place)
    return tuple(reversed(index))


# Facts of a step before any pass is repeated: the quantities that are not finite.

CHAIN = (
    "parameters", "buffers", "rollout_logp", "rewards", "advantages", "ref_logp", "old_logp", "logp", "coefficient",
    "gradients",
)  # fmt: skip
"""Quantities in order of time: a broken one breaks those after it."""
DEGENERATE = 0.9
"""Share of token id 0 above which a response was sampled from NaN logits (verl #721, #751)."""


@dataclass(slots=True)
class StepFacts:
    """Quantities of a step that are not finite: names of the model's tensors, and (micro-batch, index) of quantities of
    tokens.

    ``inside`` and ``padding`` map a quantity to its indices inside and outside the mask.
    """

    parameters: list[Broken]
    buffers: list[Broken]
    gradients: list[Broken]
    inside: dict[str, list[tuple[int, Broken]]] = field(default_factory=dict)
    padding: dict[str, list[tuple[int, Broken]]] = field(default_factory=dict)
    id0_frac: float | None = None

    @classmethod
    def of(cls, model: nn.Module, passes: RecordedPasses) -> StepFacts:
        """Examine parameters, buffers and gradients of ``model`` as they are now, and all micro-batches of ``passes``.

        A buffer may legitimately hold -inf (attention masks do), so that only NaN counts there.
        """
        grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        buffers = [(name, b.masked_fill(~b.isnan(), 0.0)) for name, b in model.named_buffers() if b.is_floating_point()]
        facts = cls(
            broken_among(model.named_parameters()),
            broken_among(buffers),
            broken_among(grads),
            id0_frac=_id0_frac(passes),
        )
        for k, one in enumerate(passes.all):
            for where, into in ((True, facts.inside), (False, facts.padding)):
                every = quantities(one)
                for broken in broken_among((name, _part(x, one.tokens.mask, where)) for name, x in every):
                    into.setdefault(broken.name, []).append((k, broken))
        return facts

    def flags(self, passes: RecordedPasses, k: int, name: str) -> Tensor:
        """Return (B, T): True for tokens of micro-batch ``k`` of ``passes``, inside its mask, whose quantity ``name``
        is not finite.
        """
        one = passes.all[k]
        values = dict(quantities(one)).get(name)
        mask = one.tokens.mask.bool()
        if values is None:
            return torch.zeros_like(mask)
        bad = ~values.detach().isfinite().to(mask.device)
        return (bad if bad.dim() != 1 else bad[:, None]).expand(mask.shape) & mask

    def counts(self) -> dict[str, int]:
        """Return the number of non-finite elements (for the model: tensors) by quantity.

        Finite quantities are absent.
        """
        counts = Counter({"parameters": len(self.parameters), "buffers": len(self.buffers)})
        counts["gradients"] = len(self.gradients)
        for suffix, broken in (("", self.inside), (" (padding)", self.padding)):
            for name, where in broken.items():
                counts[name + suffix] += sum(item.count for _, item in where)
        return {name: count for name, count in counts.items() if count}

    def chain(self) -> tuple[str, ...]:
        """Return the names of the quantities that are not finite, in the order in which a step computes them."""
        counts = self.counts()
        links = (*CHAIN[:-2], *(name for name in self.inside if name not in CHAIN), *CHAIN[-2:])
        return tuple(name for name in links if name in counts)


def quantities(one: LossPass) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of each per-token and per-sequence quantity of the micro-batch ``one``, in the order in
    which a step computes them.

    Values are (B, T), (B, 1) or (B,).
    """
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
    """Return ``values`` inside or outside the mask, 0 elsewhere; a number per response is inside if any token is."""
    if values.dim() == 0:
        return values if inside else torch.zeros_like(values)
    on = mask.bool().to(values.device)  # rewards may be elsewhere
    rows = on.any(1)
    on = rows if values.dim() == 1 else on if values.shape == on.shape else rows[:, None]
    return torch.where(on if inside else ~on, values.detach(), 0.0)


def _id0_frac(passes: RecordedPasses) -> float | None:
    shares = [id0_share(one.tokens.ids, one.tokens.mask) for one in passes.all if one.tokens.ids is not None]
    if not shares:
        return None
    known = [share for part in shares for share in part.tolist() if share == share]  # noqa: PLR0124  (not NaN)
    return sum(share >= DEGENERATE for share in known) / len(known) if known else None


# Flow between modules: outputs of one forward pass, and their gradients in one backward pass.


@dataclass(frozen=True, slots=True)
class _Sign:
    """Flags of where an output is not finite: (B, L) for outputs of such and more dimensions."""

    module: str
    flags: Tensor
    dtype: str

    @classmethod
    def of(cls, module: str, values: Tensor) -> _Sign:
        flags = ~values.detach().isfinite()
        return cls(module, flags.flatten(2).any(-1) if flags.dim() > 2 else flags, dtype_name(values))


def broken_activation(model: nn.Module, one: LossPass) -> Broken | None:
    """Return the first module, in order of finishing, whose output is not finite; None if all are finite.

    It repeats the forward pass of the micro-batch ``one``, without a graph. ``index`` of the result is (sequence,
    position in the context) if the output has these dimensions; ``count`` counts such positions. A head whose weight is
    read without calling its module is not seen.
    """
    seen: list[_Sign] = []

    def look(module: str, _: bool, output: Tensor) -> None:
        seen.append(_Sign.of(module, output))

    with listening(model, look), torch.no_grad():
        run_again(one)
    return _earliest(seen)


def broken_log_probs(model: nn.Module, one: LossPass) -> Broken | None:  # noqa: ARG001  (as the others)
    """Return a description of the response log-probs if some are not finite when the forward pass of the micro-batch
    ``one`` is repeated.

    None if all are finite. It runs one forward pass, without a graph.
    """
    with torch.no_grad():
        logp = run_again(one).logp
    found = broken_among([("logp", torch.where(one.tokens.mask.bool(), logp.detach(), 0.0))])
    return found[0] if found else None


def broken_sum(model: nn.Module, passes: RecordedPasses) -> Broken | None:
    """Return the first parameter whose gradient is not finite when all micro-batches of this rank are repeated and
    summed up.

    None if all are finite. It takes one forward and one backward pass of each micro-batch. The training state is not
    changed.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    total: list[Tensor | None] = [None] * len(named)
    for one in passes.all:
        outputs = {name: part for name, part in run_again(one).parts().items() if part.requires_grad}
        weights = [one.coefficient(name).to(part) for name, part in outputs.items()]
        gradients = torch.autograd.grad(list(outputs.values()), [p for _, p in named], weights, allow_unused=True)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                before = total[i]
                total[i] = gradient if before is None else before + gradient
    found = broken_among((name, g) for (name, _), g in zip(named, total, strict=True) if g is not None)
    return found[0] if found else None


def broken_output_gradient(model: nn.Module, one: LossPass) -> Broken | None:
    """Return the first module, in order of the backward pass, whose output has a non-finite gradient; None if all are
    finite.

    It takes one forward and one backward pass of the micro-batch ``one``, from coefficients whose non-finite entries
    are zeroed. No gradient of a parameter is computed: ``.grad`` and hooks on it are not affected.
    """
    seen: list[_Sign] = []
    sources: list[Tensor] = []

    def look(module: str, source: bool, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append(_Sign.of(module, gradient)))  # type: ignore[no-untyped-call]
            if source:
                sources.append(output)

    with torch.enable_grad():
        with listening(model, look):
            outputs = {name: part for name, part in run_again(one).parts().items() if part.requires_grad}
        clean = [one.coefficient(name).nan_to_num(0.0, 0.0, 0.0).to(part) for name, part in outputs.items()]
        if outputs and sources:
            torch.autograd.grad(list(outputs.values()), sources, clean, allow_unused=True)
    return _earliest(seen)


@contextmanager
def listening(model: nn.Module, heard: Callable[[str, bool, Tensor], None]) -> Iterator[None]:
    """Call ``heard(module, source, output)`` for each floating-point output of each module in the ``with`` block.

    ``source`` is True where the graph begins: at a module without submodules, none of whose inputs has a gradient.
    """

    def hook(name: str, leaf: bool) -> Callable[..., None]:
        def listen(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            source = leaf and not any(x.requires_grad for x in _floats((args, kwargs)))
            for values in _floats(output):
                heard(name, source, values)

        return listen

    handles = [
        module.register_forward_hook(hook(name, next(module.children(), None) is None), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(value: Any) -> Iterator[Tensor]:
    """Iterate over tensors of floats in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _floats(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _floats(part)


def _earliest(seen: list[_Sign]) -> Broken | None:
    if not seen:
        return None
    home = seen[0].flags.device
    counts = torch.stack([moved(sign.flags.sum(), home) for sign in seen]).tolist()
    for sign, count in zip(seen, counts, strict=True):
        if count:
            return Broken(sign.module, count, first_index(sign.flags), sign.dtype, tuple(sign.flags.shape))
    return None
