"""Arguments of a :class:`~rlwatch.integrations.torch.attach.Watcher`, checked before training begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from rlwatch.errors import ConfigError
from rlwatch.integrations.step_tally import Decode
from rlwatch.tensors.megatron import divided


def check_models(model: Any, ref_model: Any) -> None:
    """Raises ``ConfigError`` for what is no module, and for a reference that is the policy itself."""
    for name, given in (("model", model), ("ref_model", ref_model)):
        if given is not None and not isinstance(given, nn.Module):
            raise ConfigError(f"{name} must be a torch.nn.Module, got {type(given).__name__}")
    if ref_model is not None and ref_model is model:
        raise ConfigError("ref_model is the policy itself: its KL is always 0; pass a frozen copy, or leave it out")


HIDDEN = (
    "Megatron holds the model's gradients in buffers or cuts it over ranks, so that its forwards cannot be run again "
    "with displaced weights, and spikes are not traced to tokens"
)


def hides_gradients(model: nn.Module | None) -> bool:
    """True if spikes of its gradient cannot be localised: it is Megatron's."""
    return model is not None and divided(model)


def check_optimizer(optimizer: Any) -> None:
    """Raises ``ConfigError`` for what has no ``param_groups``."""
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), Sequence):
        raise ConfigError(f"optimizer must have param_groups, as torch.optim's do; got {type(optimizer).__name__}")


def check_callables(**given: Any) -> None:
    """Raises ``ConfigError`` naming the argument that cannot be called."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} must be a function, got {value!r}")


def check_verifier(name: Any, function: Any, known: Collection[str]) -> None:
    """Raises ``ConfigError`` for a name that is no text or is taken, or for what cannot be called."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"verifier: name must be a text that names the function, got {name!r}")
    if name in known:
        raise ConfigError(f"verifier: {name!r} names two functions; give each its own name")
    if not callable(function):
        raise ConfigError(f"verifier {name!r}: function must be a function, got {function!r}")


def check_run(run: Any, init_arguments: Mapping[str, Any]) -> None:
    """A run that exists takes no settings. Raises ``ConfigError``."""
    if run is not None and init_arguments:
        raise ConfigError(f"run= is given, so {next(iter(init_arguments))}= has no effect; give one or the other")


def clip_of(clip: Any) -> tuple[float, float] | None:
    """(low, high) of a PPO clip; a number is both. Raises ``ConfigError``."""
    if clip is None:
        return None
    pair = (clip, clip) if _is_number(clip) else clip
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(_is_number(x) and x >= 0 for x in pair):
        raise ConfigError(f"clip must be (low, high), as in [1 - low, 1 + high], or one number for both; got {clip!r}")
    return float(pair[0]), float(pair[1])


def eos_of(eos: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """Ids that end a response; a number is one, none given are the tokenizer's. Raises ``ConfigError``."""
    ids = (eos,) if _is_id(eos) else eos
    if not isinstance(ids, Sequence) or not all(_is_id(x) for x in ids):
        raise ConfigError(f"eos must be a token id or a list of them, got {eos!r}")
    eos_id = getattr(tokenizer, "eos_token_id", None)
    return tuple(ids) or ((int(eos_id),) if eos_id is not None and _is_id(eos_id) else ())


def decoder_of(tokenizer: Any) -> Decode | None:
    """Token ids -> their text. Raises ``ConfigError`` for a tokenizer that cannot tell."""
    if tokenizer is None:
        return None
    if not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(f"tokenizer must have decode(ids), got {type(tokenizer).__name__}")
    return lambda ids: str(tokenizer.decode(list(ids)))


def positive(name: str, value: Any) -> float | None:
    """A number above 0, or None. Raises ``ConfigError``."""
    if value is None:
        return None
    if not _is_number(value) or not value > 0:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
