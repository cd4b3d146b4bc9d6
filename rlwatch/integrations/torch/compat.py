"""Settings of a :class:`~rlwatch.integrations.torch.attach.Watcher`, checked before training begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from rlwatch.errors import ConfigError
from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.control_tokens import control_tokens
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.snapshots import Snapshots
from rlwatch.integrations.step_tally import Decode
from rlwatch.integrations.torch.batch import LossSettings
from rlwatch.integrations.torch.commands import Adjustable, Means, settings_of
from rlwatch.tensors import megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherSettings:
    """Settings of a custom loop, which :class:`rlwatch.Watcher` takes by name or as this one object.

    >>> WatcherSettings(clip=0.2, eos=2).loss().clip
    (0.2, 0.2)

    Parameters
    ----------
    clip, dual_clip, truncation, off_policy_delta
        Settings of the loss, so that clipped tokens are counted. ``clip`` is (low, high) of a PPO clip [1 - low, 1 +
        high], or one number for both. ``dual_clip`` is the cap on -r A of dual-clip PPO. ``truncation`` is the largest
        weight of truncated importance sampling. ``off_policy_delta`` is the threshold of an off-policy sequence mask,
        in nats per token.
    kl_coef, set_kl_coef
        Weight of the KL term, or a function that returns it; and a function that sets it, for the command
        ``set-kl-coef``.
    save
        Function that saves a checkpoint and returns its place, for the command ``save-checkpoint``. Every rank calls
        it.
    temperature
        Sampling temperature, by which ``logits`` given to ``Watcher.observe`` are divided.
    eos
        Id or ids of the tokens that end a response, so that responses that never end are counted; by default the
        tokenizer's.
    control
        Ids of control tokens (of the template, tools, thinking): their share and probability are measured, and whether
        the mismatch sits at them; by default those that the tokenizer added.
    tokenizer
        A tokenizer with Hugging Face's interface: for ``text``, to check that sampled ids survive decoding, and for the
        ids above.
    text, completions
        ``text``: keep the text of extreme tokens with their ids. ``completions``: keep a few completions at intervals
        (:class:`~rlwatch.integrations.completions.KeepCompletions`). If both are off, no text leaves the trainer.
    level
        ``"scalars"``, ``"tokens"``, ``"gradients"`` or ``"full"``: see :class:`~rlwatch.integrations.level.Level`.
    localise
        Report from ``Watcher.gradients`` the tokens that cause a spike of the gradient or a gradient that is not
        finite: True, False, or settings (:class:`~rlwatch.integrations.localising.Localise`). It needs
        ``Watcher.forward``, and waits for the device once a step, for the norm. By default it is on in a loop of one
        process. With several ranks every rank must switch it on. It is not possible for a model whose gradients
        Megatron holds or divides over ranks.
    rows
        Function that restricts the arguments of ``Watcher.forward`` to some of its sequences, for a spike. It is called
        with a list of row numbers and those arguments, and returns a tuple of arguments for these rows only. By default
        every value with one row for each sequence is restricted (tensors, lists, contents of mappings and objects,
        variables that the function closes over). The result is always compared with what the sequence gave among the
        others.
    strict
        Raise ``ConfigError`` if an input does not fit: to try a loop out, not to train.
    snapshots
        Keep snapshots of ``model``, ``optimizer``, ``scheduler`` and ``scaler``: True, False, or settings
        (:class:`~rlwatch.integrations.snapshots.Snapshots`). The first is taken now, the others by ``Watcher.obey``.
    on_rollback
        Called in ``Watcher.obey`` with the step whose state the command ``rollback`` restored: drop rollouts that wait
        to be trained on, and send the weights to the rollout engine. If another rank then fails to restore it, the
        state before is restored, and the function is called with the step that has ended.
    sync_weights
        Function that sends the weights to the rollout engine, for the command ``sync-weights``.
    adjustable
        Settings of the loop that commands may change: ``set-clip``, ``set-grad-clip``, ``set-entropy-coef`` or
        ``set-is-correction`` -> ``(read, write)``. ``read()`` returns the values by the command's argument names, or
        the value itself if the command has one. ``write(**values)`` sets them.

    Raises
    ------
    ConfigError
        If a function is not callable.
    """

    clip: float | tuple[float, float] | None = None
    dual_clip: float | None = None
    truncation: float | None = None
    off_policy_delta: float | None = None
    kl_coef: float | Callable[[], float] | None = None
    set_kl_coef: Callable[[float], Any] | None = None
    save: Callable[[], Any] | None = None
    temperature: float = 1.0
    eos: int | Sequence[int] = ()
    control: Sequence[int] = ()
    tokenizer: Any = None
    text: bool = False
    completions: bool | KeepCompletions = False
    level: str = Level.FULL
    localise: bool | Localise | None = None
    rows: Callable[..., tuple[Any, ...]] | None = None
    strict: bool = False
    snapshots: bool | Snapshots = False
    on_rollback: Callable[[int], Any] | None = None
    sync_weights: Callable[[], Any] | None = None
    adjustable: Mapping[str, Adjustable] | None = None

    def __post_init__(self) -> None:
        check_callables(
            save=self.save,
            set_kl_coef=self.set_kl_coef,
            rows=self.rows,
            on_rollback=self.on_rollback,
            sync_weights=self.sync_weights,
        )

    def loss(self) -> LossSettings:
        """Return the settings that describe the loss. Raises ``ConfigError`` for a value out of range."""
        return LossSettings(
            clip=clip_of(self.clip),
            dual_clip=positive("dual_clip", self.dual_clip),
            truncation=positive("truncation", self.truncation),
            off_policy_delta=positive("off_policy_delta", self.off_policy_delta),
            eos=eos_of(self.eos, self.tokenizer),
            **control_of(self.control, self.tokenizer),
            temperature=positive("temperature", self.temperature) or 1.0,
        )

    def commanded(self, means: Means) -> Means:
        """Return ``means`` with the loop's own functions for commands added.

        Raises ``ConfigError`` for an invalid ``adjustable``.
        """
        return replace(
            means,
            save=self.save,
            kl_coef=self.kl_coef,
            set_kl_coef=self.set_kl_coef,
            on_rollback=self.on_rollback,
            sync_weights=self.sync_weights,
            settings=settings_of(self.adjustable or {}),
        )


NAMES = frozenset(each.name for each in fields(WatcherSettings))


def divided(settings: WatcherSettings | None, arguments: Mapping[str, Any]) -> tuple[WatcherSettings, dict[str, Any]]:
    """Return ``settings`` with the fields that ``arguments`` override, and the other arguments, which are for
    :func:`rlwatch.init`.
    """
    own = {name: value for name, value in arguments.items() if name in NAMES}
    others = {name: value for name, value in arguments.items() if name not in NAMES}
    return replace(settings or WatcherSettings(), **own), others


def check_models(model: Any, ref_model: Any) -> None:
    """Raise ``ConfigError`` if a model is no ``torch.nn.Module``, or if the reference is the policy itself."""
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
    """Return True if spikes of the gradient of ``model`` cannot be localised, because it is a model of Megatron."""
    return model is not None and megatron.divided(model)


def check_optimizer(optimizer: Any) -> None:
    """Raise ``ConfigError`` if ``optimizer`` is not None and has no ``param_groups``."""
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), Sequence):
        raise ConfigError(f"optimizer must have param_groups, as torch.optim's do; got {type(optimizer).__name__}")


def check_callables(**given: Any) -> None:
    """Raise ``ConfigError`` with the name of the argument if a given value is neither None nor callable."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} must be a function, got {value!r}")


