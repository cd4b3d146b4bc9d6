"""Can the store be reached and written, and can its runs be read?"""

from __future__ import annotations

import os
from pathlib import Path

from rlwatch.cli.checks import Check, Level
from rlwatch.errors import StoreError
from rlwatch.ports import Store

MOST_LISTED = 10


def examine(url: str | None) -> list[Check]:
    """The place, its file system, its runs."""
    from rlwatch.store.url import open_store

    try:
        store = open_store(url)
    except StoreError as error:
        return [Check("store", Level.FAIL, f"cannot be opened: {error}")]
    try:
        return [*_place(store), *_runs(store)]
    finally:
        store.close()


def root_of(url: str | None) -> Path | None:
    """The directory of the store, where it is one."""
    from rlwatch.store.url import open_store

    try:
        return getattr(open_store(url), "root", None)
    except StoreError:
        return None


def _place(store: Store) -> list[Check]:
    root: Path | None = getattr(store, "root", None)
    if root is None:
        return [Check("store", Level.OK, store.url)]
    return [_writable(root), *_network(root)]


def _network(root: Path) -> list[Check]:
    from rlwatch.store.sqlite.netfs import network_file_system

    kind = network_file_system(root)
    if kind is None:
        return []
    return [
        Check(
            "file system",
            Level.WARN,
            f"{root} lies on a network file system ({kind}): runs are written node-locally and copied there every "
            "minute, and commands cannot reach the trainer; choose a local directory if you can",
        )
    ]


def _writable(root: Path) -> Check:
    """Judged by permissions: looking must not create anything."""
    existing = next(place for place in (root, *root.parents) if place.exists())
    if not os.access(existing, os.R_OK | os.X_OK):
        return Check("store", Level.FAIL, f"{root} cannot be read: check the permissions of {existing}")
    if not os.access(existing, os.W_OK):
        return Check("store", Level.WARN, f"{root} is read-only here: runs can be shown, not recorded or commanded")
    return Check("store", Level.OK, f"{root} {'is writable' if existing == root else 'will be made by the first run'}")


def _runs(store: Store) -> list[Check]:
    try:
        readable, unreadable = store.runs(), store.unreadable()
    except StoreError as error:
        return [Check("runs", Level.FAIL, str(error))]
    checks = [Check("runs", Level.OK, f"{len(readable)} readable")]
    checks += [Check("runs", Level.WARN, f"{name}: {why}") for name, why in list(unreadable.items())[:MOST_LISTED]]
    if len(unreadable) > MOST_LISTED:
        checks.append(Check("runs", Level.WARN, f"and {len(unreadable) - MOST_LISTED} more that cannot be read"))
    return checks
