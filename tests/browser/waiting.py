"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

WAIT_S = 600.0


def until(true: Callable[[], object], what: str, wait_s: float = WAIT_S) -> object:
    """Wait for other processes: the first truthy answer, or a failure that says what did not happen."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if answer := true():
            return answer
        time.sleep(0.1)
    return pytest.fail(f"not within {wait_s:g} s: {what}")
