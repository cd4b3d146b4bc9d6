"""Exchange records between nodes through a directory on a network file system: people's requests and the trainer's
answers.

SQLite's locks do not work there, and two nodes that write one file overwrite each other's records. So each node writes
a file of its own, always whole and by way of a rename, and reads the files of all nodes:

* ``RUN/.people/NODE.json``: commands, cancellations and acknowledgements of a run; the trainer's answers and alerts;
* ``.people/NODE.json`` in the root: silences and the audit.

If several files have records about one thing, only the trainer's node answers, so that nodes never have to agree.
Processes of one node take turns by a lock on the node's own disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlwatch import codec
from rlwatch.errors import StoreError
from rlwatch.records import JSON, Command, CommandStatus
from rlwatch.store.fields import dumps
from rlwatch.store.sqlite.layout import make_private, writing_to

_T = TypeVar("_T")
DIRECTORY = ".people"
MOST_BYTES = 16 << 20
"""Largest size of a node's file that is read, in bytes; no node writes a larger one."""
Words = dict[str, dict[str, Any]]
"""Contents of a node's file: kind (``commands``, ``alerts``...) -> key -> record, as JSON values."""


class NodeFiles:
    """The JSON files of all nodes in one directory, of which this node writes only its own.

    ``directory``: the run's directory, or the store's root. ``local``: a directory on this node's own disk, for its
    name and lock.
    """

    def __init__(self, directory: Path, local: Path) -> None:
        self._directory = directory / DIRECTORY
        self._local = local

    def all(self) -> list[Words]:
        """Return the contents of each node's file, ordered by file name; unreadable files count as empty."""
        return [_words_in(path) for path in self._files()]

    @contextmanager
    def change(self) -> Iterator[Words]:
        """Give this node's records for changes in place; they are written when the block is left.

        The file is on the server before it gets its name, so that a reader has the old file or the new one. Raises
        ``StoreError`` if it cannot be written.
        """
        make_private(self._local)
        with writing_to(self._local), (self._local / "people.lock").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            mine = self._directory / f"{node_name(self._local)}.json"
            words = _words_in(mine)
            before = dumps(words)
            yield words
            after = dumps(words)
            if after != before:
                self._put(mine, after)

    def _put(self, mine: Path, text: str) -> None:
        make_private(self._directory)
        arriving = mine.with_name(f".{mine.name}.{os.getpid()}")
        with writing_to(mine):
            try:
                # Users who may read the run's directory may read this.
                mode = 0o600 | self._directory.parent.stat().st_mode & 0o044
                fd = os.open(arriving, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                arriving.replace(mine)
            except OSError:
                with contextlib.suppress(OSError):
                    arriving.unlink(missing_ok=True)
                raise

    def _files(self) -> list[Path]:
        try:
            with os.scandir(self._directory) as listing:  # opened anew: so the server is asked what there is
                names = [e.name for e in listing if e.name.endswith(".json") and not e.name.startswith(".")]
        except OSError:
            return []
        return [self._directory / name for name in sorted(names)]


def node_name(local: Path) -> str:
    """Return this node's name, which is drawn once and kept in its ``local`` directory, so that all its processes share
    it.
    """
    path = local / "node-name"
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
        with os.fdopen(fd, "w") as file:
            file.write(f"{host}-{secrets.token_hex(4)}")
    return path.read_text()


def _words_in(path: Path) -> Words:
    for _ in range(2):  # ESTALE: it was replaced between its name and its opening
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe: no wait
            with os.fdopen(fd, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError:
            continue
        try:
            words = json.loads(data) if len(data) <= MOST_BYTES else {}
        except (ValueError, RecursionError):
            return {}
        whole = isinstance(words, dict) and all(isinstance(records, dict) for records in words.values())
        return words if whole else {}
    return {}


# The contents as records. Entries of other programs that are not such records are skipped.


def gathered(nodes: list[Words], kind: str) -> list[tuple[str, JSON]]:
    """Return key and record (JSON) of all records of one ``kind``, such as ``commands``, over all nodes."""
    return [record for words in nodes for record in words.get(kind, {}).items()]


def records_of(found: list[tuple[str, JSON]], kind: type[_T]) -> list[_T]:
    """Return the ``found`` (key, JSON) pairs decoded as records of the dataclass ``kind``; undecodable entries are
    skipped.
    """
    out = []
    for _, words in found:
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            out.append(codec.decoded(kind, words))
    return out


def words_of(record: object) -> JSON:
    """Return the ``record``, an instance of a dataclass, as JSON values."""
    return codec.encoded(record)


# Store commands of a run on a network file system, where each node has a file of its own: ``CommandStore``.


class FileCommands(ABC):
    """Commands to a trainer that each node keeps in its own file. Only the run's trainer claims and settles commands.

    A command that is cancelled before it was claimed is ``cancelling`` until the trainer reports it as cancelled.
    """

    @abstractmethod
    def _said(self, run_id: str) -> NodeFiles:
        """Return the files of all nodes about a run. Raises ``RunNotFoundError``."""

    def submit(self, command: Command) -> Command:
        """Store the command in this node's file; return it, or the stored one that has the same id or idempotency key.

        Raises ``RunNotFoundError``.
        """
        files = self._said(command.run_id)
        with files.change() as mine:
            for known in self.commands(command.run_id):
                same_key = command.idempotency_key and known.idempotency_key == command.idempotency_key
                if known.command_id == command.command_id or same_key:
                    return known
            mine.setdefault("commands", {})[command.command_id] = words_of(command)
        return command

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Return the commands to a run from all nodes, oldest first; if ``status`` is given, only those in that status.

        Of two commands with the same idempotency key only the older counts.
        """
        nodes = self._said(run_id).all()
        asked = records_of(gathered(nodes, "commands"), Command)
        answers: dict[str, dict[str, Any]] = {}
        for command_id, answer in gathered(nodes, "answers"):
            if isinstance(answer, dict) and _later(answer, answers.get(command_id)):
                answers[command_id] = answer
        cancelled = dict(gathered(nodes, "cancelled"))
        found, keys = [], set[str]()
        for command in sorted(asked, key=lambda each: (each.created_at, each.command_id)):
            if command.idempotency_key and command.idempotency_key in keys:
                continue
            keys.add(command.idempotency_key)
            found.append(_with_answer(command, answers.get(command.command_id), cancelled))
        return [command for command in found if status in (None, command.status)]

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Claim the commands that wait for the run's trainer and return them.

        Commands that expired before ``now`` (Unix seconds) and commands that were cancelled are settled as such and not
        returned.
        """
        waiting = [command for command in self.commands(run_id) if command.status.open and command.claimed_at is None]
        if not waiting:
            return []
        taken = []
        with self._said(run_id).change() as mine:
            for command in waiting:
                if 0 < command.expires_at <= now:
                    answered = replace(command, status=CommandStatus.EXPIRED, finished_at=now)
                elif command.status is CommandStatus.CANCELLING:
                    answered = replace(command, status=CommandStatus.CANCELLED, finished_at=now)
                else:
                    answered = replace(command, status=CommandStatus.CLAIMED, claimed_at=now)
                    taken.append(answered)
                mine.setdefault("answers", {})[command.command_id] = words_of(answered)
        return taken

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Settle a claimed command: store its final ``status``, the ``step`` at which it was done and its ``result``.

        Returns the command as stored; if it was already settled, the first answer stays. Raises ``StoreError`` if
        ``status`` is not final, if the command was never claimed, or if there is no such command. ``now``: Unix
        seconds.
        """
        if status.open:
            answers = ", ".join(each.value for each in CommandStatus if not each.open)
            raise StoreError(f"a command is settled as one of {answers}, not as {status.value!r}")
        with self._said(run_id).change() as mine:
            command = self._known(run_id, command_id)
            if not command.status.open:
                return command
            if command.claimed_at is None:
                raise StoreError(f"command {command_id!r} is still queued: claim it before settling it")
            settled = replace(command, status=status, finished_at=now, finished_step=step, result=result)
            mine.setdefault("answers", {})[command_id] = words_of(settled)
        return settled

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Request that the run's trainer drops the command; the trainer answers at its next poll. Returns the command
        as it is now.

        A command that is already settled stays as it is. ``now``: Unix seconds. ``result``: the reason, for the
        command's log. Raises ``StoreError`` if there is no such command.
        """
        with self._said(run_id).change() as mine:
            command = self._known(run_id, command_id)
            if not command.status.open:
                return command
            mine.setdefault("cancelled", {})[command_id] = {"at": now, "result": result}
        return self._known(run_id, command_id)

    def _known(self, run_id: str, command_id: str) -> Command:
        for command in self.commands(run_id):
            if command.command_id == command_id:
                return command
        raise StoreError(f"run {run_id!r} has no command {command_id!r}")


def _later(answer: dict[str, Any], known: dict[str, Any] | None) -> bool:
    """Return True if ``answer`` replaces ``known``, the answer of an earlier trainer's node: settled precedes
    claimed.
    """
    if known is None or known.get("finished_at") is None:
        return True
    return answer.get("finished_at") is not None and answer["finished_at"] < known["finished_at"]


def _with_answer(command: Command, answer: dict[str, Any] | None, cancelled: dict[str, Any]) -> Command:
    if answer is not None:
        try:
            command = codec.decoded(Command, {**words_of(command), **answer})
        except (TypeError, ValueError):  # an answer of another program
            return command
    if command.status in (CommandStatus.QUEUED, CommandStatus.CLAIMED) and command.command_id in cancelled:
        cancellation = cancelled[command.command_id]
        result = str(cancellation.get("result", "")) if isinstance(cancellation, dict) else ""
        return replace(command, status=CommandStatus.CANCELLING, result=result)
    return command
