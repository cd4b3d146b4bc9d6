"""Opening the store a command was pointed at, and closing it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlwatch.ports import Store


@contextmanager
def opened(url: str | None) -> Iterator[Store]:
    """The store at ``url`` (``None``: ``RLWATCH_STORE``, else ``./rlwatch-runs``), closed afterwards."""
    from rlwatch.store.url import open_store

    store = open_store(url)
    try:
        yield store
    finally:
        store.close()
