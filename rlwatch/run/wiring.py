"""``rlwatch.init``: from what the caller says to a run that records."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from rlwatch.alerts.rules import Rule
from rlwatch.ports import Detector, Store
from rlwatch.recorder.counters import Counters
from rlwatch.records import RunInfo
from rlwatch.redaction import MAX_TEXT, recordable, redacted, tags_of
from rlwatch.run.alerting import alerting_for
from rlwatch.run.assembly import Assembly
from rlwatch.run.identity import choose_run_id, remember_run_id
from rlwatch.run.lifecycle import watch_over
from rlwatch.run.run import Run
from rlwatch.store.url import open_store

CONTROL_TIMEOUT_S = 0.0
"""The trainer never waits for somebody else's lock on the control file."""


def init(
    *,
    project: str = "default",
    name: str | None = None,
    run_id: str | None = None,
    resume: str = "auto",
    store: str | os.PathLike[str] | Store | None = None,
    config: object = None,
    source: str = "",
    tags: Sequence[str] | str | None = (),
    output_dir: str | os.PathLike[str] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    webhook_url: str | None = None,
    rules: Sequence[Rule] | None = None,
    detectors: Callable[[], Sequence[Detector]] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    queue_size: int = 10_000,
    sigterm: bool = True,
) -> Run:
    """Begin recording a run, or continue one.

    Parameters
    ----------
    project, name, tags, config
        What people will know the run by. ``config``: a dict, a namespace, a dataclass, OmegaConf; secrets in any of
        them are blacked out (:mod:`rlwatch.redaction`).
    run_id, resume, output_dir
        Which run this is: ``run_id``, else ``RLWATCH_RUN_ID``, else the one remembered in
        ``output_dir/rlwatch.json``, else a new one. ``resume="never"`` always makes a new one, ``"must"``
        never does. Each process start is a new *attempt* of its run.
    store
        A directory, ``sqlite:///directory``, ``memory://name`` or an open store; ``RLWATCH_STORE`` or
        ``./rlwatch-runs`` if not given.
    source
        The trainer, e.g. ``"trl/grpo"``, ``"verl"``: how ambiguous metric names (``kl``) are read.
    config_file, webhook_url, rules
        Alerting: ``rlwatch.toml``; a webhook (or ``RLWATCH_WEBHOOK_URL``); rules that replace all others.
    detectors
        Makes the detectors; the default set if None.
    rank, world_size
        Of this process (default: ``RANK``, ``WORLD_SIZE``). Ranks other than 0 are inert until they are linked to
        rank 0 (:func:`rlwatch.run.joining.join`), and then send it what they measure.
    queue_size
        Records that may wait; beyond it they are dropped and counted.
    sigterm
        Whether to finish the run on SIGTERM, where no other handler is installed.

    Raises
    ------
    ConfigError
        For a setting that is wrong, or an extra that is missing.
    RunLockedError
        If another live process writes this run.
    StoreError
        If the store cannot be opened or written.
    """
    rank = _from_environment("RANK", 0) if rank is None else rank
    world_size = _from_environment("WORLD_SIZE", 1) if world_size is None else world_size
    asked = RunInfo(run_id=run_id or "", project=project or "default", name=name or "", source=source)
    if rank != 0:
        return Run(asked, Counters(), rank=rank, world_size=world_size)
    place = opened(store)
    alerting = alerting_for(config_file=config_file, webhook_url=webhook_url, rules=rules, store=place)
    assembly = Assembly(place, alerting, detectors, queue_size, world_size)
    chosen = choose_run_id(run_id, output_dir, project, resume)
    info = _of_this_process(replace(asked, run_id=chosen), config=config, tags=tags)
    with ExitStack() as undo:  # what cannot be begun is let go: it may be tried again
        writer = undo.enter_context(closing(place.open_run(info)))
        if output_dir is not None:
            remember_run_id(writer.run.run_id, output_dir)
        run = assembly.run(writer)
        undo.pop_all()
    watch_over(run, sigterm=sigterm)
    return run


def _short(text: object) -> str:
    return redacted(str(text), most=MAX_TEXT // 4)


def _of_this_process(info: RunInfo, *, config: object, tags: object) -> RunInfo:
    return replace(
        info,
        project=_short(info.project),
        name=_short(info.name),
        created_at=time.time(),
        config=recordable(config),
        tags=tags_of(tags),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def opened(store: str | os.PathLike[str] | Store | None) -> Store:
    """The store that :func:`init` would write to. Raises ``StoreError`` if it cannot be opened."""
    if store is None or isinstance(store, str | os.PathLike):
        return open_store(store, control_timeout_s=CONTROL_TIMEOUT_S)
    return store


def _from_environment(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default
