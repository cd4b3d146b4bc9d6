"""Directories that are runs, and the logs below a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from rlwatch.errors import ImportFormatError
from rlwatch.importers.tensorboard_events import event_files

PATTERNS = ("*.log", "*.jsonl", "*.out", "*.csv", "*.wandb")
"""What logs are called, unless somebody says otherwise."""
DEEPEST = 12
"""Levels of directories that are looked through."""
_STATES = ("trainer_state.json", "*/trainer_state.json")
_CHECKPOINT = "checkpoint-"
_WANDB = "*.wandb"


def run_directory(directory: Path) -> Path | None:
    """What to read of a directory that is one run: itself (TensorBoard), or its ``.wandb`` file; None if it is none."""
    runs = sorted(directory.glob(_WANDB))
    if len(runs) == 1:
        return runs[0]
    return directory if event_files(directory) else None


def run_in(directory: Path) -> Path:
    """The run of ``directory``. Raises ``ImportFormatError`` with what to do where it is not one."""
    run = run_directory(directory)
    if run is not None:
        return run
    states = sorted(
        (state for pattern in _STATES for state in directory.glob(pattern)), key=lambda state: state.stat().st_mtime
    )
    below = next(logs_below(directory), None)
    if states:
        hint = f"the newest state of this directory is {states[-1]}"
    elif below is not None:
        hint = f"give one of the logs in it, such as {below}, or follow all of them with `rlwatch watch {directory}`"
    else:
        hint = "give the log file inside it"
    raise ImportFormatError(str(directory), f"is a directory, not a log; {hint}")


Refused = Callable[[Path, OSError], None]


def logs_below(
    directory: Path, patterns: Sequence[str] = PATTERNS, refused: Refused = lambda _directory, _error: None
) -> Iterator[Path]:
    """The logs in ``directory`` and below it, each once, directories in order of their names.

    A directory with event files is one log, and one with a ``.wandb`` file is nothing but that run. Hidden
    directories, checkpoints, links, what is neither file nor directory, and stores of rlwatch are left out. So are
    directories that cannot be read, of which ``refused`` is told.
    """
    yield from _below(directory, tuple(patterns), DEEPEST, refused)


def _below(directory: Path, patterns: tuple[str, ...], depth: int, refused: Refused) -> Iterator[Path]:
    try:
        names, directories = _listed(directory)
    except OSError as error:
        refused(directory, error)
        return
    if any((directory / name / "run.db").is_file() for name in directories):
        return
    wandb = [name for name in names if fnmatch(name, _WANDB)]
    if wandb:
        yield from (directory / name for name in wandb if _wanted(name, patterns))
        return
    if any("tfevents" in name for name in names) and (patterns == PATTERNS or _wanted("events.out.tfevents", patterns)):
        yield directory
    yield from (directory / name for name in names if "tfevents" not in name and _wanted(name, patterns))
    for name in directories:
        if depth > 0 and not name.startswith((".", _CHECKPOINT)):
            yield from _below(directory / name, patterns, depth - 1, refused)


def _listed(directory: Path) -> tuple[list[str], list[str]]:
    """Names of the files and of the directories in ``directory``, sorted."""
    files: list[str] = []
    directories: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            elif entry.is_file(follow_symlinks=False):
                files.append(entry.name)
    return sorted(files), sorted(directories)


def _wanted(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
