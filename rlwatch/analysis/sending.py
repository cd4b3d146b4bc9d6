"""Export of a recorded run to another tracker (MLflow, wandb, TensorBoard's event files), each through its own package.

The export has the rows that no later attempt replaced, with their steps and times, settings without secrets, tags, and
verdict and findings as text. Findings and forecasts are also series: ``rlwatch/<kind>`` is 1, 2, 3 while a finding of
that kind holds as info, warning, critical, and 0 after; forecasts are ``forecast/...``. rlwatch does not read these
series back as measurements.
"""

from __future__ import annotations

import posixpath
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlwatch.errors import ConfigError, MissingExtraError, RLWatchError
from rlwatch.importers.tensorboard_events import event_files
from rlwatch.records import JSON, Finding, RunInfo, RunState, Stage, StepRecord
from rlwatch.wording import cut, for_markdown, one_line

Progress = Callable[[Sequence[StepRecord]], Iterable[StepRecord]]
"""Wraps the sequence of rows to display progress: yields its rows one by one."""
LONGEST_SUMMARY = 5000
"""Largest number of characters of a text that every version of MLflow accepts."""
MOST_METRICS, MOST_ENTRIES = 1000, 100
"""Largest number of metrics, and of settings, that MLflow accepts in one call."""
OWN_TAG = "rlwatch.run_id"
"""Tag that identifies a run in MLflow."""


@dataclass(frozen=True, slots=True)
class Story:
    """A run ready for export to another tracker.

    Attributes
    ----------
    info
        Description of the run.
    records
        A row for each step, in order.
    options, config
        Settings by dotted name, and as they were given; both without secrets.
    verdict
        The verdict in one line.
    findings
        Findings to list, in order.
    """

    info: RunInfo
    records: Sequence[StepRecord]
    options: Mapping[str, str]
    config: Mapping[str, JSON]
    verdict: str
    findings: Sequence[Finding]

    @property
    def summary(self) -> str:
        """Verdict and findings of the run as Markdown."""
        lines = [f"**{for_markdown(self.verdict)}**", ""]
        lines += [f"- step {f.step}, {f.severity.value}: {for_markdown(f.message)}" for f in self.findings]
        return cut("\n".join(lines), LONGEST_SUMMARY)

    @property
    def name(self) -> str:
        """Name of the run; its id if it has none."""
        return self.info.name or self.info.run_id

    @property
    def ended_at(self) -> float:
        """Time of the last row in Unix seconds; of the run's creation if it has no rows."""
        return self.records[-1].ts if self.records else self.info.created_at


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of an export to another tracker.

    ``where``: the run's place there. ``rows``, ``values``: numbers of rows and of values sent. ``renamed``: name ->
    other name, where the tracker does not accept a name.
    """

    where: str
    rows: int
    values: int
    renamed: Mapping[str, str]


def story_of(
    info: RunInfo,
    records: Sequence[StepRecord],
    findings: Sequence[Finding],
    *,
    options: Mapping[str, str],
    config: Mapping[str, JSON],
    verdict: str,
) -> Story:
    """Return a run ready for export to another tracker.

    Parameters
    ----------
    info
        Description of the run.
    records
        A row for each step, in order.
    findings
        Its findings and recoveries, in order.
    options, config
        Settings by dotted name, and as they were given; both without secrets.
    verdict
        The verdict in one line.
    """
    shown = [finding for finding in findings if not finding.stage.better]
    return Story(info, list(_with_levels(records, findings)), options, config, verdict, shown)


def _with_levels(records: Sequence[StepRecord], findings: Sequence[Finding]) -> Iterator[StepRecord]:
    """Yield the rows, each with the severities of the findings that hold there."""
    by_step = sorted(findings, key=lambda finding: finding.step)
    kinds = {finding.kind for finding in by_step}
    held: dict[tuple[str, str, str], int] = {}
    place = 0
    for record in records:
        while place < len(by_step) and by_step[place].step <= record.step:
            one = by_step[place]
            held[one.kind, one.detector, one.metric] = 0 if one.stage is Stage.RESOLVED else one.severity.rank + 1
            place += 1
        levels = {
            f"rlwatch/{kind}": float(max((level for at, level in held.items() if at[0] == kind), default=0))
            for kind in sorted(kinds)
        }
        yield replace(record, metrics={**record.metrics, **levels})


# TensorBoard.


def to_tensorboard(story: Story, directory: Path, *, progress: Progress = iter) -> Sent:
    """Write a run as one event file into ``directory``, complete or not at all; numbers have TensorBoard's 32 bits.

    ``progress`` wraps the sequence of rows to show progress. Returns a summary of the export.

    Raises
    ------
    ConfigError
        If ``directory`` is a file or holds event files already.
    MissingExtraError
        If tensorboard is not installed.
    OSError
        If the file cannot be written.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "tensorboard", "sending a run to TensorBoard") from None
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; event files are written into a directory, a new one for each run")
    if directory.is_dir() and event_files(directory):
        raise ConfigError(f"{directory} has event files already, which TensorBoard would mix with these; give another")
    directory.mkdir(parents=True, exist_ok=True)
    began = story.info.created_at
    target = directory / f"events.out.tfevents.{int(began):010d}.{socket.gethostname()}.rlwatch"
    part = target.with_name(f".{target.name}.part")
    settings = "".join(f"- {for_markdown(name)}: {for_markdown(value)}\n" for name, value in story.options.items())
    texts = {"config": settings, "tags": for_markdown(", ".join(story.info.tags)), "rlwatch/findings": story.summary}
    values = 0
    try:
        with part.open("wb") as file:
            write = RecordWriter(file).write
            write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
            for record in progress(story.records):
                scalars = [Summary.Value(tag=name, simple_value=_single(v)) for name, v in record.metrics.items()]
                event = Event(wall_time=record.ts, step=record.step, summary=Summary(value=scalars))
                write(event.SerializeToString())
                values += len(scalars)
            for tag, text in texts.items():
                if text:
                    write(Event(wall_time=story.ended_at, summary=text_pb(tag, text)).SerializeToString())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return Sent(str(directory), len(story.records), values, {})


