"""Store runs whose directory lies on a network file system: written on the node's own disk, shared as snapshots.

The write-ahead log needs shared memory and locks that NFS, Lustre and their kin do not give. So the writer works in a
directory of its node and puts a whole copy of ``run.db`` into the shared directory by rename: at the start, every
minute, and at the end. Readers see those copies. What a killed process had not yet published is still in the node's
directory and is published when the run resumes on that node. People's commands and annotations, and the alerts of the
run, are in the shared directory as well, in a file of each node (:mod:`rlwatch.store.sqlite.nodefiles`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import StoreError
from rlwatch.ports import Composer, RunWriter, Topic
from rlwatch.records import (
    JSON,
    Acknowledgement,
    Alert,
    AuditEntry,
    ForecastAnswer,
    Ledger,
    OutboxMessage,
    RunInfo,
    RunState,
    Silence,
)
from rlwatch.store.sqlite import connection, layout, runrow
from rlwatch.store.sqlite.connection import Opened, explained, open_immutable, open_reader
from rlwatch.store.sqlite.curating import NoCuration
from rlwatch.store.sqlite.filenews import FileNews
from rlwatch.store.sqlite.filestore import FileStore
from rlwatch.store.sqlite.layout import (
    RunFiles,
    RunLock,
    existing_files,
    make_private,
    network_file_system,
    touch_private,
    writing_to,
)
from rlwatch.store.sqlite.nodefiles import FileCommands, NodeFiles, gathered, records_of, words_of
from rlwatch.store.sqlite.reading import RunTables
from rlwatch.store.sqlite.writer import FileWriter, open_files

logger = logging.getLogger("rlwatch")
_T = TypeVar("_T")
_warned: set[Path] = set()


class SharedStore(RunTables, FileCommands, NoCuration):
    """A store of runs in the directory ``root`` on a network file system of type ``kind`` (``nfs4``...).

    All nodes see commands, acknowledgements, silences and alerts. Outgoing messages stay on the node that writes the
    run. Edits raise ``ControlUnavailableError``. ``local_root``: directory on the node's own disk where the writer
    works, by default under ``RLWATCH_LOCAL_DIR``, else in the temporary directory. ``timeout_s``: seconds to wait for
    another process of this node. ``clock``: source of creation times.
    """

    def __init__(
        self,
        root: Path,
        kind: str,
        *,
        local_root: Path | None = None,
        timeout_s: float = 2.0,
        clock: Clock | None = None,
    ) -> None:
        self.root = root.absolute()
        self.url = f"sqlite://{quote(str(self.root))}"
        self._kind = kind
        self._no_commands_because = (
            f"on a network file system ({self.root} is {kind}): "
            "keep the store on a disk that is local to the trainer and to you"
        )
        self._clock = clock or SystemClock()
        self.local_root = local_root or node_directory(self.root)
        self._local = FileStore(self.local_root, control_timeout_s=timeout_s, clock=self._clock)

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt, in the node's own directory; return its writer.

        Raises ``RunLockedError`` while another process writes the run, and ``StoreError`` if the node's directory
        belongs to another user or is on a network file system, too.
        """
        shared = layout.files_of(self.root, run.run_id)
        local = layout.files_of(self.local_root, run.run_id)
        _refuse_others(self.local_root)
        self._warn_once()
        return open_shared(local, shared, run, self._clock.now())

    def amend_run(self, run_id: str) -> RunWriter | None:  # noqa: ARG002  (its node alone has what was left undone)
        """Return None: data that a dead process left unfinished lie on its node, where the run's next attempt finds
        them.
        """
        return None

    def news(self, topic: Topic, run_id: str | None = None) -> FileNews | None:
        """Return notifications of changes for pages that show runs; None for other topics, which are polled.

        ``run_id``: the run to watch; None for all.
        """
        return FileNews(self.root, run_id, self.snapshot) if topic == "pages" else None

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Store alerts and new messages on this node, and publish the alerts to the other nodes."""
        self._local.put_alerts(alerts, messages)
        for run_id in dict.fromkeys(alert.run_id for alert in alerts):
            self._show(run_id, [alert for alert in alerts if alert.run_id == run_id])

    def publish(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Insert or update the run's alerts and the messages that ``compose`` returns, and publish the alerts to other
        nodes.

        ``compose`` is called with the run's alerts, messages and acknowledgements, including acknowledgements from
        other nodes. Returns the messages whose id was new.
        """
        self._adopt(run_id)
        new = self._local.publish(run_id, alerts, compose)
        self._show(run_id, alerts)
        return new

    def ledger(self, run_id: str) -> Ledger:
        """Return the run's alerts, messages and acknowledgements; without messages if another node writes the run."""
        if not self._is_here(run_id):
            return Ledger(tuple(self.alerts(run_id)[::-1]), (), tuple(self.acknowledgements(run_id)))
        self._adopt(run_id)
        return self._local.ledger(run_id)

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Store the acknowledgement of an alert, unless an earlier one has at least its severity; return the stored
        one.

        If another node writes the run, that node takes the acknowledgement over from this node's file.
        """
        run_id = acknowledgement.run_id
        if self._is_here(run_id):
            return self._local.acknowledge(acknowledgement)
        with self._said(run_id).change() as mine:
            kept = next((a for a in self.acknowledgements(run_id) if a.alert_id == acknowledgement.alert_id), None)
            if kept is not None and kept.severity.rank >= acknowledgement.severity.rank:
                return kept
            mine.setdefault("acknowledgements", {})[acknowledgement.alert_id] = words_of(acknowledgement)
        return acknowledgement

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Return the acknowledgements of alerts of one run, or of all runs, from every node; of two for one alert the
        more severe.
        """
        found: dict[str, Acknowledgement] = {}
        for each in [*self._kept_here(run_id), *self._from_others(run_id, "acknowledgements", Acknowledgement)]:
            known = found.get(each.alert_id)
            if known is None or each.severity.rank > known.severity.rank:
                found[each.alert_id] = each
        return list(found.values())

    def put_silence(self, silence: Silence) -> None:
        """Store a silence for all nodes; of several versions of one silence the newest counts."""
        with self._store_wide_words().change() as mine:
            words = {"said_at": self._clock.now(), "silence": words_of(silence)}
            mine.setdefault("silences", {})[silence.silence_id] = words

    def silences(self) -> list[Silence]:
        """Return all silences of the store, oldest first, including expired ones."""
        entries = gathered(self._store_wide_words().all(), "silences")
        newest = sorted((each for each in entries if isinstance(each[1], dict)), key=lambda each: _stored_at(each[1]))
        known = {silence.silence_id: silence for silence in self._local.silences()}
        known |= {s.silence_id: s for s in records_of([(key, words.get("silence")) for key, words in newest], Silence)}
        return sorted(known.values(), key=lambda silence: silence.created_at)

    def put_entry(self, entry: AuditEntry) -> None:
        """Add an entry to the audit, which all nodes see, unless its id is known to this node."""
        with self._store_wide_words().change() as mine:
            mine.setdefault("audit", {}).setdefault(entry.entry_id, words_of(entry))

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """Return people's actions and annotations from all nodes (about one run, or about all), oldest first."""
        entries = records_of(gathered(self._store_wide_words().all(), "audit"), AuditEntry)
        known = {e.entry_id: e for e in [*entries, *self._local.audit()] if run_id in (None, e.run_id)}
        return sorted(known.values(), key=lambda entry: entry.at)

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Store a user's answer to a forecast on this node only."""
        self._local.answer_forecast(answer)

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Return users' answers to forecasts of one run, or of all runs, that are written on this node; else none."""
        return self._local.forecast_answers(run_id) if self._is_here(run_id) else []

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold a lock over all processes of this node until the block is left; other nodes are not locked out."""
        return self._local.exclusive()

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Return alerts of one run, or of all, newest first; alerts of runs on other nodes as last published."""
        if run_id is not None and self._is_here(run_id):
            return self._local.alerts(run_id)
        here = self._local.alerts() if run_id is None else []
        alerts_elsewhere = {alert.alert_id: alert for alert in self._from_others(run_id, "alerts", Alert)}
        return [*here, *sorted(alerts_elsewhere.values(), key=lambda alert: alert.fired_at or 0.0, reverse=True)]

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Lease due messages of runs written on this node until ``now + lease_s`` (seconds), at most ``limit``.

        ``channels``: only messages to these channels; None for all.
        """
        return self._local.lease_messages(now, lease_s=lease_s, limit=limit, channels=channels)

    def settle_message(self, message: OutboxMessage) -> None:
        """Store the outcome of a message's delivery on this node, and end its lease."""
        self._local.settle_message(message)

    def retry_message(self, message: OutboxMessage) -> None:
        """Make an unsent message of a run on this node due now."""
        self._local.retry_message(message)

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """Return the outgoing messages of one run, or of all runs, that are written on this node; else none."""
        return self._local.outbox(run_id) if self._is_here(run_id) else []

    def _run_ids(self) -> list[str]:
        return layout.run_ids(self.root)

    def snapshot(self, run_id: str) -> AbstractContextManager[sqlite3.Connection]:
        """Give a connection to the run's tables as they were last published, at most about a minute old."""
        return connection.open_immutable(existing_files(self.root, run_id))

    def _said(self, run_id: str) -> NodeFiles:
        return NodeFiles(existing_files(self.root, run_id).directory, self._own_place())

    def _store_wide_words(self) -> NodeFiles:
        return NodeFiles(self.root, self._own_place())

    def _own_place(self) -> Path:
        _refuse_others(self.local_root)
        return self.local_root

    def _kept_here(self, run_id: str | None) -> list[Acknowledgement]:
        return self._local.acknowledgements(run_id) if self._is_here(run_id) else []

    def _from_others(self, run_id: str | None, kind: str, made: type[_T]) -> list[_T]:
        """Return records of ``kind`` in the files about a run, or about all runs that are not written here."""
        if run_id is not None:
            return records_of(gathered(self._said(run_id).all(), kind), made)
        elsewhere = [each for each in self._run_ids() if not self._is_here(each)]
        return [record for each in elsewhere for record in self._from_others(each, kind, made)]

    def _adopt(self, run_id: str) -> None:
        """Store acknowledgements that people made on other nodes in this node's files, where the run is written."""
        known = {each.alert_id: each.severity.rank for each in self._local.acknowledgements(run_id)}
        try:
            given = self._from_others(run_id, "acknowledgements", Acknowledgement)
        except StoreError as error:
            logger.debug("what other nodes say of run %s is not known now: %s", run_id, error)
            return
        for each in given:
            if each.severity.rank > known.get(each.alert_id, -1):
                self._local.acknowledge(each)

    def _show(self, run_id: str, alerts: Sequence[Alert]) -> None:
        """Publish alerts to other nodes. A failure to do so does not affect what is stored here."""
        if not alerts:
            return
        try:
            with self._said(run_id).change() as mine:
                mine.setdefault("alerts", {}).update({alert.alert_id: words_of(alert) for alert in alerts})
        except StoreError as error:
            logger.warning("alerts of run %s are not shown on other nodes: %s", run_id, error)

    def _is_here(self, run_id: str | None) -> bool:
        if run_id is None:
            return True
        existing_files(self.root, run_id)
        return (self.local_root / run_id / "run.db").exists()

    def _warn_once(self) -> None:
        if self.root not in _warned:
            _warned.add(self.root)
            warnings.warn(
                f"{self.root} is on a network file system ({self._kind}): this run is written to {self.local_root} "
                "and copied there every 60 s and at the end; commands go by files, within a minute. "
                "RLWATCH_LOCAL_DIR chooses another local directory.",
                stacklevel=3,
            )


