"""All importers: recognition of a log's format, search for logs in a directory, and reading of a whole log."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from rlwatch.error_boundary import call_or, described
from rlwatch.errors import ImportFormatError
from rlwatch.importers.aim_repository import AIM_NAME, AimRepository, aim_repository
from rlwatch.importers.assemble import RunAssembly, source_of
from rlwatch.importers.base import FormatMatch, ImportedRow, ImportedRun, Importer, LineImporter, LogReading
from rlwatch.importers.clearml_offline import ClearMlOffline
from rlwatch.importers.data_frame import ParquetTable, is_table, plain, tables_of
from rlwatch.importers.databases import MlflowFiles, RunDatabase, runs_of_mlflow
from rlwatch.importers.json_document import JsonDocument, JsonDocumentReading
from rlwatch.importers.json_logs import FlatJsonLines, TrainerState, VerlJsonLines
from rlwatch.importers.lines import MOST_RUNS, blocks, shown
from rlwatch.importers.loop_console import LoopConsole
from rlwatch.importers.naming import NONE, Naming
from rlwatch.importers.notebook import Notebook
from rlwatch.importers.pattern_console import PREFIX, pattern_console
from rlwatch.importers.refusals import (
    NO_LOG_OF_WANDB,
    RUNS_NOT_STEPS,
    died_early,
    is_binary,
    is_wandb_sidecar,
    named_binary,
    none_known,
    unknown_format,
)
from rlwatch.importers.swanlab_runs import SwanLabRun
from rlwatch.importers.tensorboard_events import TensorBoardEvents, event_files, is_event_file
from rlwatch.importers.text_tables import ConsoleTable, LongTable, MarkdownTable, WideTable
from rlwatch.importers.trainer_consoles import BlockConsole, MegatronConsole, OpenRlhfConsole, RollConsole, SlimeConsole
from rlwatch.importers.trl_console import TrlConsole
from rlwatch.importers.verl_console import VerlConsole
from rlwatch.importers.wandb_runs import WandbOffline
from rlwatch.metrics import known
from rlwatch.plugins import usable
from rlwatch.wording import meant, nearest

# Search for runs and logs in directories.

PATTERNS = ("*.log", "*.jsonl", "*.out", "*.csv", "*.wandb", "*.swanlab")
"""Default patterns of the names of log files."""
DEEPEST = 12
"""Number of directory levels that are searched."""
_PACKED = re.compile(r"\.(?:gz|bz2|xz|zst)$")
_STATES = ("trainer_state.json", "*/trainer_state.json")
_CHECKPOINT = "checkpoint-"
_RUN_FILES = ("*.wandb", "*.swanlab")
_STATE_OF_OTHER_NAME = "?*trainer_state.json"


def run_directory(directory: Path) -> Path | None:
    """Return the log that ``directory`` is: itself (TensorBoard, MLflow's files, Aim), or its tracker's file.

    The result is None if ``directory`` is no log.
    """
    runs = sorted(run for pattern in _RUN_FILES for run in directory.glob(pattern))
    if len(runs) == 1:
        return runs[0]
    return directory if event_files(directory) or runs_of_mlflow(directory) or directory.name == AIM_NAME else None


def run_in(directory: Path) -> Path:
    """Return the log that ``directory`` is or contains. Raises ``ImportFormatError`` with advice if there is none."""
    run = run_directory(directory) or aim_repository(directory)
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


def boards_below(directory: Path) -> list[Path]:
    """Return the directories with TensorBoard's event files below ``directory``, if all logs below it are such
    directories.

    Empty if ``directory`` is a log itself, or if there are other logs below it.
    """
    if not directory.is_dir() or run_directory(directory) is not None:
        return []
    logs = list(islice(logs_below(directory), MOST_RUNS))
    return logs if all(log.is_dir() for log in logs) else []


def newest_states(directory: Path) -> list[Path]:
    """Return the newest ``trainer_state.json`` of each training below ``directory``: its own or that of a
    checkpoint.
    """
    newest: dict[Path, Path] = {}
    for state in sorted(directory.rglob("trainer_state.json"), key=_how_far):
        home = state.parent.parent if state.parent.name.startswith(_CHECKPOINT) else state.parent
        newest[home] = state
    return [newest[home] for home in sorted(newest)]


def _how_far(state: Path) -> tuple[int, int]:
    """Return the sort key of a state: the number of its checkpoint; a state outside checkpoints is the last."""
    digits = state.parent.name.removeprefix(_CHECKPOINT)
    return (0, int(digits)) if digits.isdecimal() and state.parent.name.startswith(_CHECKPOINT) else (1, 0)


def logs_in(path: Path) -> list[Path]:
    """Return the logs that ``path`` means: itself, or all logs in and below it if it is a directory but no log.

    Of the checkpoints of one training only the newest state counts, because it contains all earlier rows.
    """
    if not path.is_dir() or run_directory(path) is not None or boards_below(path):
        return [path]
    found = [*logs_below(path, (*PATTERNS, "*.parquet", _STATE_OF_OTHER_NAME)), *newest_states(path)]
    found += (home for home in sorted(path.rglob("mlruns")) if home.is_dir() and runs_of_mlflow(home))
    return [*found, *(home for home in sorted(path.rglob(AIM_NAME)) if home.is_dir())]


Refused = Callable[[Path, OSError], None]


def logs_below(
    directory: Path, patterns: Sequence[str] = PATTERNS, refused: Refused = lambda _directory, _error: None
) -> Iterator[Path]:
    """Yield the log files in ``directory`` and below it, each once, in the order of directory names.

    A directory with event files is one log; a directory with a ``.wandb`` or ``.swanlab`` file is only that run.
    Hidden directories, checkpoints, links, special files and stores of rlwatch are left out.

    Parameters
    ----------
    directory
        The directory to search.
    patterns
        Patterns of the names of log files.
    refused
        Called with each directory that cannot be read, and the error.
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
    runs = [name for name in names if _wanted(name, _RUN_FILES)]
    if runs:
        yield from (directory / name for name in runs if _wanted(name, patterns))
        return
    if any("tfevents" in name for name in names) and (patterns == PATTERNS or _wanted("events.out.tfevents", patterns)):
        yield directory
    yield from (directory / name for name in names if "tfevents" not in name and _wanted(name, patterns))
    for name in directories:
        if depth > 0 and not name.startswith((".", _CHECKPOINT)):
            yield from _below(directory / name, patterns, depth - 1, refused)


def _listed(directory: Path) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the directories in ``directory``, sorted."""
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


TENSORBOARD = TensorBoardEvents()
JSON_DOCUMENT = JsonDocument()
MLFLOW_FILES = MlflowFiles()
AIM = AimRepository()
BINARY: tuple[Importer, ...] = (TENSORBOARD, WandbOffline(), SwanLabRun(), ParquetTable(), RunDatabase())
CONSOLES: tuple[LineImporter, ...] = (
    OpenRlhfConsole(),
    SlimeConsole(),
    RollConsole(),
    MegatronConsole(),
    VerlConsole(),
    TrlConsole(),
    BlockConsole(),
    LoopConsole(),
    ConsoleTable(),
)
IMPORTERS: tuple[Importer, ...] = (
    *BINARY,
    MLFLOW_FILES,
    AIM,
    TrainerState(),
    VerlJsonLines(),
    FlatJsonLines(),
    ClearMlOffline(),
    JSON_DOCUMENT,
    Notebook(CONSOLES),
    LongTable(),
    WideTable(),
    MarkdownTable(),
    *CONSOLES,
)
WINDOW = 1 << 18
_OVERLAP = 1 << 14
_LISTED = 20
LEAST_RUNS = 3
MOST_NAMES_TRIED = 5000
"""Largest number of files searched for a name similar to that of a missing file."""
HARDLY = 0.2


def formats() -> tuple[str, ...]:
    """Return the names of the formats that can be read."""
    return tuple(importer.name for importer in importers())


def importers(naming: Naming = NONE) -> tuple[Importer, ...]:
    """Return all importers, those of plugins last.

    Importers that recognise rows by metric names also know those in ``naming``.
    """
    others = usable("rlwatch.importers", {importer.name for importer in IMPORTERS}).values()
    known_ones = (*IMPORTERS, *(other() if isinstance(other, type) else other for other in others))
    if not naming.metrics:
        return known_ones
    loop = LoopConsole(frozenset(naming.metrics))
    consoles = [loop if isinstance(console, LoopConsole) else console for console in CONSOLES]
    renaming: dict[str, Importer] = {loop.name: loop, Notebook.name: Notebook(consoles)}
    return tuple(renaming.get(importer.name, importer) for importer in known_ones)


def _sniffed(importer: Importer, head: bytes, path: Path) -> FormatMatch:
    """Return the confidence of an importer; 0 for an importer of a plugin that raises."""
    if importer in IMPORTERS or isinstance(importer, LoopConsole | Notebook):
        return importer.sniff(head, path)
    return call_or(lambda: importer.sniff(head, path), lambda error: FormatMatch(0.0, f"failed: {described(error)}"))


def named(name: str, path: str = "", naming: Naming = NONE) -> Importer:
    """Return the importer of the format ``name``, or of ``pattern:REGEX``.

    ``naming`` are metrics that the user assigned to names. ``path`` is the log, for error messages. Raises
    ``ImportFormatError`` for an unknown name.
    """
    if name.startswith(PREFIX):
        return pattern_console(name.removeprefix(PREFIX))
    for importer in importers(naming):
        if importer.name == name:
            return importer
    hint = meant(name, formats()) or f"; there are: {', '.join(formats())}"
    raise ImportFormatError(path or "format", f"no format is called {name!r}{hint}")


def verdicts(
    head: bytes, path: Path, *, beginning: bool = True, naming: Naming = NONE, best: bool = False
) -> list[tuple[Importer, FormatMatch]]:
    """Return the confidence of each importer that ``head``, a piece of the log at ``path``, has its format.

    A later piece of a log (``beginning`` False) is tried only by importers whose rows may come anywhere. The importer
    of custom loops takes longer than all others together, so it is tried only if no other importer is more confident.
    ``naming`` are metrics that the user assigned to names. ``best``: leave out those that cannot be more confident than
    one before them.
    """
    given: list[tuple[Importer, FormatMatch]] = []
    highest = 0.0
    for importer in importers(naming):
        if not (beginning or importer.anywhere):
            continue
        most = importer.weight if isinstance(importer, LineImporter) and importer in IMPORTERS else 1.0
        if (highest > most and isinstance(importer, LoopConsole)) or (best and highest >= most):
            continue
        given.append((importer, _sniffed(importer, head, path)))
        highest = max(highest, given[-1][1].confidence)
    return given


def recognise(
    head: bytes, path: Path, *, beginning: bool = True, last: bool = False, naming: Naming = NONE
) -> tuple[Importer | None, str]:
    """Return the importer with the highest confidence in ``head``, a piece of the log at ``path``, and the reason.

    ``naming`` are metrics that the user assigned to names. If no importer is confident, return None and the list of
    formats that were tried. A piece that is not the beginning of the log (``beginning`` False) is tried by fewer
    importers.

    A confidence up to 0.2 counts only in a second pass over the log (``last``), if the first found nothing better.

    Raises
    ------
    ImportFormatError
        If ``head`` begins a file that is certainly not a readable log.
    """
    if beginning:
        binary = binary_format(head, path)
        if binary is not None:
            return binary, f"found {binary.expects}"
        refuse_binary(head, path)
    given = verdicts(head, path, beginning=beginning, naming=naming, best=True)
    importer, best = max(given, key=lambda pair: pair[1].confidence)
    if best.confidence > (0 if last else HARDLY):
        return importer, best.reason
    # Each format lacks its mark; only further findings help the user.
    partly = [f"{one.name}: {verdict.reason}" for one, verdict in given if verdict.reason != f"no {one.expects}"]
    return None, "; ".join([f"tried {', '.join(one.name for one, _ in given)}", *partly])


def binary_format(head: bytes, path: Path) -> Importer | None:
    """Return the importer of the binary file that begins with ``head``; None if no importer reads it."""
    return next((importer for importer in BINARY if importer.sniff(head, path).confidence > 0), None)


def refuse_binary(head: bytes, path: Path) -> None:
    """Raise ``ImportFormatError`` if ``head`` begins a file that holds no text and cannot be read."""
    problem = named_binary(head)
    if problem is None and is_binary(head):
        problem = f"is a binary file of no known kind; formats that can be read: {', '.join(formats())}"
    if problem:
        raise ImportFormatError(str(path), problem)


def windows(path: Path) -> Iterator[bytes]:
    """Yield overlapping pieces of a log as bytes, so that a row at the border of one piece is whole in the next."""
    error_boundary = b""
    for block in blocks(path, WINDOW):
        yield error_boundary + block
        error_boundary = block[-_OVERLAP:]


def sniff(path: str | os.PathLike[str], naming: Naming = NONE) -> Importer:
    """Return the importer for the log at ``path``, recognised by its content.

    ``naming`` are metrics that the user assigned to names. Raises ``ImportFormatError`` with the tried formats if none
    fits.
    """
    log = readable(path)
    if log.is_dir():
        return of_directory(log)
    if is_wandb_sidecar(log):
        raise ImportFormatError(str(log), NO_LOG_OF_WANDB)
    head, tried, window = b"", "", b""
    for last in (False, True):
        for number, window in enumerate(windows(log)):
            importer, reason = recognise(window, log, beginning=number == 0, last=last, naming=naming)
            if importer is not None:
                return importer
            if number == 0:
                head, tried = window, reason
    if not head.strip():
        raise ImportFormatError(str(log), "the file is empty; has the run logged anything yet?")
    raise ImportFormatError(str(log), died_early(window) or unknown_format(head, tried))


def of_directory(log: Path) -> Importer:
    """Return the importer for ``log``, a directory that is a log itself (Aim, MLflow or TensorBoard)."""
    if log.name == AIM_NAME:
        return AIM
    return MLFLOW_FILES if runs_of_mlflow(log) and not event_files(log) else TENSORBOARD


def readable(path: str | os.PathLike[str]) -> Path:
    """Return the log at ``path``, or in it if it is a directory.

    Raises ``ImportFormatError`` with advice if there is none.
    """
    log = Path(path)
    if log.is_dir():
        return run_in(log)
    if not log.exists():
        raise ImportFormatError(str(log), "no such file" + nearly(log))
    if not log.is_file():
        raise ImportFormatError(
            str(log), "is not a regular file; save the output to one (`| tee train.log`) and give that"
        )
    return log


def nearly(missing: Path) -> str:
    """Return a question that suggests existing names similar to that of the file ``missing``.

    The result is empty if no name is similar.
    """
    try:
        names = [*islice((path.name for path in missing.parent.iterdir()), MOST_NAMES_TRIED)]
    except OSError:
        return ""
    close = [str(missing.parent / name) for name in nearest(missing.name, names, 2, 0.7)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def run_name(path: Path) -> str:
    """Return a name for the run in the log at ``path``, which does not name it: that of the file or of its
    directory.
    """
    if is_event_file(path):
        return path.resolve().parent.name or "run"
    if path.is_dir():
        return path.resolve().name or "run"
    if not path.name.startswith("trainer_state.json"):
        return _PACKED.sub("", path.name).rsplit(".", 1)[0] or path.name
    parents = [parent.name for parent in path.resolve().parents if not parent.name.startswith("checkpoint-")]
    return parents[0] or "run"


def read_log(
    path: str | os.PathLike[str],
    *,
    run: str | None = None,
    format: str | None = None,  # noqa: A002  (the word users know)
    naming: Naming = NONE,
) -> list[ImportedRun]:
    r"""Read the log at ``path`` and return the runs that it holds, in order of first appearance; only ``run`` if given.

    A directory with nothing but directories of TensorBoard's event files below it holds all their runs.

    Parameters
    ----------
    path
        A log, or a directory that holds one.
    run
        Name of the run to read; None reads all.
    format
        Name of the format; None recognises it by content.
    naming
        Metrics that the user assigned to unknown names.

    Raises
    ------
    ImportFormatError
        If the log cannot be read, holds no run of that name, lacks a name that the user mapped, or has none of the
        metrics that rlwatch knows. The message names the path, the line and what to do.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> log = pathlib.Path(tempfile.mkdtemp()) / "seed3.log"
    >>> _ = log.write_text("(main_task pid=7) step:1 - actor/entropy:0.42 - actor/grad_norm:nan\n")
    >>> [imported] = read_log(log)
    >>> imported.name, imported.format, imported.records[0].metrics
    ('seed3', 'verl-console', {'actor/entropy': 0.42, 'actor/grad_norm': nan})
    """
    boards = boards_below(Path(path)) if format in (None, TENSORBOARD.name) else []
    if boards:
        return _read_boards(Path(path), boards, run, naming)
    log = readable(path)
    importer = named(format, str(log), naming) if format else sniff(log, naming)
    reading = importer.reading(str(log))
    reading.only = run
    return _assembled(importer, reading, reading.rows(log), run_name(log), run=run, naming=naming)


def read_data(data: object, *, run: str | None = None, naming: Naming = NONE) -> list[ImportedRun]:
    """Return the runs in a DataFrame, a mapping or a list of rows in memory; only ``run`` if given.

    ``naming`` are metrics that the user assigned to names. Mappings and lists are read as
    :mod:`~rlwatch.importers.json_document` reads them from a file, tables of pandas, polars and pyarrow as
    :mod:`~rlwatch.importers.data_frame` does. Raises ``ImportFormatError`` as :func:`read_log`.

    >>> [one] = read_data({"step": [1, 2], "entropy": [0.5, float("nan")]})
    >>> one.format, [record.metrics for record in one.records]
    ('dict', [{'entropy': 0.5}, {'entropy': nan}])
    """
    kind = type(data).__name__
    reading = JsonDocumentReading(f"a {kind} in memory")
    rows = reading.rows_in(tables_of(data, reading.path)) if is_table(data) else reading.rows_of(plain(data))
    found = _assembled(JSON_DOCUMENT, reading, rows, "run", run=run, naming=naming)
    return [replace(one, format=kind) for one in found]


def _assembled(
    importer: Importer,
    reading: LogReading,
    rows: Iterable[ImportedRow],
    unnamed: str,
    *,
    run: str | None,
    naming: Naming = NONE,
) -> list[ImportedRun]:
    """Return the runs of ``rows``; runs without a name are called ``unnamed``."""
    found: dict[str, RunAssembly] = {}
    path = reading.path
    for row in rows:
        name = row.run or unnamed
        if name not in found:
            if run not in (None, name) and len(found) > _LISTED:
                continue  # another run is wanted: the first few names are enough for a message
            if run is None and len(found) >= MOST_RUNS:
                names = ", ".join(shown(other) for other in list(found)[:3])
                problem = f"holds more than {MOST_RUNS:,} runs ({names}, ...), which are not read together; name one "
                raise ImportFormatError(path, problem + "(--run), or split the file", row.line or None)
            found[name] = RunAssembly(path, naming=naming, ordered=not importer.table)
        if run in (None, name):
            found[name].add(row, reading.skips)
    for assembly in found.values():
        assembly.records += assembly.finish(reading.skips)
    _check_found(found, importer, reading, run)
    _check_rows(found, importer, path)
    wanted = {name: assembly for name, assembly in found.items() if run in (None, name)}
    _check_named(wanted, reading, naming)
    _check_known(wanted, importer, reading)
    return [_run(name, assembly, importer, reading) for name, assembly in wanted.items()]


def _read_boards(directory: Path, boards: Sequence[Path], run: str | None, naming: Naming = NONE) -> list[ImportedRun]:
    """Return the runs of the event directories below ``directory``, each named by its relative path."""
    found: dict[str, ImportedRun] = {}
    problem: ImportFormatError | None = None
    for board in boards:
        way = board.relative_to(directory).as_posix()
        try:
            read = read_log(board, naming=naming)
        except ImportFormatError as error:  # a writer of histograms, or a start that logged nothing
            problem = problem or error
            continue
        found |= {(name := way + each.name.removeprefix(run_name(board))): replace(each, name=name) for each in read}
    if problem is not None and not found:
        raise problem
    if run is not None and run not in found:
        names = ", ".join(shown(name) for name in list(found)[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
        raise ImportFormatError(str(directory), f"has no run {run!r}; it has: {names}")
    return [each for name, each in found.items() if run in (None, name)]


def _known_source(importer: Importer, reading: LogReading) -> str:
    """Return the trainer that the log names, or else the one that its format implies."""
    return importer.source if reading.source is None else reading.source


def _run(name: str, assembly: RunAssembly, importer: Importer, reading: LogReading) -> ImportedRun:
    about = reading.about(name)
    return ImportedRun(
        name=name,
        source=source_of(assembly.names, _known_source(importer, reading)),
        format=importer.name,
        path=reading.path,
        records=assembly.by_step() if importer.table else assembly.records,
        skipped=reading.skips.listed(),
        config=about.config,
        notes=reading.notes() + assembly.notes(),
        tags=about.tags,
        title=about.name,
        project=about.project,
        example=reading.example,
    )


def _check_found(found: Mapping[str, RunAssembly], importer: Importer, reading: LogReading, run: str | None) -> None:
    if not found:
        seen = "; ".join(f"{skipped.count} x {skipped.reason}" for skipped in reading.skips.listed())
        problem = f"holds no metrics of any step, read as {importer.name} ({importer.expects})"
        raise ImportFormatError(reading.path, problem + (f"; left out: {seen}" if seen else ""))
    if run is not None and run not in found:
        names = ", ".join(shown(name) for name in list(found)[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
        raise ImportFormatError(reading.path, f"has no run {run!r}; it has: {names}")


def _check_rows(runs: Mapping[str, RunAssembly], importer: Importer, path: str) -> None:
    """Refuse a table whose rows are runs: a single row of a run has no history."""
    rows = [len(assembly.records) for assembly in runs.values()]
    if isinstance(importer, LongTable | WideTable) and len(rows) >= LEAST_RUNS and sorted(rows)[len(rows) // 2] == 1:
        raise ImportFormatError(path, f"is a {RUNS_NOT_STEPS}")


def _check_named(runs: Mapping[str, RunAssembly], reading: LogReading, naming: Naming) -> None:
    """Refuse a log that lacks a name which the user mapped."""
    problem = naming.missing({name for assembly in runs.values() for name in (*assembly.names, *assembly.given)})
    if problem:
        raise ImportFormatError(reading.path, problem)


def _check_known(runs: Mapping[str, RunAssembly], importer: Importer, reading: LogReading) -> None:
    names = list(dict.fromkeys(name for assembly in runs.values() for name in assembly.names))
    if not known(names, source_of(names, _known_source(importer, reading))):
        raise ImportFormatError(reading.path, none_known(names))