def _single(value: float) -> float:
    """Return the nearest 32-bit number; beyond their range infinity, as TensorBoard's own writers do."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.float32(value))


# wandb.


def to_wandb(
    story: Story,
    *,
    project: str = "",
    entity: str | None = None,
    offline: bool = False,
    directory: Path | None = None,
    progress: Progress = iter,
) -> Sent:
    """Create a run of wandb with the same id and all rows: on the server, or ``offline`` in ``directory`` for ``wandb
    sync``.

    Returns a summary of the export.

    Parameters
    ----------
    story
        The run.
    project, entity
        Where it is created; empty: the run's project, and wandb's default.
    offline
        Whether to write to ``directory`` instead of the server.
    directory
        Directory of wandb's files; None: the current one.
    progress
        Wraps the sequence of rows to show progress.

    Raises
    ------
    ConfigError
        Where the run is there already, or this process has a run of wandb.
    MissingExtraError
        Without wandb.
    RLWatchError
        For an error of wandb.
    """
    wandb = _idle_wandb()
    home = Path(directory or ".")
    if there := sorted(home.glob(f"wandb/*run-*-{story.info.run_id}")):
        raise ConfigError(f"{there[0]} is this run already; remove it, or give another directory")
    home.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
    )
    with _refusals("wandb", wandb.errors.Error):
        run = wandb.init(
            id=story.info.run_id,
            resume="never",
            project=project or story.info.project,
            entity=entity,
            name=story.name,
            tags=[cut(tag, 64) for tag in story.info.tags if tag],
            notes=story.summary,
            config={**story.config, "rlwatch": {"source": story.info.source, "attempts": story.info.attempt}},
            dir=str(home),
            mode="offline" if offline else "online",
            settings=settings,
        )
        values = _logged(run, story, progress)
    return Sent(str(Path(run.dir).parent) if offline else str(run.url), len(story.records), values, {})


def _idle_wandb() -> Any:
    """Return the package wandb, if it is installed and this process has no run of it."""
    try:
        import wandb
    except ImportError:
        raise MissingExtraError("wandb", "wandb", "sending a run to wandb") from None
    if wandb.run is not None:
        raise ConfigError(f"this process has the run {wandb.run.id} of wandb; finish it first: wandb.finish()")
    return wandb


def _logged(run: Any, story: Story, progress: Progress) -> int:
    """Log all rows to a run of wandb and finish it; return the number of values."""
    code, values = 1, 0
    try:
        for record in progress(story.records):
            run.log({**record.metrics, "_timestamp": record.ts}, step=record.step)
            values += len(record.metrics)
        run.summary["rlwatch/verdict"] = story.verdict
        code = int(story.info.state is RunState.CRASHED)
    finally:
        run.finish(exit_code=code)
    return values


# MLflow.


def to_mlflow(story: Story, *, uri: str | None = None, experiment: str = "", progress: Progress = iter) -> Sent:
    """Create a run of MLflow with all rows, at the tracking URI ``uri`` (None: MLflow's default).

    A run that is not sent completely is deleted. Returns a summary of the export. ``experiment``: its name; empty: the
    run's project. ``progress`` wraps the sequence of rows to show progress. Raises ``ConfigError`` where the run is
    there already, ``MissingExtraError`` without MLflow, ``RLWatchError`` for an error of MLflow.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
        from mlflow.utils import validation
    except ImportError:
        raise MissingExtraError("mlflow", "mlflow", "sending a run to MLflow") from None
    longest = int(getattr(validation, "MAX_PARAM_VAL_LENGTH", 500))
    metrics = _plain_names(name for record in story.records for name in record.metrics)
    options = _plain_names(story.options)
    called = experiment or story.info.project
    values = (
        Metric(metrics[name], value, _milliseconds(record.ts), record.step)
        for record in progress(story.records)
        for name, value in record.metrics.items()
    )
    params = [Param(options[name], cut(value, longest)) for name, value in story.options.items()]
    with _refusals("MLflow", MlflowException):
        client = MlflowClient(tracking_uri=uri)
        there = client.get_experiment_by_name(called)
        experiment_id = there.experiment_id if there else client.create_experiment(called)
        if client.search_runs([experiment_id], f"tags.`{OWN_TAG}` = '{story.info.run_id}'"):
            raise ConfigError(f"experiment {called!r} of MLflow has run {story.info.run_id!r} already; delete it there")
        began = _milliseconds(story.info.created_at)
        run_id = client.create_run(experiment_id, start_time=began, run_name=story.name).info.run_id
        sent, whole = 0, False
        try:
            for some in _lots(params, MOST_ENTRIES):
                client.log_batch(run_id, params=some)
            for lot in _lots(values, MOST_METRICS):
                client.log_batch(run_id, metrics=lot)
                sent += len(lot)
            for some in _lots((RunTag(*tag) for tag in _tags_of(story).items()), MOST_ENTRIES):
                client.log_batch(run_id, tags=some)
            status = "FAILED" if story.info.state is RunState.CRASHED else "FINISHED"
            client.set_terminated(run_id, status, _milliseconds(story.ended_at))
            whole = True
        finally:
            if not whole:
                with suppress(MlflowException):
                    client.delete_run(run_id)
    renamed = {name: other for name, other in (metrics | options).items() if name != other}
    return Sent(f"experiment {called!r}, run {run_id}", len(story.records), sent, renamed)


def _tags_of(story: Story) -> dict[str, str]:
    """Return the tags of the run, and those of MLflow's own fields."""
    fields = {"mlflow.note.content": story.summary, "mlflow.source.name": story.info.source or "rlwatch"}
    own = {"rlwatch.verdict": story.verdict, OWN_TAG: story.info.run_id}
    return {tag: "" for tag in map(_plain, story.info.tags) if tag} | fields | own


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _lots(items: Iterable[Any], most: int) -> Iterator[list[Any]]:
    lot: list[Any] = []
    for item in items:
        lot.append(item)
        if len(lot) == most:
            yield lot
            lot = []
    if lot:
        yield lot


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return name -> a distinct name that MLflow accepts."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in dict.fromkeys(names):
        plain = first = _plain(name)
        number = 1
        while plain in taken:
            number += 1
            plain = f"{first}_{number}"
        taken.add(plain)
        found[name] = plain
    return found


def _plain(name: str) -> str:
    """Return a name of letters, digits and ``_-. :/`` that is no path outside of its directory.

    >>> _plain("reward[math]"), _plain("actor/kl"), _plain("../x")
    ('reward_math_', 'actor/kl', '.._x')
    """
    kept = re.sub(r"[^\w\-. :/]", "_", name)[:250]
    return kept if posixpath.normpath(kept) == kept and kept[:1] not in "./" else kept.replace("/", "_")


@contextmanager
def _refusals(tracker: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the other tracker into an ``RLWatchError`` of one line."""
    try:
        yield
    except kinds as error:
        raise RLWatchError(f"{tracker} refuses it: {one_line(error, 400)}") from error
