"""Canaries in verl: known answers scored by the reward function of its reward manager, in the driver's process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rlwatch.errors import ConfigError
from rlwatch.integrations.canaries import Canaries, Canary, CanaryScorer

REQUIRED = ("data_source", "solution", "ground_truth", "right")
OPTIONAL = ("name", "extra_info")


def canaries_of(wish: Any) -> Canaries | None:
    """Parse the section ``trainer.rlwatch.canaries``: a list of answers, or ``answers`` with ``every`` and ``wait_s``.

    Each answer has ``data_source``, ``solution``, ``ground_truth`` and ``right``, and may have ``name`` and
    ``extra_info``, as in verl's dataset. Raises ``ConfigError`` for anything else.
    """
    if not wish:
        return None
    given = dict(wish) if isinstance(wish, Mapping) else {"answers": wish}
    known = [one.name for one in fields(Canaries)]
    if not isinstance(given.get("answers"), list | tuple) or not given.keys() <= set(known):
        raise ConfigError(f"trainer.rlwatch.canaries is a list, or holds {', '.join(known)}; got {wish!r}")
    return Canaries(**{**given, "answers": [_canary(one) for one in given["answers"]]})


def _canary(one: Any) -> Canary:
    names = set(one) if isinstance(one, Mapping) else set()
    if not set(REQUIRED) <= names or not names <= {*REQUIRED, *OPTIONAL}:
        raise ConfigError(
            f"a canary of verl has {', '.join(REQUIRED)}, and may have {', '.join(OPTIONAL)}; got {one!r}"
        )
    answer = (one["data_source"], one["solution"], one["ground_truth"])
    return Canary(*answer, right=one["right"], name=one.get("name", ""), extra_info=dict(one.get("extra_info") or {}))


def canary_scorer(config: Any, wish: Canaries | None) -> CanaryScorer | None:
    """Return the scorer of the canaries ``wish`` by the reward function in verl's ``config``; None without canaries.

    Raises ``ConfigError`` if the function cannot score one of them.
    """
    if wish is None:
        return None
    name, function = reward_function(config)
    return CanaryScorer(wish, {name: lambda canary: _scored(function, canary)})


def reward_function(config: Any) -> tuple[str, Callable[..., Any]]:
    """Return name and function that verl's reward manager calls: the custom one of ``config``, else verl's own."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    custom = get_custom_reward_fn(config)
    if custom is None:
        return "default_compute_score", default_compute_score
    return str(config.reward.custom_reward_function.name), custom


def _scored(function: Callable[..., Any], canary: Canary) -> Any:
    data_source, solution, truth = canary.given
    result = function(data_source=data_source, solution_str=solution, ground_truth=truth, **canary.columns)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return result["score"] if isinstance(result, Mapping) else result


async def _awaited(result: Any) -> Any:
    return await result