def _stored_at(words: JSON) -> float:
    value = words.get("said_at")
    return float(value) if isinstance(value, int | float) else 0.0


def local_base() -> Path:
    """Return the directory on this node's disk where this user's trainers keep data of stores that lie elsewhere.

    It is ``RLWATCH_LOCAL_DIR`` if set, else ``rlwatch-UID`` in the temporary directory.
    """
    chosen = os.environ.get("RLWATCH_LOCAL_DIR")
    return (Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"rlwatch-{os.getuid()}").absolute()


def node_directory(root: Path | str) -> Path:
    """Return this node's directory for runs of the shared store ``root``, a directory or a URL."""
    return local_base() / hashlib.sha256(str(root).encode()).hexdigest()[:12]


def refuse_foreign(local_root: Path) -> None:
    """Create ``local_root`` if missing, and raise ``StoreError`` if it or its parent belongs to another user.

    Temporary directories are open to all users, so another user could have made it first.
    """
    layout.make_private(local_root.parent)
    layout.make_private(local_root)
    for directory in (local_root.parent, local_root):
        if directory.stat().st_uid != os.getuid():
            raise StoreError(
                f"{directory} belongs to another user; set RLWATCH_LOCAL_DIR to a local directory of yours"
            )


def _refuse_others(local_root: Path) -> None:
    """Raise ``StoreError`` unless ``local_root`` belongs to this user and is on a local disk."""
    refuse_foreign(local_root)
    kind = network_file_system(local_root)
    if kind is not None:
        raise StoreError(
            f"{local_root} is on a network file system too ({kind}); set RLWATCH_LOCAL_DIR to a local disk"
        )


