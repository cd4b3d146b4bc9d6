"""What a loop passes of a micro-batch, read as a :class:`~rlwatch.tensors.tokens.TokenBatch`.

A tensor that does not fit is left out, alone, with the reason; without ``logp`` or ``mask`` nothing can be read.
Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlwatch.seam import by_a_signal, described
from rlwatch.tensors.entropy import token_entropy, token_logp_entropy
from rlwatch.tensors.padded import Padded, longest_row
from rlwatch.tensors.tokens import TokenBatch

TOKENS = ("entropy", "old_logp", "ref_logp", "rollout_logp", "ids", "environment")
"""(B, T)."""
RESPONSES = ("staleness",)
"""(B,)."""
ROUTES = ("experts", "rollout_experts")
"""(B, T, layers, k)."""
OF_THE_LOSS = ("clip", "dual_clip", "truncation", "off_policy_delta")
"""The same for every micro-batch."""
WHOLE = ("ids", *ROUTES)
"""Integers: indices, not measurements."""


def why(misfit: Exception) -> str:
    """In our own words and torch's; of anything else the type, too."""
    return str(misfit) if type(misfit) in (ValueError, TypeError, RuntimeError, MisfitError) else described(misfit)


NO_DATA = "it is on the meta device, which holds no data"


class MisfitError(ValueError):
    """An input that cannot be what its name says."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for every micro-batch: fields of ``TokenBatch``, and the temperature of the logits."""

    clip: tuple[float, float] | None = None
    dual_clip: float | None = None
    truncation: float | None = None
    off_policy_delta: float | None = None
    temperature: float = 1.0


@dataclass(slots=True)
class Reader:
    """Reads one micro-batch; ``refused`` says of every input that was left out why."""

    settings: Settings
    refused: dict[str, str] = field(default_factory=dict)

    def read(self, inputs: Mapping[str, Any]) -> TokenBatch | None:
        """The batch; None if it holds no token at all, or no ``logp`` or ``mask`` that fits."""
        given = {name: value for name, value in inputs.items() if value is not None}
        if "logits" in given:
            self._try("logits", self._from_logits, given)
        logp = self._try("logp", self._logp, given)
        if logp is None:
            return None
        mask = self._try("mask", self._mask, given, logp)
        if mask is None or not logp.values.numel():
            return None
        read = {name: self._try(name, self._one, name, value, logp) for name, value in given.items()}
        extras = {name: value for name, value in read.items() if value is not None}
        of_the_loss = {name: getattr(self.settings, name) for name in OF_THE_LOSS}
        return TokenBatch(logp.values, mask, **extras, **of_the_loss)

    def _try(self, name: str, read: Any, *args: Any) -> Any:
        """None where ``read`` says that the input does not fit."""
        try:
            return read(*args)
        except Exception as misfit:
            if by_a_signal(misfit):
                raise
            self.refused[name] = why(misfit)
            return None

    def _from_logits(self, given: dict[str, Any]) -> None:
        """Entropy, and log-probs if the ids are known, unless they were given themselves."""
        logits, ids, heat = given["logits"], given.get("ids"), self.settings.temperature
        if "logp" not in given and ids is not None:
            logp, entropy = _over_rows(lambda x, i: token_logp_entropy(*_paired(x, i), temperature=heat), logits, ids)
            given["logp"] = logp
            given.setdefault("entropy", entropy)
        elif "entropy" not in given:
            (given["entropy"],) = _over_rows(lambda x: (token_entropy(x, temperature=heat),), logits)

    def _logp(self, given: dict[str, Any]) -> Padded:
        if "logp" not in given:
            raise MisfitError("neither logp= nor logits= with ids= was given")
        logp = Padded.of(measured(given["logp"]), longest=_longest(given))
        if logp.values.dim() != 2:
            raise MisfitError(f"it has shape {_shape(logp.values)} where (B, T) is needed{_packed(logp.values)}")
        if not logp.values.is_floating_point():
            raise MisfitError(f"it is of {logp.values.dtype}, which holds no log-probs")
        return logp

    def _mask(self, given: dict[str, Any], logp: Padded) -> Tensor:
        """Inside the mask, and there at all."""
        if "mask" not in given:
            if logp.valid is None:
                raise MisfitError("it was not given: which of the tokens are not padding?")
            return logp.valid
        mask = _beside(Padded.of(measured(given["mask"]), longest=logp.values.shape[1]), logp)
        inside = [part.bool() for part in (mask.values, mask.valid, logp.valid) if part is not None]
        return torch.stack(inside).all(0) if len(inside) > 1 else inside[0]

    def _one(self, name: str, value: Any, logp: Padded) -> Tensor | None:
        if name in ("logp", "mask", "logits"):
            return None
        value = Padded.of(measured(value), longest=logp.values.shape[1])
        if name in WHOLE and (value.values.is_floating_point() or value.values.is_complex()):
            raise MisfitError(f"it is of {value.values.dtype} where whole numbers are needed")
        if name == "advantages":
            return _advantages(value, logp)
        if name in RESPONSES:
            return _per_response(value, logp)
        return _beside(value, logp, more=2 if name in ROUTES else 0).values


