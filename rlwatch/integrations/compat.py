"""What a trainer must have for us to look into it: methods, by the parameters we use, and settings, by their path.

Never a version number: a version says what was read, not what is there. Imports neither torch nor a trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Needs = Mapping[str, Sequence[str]]
"""Methods, and the parameters by which we know them."""


def lacking(holder: Any, needs: Needs) -> str | None:
    """Which of the methods ``needs`` names ``holder`` (a class or an instance) lacks, in words; None if it has all."""
    kind = holder if isinstance(holder, type) else type(holder)
    for method, parameters in needs.items():
        found = getattr(holder, method, None)
        if not callable(found) or getattr(kind, method, None) is getattr(object, method, kind):
            return f"{kind.__name__} has no {method}"
        absent = missing_parameter(found, parameters)
        if absent is not None:
            return f"{kind.__name__}.{method} has no parameter {absent!r}"
    return None


def missing_parameter(function: Callable[..., Any], parameters: Iterable[str]) -> str | None:
    """The first of ``parameters`` that ``function`` does not take; None if it takes all, or whatever it is given."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled: it does not say
        return None
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):  # as overriding methods pass on what they get
        return None
    return next((name for name in parameters if name not in known), None)


def lacking_settings(settings: Any, paths: Iterable[str]) -> str | None:
    """Which dotted path of attributes ``settings`` does not have, in words; None if it has all."""
    for path in paths:
        here = settings
        for name in path.split("."):
            if not hasattr(here, name):
                return f"there is no {path}"
            here = getattr(here, name)
    return None


def installed(distribution: str) -> str:
    """The installed version of ``distribution``, or ``""``: to be named in messages, never to be decided by."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
