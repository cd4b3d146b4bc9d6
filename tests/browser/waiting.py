"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

WAIT_S = 600.0
PATIENCE_MS = 120_000
"""How long a page is waited for: far longer than it takes on a busy machine, since nothing is asserted of its speed."""


def patient(browser: Browser, **options: object) -> BrowserContext:
    """Make a browser of somebody's, whose every click and look waits as long as all others do, not Playwright's 30 s."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    return context


def until(true: Callable[[], object], what: str, wait_s: float = WAIT_S) -> object:
    """Wait for other processes: the first truthy answer, or a failure that says what did not happen."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if answer := true():
            return answer
        time.sleep(0.1)
    return pytest.fail(f"not within {wait_s:g} s: {what}")
