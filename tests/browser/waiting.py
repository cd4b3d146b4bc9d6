"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

WAIT_S = 600.0
PATIENCE_MS = 120_000
"""How long a page is waited for: far longer than it takes on a busy machine, since nothing is asserted of its speed."""


def patient(browser: Browser, **options: object) -> BrowserContext:
    """Make a browser of somebody's, whose every click and look waits as long as all others do, not Playwright's 30 s."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    make = context.new_page

    def new_page() -> Page:
        page = make()
        page.goto, page.reload = _taken_over(page, page.goto), _taken_over(page, page.reload)  # type: ignore[method-assign]
        return page

    context.new_page = new_page  # type: ignore[method-assign]
    return context


STATE = """document.documentElement.dataset.rlFirst
    ?? (document.querySelector("link[data-rl-first]") ? "awaited" : "none")"""


def _taken_over(page: Page, go: Callable[..., object]) -> Callable[..., object]:
    """Return ``go``, which then also waits until Streamlit has taken over what the page showed first."""

    def went(*args: object, **options: object) -> object:
        answer = go(*args, **options)
        until(lambda: page.evaluate(STATE) in {"none", "over"}, "Streamlit took the page over", PATIENCE_MS / 1000)
        return answer

    return went


def until(true: Callable[[], object], what: str, wait_s: float = WAIT_S) -> object:
    """Wait for other processes: the first truthy answer, or a failure that says what did not happen."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if answer := true():
            return answer
        time.sleep(0.1)
    return pytest.fail(f"not within {wait_s:g} s: {what}")
