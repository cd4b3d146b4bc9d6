"""A recorded step run again on a model, and what comes out beside what was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.errors import ConfigError
from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.errors import NotLocalised
from rlwatch.gradloc.gradients import run_again
from rlwatch.gradloc.passes import LossPass, Outputs, Passes, RandomState
from rlwatch.gradloc.recording import Recording, RecordingError, fingerprint
from rlwatch.gradloc.report import TokenAt
from rlwatch.gradloc.verification import verify
from rlwatch.tensors.tokens import TokenBatch

TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
"""Relative; of contributions and log-probs, of the norm and of 1 nat."""
TOLERANCE_LOW = 3e-2
"""In half precision: other kernels round otherwise."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, recorded and recomputed; ``scale`` is what its tolerance is relative to. None: not had."""

    name: str
    recorded: float | None
    recomputed: float | None
    scale: float = 1.0
    tolerance: float = 1e-3

    @property
    def agrees(self) -> bool | None:
        """Whether the two are as near as rounding explains; NaN agrees with NaN. None where one is not had."""
        if self.recorded is None or self.recomputed is None:
            return None
        if not (math.isfinite(self.recorded) and math.isfinite(self.recomputed)):
            return str(self.recorded) == str(self.recomputed)
        return abs(self.recorded - self.recomputed) <= self.tolerance * max(abs(self.scale), 1e-12)


@dataclass(frozen=True, slots=True)
class Replayed:
    """``figures`` in order: norm, log-probs, layers, then of each culprit the contribution and its own norm.

    ``same_parameters``: whether the model's are those of the recording; None if not known.
    """

    figures: Sequence[Figure]
    gap: float | None
    same_parameters: bool | None
    notes: Sequence[str] = ()

    @property
    def agrees(self) -> bool:
        """Whether every figure that both have does."""
        return not any(figure.agrees is False for figure in self.figures)


def replay(recordings: Sequence[Recording], model: nn.Module) -> Replayed:
    """Run the passes of ``recordings`` (one of each rank of a step) again and compare. ``.grad`` of ``model`` is used.

    Raises
    ------
    RecordingError
        The recordings are of different steps, or not of all ranks.
    """
    _check(recordings)
    where = [(one.rank, k) for one in recordings for k in range(len(one.passes))]
    passes = Passes()
    for one in recordings:
        passes.all += [_loss_pass(one, k, model) for k in range(len(one.passes))]
    _row_numbers(passes)
    apart = _gradient(model, passes)
    figures = _Figures(recordings[0], where)
    notes = [note for one in recordings for note in one.notes]
    direction = Direction.of(model)
    contributions, gap = _contributions(model, passes, direction, notes)
    found = list(figures.step(direction, apart))
    found += figures.culprits(model, passes, contributions, notes)
    known = {one.fingerprint for one in recordings} - {""}
    same = None if not known else known == {fingerprint(model)}
    return Replayed(found, gap, same, tuple(dict.fromkeys(notes)))


def load_model(folder: Path, dtype: str, device: str = "cpu") -> nn.Module:
    """A causal language model of transformers, in ``dtype``.

    Raises
    ------
    ConfigError
        transformers is not installed, there is no such model in ``folder``, or no such ``device``.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("replaying a step needs transformers; run: pip install transformers") from error
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        return model.to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no causal language model could be loaded from {folder} on {device}: {error}") from error


def _check(recordings: Sequence[Recording]) -> None:
    steps, ranks = {one.step for one in recordings}, {one.rank for one in recordings}
    if len(steps) != 1:
        raise RecordingError(f"recordings of one step are wanted, got those of {sorted(steps)}")
    expected = recordings[0].ranks
    if len(recordings) != expected or ranks != set(range(expected)):
        raise RecordingError(
            f"the gradient is the mean of {expected} ranks: pass their {expected} files, got those of {sorted(ranks)}"
        )


def _loss_pass(recording: Recording, k: int, model: nn.Module) -> LossPass:
    """With the coefficients divided by the number of ranks, so that all ranks' passes together make the gradient."""
    arrays = {name: torch.as_tensor(values) for name, values in recording.passes[k].items()}
    device = next(model.parameters()).device
    drew = "random" in arrays
    random = RandomState(arrays["random"]) if drew else RandomState.now()
    arrays = {name: values.to(device) for name, values in arrays.items() if name != "random"}
    forward = _Forward(model, arrays, recording.temperatures[k], recording.autocast, drew)
    response = arrays["ids"][:, -arrays["mask"].shape[1] :]
    tokens = TokenBatch(arrays["logp"], arrays["mask"], ids=response, advantages=arrays.get("advantages"))
    one = LossPass(forward, tokens, random, drew)
    for name, stored in (("logp", "coefficient"), ("entropy", "entropy_coefficient")):
        if stored in arrays:
            one.coefficients[name] = arrays[stored] / recording.ranks
    return one


