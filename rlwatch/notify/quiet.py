"""Libraries that carry alerts write whole addresses and messages to their logs; ours are secrets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
    "apprise",
)


class _Ours(logging.Filter):
    """Drops what these libraries log about our own deliveries, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.now = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002  (the interface of logging)
        return not getattr(self.now, "delivering", False)


_ours = _Ours()


@contextmanager
def quiet_http_logs() -> Iterator[None]:
    """Within it this thread's requests leave no line in the libraries' logs. May be nested."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_ours)  # a filter is only added once
    before = getattr(_ours.now, "delivering", False)
    _ours.now.delivering = True
    try:
        yield
    finally:
        _ours.now.delivering = before
