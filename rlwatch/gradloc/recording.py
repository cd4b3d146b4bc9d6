"""A localised step as one file: what its loss passes read, their coefficients, and the figures that came out.

One ``.npz`` of each rank, without pickle: ids, masks, coefficients and log-probs of every micro-batch as arrays, the
rest as one JSON text. It holds token ids, and so the text of prompts and responses: the file is for its owner only.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlwatch.errors import RLWatchError
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.report import Culprit, Localisation

FORMAT = 1
SAMPLES = 64
"""Elements of each parameter that its fingerprint is made of: an optimizer's step moves nearly all of them."""


class RecordingError(RLWatchError):
    """A recorded step cannot be read, or not be replayed."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the forward of a micro-batch read: ``ids`` and ``attention`` (B, L), the last T positions of which are the
    response; ``positions`` (B, L) where they were given. Logits were divided by ``temperature``.
    """

    ids: Tensor
    attention: Tensor
    temperature: float = 1.0
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """One rank's part of a step.

    Parameters
    ----------
    passes
        Of each micro-batch the arrays: ``ids``, ``attention``, ``positions`` (B, L), ``mask``, ``logp``, ``old_logp``,
        ``ref_logp``, ``rollout_logp``, ``coefficient``, ``entropy_coefficient``, ``contribution`` (B, T),
        ``advantages``, ``rewards``, ``random`` (bytes of the CPU's generator, where numbers were drawn). Those that
        were not known are absent.
    temperatures
        Of each micro-batch.
    figures
        Norm, layers, gap, method and culprits of the report.
    dtype, autocast
        Of the parameters, and what the forward computed in (``""``: that).
    fingerprint
        Of the parameters; ``""`` where they were in shards.
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


def save(
    folder: Path,
    step: int,
    report: Localisation,
    *,
    model: nn.Module,
    passes: Passes,
    contexts: Sequence[Context],
    contributions: Sequence[Tensor] = (),
    rank: int = 0,
    ranks: int = 1,
    autocast: str = "",
) -> Path:
    """Write one rank's part into ``folder`` (made 0700 where it does not exist), as one file (0600), and return it.

    ``contexts`` are those of ``passes``, in order. Reads the parameters' fingerprint and copies the step to the CPU.

    Raises
    ------
    OSError
        The file cannot be written; nothing is left of it then.
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
        "figures": _figures(report),
        "dtype": _dtype(model),
        "autocast": autocast,
        "fingerprint": fingerprint(model),
        "notes": _notes(passes),
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"step{step:08d}-rank{rank}.npz"
    _write(path, arrays | {"head": np.array(json.dumps(head))})
    return path


def load(path: Path) -> Recording:
    """Read a file that :func:`save` wrote.

    Raises
    ------
    RecordingError
        It is none, is damaged, or was written by a newer version.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        head = json.loads(str(arrays.pop("head")))
        if head["format"] != FORMAT:
            raise RecordingError(f"{path} has format {head['format']}; this rlwatch reads {FORMAT}")
        passes: list[dict[str, np.ndarray]] = [{} for _ in range(head.pop("micro_batches"))]
        for name, values in arrays.items():
            k, _, quantity = name.partition("/")
            passes[int(k)][quantity] = values
        del head["format"]
        return Recording(passes=passes, **head)
    except (ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RecordingError(f"{path} is no recorded step, or is damaged ({type(error).__name__}: {error})") from error


def fingerprint(model: nn.Module) -> str:
    """Of shapes and of some elements of all parameters, in order, as float64; "" where they are in shards."""
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
    """bfloat16, which numpy does not know, becomes float32."""
    host = values.detach().cpu()
    array: np.ndarray = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return array


def _dtype(model: nn.Module) -> str:
    first = next(model.parameters(), None)
    return "float32" if first is None else str(first.dtype).removeprefix("torch.")


def _notes(passes: Passes) -> list[str]:
    notes = []
    if any("aux" in one.coefficients for one in passes.all):
        notes.append("the loss had an auxiliary part of the model's, which is not replayed")
    if any(one.drew and one.random.cuda for one in passes.all):
        notes.append("dropout drew on an accelerator, which is not drawn again")
    return notes


def _figures(report: Localisation) -> dict[str, Any]:
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
    """Under another name first: a file of this name is whole."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
