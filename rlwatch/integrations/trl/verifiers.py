"""Measurement of the reward functions of a GRPO or RLOO trainer while the trainer calls them."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rlwatch.error_boundary import ErrorBoundary, call_or
from rlwatch.errors import ConfigError
from rlwatch.integrations.canaries import Canaries, Canary
from rlwatch.integrations.trl.batch import as_text
from rlwatch.integrations.verifiers import TAP, VerifierMeter


class RewardFunctions:
    """The reward functions of one trainer, which are replaced by measuring wrappers only while the trainer computes
    rewards.

    Between such calls ``trainer.reward_funcs`` are the user's own objects, which a callback may read, change or
    replace. Reward models are not wrapped: TRL calls a module in another way, and its time is that of a device.
    ``error_boundary`` is the error boundary around the measurement.
    """

    def __init__(self, trainer: Any, error_boundary: ErrorBoundary) -> None:
        self.meter = VerifierMeter(error_boundary)
        self._trainer = trainer
        self._error_boundary = error_boundary

    def names(self) -> list[str]:
        """Return the names of all reward functions; of several with the same name the later ones are numbered."""
        return numbered(self._trainer.reward_func_names)

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Measure the reward functions that are called inside the ``with`` block.

        Exceptions of the block propagate unchanged.
        """
        trainer, given = self._trainer, getattr(self._trainer, "reward_funcs", None)
        measured = self._error_boundary.attempt(TAP, self._measured)
        if measured is not None:
            trainer.reward_funcs = measured
        try:
            yield
        finally:
            if measured is not None and trainer.reward_funcs is measured:
                trainer.reward_funcs = given

    def _measured(self) -> list[Any]:
        names = self.names()
        functions = list(self._trainer.reward_funcs)
        return [self._with_meter(name, one) for name, one in zip(names, functions, strict=True)]

    def _with_meter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if isinstance(function, nn.Module) else self.meter.metered(name, function)


def numbered(names: Sequence[str]) -> list[str]:
    """Return ``names`` made unique, by a number after repeated names.

    >>> numbered(["exact", "format", "exact"])
    ['exact', 'format', 'exact#2']
    """
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def canary_scores(trainer: Any) -> dict[str, Callable[[Canary], Any]]:
    """Return for each reward function of ``trainer`` a function that scores one canary (an answer known to be right or
    wrong).

    The reward function is called as TRL calls it. Raises ``ConfigError`` if the trainer has only reward models.
    """
    named = zip(numbered(trainer.reward_func_names), range(len(trainer.reward_funcs)), strict=True)
    found = {name: _score(trainer, at) for name, at in named if not isinstance(trainer.reward_funcs[at], nn.Module)}
    if not found:
        raise ConfigError("canaries: this trainer has reward models only; leave canaries out")
    return found


def _score(trainer: Any, at: int) -> Callable[[Canary], Any]:
    ids: dict[int, list[int]] = {}  # created at set-up, when no other thread uses the tokenizer

    def score(canary: Canary) -> Any:
        prompt, completion = canary.given
        if id(canary) not in ids:
            ids[id(canary)] = call_or(lambda: ids_of(trainer, completion), lambda _error: [])
        given: dict[str, Any] = {name: [value] for name, value in canary.columns.items()}
        given |= {"prompts": [prompt], "completions": [completion], "completion_ids": [list(ids[id(canary)])]}
        given |= {name: _nothing for name, method in LOGS.items() if hasattr(trainer, method)}
        result = trainer.reward_funcs[at](**given, trainer_state=trainer.state)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return score


LOGS = {"log_extra": "_log_completion_extra", "log_metric": "_log_metric"}
"""Argument with which a reward function can log -> the method of a TRL that passes this argument."""


def ids_of(trainer: Any, completion: Any) -> list[int]:
    """Return the token ids of ``completion``, by the trainer's tokenizer."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return list(tokenizer(as_text(completion), add_special_tokens=False)["input_ids"])


def checked(wish: Canaries | None) -> None:
    """Raise ``ConfigError`` for a canary whose positional arguments are not a prompt and a completion."""
    for name, canary in wish.named() if wish is not None else ():
        if len(canary.given) != 2:
            raise ConfigError(f"canary {name!r}: give prompt and completion, got {canary!r}")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, in place of a function that logs: canaries are no completions of the run."""
