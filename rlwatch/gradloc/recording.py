"""A localised step as a file: the inputs of its loss passes, their coefficients, and the figures of the report.

Each rank writes one ``.npz``, without pickle: ids, masks, coefficients and log-probs of every micro-batch as arrays,
everything else as one JSON text. The file holds token ids, and so the text of prompts and responses. Only its owner
may read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import LossPass, Outputs, RandomState, RecordedPasses, run_again
from rlwatch.gradloc.report import Culprit, Localisation, NotLocalised, TokenAt
from rlwatch.gradloc.verification import verify
from rlwatch.tensors.tokens import TokenBatch

FORMAT = 1
SAMPLES = 64
"""Number of elements of each parameter in its fingerprint: an optimizer's step changes nearly all elements."""


class RecordingError(RLWatchError):
    """Error for a recorded step that cannot be read or replayed."""


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs of the forward pass of one micro-batch.

    ``ids`` and ``attention`` are (B, L), and their last T positions are the response. ``positions`` are (B, L) if they
    were given. Logits were divided by ``temperature``.
    """

    ids: Tensor
    attention: Tensor
    temperature: float = 1.0
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RankRecording:
    """One rank's part of a recorded step.

    Parameters
    ----------
    passes
        Arrays of each micro-batch: ``ids``, ``attention``, ``positions`` (B, L), ``mask``, ``logp``, ``old_logp``,
        ``ref_logp``, ``rollout_logp``, ``coefficient``, ``entropy_coefficient``, ``contribution`` (B, T),
        ``advantages``, ``rewards``, ``random`` (bytes of the CPU's generator, if numbers were drawn). Unknown ones are
        absent.
    temperatures
        Temperature of each micro-batch.
    figures
        Norm, layers, gap, method and culprits of the report.
    dtype, autocast
        Type of the parameters, and the type in which the forward pass computed (``""``: the same).
    fingerprint
        Digest of the parameters; ``""`` if they were sharded.
    """

    step: int
    rank: int
    ranks: int
    passes: Sequence[Mapping[str, np.ndarray]]
    temperatures: Sequence[float]
    figures: Mapping[str, Any]
    dtype: str = "float32"
    autocast: str = ""
    fingerprint: str = ""
    notes: Sequence[str] = field(default_factory=tuple)


def save_recording(
    folder: Path,
    step: int,
    report: Localisation,
    *,
    model: nn.Module,
    passes: RecordedPasses,
    contexts: Sequence[Context],
    contributions: Sequence[Tensor] = (),
    rank: int = 0,
    ranks: int = 1,
    autocast: str = "",
) -> Path:
    """Write one rank's part of a localised step into ``folder`` as one file (mode 0600), and return its path.

    ``folder`` is created with mode 0700 if it does not exist. ``contexts`` are the inputs of ``passes``, in order;
    ``contributions`` (B, T) belong to each pass. ``autocast`` is the type in which the forward pass computed. The call
    reads the parameters' fingerprint and copies the step to the CPU.

    Raises
    ------
    OSError
        If the file cannot be written; no partial file remains.
    """
    arrays = {
        f"{k}/{name}": values
        for k, (one, context) in enumerate(zip(passes.all, contexts, strict=True))
        for name, values in _arrays(one, context, contributions[k] if contributions else None).items()
    }
    head = {
        "format": FORMAT,
        "step": step,
        "rank": rank,
        "ranks": ranks,
        "micro_batches": len(passes.all),
        "temperatures": [context.temperature for context in contexts],
        "figures": _figures_of(report),
        "dtype": _dtype(model),
        "autocast": autocast,
        "fingerprint": fingerprint(model),
        "notes": _notes(passes),
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"step{step:08d}-rank{rank}.npz"
    _write(path, arrays | {"head": np.array(json.dumps(head))})
    return path


def load_recording(path: Path) -> RankRecording:
    """Read a file that :func:`save_recording` wrote.

    Raises
    ------
    RecordingError
        If the file is not a recording, is damaged, or was written by a newer version.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        head = json.loads(str(arrays.pop("head")))
        if head["format"] != FORMAT:
            raise RecordingError(f"{path} has format {head['format']}; this rlwatch reads {FORMAT}")
        passes: list[dict[str, np.ndarray]] = [{} for _ in range(head.pop("micro_batches"))]
        for name, values in arrays.items():
            k, _, quantity = name.partition("/")
            passes[int(k)][quantity] = values
        del head["format"]
        return RankRecording(passes=passes, **head)
    except (ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RecordingError(f"{path} is no recorded step, or is damaged ({type(error).__name__}: {error})") from error


def fingerprint(model: nn.Module) -> str:
    """Return a digest of the shapes and some elements of all parameters, in order; "" if they are sharded."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if hasattr(parameter, "to_local"):
            return ""
        values = parameter.detach().flatten()
        stride = max(1, len(values) // SAMPLES)
        digest.update(repr(tuple(parameter.shape)).encode())
        digest.update(values[::stride].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _arrays(one: LossPass, context: Context, contributions: Tensor | None) -> dict[str, np.ndarray]:
    tokens = one.tokens
    known = {
        "ids": context.ids,
        "attention": context.attention,
        "positions": context.positions,
        "mask": tokens.mask.bool(),
        "logp": tokens.logp,
        "old_logp": tokens.old_logp,
        "ref_logp": tokens.ref_logp,
        "rollout_logp": tokens.rollout_logp,
        "advantages": tokens.advantages,
        "rewards": one.rewards,
        "coefficient": one.coefficients.get("logp"),
        "entropy_coefficient": one.coefficients.get("entropy"),
        "contribution": contributions,
        "random": one.random.cpu if one.drew else None,
    }
    return {name: _array(values) for name, values in known.items() if values is not None}


def _array(values: Tensor) -> np.ndarray:
    """Convert a tensor to numpy; bfloat16, which numpy does not know, becomes float32."""
    host = values.detach().cpu()
    array: np.ndarray = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return array


def _dtype(model: nn.Module) -> str:
    first = next(model.parameters(), None)
    return "float32" if first is None else str(first.dtype).removeprefix("torch.")


def _notes(passes: RecordedPasses) -> list[str]:
    notes = []
    if any("aux" in one.coefficients for one in passes.all):
        notes.append("the loss had an auxiliary part of the model's, which is not replayed")
    if any(one.drew and one.random.devices for one in passes.all):
        notes.append("dropout drew on an accelerator, which is not drawn again")
    return notes


def _figures_of(report: Localisation) -> dict[str, Any]:
    return {
        "norm": report.norm,
        "gap": report.gap,
        "method": None if report.method is None else report.method.value,
        "cause": report.cause.value,
        "layers": dict(report.layers),
        "culprits": [_culprit(culprit) for culprit in report.culprits],
    }


def _culprit(culprit: Culprit) -> dict[str, Any]:
    own = None if culprit.own is None else {"norm": culprit.own.norm, "layers": dict(culprit.own.layers)}
    return {
        **asdict(culprit.at),
        "token_id": culprit.token_id,
        "cause": culprit.cause.value,
        "contribution": culprit.contribution,
        "own": own,
    }


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write under another name and rename, so that a file of this name is whole."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# Replay of a recorded step on a model, and comparison of the results with the recorded ones.

REPLAY_TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
"""Relative tolerance: of contributions relative to the norm, of log-probs relative to 1 nat."""
REPLAY_TOLERANCE_LOW = 3e-2
"""Relative tolerance in half precision, because other kernels round differently."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a localised step (norm, log-prob, contribution...), as recorded and as recomputed; its tolerance is
    relative to ``scale``.

    ``recorded`` or ``recomputed`` is None if that value is not available.
    """

    name: str
    recorded: float | None
    recomputed: float | None
    scale: float = 1.0
    tolerance: float = 1e-3

    @property
    def agrees(self) -> bool | None:
        """Return True if the recorded and the recomputed value are equal within rounding; NaN equals NaN. None if one
        is not available.
        """
        if self.recorded is None or self.recomputed is None:
            return None
        if not (math.isfinite(self.recorded) and math.isfinite(self.recomputed)):
            return str(self.recorded) == str(self.recomputed)
        return abs(self.recorded - self.recomputed) <= self.tolerance * max(abs(self.scale), 1e-12)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of repeating a recorded step: ``figures`` in order, which are norm, log-probs, layers, then contribution
    and own norm of each outlying token.

    ``same_parameters`` is True if the model has the parameters of the recording; None if not known.
    """

    figures: Sequence[Figure]
    gap: float | None
    same_parameters: bool | None
    notes: Sequence[str] = ()

    @property
    def agrees(self) -> bool:
        """Return True if every figure that is available in both agrees."""
        return not any(figure.agrees is False for figure in self.figures)


def replay(recordings: Sequence[RankRecording], model: nn.Module) -> Replayed:
    """Repeat the passes of ``recordings`` (one for each rank of a step) on ``model``, and compare.

    The model's ``.grad`` is overwritten.

    Raises
    ------
    RecordingError
        If the recordings are of different steps, or not of all ranks.
    """
    _check(recordings)
    where = [(one.rank, k) for one in recordings for k in range(len(one.passes))]
    passes = RecordedPasses()
    for one in recordings:
        passes.all += [_loss_pass(one, k, model) for k in range(len(one.passes))]
    _row_numbers(passes)
    apart = _gradient(model, passes)
    figures = _Figures(recordings[0], where)
    notes = [note for one in recordings for note in one.notes]
    direction = Direction.of(model)
    contributions, gap = _contributions(model, passes, direction, notes)
    compared = list(figures.step(direction, apart))
    compared += figures.culprits(model, passes, contributions, notes)
    known = {one.fingerprint for one in recordings} - {""}
    same = None if not known else known == {fingerprint(model)}
    return Replayed(compared, gap, same, tuple(dict.fromkeys(notes)))


def load_model(folder: Path, dtype: str, device: str = "cpu") -> nn.Module:
    """Load a causal language model of transformers from ``folder``, in ``dtype``, on ``device``.

    Raises
    ------
    ConfigError
        If transformers is not installed, or if there is no such model in ``folder`` or no such ``device``.
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


def _check(recordings: Sequence[RankRecording]) -> None:
    steps, ranks = {one.step for one in recordings}, {one.rank for one in recordings}
    if len(steps) != 1:
        raise RecordingError(f"recordings of one step are wanted, got those of {sorted(steps)}")
    expected = recordings[0].ranks
    if len(recordings) != expected or ranks != set(range(expected)):
        raise RecordingError(
            f"the gradient is the mean of {expected} ranks: pass their {expected} files, got those of {sorted(ranks)}"
        )


def _loss_pass(recording: RankRecording, k: int, model: nn.Module) -> LossPass:
    """Return loss pass ``k`` with coefficients divided by the number of ranks, so that all passes make the gradient."""
    arrays = {name: torch.as_tensor(values, device="cpu") for name, values in recording.passes[k].items()}
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


def _row_numbers(passes: RecordedPasses) -> None:
    rows = 0
    for one in passes.all:
        one.first_row = rows
        rows += one.shape[0]


def _gradient(model: nn.Module, passes: RecordedPasses) -> float:
    """Leave sum a dlogp + e dH in ``.grad``.

    Return the largest difference of a log-prob from the recorded one, nats.
    """
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
    model: nn.Module, passes: RecordedPasses, direction: Direction, notes: list[str]
) -> tuple[Sequence[Tensor], float | None]:
    try:
        attribution = attribute(model, passes, direction)
    except NotLocalised as why:
        notes.append(f"no contributions: {why}")
        return (), None
    return attribution.contributions, attribution.gap


@dataclass(frozen=True, slots=True)
class _Figures:
    """Pairs of recorded and recomputed values; ``where`` is (rank, micro-batch) of each pass."""

    recording: RankRecording
    where: Sequence[tuple[int, int]]

    @property
    def tolerance(self) -> float:
        low = self.recording.autocast or self.recording.dtype
        return REPLAY_TOLERANCE.get(low, REPLAY_TOLERANCE_LOW)

    def step(self, direction: Direction, apart: float) -> Iterator[Figure]:
        """Yield the figures of the whole step."""
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
        """Return the largest difference over all tokens of the first rank's passes, which are the first here too."""
        stored = [arrays.get("contribution") for arrays in self.recording.passes]
        gaps = [
            float((torch.as_tensor(before, device="cpu") - now).abs().max())
            for before, now in zip(stored, contributions, strict=False)
            if before is not None and before.size
        ]
        name = "contributions: largest difference of any token"
        return Figure(name, 0.0 if gaps else None, max(gaps, default=None), norm, self.tolerance)

    def culprits(
        self, model: nn.Module, passes: RecordedPasses, contributions: Sequence[Tensor], notes: list[str]
    ) -> Iterator[Figure]:
        """Yield the figures of each culprit."""
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
