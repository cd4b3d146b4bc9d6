"""Reward functions of a GRPO or RLOO trainer, measured while it calls them."""

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
    """The reward functions of one trainer, replaced by meters only during the call that computes rewards.

    Between calls ``trainer.reward_funcs`` are the user's own objects, which a callback may read, change or replace.
    Reward models are left alone: TRL calls a module in another way, and its time is that of a device.
    """

    def __init__(self, trainer: Any, seam: ErrorBoundary) -> None:
        self.meter = VerifierMeter(seam)
        self._trainer = trainer
        self._seam = seam

    def names(self) -> list[str]:
        """Return names of all functions; of several with one name the later ones are numbered."""
        return numbered(self._trainer.reward_func_names)

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Have the functions measured that are called inside the block. What the block raises passes unchanged."""
        trainer, given = self._trainer, getattr(self._trainer, "reward_funcs", None)
        measured = self._seam.attempt(TAP, self._measured)
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
    """Make names unique.

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
    """Each reward function of the trainer, called as TRL calls it, with one answer.

    Raises ``ConfigError`` where there are only reward models.
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
"""Arguments with which a reward function logs, and the methods of a TRL that gives them."""


def ids_of(trainer: Any, completion: Any) -> list[int]:
    """Return token ids of a completion."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return list(tokenizer(as_text(completion), add_special_tokens=False)["input_ids"])


def checked(wish: Canaries | None) -> None:
    """Raise ``ConfigError`` for a canary that is no prompt and completion."""
    for name, canary in wish.named() if wish is not None else ():
        if len(canary.given) != 2:
            raise ConfigError(f"canary {name!r}: give prompt and completion, got {canary!r}")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In the place of a function that logs: canaries are no completions of the run."""