def _over_rows(work: Any, *inputs: Any) -> tuple[Any, ...]:
    """``work`` of whole or jagged tensors, or of the rows of a list: nothing is padded before it is small."""
    if all(isinstance(x, Tensor) and (not x.is_nested or x.layout == torch.jagged) for x in inputs):
        return tuple(work(*(measured(x) for x in inputs)))
    rows = [_rows(x) for x in inputs]
    if len({len(x) for x in rows}) > 1:
        raise MisfitError(f"it has {len(rows[0])} rows where ids has {len(rows[-1])}")
    return tuple(list(column) for column in zip(*(work(*row) for row in zip(*rows, strict=True)), strict=True))


def _rows(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged:
        raise MisfitError("one of logits and ids is jagged and the other is not")
    return x.unbind() if isinstance(x, Tensor) else x


def _paired(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    if not logits.is_nested and logits.shape[:-1] != ids.shape:
        raise MisfitError(f"it has shape {_shape(logits)} where ids has {_shape(ids)}; one more dimension is needed")
    return logits, ids


def there(x: Any) -> Any:
    """``x``, if it holds data."""
    if isinstance(x, Tensor) and x.is_meta:
        raise MisfitError(NO_DATA)
    return x


def measured(x: Any) -> Any:
    """``x``, if it can be measured where it is."""
    if not isinstance(x, Tensor):
        return x
    if hasattr(x, "full_tensor"):
        raise MisfitError("it is a DTensor: pass what this rank holds of it (to_local), or all of it (full_tensor)")
    if x.is_complex():
        raise MisfitError("it is complex")
    return x


def _longest(given: Mapping[str, Any]) -> int | None:
    """The longest row, from whichever jagged input knows it."""
    return next((known for value in given.values() if (known := longest_row(value)) is not None), None)


def _beside(x: Padded, logp: Padded, more: int = 0) -> Padded:
    """``x``, if it lies token by token beside ``logp``, with ``more`` dimensions after those two."""
    wanted = logp.values.shape
    if x.values.shape[:2] != wanted or x.values.dim() != 2 + more:
        raise MisfitError(f"it has shape {_shape(x.values)} where logp has {_shape(logp.values)}{_routed(more)}")
    if x.lengths is not None and logp.lengths is not None and x.lengths != logp.lengths:
        raise MisfitError(f"its rows have lengths {_few(x.lengths)} where those of logp have {_few(logp.lengths)}")
    return Padded(_moved(x.values, logp), None if x.valid is None else _moved(x.valid, logp), x.lengths)


def _advantages(x: Padded, logp: Padded) -> Tensor:
    rows, shape = logp.values.shape[0], tuple(x.values.shape)
    if shape in ((rows,), (rows, 1)):
        return _moved(x.values, logp)
    return _beside(x, logp).values


def _per_response(x: Padded, logp: Padded) -> Tensor:
    rows, shape = logp.values.shape[0], tuple(x.values.shape)
    if shape not in ((rows,), (rows, 1)):
        raise MisfitError(f"it has shape {_shape(x.values)} where ({rows},) is needed: one for each response")
    return _moved(x.values.reshape(rows), logp)


def _moved(x: Tensor, logp: Padded) -> Tensor:
    """``x`` where ``logp`` is. To the CPU nothing is fetched: that would wait for the device."""
    here = logp.values.device
    if x.device == here:
        return x
    if here.type == "cpu":
        raise MisfitError(f"it is on {x.device} where logp is on the CPU")
    return x.to(here, non_blocking=True)


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _few(lengths: tuple[int, ...]) -> str:
    return f"{lengths}" if len(lengths) <= 8 else f"{lengths[:8]}..."


def _routed(more: int) -> str:
    return " and routing needs (B, T, layers, k)" if more else ""


def _packed(x: Tensor) -> str:
    packed = "; packed tokens: torch.nested.nested_tensor_from_jagged(logp, offsets=..., max_seqlen=...)"
    return packed if x.dim() == 1 else ""
