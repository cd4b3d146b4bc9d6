"""Name and create the files of a run, readable by their owner only (modes 0700 and 0600), and detect network file
systems, where SQLite's write-ahead log does not work.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Protocol

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreCorruptError, StoreError, StoreFullError
from rlwatch.store import check_run_id
from rlwatch.store.sqlite.segments import HEADER_BYTES

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths of the files of one run, which lie in ``directory``."""

    directory: Path

    @property
    def run(self) -> Path:
        """Path of the database of measurements; while a writer lives there are also ``run.db-wal`` and
        ``run.db-shm``.
        """
        return self.directory / "run.db"

    @property
    def wal(self) -> Path:
        """Path of SQLite's write-ahead log: committed rows that are not yet in ``run.db``."""
        return self.directory / "run.db-wal"

    @property
    def unborn(self) -> Path:
        """Path of ``run.db`` before its tables are complete; no reader opens it."""
        return self.directory / ".run.db.new"

    @property
    def control(self) -> Path:
        """Path of the database of commands, alerts and outgoing messages."""
        return self.directory / "control.db"

    @property
    def lock(self) -> Path:
        """Path of the lock file that the run's writer holds; it contains the writer's process id and host."""
        return self.directory / "run.lock"


def files_of(root: Path, run_id: str) -> RunFiles:
    """Return the paths of the run's files under ``root``. Raises ``StoreError`` if ``run_id`` is not a valid name."""
    return RunFiles(root / check_run_id(run_id))


def existing_files(root: Path, run_id: str) -> RunFiles:
    """Return the paths of the files of a run that exists under ``root``. Raises ``RunNotFoundError`` if it does not."""
    try:
        files = files_of(root, run_id)
    except StoreError as error:
        raise RunNotFoundError(f"no such run in {root}: {error}") from error
    if not holds_run(files.directory):
        raise RunNotFoundError(f"no run {run_id!r} in {root}; `rlwatch runs` lists what there is")
    return files


def run_ids(root: Path) -> list[str]:
    """Return the names of the directories under ``root`` that hold a run; empty if ``root`` does not exist yet."""
    return [entry.name for entry in directories_in(root) if holds_run(root / entry.name)]


def holds_run(directory: Path) -> bool:
    """Return True for a directory with a ``run.db``, or with a journal from which one can be rebuilt."""
    return is_there(directory / "run.db") or has_journal(directory)


def has_journal(directory: Path) -> bool:
    """Return True if a journal file in the run's ``directory`` holds anything but its header."""
    return any(size_of(path) > HEADER_BYTES for path in files_in(directory))


_JOURNAL = re.compile(r"run\.journal-(\d+)")


def files_in(directory: Path) -> list[Path]:
    """Return the journal files of the run in ``directory``, in the order they were written."""
    try:
        with os.scandir(directory) as listing:
            names = [e.name for e in listing if _JOURNAL.fullmatch(e.name) and e.is_file(follow_symlinks=False)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]))]


def require_plain(path: Path) -> None:
    """Raise ``StoreCorruptError`` if a database, or a file that SQLite keeps next to it, is not a regular file.

    Opening a named pipe would wait for its other end for ever.
    """
    for each in (path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm", "-journal"))):
        try:
            mode = each.stat().st_mode
        except OSError:
            continue  # not there, or opening it gives the error
        if not S_ISREG(mode):
            raise StoreCorruptError(f"{each} is not a regular file, and not of rlwatch: move it out of the store")


def directories_in(root: Path) -> list[os.DirEntry[str]]:
    """Return all directories under ``root`` except hidden ones, sorted by name, whatever they hold.

    Empty if ``root`` does not exist yet. Raises ``StoreError`` if it cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot list {root} ({error.strerror}); check its permissions") from error
    return sorted(found, key=lambda entry: entry.name)


def is_there(path: Path) -> bool:
    """Return True if the file exists, or if its existence cannot be determined: opening it then gives the error."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def size_of(path: Path) -> int:
    """Return the size of the file in bytes; 0 if it does not exist or cannot be accessed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def usage_of(files: RunFiles) -> dict[str, int]:
    """Return the disk space of a run's files in bytes, with space reserved for them, by contents.

    Keys: ``measurements``, ``control``, ``journal`` and ``other``.
    """
    kinds = {"run.db": "measurements", "control.db": "control", "run.journal": "journal"}
    found: dict[str, int] = {}
    for path in sorted(files.directory.rglob("*")):
        name = next((kind for start, kind in kinds.items() if path.name.startswith(start)), "other")
        with contextlib.suppress(OSError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                found[name] = found.get(name, 0) + 512 * stat.st_blocks
    return found


def make_private(directory: Path) -> None:
    """Create ``directory`` (and its parents) if missing, with mode 0700. Raises ``StoreError`` if that fails."""
    with writing_to(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)


def touch_private(path: Path) -> None:
    """Create the file ``path`` if missing, with mode 0600; SQLite gives its side files the same mode.

    An existing file is not opened. Closing any descriptor of a file drops every lock that this process holds on it,
    SQLite's in other threads too; two writers would then corrupt it. For the same reason a new file gets its name only
    after it was closed. Raises ``StoreError`` if the file cannot be created.
    """
    if path.exists():
        return
    born = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with writing_to(path):
        os.close(os.open(born, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        try:
            os.link(born, path)
        except FileExistsError:
            pass  # another thread or process was first
        except OSError:  # no hard links here
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        finally:
            born.unlink()


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` of writing to ``path`` to ``StoreFullError`` (no space) or ``StoreError``, with advice."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(f"no room to write {path} ({error.strerror}); free disk space or quota") from error
        raise StoreError(
            f"cannot write {path} ({error.strerror}); check the directory's permissions, "
            "or choose another with RLWATCH_STORE or store="
        ) from error


# Detection of network file systems, where SQLite's write-ahead log does not work.

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb2",
    "smb3",
    "smbfs",
    "wekafs",
}
# FUSE mounts are remote (sshfs, s3fs, gcsfuse, juicefs...) unless known to be a view of a local disk.
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.ntfs-3g", "fuse.bindfs"}
_ESCAPED = re.compile(r"\\([0-7]{3})")  # mountinfo writes space, tab, newline and backslash as octal


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that holds ``path``, such as ``nfs4``; None for a local disk.

    ``path`` need not exist yet. The mount whose directory is the longest prefix of the resolved path decides; of two at
    one directory, the later one, which hides the earlier. ``mounts`` is the text of ``/proc/self/mountinfo``; where
    there is none (not Linux) every path counts as local.
    """
    if mounts is None:
        mounts = _MOUNTS.read_text(errors="replace") if _MOUNTS.exists() else ""
    target = path.resolve()
    deepest, kind = -1, ""
    for line in mounts.splitlines():
        before, separated, after = line.partition(" - ")
        fields = before.split(" ")
        if not separated or len(fields) < 5:
            continue
        directory = Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4]))
        if target.is_relative_to(directory) and len(directory.parts) >= deepest:
            deepest, kind = len(directory.parts), after.split(" ")[0]
    return kind if is_network(kind) else None


