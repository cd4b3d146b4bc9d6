"""Checking at set-up what a mirrored run will need at its first row, when nothing may be raised any more."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlwatch.errors import ConfigError
from rlwatch.run import Run
from rlwatch.run.alerting import alerting_for
from rlwatch.run.wiring import init, opened


def settings(given: Mapping[str, Any], run: Run | None, caller: str) -> dict[str, Any]:
    """Arguments of :func:`rlwatch.init` for the runs of ``caller``: its store opened, its alerting tried.

    Raises
    ------
    ConfigError
        For an unknown argument, one beside ``run``, or alerting that cannot work.
    StoreError
        If the store cannot be opened.
    """
    if run is not None:
        if given:
            raise ConfigError(
                f"{caller} got run= and {sorted(given)[0]}=; arguments of rlwatch.init are for runs made here"
            )
        return {}
    known = set(inspect.signature(init).parameters)
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"{caller} has no argument {unknown[0]!r}; those of rlwatch.init are: {', '.join(sorted(known))}"
        )
    store = opened(given.get("store"))
    alerting_for(
        config_file=given.get("config_file"),
        webhook_url=given.get("webhook_url"),
        rules=given.get("rules"),
        store=store,
    )
    return {**given, "store": store}
