"""Which verl this is, and whether it has what the hooks need. Imports neither torch nor verl."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

KNOWN = ("0.9.",)
"""Versions whose trainer and workers were read; tests run against 0.9.1."""


def verl_version() -> str:
    """The installed version of verl, or ``""``."""
    try:
        return version("verl")
    except PackageNotFoundError:
        return ""


def obstacle(holder: Any, methods: Iterable[str]) -> str | None:
    """Why ``holder`` cannot be tapped at ``methods``; None if it can."""
    installed = verl_version()
    if not installed.startswith(KNOWN):
        return f"verl {installed or 'is not installed'}; the taps know verl 0.9"
    for name in methods:
        if not callable(getattr(holder, name, None)):
            called = holder.__name__ if isinstance(holder, type) else type(holder).__name__
            return f"verl {installed}: {called} has no {name}"
    return None
