"""All importers, choosing the right one, and reading a whole log."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlwatch.errors import ImportFormatError
from rlwatch.importers.assemble import RunAssembly
from rlwatch.importers.base import ImportedRun, Importer, Verdict
from rlwatch.importers.bounds import MOST_RUNS, shown
from rlwatch.importers.csv_table import LongTable, WideTable
from rlwatch.importers.directories import run_in
from rlwatch.importers.jsonl import FlatJsonLines, VerlJsonLines
from rlwatch.importers.lines import blocks
from rlwatch.importers.openrlhf_console import OpenRlhfConsole
from rlwatch.importers.reading import Reading
from rlwatch.importers.source import source_of
from rlwatch.importers.tensorboard_events import TensorBoardEvents, is_event_file
from rlwatch.importers.trainer_state import TrainerState
from rlwatch.importers.trl_console import TrlConsole
from rlwatch.importers.unsupported import is_binary, named_binary, named_text
from rlwatch.importers.verl_console import VerlConsole
from rlwatch.importers.wandb_offline import WandbOffline
from rlwatch.metrics import known

TENSORBOARD = TensorBoardEvents()
BINARY: tuple[Importer, ...] = (TENSORBOARD, WandbOffline())
IMPORTERS: tuple[Importer, ...] = (
    *BINARY,
    TrainerState(),
    VerlJsonLines(),
    FlatJsonLines(),
    LongTable(),
    WideTable(),
    OpenRlhfConsole(),
    VerlConsole(),
    TrlConsole(),
)
WINDOW = 1 << 18
_OVERLAP = 1 << 14
_LISTED = 20


def formats() -> tuple[str, ...]:
    """Names of the formats that can be read."""
    return tuple(importer.name for importer in IMPORTERS)


def named(name: str, path: str = "") -> Importer:
    """The importer of a format. Raises ``ImportFormatError`` if there is none of that name."""
    for importer in IMPORTERS:
        if importer.name == name:
            return importer
    raise ImportFormatError(path or "format", f"no format is called {name!r}; there are: {', '.join(formats())}")


def verdicts(head: bytes, path: Path, *, beginning: bool = True) -> list[tuple[Importer, Verdict]]:
    """What each importer says of ``head``; of a later piece only those are asked whose rows may come anywhere."""
    return [(importer, importer.sniff(head, path)) for importer in IMPORTERS if beginning or importer.anywhere]


def recognise(head: bytes, path: Path, *, beginning: bool = True) -> tuple[Importer | None, str]:
    """The importer most sure of ``head``, or None and what each was missing.

    Raises ``ImportFormatError`` for what is certainly no log that can be read.
    """
    if beginning:
        binary = binary_format(head, path)
        if binary is not None:
            return binary, f"found {binary.expects}"
        refuse_binary(head, path)
    given = verdicts(head, path, beginning=beginning)
    importer, best = max(given, key=lambda pair: pair[1].confidence)
    if best.confidence > 0:
        return importer, best.reason
    return None, "; ".join(f"{importer.name}: {verdict.reason}" for importer, verdict in given)


def binary_format(head: bytes, path: Path) -> Importer | None:
    """The format of a file that is no text, if it is one that can be read."""
    return next((importer for importer in BINARY if importer.sniff(head, path).confidence > 0), None)


def refuse_binary(head: bytes, path: Path) -> None:
    """Raise ``ImportFormatError`` if ``head`` begins a file that holds no text."""
    problem = named_binary(head, path)
    if problem is None and is_binary(head):
        problem = f"is a binary file of no known kind; formats that can be read: {', '.join(formats())}"
    if problem:
        raise ImportFormatError(str(path), problem)


def windows(path: Path) -> Iterator[bytes]:
    """Overlapping pieces of a log, so that a row on a seam is whole in one of them."""
    seam = b""
    for block in blocks(path, WINDOW):
        yield seam + block
        seam = block[-_OVERLAP:]


def sniff(path: str | os.PathLike[str]) -> Importer:
    """The importer for the log at ``path``. Raises ``ImportFormatError`` with what was tried if none fits."""
    log = readable(path)
    if log.is_dir():
        return TENSORBOARD
    head, tried = b"", ""
    for number, window in enumerate(windows(log)):
        importer, reason = recognise(window, log, beginning=number == 0)
        if importer is not None:
            return importer
        if number == 0:
            head, tried = window, reason
    if not head.strip():
        raise ImportFormatError(str(log), "the file is empty; has the run logged anything yet?")
    raise ImportFormatError(str(log), named_text(head) or f"no known format ({tried})")


def readable(path: str | os.PathLike[str]) -> Path:
    """The log that ``path`` is or, of a directory, holds. Raises ``ImportFormatError`` with what to do otherwise."""
    log = Path(path)
    if log.is_dir():
        return run_in(log)
    if not log.exists():
        raise ImportFormatError(str(log), "no such file")
    if not log.is_file():
        raise ImportFormatError(
            str(log), "is not a regular file; save the output to one (`| tee train.log`) and give that"
        )
    return log


def run_name(path: Path) -> str:
    """A name for the run of a log that does not name it: the file's, or that of the directory that stands for it."""
    if is_event_file(path):
        return path.resolve().parent.name or "run"
    if path.is_dir():
        return path.resolve().name or "run"
    if not path.name.startswith("trainer_state.json"):
        return path.name.removesuffix(".gz").rsplit(".", 1)[0] or path.name
    parents = [parent.name for parent in path.resolve().parents if not parent.name.startswith("checkpoint-")]
    return parents[0] or "run"


