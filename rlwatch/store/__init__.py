"""The contract of a store, in prose. :mod:`rlwatch.testing.store_contract` is the same contract as tests.

**What a store is.** A place for runs, addressed by a URL (:func:`rlwatch.store.url.open_store`). A run is a
stream of records and events in order of ``seq``, its spike and completion batches, findings, commands, alerts and
outbox. Opening a store touches nothing; the first run creates what is needed. Runs are named by ``run_id``: letters,
digits, ``.``, ``_`` and ``-``, at most 120 characters, not starting with a dot, nor with a
dash, which commands take for an option (:func:`check_run_id`).

**Ownership.** One writer per run at a time, whichever process or thread it lives in. ``open_run`` takes the
run's lock before it touches anything and raises ``RunLockedError``, which names the holder, if the lock is taken. The
lock goes with ``RunWriter.close`` or with the process, however that dies; a forked child never holds it, and
the writer object it inherits is inert: ``write`` raises ``StoreError``, the other methods do nothing.

**Attempts.** ``open_run`` on a run that exists begins its next attempt: ``writer.run.attempt`` is one more
than any before, ``writer.last_seq`` goes on from where the run stopped and the state is ``running`` again.
``project`` and ``created_at`` stay those of the first attempt; ``config``, ``source``, ``name`` and ``tags``
are those of the newest that gave any.

**Sequence numbers.** Records and events of a run share one ascending space of ``seq``. An item with ``seq`` 0
gets the next number; one with a number not above ``last_seq`` is refused with ``UnstorableError``. A finding's
``seq`` is that of the step it judges and may repeat.

**Forecasts.** A forecast carries the ``seq`` of the record it was made at; a second one for the same ``seq`` is
ignored. ``series``, ``last_values`` and ``metric_names`` return its numbers together with the measured ones;
``records`` and ``branch`` do not, so that no replay takes them for measurements.

**Writing.** ``write`` stores all of its items or none and, once it returns, they survive the death of the
process (``SIGKILL``; not a power cut). ``StoreFullError``: the disk is full, nothing was written, and the same
call may be made again once there is room. ``UnstorableError``: an item cannot be stored as it is; the message
names it. After ``finish`` the writer only closes.

**Numbers.** Metric values are float64 and come back bit for bit: NaN, +Inf, -Inf and "absent" are four
different things, in metrics, batch columns, evidence, configuration, event bodies, arguments and payloads.
Mappings come back in the order given. Values ``json`` does not know come back as the nearest it does: tuples
as lists, numpy scalars and arrays as numbers and lists, anything else as its text.

**Reading.** Every answer is a snapshot: no later write changes it, and changing it changes nothing stored. Within
``at_once`` the answers to one thread on one run may be of one snapshot. Readers never block, slow or change a writer,
need no lock and no write permission, and may be used from any thread and process. ``runs`` leaves out what cannot be
read; ``unreadable`` gives the reason. For one run that is ``RunNotFoundError``, ``StoreCorruptError`` or
``StoreVersionError``.

**Branches.** After a restart, steps repeat. ``branch(run_id, a, before_step)`` is the history attempt ``a``
continues: of attempt a-1 the records below ``before_step``, of a-2 those below both that and the first step
of a-1, and so on; an attempt without records is passed over. An event belongs if its step (where it has one)
is below its attempt's bound and it came before the first record at or above it.

**Commands.** ``submit`` is idempotent in ``idempotency_key`` (where not empty) and in ``command_id``.
``claim`` expires queued commands with ``0 < expires_at <= now`` (0: never) and hands each other one out
exactly once, however many processes ask. ``settle`` takes a claimed command to ``done`` or ``rejected``; the
first answer stays, and the caller gets it back. ``StoreBusyError``: another process is at it; try again.
``ControlUnavailableError``: this store cannot carry commands, and why.

**Alerts and outbox.** ``put_alerts`` inserts or updates alerts by id and inserts messages whose id is new, in
one transaction per run. ``lease_messages`` hands out due messages of all runs, each to one caller until its
lease ends; runs whose outbox is busy or damaged are left for the next time. ``settle_message`` writes the
outcome back; once ``sent`` or ``dead`` a message stays so, and a caller whose lease has gone to another caller
can only report success. Only ``retry_message``, for people, makes a dead one pending again, under the same id.

``publish`` inserts or updates alerts of one run and then inserts what the caller makes of the run's ledger, all in one
transaction that no other writer of alerts interrupts: the caller that composes has seen all that was written before. An
acknowledgement belongs to an alert: the first stays, unless a later one is of a higher severity. Silences belong to
the store; ``exclusive`` is held by one caller at a time over all processes.

**Curation.** People's edits of a run (name, tags, notes, archived, deleted) are kept one row per edit, separate from
what its trainer wrote, and another process may be writing the run: ``edit`` needs no lock of the run. Readers see
``name`` and ``tags`` as edited, the rest and the trainer's own under ``curation``; writers and resumes know the
trainer's alone. Tags are added and removed one by one, so that two people lose none. A run that is deleted is left out
of ``runs()`` and of ``alerts()`` of all runs; ``run`` finds it, ``runs(deleted=True)`` lists it, an edit restores it,
and a sign of life of its writer that is younger does, too. ``purge`` alone removes data, of deleted runs without a
writer, and leaves a row with the user's name.

**Threads.** A ``Store`` may be used from many threads. A ``RunWriter`` from one at a time.
"""

from __future__ import annotations

import re

from rlwatch.errors import StoreError

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,119}", re.ASCII)


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` unchanged if it is a valid name of a run.

    Raises ``StoreError``, whose message describes valid run ids, if it is not.

    >>> check_run_id("qwen-0.5b_seed3")
    'qwen-0.5b_seed3'
    """
    if _RUN_ID.fullmatch(run_id):
        return run_id
    raise StoreError(
        f"{run_id!r} cannot be a run id: use 1 to 120 letters, digits, '.', '_' or '-', "
        "not starting with a dot or a dash"
    )
