"""Trust in a configuration file: a file of the user applies, a file that came with the data is only data.

A file that was named (``--config``, ``RLWATCH_CONFIG``, in code) is the user's. A file that was only found applies
under the rule of git and ssh: the user owns it, and not everyone may write it. A file in a store or run directory is
data, regardless of its owner: a store that was unpacked belongs to the user who unpacked it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_NAME = "rlwatch.toml"


def why_not_obeyed(file: Path, store_root: str | os.PathLike[str] | None = None) -> str:
    """Return why a configuration file that was found, not named, must not be applied; an empty text if it is the user's
    own.

    Links are followed; location and owner of link and file count. ``store_root``: directory of the store, where files
    are data.
    """
    try:
        found = [(file.absolute(), file.lstat()), (Path(os.path.realpath(file)), file.stat())]
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"
    if any(_lies_in_store(place.parent, store_root) for place, _ in found):
        return "it lies in a store, where it is data"
    foreign = next((info.st_uid for _, info in found if info.st_uid not in _our_ids()), None)
    if foreign is not None:
        return f"it belongs to another user (uid {foreign})"
    return "everybody may write it" if found[-1][1].st_mode & stat.S_IWOTH else ""


def _our_ids() -> set[int]:
    """Return the trusted users: the present one, root, and the one who called ``sudo``."""
    caller = os.environ.get("SUDO_UID", "")
    return {0, os.geteuid(), *([int(caller)] if os.geteuid() == 0 and caller.isdecimal() else [])}


def _lies_in_store(directory: Path, store_root: str | os.PathLike[str] | None) -> bool:
    """Return whether a directory is in the store, is a run's directory, or is another store."""
    if store_root is not None and any(_same(place, store_root) for place in (directory, *directory.parents)):
        return True
    try:
        return (directory / "run.db").exists() or any(directory.glob("*/run.db"))
    except OSError:
        return True


def _same(one: Path, other: str | os.PathLike[str]) -> bool:
    try:
        return one.samefile(other)  # also through links, bind mounts and letter case
    except OSError:
        return False