def is_network(kind: str) -> bool:
    """Return True if the mount type ``kind`` (``nfs4``, ``ext4``, ``fuse.sshfs``...) is a network file system."""
    return kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


# Own a run: one writer at a time, no shared state in forked children, and leases that end with their process.


class ForkAware(Protocol):
    """An object that belongs to the process that made it, such as a lock or a database connection."""

    def disown(self) -> None:
        """Drop the resources of the parent process, without touching files. Called in a freshly forked child."""
        ...


_alive: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def belongs_here(thing: ForkAware) -> None:
    """Have ``thing.disown()`` called in every child that this process forks from now on."""
    _alive.add(thing)


def keep_forever(db: object) -> None:
    """Keep the database connection ``db`` from ever being closed, even when the interpreter ends.

    In a forked child, closing an inherited connection rolls back the transaction that the parent is writing, in the
    log's index that both share in memory. That would damage the parent's file.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


def _in_child() -> None:
    for thing in list(_alive):
        thing.disown()
    _alive.clear()


os.register_at_fork(after_in_child=_in_child)


# One writer per run: ``flock`` on ``run.lock``, which dies with the process that holds it.

_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class RunLock:
    """The lock of a run, which its one writer holds from construction to :meth:`release`.

    ``path``: the lock file. ``optional``: succeed on file systems that cannot lock at all (some network ones).
    ``amending``: the lock is held only briefly, and its file notes that.

    ``flock`` belongs to the opened file, not to the process: a second lock in the same process is refused, too. Raises
    ``RunLockedError``, which names the holder, if the lock is taken.
    """

    def __init__(self, path: Path, *, optional: bool = False, amending: bool = False) -> None:
        self._amending = amending
        with writing_to(path):
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        belongs_here(self)
        with contextlib.ExitStack() as undo:
            undo.callback(self.release)
            self._take(self._fd, path, optional=optional)
            undo.pop_all()

    def release(self) -> None:
        """Release the lock; idempotent. A forked child may hold a copy of the file, so that closing ours would not
        release it.
        """
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a file system that cannot lock has nothing to let go
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.disown()

    def disown(self) -> None:
        """Close this forked child's copy of the lock file, so that the lock ends with the parent."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _take(self, fd: int, path: Path, *, optional: bool) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder, amending = _holder(fd)
            error = RunLockedError(
                f"run {path.parent.name!r} is already being written by {holder}; "
                "wait for it to end, stop it, or give this run another run_id"
            )
            error.amending = amending
            raise error from None
        except OSError as error:
            if not (optional and error.errno in _UNSUPPORTED):
                with writing_to(path):
                    raise
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "amending": self._amending}
        note = json.dumps(owner).encode()
        with writing_to(path):
            os.truncate(fd, 0)
            os.pwrite(fd, note, 0)


def _holder(fd: int) -> tuple[str, bool]:
    """Return a description of the lock's holder, and True if it holds the lock only briefly."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        note = json.loads(os.pread(fd, 4096, 0))
        return f"process {note['pid']} on {note['host']}", bool(note.get("amending"))
    return "another process", False


# The process that holds a row, written so that another process of the same machine can check whether it still lives.


def this_process() -> str:
    """Return a name of this process that is unique over time: host, process id, and start time, as ids are reused."""
    return _process_name(os.getpid())


@cache
def _process_name(pid: int) -> str:
    return f"{socket.gethostname()}/{pid}/{_started_at(pid)}"


def is_gone(owner: str) -> bool:
    """Return True if the process named ``owner`` (see :func:`this_process`) ran on this machine and has ended.

    Always False for a process of another machine, which cannot be checked.
    """
    host, _, rest = owner.rpartition("/")[0].rpartition("/")
    started = owner.rpartition("/")[2]
    if host != socket.gethostname() or not rest.isdecimal():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return started != _started_at(int(rest))


def _started_at(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if there is no ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