@dataclass(frozen=True, slots=True)
class _Forward:
    """The plain forward of a causal language model: log-probs (and entropies) of the response, in float32."""

    model: nn.Module
    arrays: Mapping[str, Tensor]
    temperature: float
    autocast: str
    drew: bool

    def __call__(self, rows: Sequence[int] | None = None) -> Outputs:
        chosen = slice(None) if rows is None else list(rows)
        ids, attention = self.arrays["ids"][chosen], self.arrays["attention"][chosen]
        given = {"position_ids": self.arrays["positions"][chosen]} if "positions" in self.arrays else {}
        self.model.train(self.drew)
        with self._precision(ids.device.type):
            logits = self.model(input_ids=ids, attention_mask=attention, **given).logits
        length = self.arrays["mask"].shape[1]
        every = (logits[:, -length - 1 : -1].float() / self.temperature).log_softmax(-1)
        logp = every.gather(-1, ids[:, -length:, None])[..., 0]
        entropy = -(every.exp() * every).sum(-1) if "entropy_coefficient" in self.arrays else None
        return Outputs(logp, entropy)

    def _precision(self, device: str) -> AbstractContextManager[Any]:
        return torch.autocast(device, getattr(torch, self.autocast)) if self.autocast else nullcontext()


def _row_numbers(passes: Passes) -> None:
    rows = 0
    for one in passes.all:
        one.first_row = rows
        rows += one.shape[0]


def _gradient(model: nn.Module, passes: Passes) -> float:
    """Leave sum a dlogp + e dH in ``.grad``; the largest difference of a log-prob from the recorded one, nats."""
    model.zero_grad(set_to_none=True)
    apart = 0.0
    for one in passes.all:
        outputs = run_again(one)
        parts = {name: part for name, part in outputs.parts().items() if name in one.coefficients}
        torch.autograd.backward(list(parts.values()), [one.coefficient(name).to(p) for name, p in parts.items()])
        gaps = (outputs.logp.detach() - one.tokens.logp).abs()[one.tokens.mask.bool()]
        apart = max(apart, float(gaps.nan_to_num(0.0).max())) if gaps.numel() else apart
    return apart


def _contributions(
    model: nn.Module, passes: Passes, direction: Direction, notes: list[str]
) -> tuple[Sequence[Tensor], float | None]:
    try:
        found = attribute(model, passes, direction)
    except NotLocalised as why:
        notes.append(f"no contributions: {why}")
        return (), None
    return found.contributions, found.gap


@dataclass(frozen=True, slots=True)
class _Figures:
    """Pairs what was recorded with what was recomputed; ``where`` is (rank, micro-batch) of each pass."""

    recording: Recording
    where: Sequence[tuple[int, int]]

    @property
    def tolerance(self) -> float:
        low = self.recording.autocast or self.recording.dtype
        return TOLERANCE.get(low, TOLERANCE_LOW)

    def step(self, direction: Direction, apart: float) -> Iterator[Figure]:
        """Of the whole step."""
        figures = self.recording.figures
        norm, layers = float(figures["norm"]), figures["layers"]
        yield Figure("gradient norm", norm, direction.norm, norm, self.tolerance)
        yield Figure("log-probs: largest difference, nats", 0.0, apart, 1.0, self.tolerance)
        for name in sorted(layers, key=layers.__getitem__, reverse=True):
            yield Figure(f"share of {name}", layers[name], direction.layers.get(name), 1.0, self.tolerance)

    def _place(self, culprit: Mapping[str, Any]) -> str:
        rank = f"rank {culprit['rank']}, " if self.recording.ranks > 1 else ""
        place = f"{rank}micro-batch {culprit['microbatch']}, row {culprit['row']}, position {culprit['position']}"
        return place if culprit["token_id"] is None else f"token {culprit['token_id']} ({place})"

    def _all_contributions(self, contributions: Sequence[Tensor], norm: float) -> Figure:
        """Over all tokens of the first rank's passes, which are the first here too."""
        stored = [arrays.get("contribution") for arrays in self.recording.passes]
        gaps = [
            float((torch.as_tensor(before) - now).abs().max())
            for before, now in zip(stored, contributions, strict=False)
            if before is not None and before.size
        ]
        name = "contributions: largest difference of any token"
        return Figure(name, 0.0 if gaps else None, max(gaps, default=None), norm, self.tolerance)

    def culprits(
        self, model: nn.Module, passes: Passes, contributions: Sequence[Tensor], notes: list[str]
    ) -> Iterator[Figure]:
        """Of each culprit."""
        culprits = self.recording.figures["culprits"]
        places = [TokenAt(0, self.where.index((c["rank"], c["microbatch"])), c["row"], c["position"]) for c in culprits]
        verified = [at for at, c in zip(places, culprits, strict=True) if c["own"] is not None]
        own = verify(model, passes, verified, notes=notes) if verified else {}
        norm = float(self.recording.figures["norm"])
        if contributions:
            yield self._all_contributions(contributions, norm)
        for at, culprit in zip(places, culprits, strict=True):
            name = self._place(culprit)
            value = float(contributions[at.microbatch][at.row, at.position]) if contributions else None
            yield Figure(f"contribution of {name}", culprit["contribution"], value, norm, self.tolerance)
            if culprit["own"] is not None:
                again = own[at].norm if at in own else None
                recorded = culprit["own"]["norm"]
                yield Figure(f"own norm of {name}", recorded, again, recorded, self.tolerance)