# The writer of a run on a network file system: a local writer that publishes snapshots.

PUBLISH_S = 60.0
"""Seconds between two snapshots of a live run; readers on other nodes see the run with this delay."""


class SharedWriter(FileWriter):
    """A writer on the node's own disk that also owns the lock of the shared directory and publishes snapshots there."""

    def share(self, local: RunFiles, shared: RunFiles, lock: RunLock, now: float) -> None:
        """Begin to publish, at ``now`` (Unix seconds). Before this call the shared directory shows nothing of the
        attempt.

        ``local``, ``shared``: the run's files in the two directories. ``lock``: the shared directory's lock, released
        by :meth:`close`.
        """
        self._local = local
        self._shared = shared
        self._shared_lock = lock
        self._publish(now)

    def heartbeat(self, now: float, stage: str = "", since: float | None = None) -> None:
        """Store the heartbeat time ``now`` (Unix seconds) and the writer's stage; publish if the last snapshot is old.

        ``stage``: what the process does now, and ``since`` when (Unix seconds).
        """
        super().heartbeat(now, stage, since)
        if self._mine() and now - self._published_at >= PUBLISH_S:
            self._publish(now)

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Store how the run ended (state, reason in words, Unix seconds) and publish the whole run."""
        super().finish(state, reason, now)
        if self._mine():
            self._publish(now)

    def close(self) -> None:
        """Close the connection, then release the locks of both directories; idempotent."""
        super().close()
        self._shared_lock.release()

    def _publish(self, now: float) -> None:
        if self.db is not None:
            publish(self.db, self._local, self._shared)
        self._published_at = now


def open_shared(local: RunFiles, shared: RunFiles, run: RunInfo, now: float) -> SharedWriter:
    """Open the run for writing, and continue from whichever copy has more rows, the node's or the shared one.

    Takes the shared lock, then the local one; raises ``RunLockedError`` if either is taken. ``now``: Unix seconds.
    """
    make_private(shared.directory.parent)
    make_private(shared.directory)
    lock = RunLock(shared.lock, optional=True)
    with ExitStack() as undo:
        undo.callback(lock.release)
        writer = undo.enter_context(
            closing(open_files(local, run, now, made=SharedWriter, before=partial(adopt, shared, local)))
        )
        writer.share(local, shared, lock, now)
        undo.pop_all()
        return writer


# Whole copies of ``run.db`` between the node's directory and the shared one.


def publish(db: sqlite3.Connection, local: RunFiles, shared: RunFiles) -> None:
    """Copy the database ``db`` into the shared directory. Readers see the old file or the new one, never a part."""
    made = local.directory / ".run.db.snapshot"
    touch_private(made)
    with explained(str(made)), closing(connection.connect(made, isolation_level=None)) as copy:
        db.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # until then the copy's header has the mode "log"
    put_in_place(made, shared.run)
    made.unlink()


def put_in_place(source: Path, target: Path) -> None:
    """Copy the file ``source`` to ``target`` by way of a rename; the data are on disk before the name appears.

    Raises ``StoreFullError`` or ``StoreError``.
    """
    arriving = target.with_name(f".{target.name}.{os.getpid()}")
    with writing_to(target):
        try:
            touch_private(arriving)
            shutil.copyfile(source, arriving)
            with arriving.open("rb") as written:
                os.fsync(written.fileno())  # network file systems report a full disk here or at close
            arriving.replace(target)
        except OSError:
            arriving.unlink(missing_ok=True)
            raise


def adopt(shared: RunFiles, local: RunFiles) -> None:
    """Replace this node's copy of the run by the shared one if that is further, as the run went on on another node.

    Called before an attempt begins on this node.
    """
    if not shared.run.exists() or _progress(open_immutable(shared)) <= _progress_here(local):
        return
    for stale in (local.run, local.wal, Path(f"{local.run}-shm")):
        stale.unlink(missing_ok=True)
    put_in_place(shared.run, local.run)


def _progress_here(local: RunFiles) -> tuple[int, int]:
    if not local.run.exists():
        return (0, 0)
    try:
        return _progress(open_reader(local))
    except StoreError:
        return (0, 0)  # damaged, for example by a full disk: the shared copy is what there is


def _progress(opened: Opened) -> tuple[int, int]:
    with opened as db:
        return runrow.load(db, "").attempt, runrow.last_seq(db)
