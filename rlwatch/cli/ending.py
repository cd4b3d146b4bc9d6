"""Ending a command that would go on for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within it SIGTERM (a service manager, ``kill``) ends as tidily as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unbroken() -> Iterator[None]:
    """Put Ctrl-C off until the block has ended: what it begins must not be lost before somebody holds it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in before:
        signal.signal(name, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    if arrived:
        signal.raise_signal(arrived[0])