def read_log(
    path: str | os.PathLike[str],
    *,
    run: str | None = None,
    format: str | None = None,  # noqa: A002  (the word users know)
) -> list[ImportedRun]:
    r"""The runs that the log at ``path`` holds, in order of first appearance; only ``run`` if given.

    ``format`` overrules recognition by content. Raises ``ImportFormatError`` (path, line, what to do) if the log
    cannot be read, holds no run of that name, or none of the metrics rlwatch knows.

    >>> import tempfile, pathlib
    >>> log = pathlib.Path(tempfile.mkdtemp()) / "seed3.log"
    >>> _ = log.write_text("(main_task pid=7) step:1 - actor/entropy:0.42 - actor/grad_norm:nan\n")
    >>> [imported] = read_log(log)
    >>> imported.name, imported.format, imported.records[0].metrics
    ('seed3', 'verl-console', {'actor/entropy': 0.42, 'actor/grad_norm': nan})
    """
    log = readable(path)
    importer = named(format, str(log)) if format else sniff(log)
    reading = importer.reading(str(log))
    found: dict[str, RunAssembly] = {}
    unnamed = run_name(log)
    for row in reading.rows(log):
        name = row.run or unnamed
        if name not in found:
            if run not in (None, name) and len(found) > _LISTED:
                continue  # asked for another: of these the first few names are enough
            if run is None and len(found) >= MOST_RUNS:
                names = ", ".join(shown(other) for other in list(found)[:3])
                problem = f"holds more than {MOST_RUNS:,} runs ({names}, ...), which are not read together; name one "
                raise ImportFormatError(str(log), problem + "(--run), or split the file", row.line or None)
            found[name] = RunAssembly(str(log))
        if run in (None, name):
            found[name].add(row, reading.skips)
    _check_found(found, importer, reading, run)
    wanted = {name: assembly for name, assembly in found.items() if run in (None, name)}
    _check_known(wanted, importer, reading)
    return [_run(name, assembly, importer, reading) for name, assembly in wanted.items()]


def _run(name: str, assembly: RunAssembly, importer: Importer, reading: Reading) -> ImportedRun:
    return ImportedRun(
        name=name,
        source=source_of(assembly.names, importer.source),
        format=importer.name,
        path=reading.path,
        records=assembly.by_step() if importer.table else assembly.records,
        skipped=reading.skips.listed(),
        config=reading.config(),
        notes=reading.notes(),
    )


def _check_found(found: Mapping[str, RunAssembly], importer: Importer, reading: Reading, run: str | None) -> None:
    if not found:
        seen = "; ".join(f"{skipped.count} x {skipped.reason}" for skipped in reading.skips.listed())
        problem = f"holds no metrics of any step, read as {importer.name} ({importer.expects})"
        raise ImportFormatError(reading.path, problem + (f"; left out: {seen}" if seen else ""))
    if run is not None and run not in found:
        names = ", ".join(shown(name) for name in list(found)[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
        raise ImportFormatError(reading.path, f"has no run {run!r}; it has: {names}")


def _check_known(runs: Mapping[str, RunAssembly], importer: Importer, reading: Reading) -> None:
    names = list(dict.fromkeys(name for assembly in runs.values() for name in assembly.names))
    if not known(names, source_of(names, importer.source)):
        few = ", ".join(shown(name) for name in names[:5]) or "none"
        problem = (
            f"none of its {len(names)} metrics is known to rlwatch (found {few}); rename them to what they are, for "
            "example policy/entropy, policy/kl_ref, reward/mean, optim/grad_norm, or loss, kl, reward as TRL does"
        )
        raise ImportFormatError(reading.path, problem)
