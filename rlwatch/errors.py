"""Every error a user can meet, each with what was wrong, the value got and what to do.

Nothing here is raised into a training loop after set-up: see the failure policy in ``docs/decisions``.
"""

from __future__ import annotations


class RLWatchError(Exception):
    """Base of all errors rlwatch raises on purpose; the CLI prints these without a traceback."""


class ConfigError(RLWatchError):
    """A setting is wrong: unknown key, value out of range, missing extra."""


class FirstStepError(ConfigError, ValueError):
    """The first row of a run came with a step that is none: so would every other."""


class StoreError(RLWatchError):
    """A store cannot be opened, read or written."""


class StoreURLError(StoreError, ConfigError):
    """The store URL names no known backend or cannot be parsed."""


class StoreVersionError(StoreError):
    """The store was written by a newer rlwatch than this one."""


class StoreCorruptError(StoreError):
    """A run file is damaged and cannot be read."""


class StoreFullError(StoreError):
    """The disk (or quota) under the store is full."""


class StoreBusyError(StoreError):
    """Another process holds the row or file right now; the caller may try again later."""


class UnstorableError(StoreError):
    """An item cannot be stored as it is, now or later; nothing of its batch was written. ``item``: which, if known."""

    item: object = None


class RunNotFoundError(StoreError):
    """No run of that id in this store."""


class RunLockedError(StoreError):
    """Another process already writes this run; ``amending``: it only completes what a dead one left undone."""

    amending = False


class ControlUnavailableError(StoreError):
    """Commands cannot work on this store (for example on a network file system)."""


class ImportFormatError(RLWatchError):
    """A log could not be read.

    Parameters
    ----------
    source
        Path or name of the log.
    problem
        What was wrong and what to do about it.
    line
        1-based line number where reading stopped making sense, if known.
    """

    def __init__(self, source: str, problem: str, line: int | None = None) -> None:
        self.source = source
        self.problem = problem
        self.line = line
        where = source if line is None else f"{source}:{line}"
        super().__init__(f"{where}: {problem}")


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is not installed.

    Parameters
    ----------
    package
        The import name that is missing.
    extra
        The extra of ``rlwatch-monitor`` that brings it.
    needed_for
        What the user was trying to do.
    """

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed; "
            f"run: pip install 'rlwatch-monitor[{extra}]'"
        )