def check_verifier(name: Any, function: Any, known: Collection[str]) -> None:
    """Raise ``ConfigError`` if ``name`` is no text or is in ``known``, or if ``function`` is not callable."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"verifier: name must be a text that names the function, got {name!r}")
    if name in known:
        raise ConfigError(f"verifier: {name!r} names two functions; give each its own name")
    if not callable(function):
        raise ConfigError(f"verifier {name!r}: function must be a function, got {function!r}")


def check_run(run: Any, init_arguments: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if ``run`` is given together with arguments for a new run."""
    if run is not None and init_arguments:
        raise ConfigError(f"run= is given, so {next(iter(init_arguments))}= has no effect; give one or the other")


def clip_of(clip: Any) -> tuple[float, float] | None:
    """Return (low, high) of a PPO clip [1 - low, 1 + high]; one number means both.

    Raises ``ConfigError`` for other values.
    """
    if clip is None:
        return None
    pair = (clip, clip) if _is_number(clip) else clip
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(_is_number(x) and x >= 0 for x in pair):
        raise ConfigError(f"clip must be (low, high), as in [1 - low, 1 + high], or one number for both; got {clip!r}")
    return float(pair[0]), float(pair[1])


def eos_of(eos: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the token ids that end a response, from one id or a sequence; by default the tokenizer's.

    Raises ``ConfigError`` for other values.
    """
    ids = (eos,) if _is_id(eos) else eos
    if not isinstance(ids, Sequence) or not all(_is_id(x) for x in ids):
        raise ConfigError(f"eos must be a token id or a list of them, got {eos!r}")
    eos_id = getattr(tokenizer, "eos_token_id", None)
    return tuple(ids) or ((int(eos_id),) if eos_id is not None and _is_id(eos_id) else ())


def control_of(control: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Return ids of control tokens, the tokenizer's if none are given, and its tags. Raises ``ConfigError``."""
    if not isinstance(control, Sequence) or not all(_is_id(x) for x in control):
        raise ConfigError(f"control must be a list of token ids, got {control!r}")
    known = control_tokens(tokenizer)
    return {"control": tuple(control) or known.ids, "tags": known.tags}


def decoder_of(tokenizer: Any) -> Decode | None:
    """Return a function that converts token ids to text, or None without a tokenizer.

    Raises ``ConfigError`` for a tokenizer without ``decode``.
    """
    if tokenizer is None:
        return None
    if not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(f"tokenizer must have decode(ids), got {type(tokenizer).__name__}")
    return lambda ids: str(tokenizer.decode(list(ids)))


def positive(name: str, value: Any) -> float | None:
    """Return ``value`` as a float, or None if it is None.

    Raises ``ConfigError``, with ``name``, unless it is above 0.
    """
    if value is None:
        return None
    if not _is_number(value) or not value > 0:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
