"""Every error that a user can meet. A message states what was wrong, the value received and what to do.

No error of this module is raised into a training loop after set-up: see the failure policy in ``docs/decisions``.
"""

from __future__ import annotations


class RLWatchError(Exception):
    """Base of all errors that rlwatch raises on purpose; the command line prints these without a traceback."""


class ConfigError(RLWatchError):
    """A setting is wrong: an unknown key, a value out of range, or a feature whose optional dependency is not
    installed.
    """


class FirstStepError(ConfigError, ValueError):
    """The first row that a run logged has an invalid step number, so every later row would probably have one too."""


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
    """An item (a row, an event, a batch of tokens) cannot be stored as it is, now or later; nothing of its batch was
    written.

    ``item``: the item, or None if it is not known which one of the batch is meant.
    """

    item: object = None


class RunNotFoundError(StoreError):
    """The store has no run with this id."""


class RunLockedError(StoreError):
    """Another process already writes this run.

    ``amending``: True if that process only completes data that a dead process of the run left unwritten.
    """

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
        A description of what was wrong and what to do about it.
    line
        1-based number of the line from which the log could not be read, if known.
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
        Name under which the missing package is imported.
    extra
        Extra of ``rlwatch-monitor`` that installs the package (``pip install 'rlwatch-monitor[extra]'``).
    needed_for
        The operation that the user requested; begins the message.
    """

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed; "
            f"run: pip install 'rlwatch-monitor[{extra}]'"
        )
