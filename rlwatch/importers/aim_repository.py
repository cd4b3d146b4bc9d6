"""Reading of repositories of Aim: ``.aim``, with two RocksDB databases for each run, for metadata and for metrics.

Aim's own package reads the databases, one by one and read only. Aim itself compacts the databases that it opens, and
removes an index that it cannot read. This importer writes nothing and takes no lock, also while a trainer tracks. If a
step was tracked twice, the last value counts. NaN and the infinities are values. Aim's measurements of the machine
(``__system__...``), archived runs, images and texts are left out. Lines are not counted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from rlwatch.error_boundary import call_or, described
from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import About, DirectoryImporter, ImportedRow, LogReading, step_of, value_of
from rlwatch.importers.databases import opened, unique_name
from rlwatch.importers.lines import shown
from rlwatch.importers.refusals import EXPORT
from rlwatch.records import JSON

AIM_NAME = ".aim"
_ABOUT, _SERIES = "meta/chunks", "seqs/chunks"
_NUMBERS = frozenset({"float", "float64", "int", "number"})
_OF_THE_MACHINE = "__"
_SETTINGS = "hparams"
_NO_EXPERIMENT = "default"
_TRIES = 20
"""Number of attempts to open a database: while a trainer writes to it, files and their values may vanish."""
_TRAINING = frozenset({"train", "training"})
_HELD_OUT = {"valid": "val", "dev": "val"} | {name: name for name in ("eval", "val", "validation", "test")}
"""Word of a context -> prefix of the metric's name."""
_PROPERTIES = (
    "SELECT r.hash, r.name, r.is_archived, e.name, t.name FROM run r LEFT JOIN experiment e ON e.id = r.experiment_id "
    "LEFT JOIN run_tag l ON l.run_id = r.id LEFT JOIN tag t ON t.id = l.tag_id ORDER BY r.id, t.id"
)
_GONE = (
    "only Aim's own package reads them, which is not installed here: `pip install 'aim>=3.11'` (under Python 3.12 or "
    f"older, for which there is one), or {EXPORT}"
)


def aim_repository(directory: Path) -> Path | None:
    """Return the repository that ``directory`` is or contains; None if there is none."""
    if directory.name != AIM_NAME:
        directory = directory / AIM_NAME
    return directory if directory.is_dir() else None


class _Storage(NamedTuple):
    """Functions of Aim's package that are used."""

    opened: Callable[[Path], Any]
    path: Callable[[tuple[str | int, ...]], bytes]
    way: Callable[[bytes], list[str | int]]
    value: Callable[[bytes], Any]
    tree: Callable[[Iterator[tuple[bytes, bytes]]], dict[Any, Any]]


def _storage() -> _Storage:
    """Load Aim's functions. Raises ``ImportError`` if Aim is not installed, or too old for its databases."""
    import aimrocks
    from aim.storage import treeutils
    from aim.storage.encoding import decode, decode_path, encode_path

    return _Storage(
        lambda path: aimrocks.DB(str(path), aimrocks.Options(), read_only=True),
        encode_path,
        decode_path,
        decode,
        lambda items: treeutils.decode_tree(items, resolve_objects=True),
    )


class _Properties(NamedTuple):
    """Name, experiment and tags that users set for a run."""

    name: str = ""
    archived: bool = False
    project: str = ""
    tags: tuple[str, ...] = ()


class AimReading(LogReading):
    """Reader of the runs in an Aim repository."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._about: dict[str, About] = {}

    def rows(self, path: Path) -> Iterator[ImportedRow]:
        """Yield the rows of every run in the repository at ``path``, one run after another.

        Raises ``ImportFormatError`` if it has no run, or if Aim's package is missing or fails.
        """
        runs = sorted(run.name for run in (path / _ABOUT).glob("*") if run.is_dir())
        what = f"is a repository of Aim with {len(runs):,} run{'' if len(runs) == 1 else 's'}"
        if not runs:
            raise ImportFormatError(self.path, f"{what}; has any run tracked anything yet?")
        storage = call_or(_storage, lambda error: self._without_aim(what, error))
        for name, run, properties in self._named(path, runs):
            yield from self._run(storage, path, name, run, properties)

    def about(self, run: str) -> About:
        """Return name, experiment, settings and tags of the run called ``run``."""
        return self._about.get(run, About())

    def _without_aim(self, what: str, error: Exception) -> NoReturn:
        problem = _GONE if isinstance(error, ImportError) else f"Aim's own package fails here: {described(error)}"
        raise ImportFormatError(self.path, f"{what}; {problem}") from error

    def _named(self, path: Path, runs: Sequence[str]) -> list[tuple[str, str, _Properties]]:
        """Return name, id and properties of each run to read, in the order of their start."""
        properties = self._properties(path)
        order = {run: number for number, run in enumerate(properties)}
        found: dict[str, tuple[str, str, _Properties]] = {}
        for run in sorted(runs, key=lambda run: order.get(run, len(order))):
            own = properties.get(run, _Properties())
            if own.archived:
                self.skips.add("a run that was archived", 0)
            else:
                name = unique_name(own.name or run, run, found)
                found[name] = (name, run, own)
        return [found[self.only]] if self.only in found else list(found.values())

    def _properties(self, path: Path) -> dict[str, _Properties]:
        """Return the properties of each run by its id; count what cannot be read."""
        found: dict[str, _Properties] = {}
        try:
            with closing(opened(path / "run_metadata.sqlite")) as database:
                for run, name, archived, experiment, tag in database.execute(_PROPERTIES):
                    tags = (*found.get(run, _Properties()).tags, *([tag] if tag else []))
                    project = "" if experiment == _NO_EXPERIMENT else experiment or ""
                    found[run] = _Properties(name or "", bool(archived), project, tags)
        except sqlite3.Error as error:
            self.skips.add(f"names, experiments and tags of runs ({error})", 0)
        return found

    def _run(
        self, storage: _Storage, path: Path, name: str, run: str, properties: _Properties
    ) -> Iterator[ImportedRow]:
        problem, read = "", None
        for _ in range(_TRIES):
            problem, read = call_or(
                lambda: ("", _Run(storage, path, run).read(self)), lambda error: (_message(error), None)
            )
            if read is not None:
                break
        if read is None:
            self.skips.add(f"run {shown(name)} cannot be read ({problem})", 0)
            return
        config, rows = read
        if not rows:
            self.skips.add("a run that has no metric of any step", 0)
        self.recognised = True
        self._about[name] = About(name, properties.project, config, properties.tags)
        for step in sorted(rows):
            at, metrics = rows[step]
            yield ImportedRow(step, metrics, 0, name, at)


Rows = dict[int, tuple[float, dict[str, float]]]
"""Step -> Unix time and metrics."""


class _Run:
    """The two databases of one run."""

    def __init__(self, storage: _Storage, path: Path, run: str) -> None:
        self._storage, self._run = storage, run
        self._meta = _whole(storage, path / _ABOUT / run)
        self._series = _whole(storage, path / _SERIES / run)

    def read(self, reading: LogReading) -> tuple[dict[str, JSON], Rows]:
        """Return the settings and the rows of the run."""
        meta = self._tree("meta", "chunks", self._run)
        contexts = {context: words or {} for context, words in self._tree("meta", "contexts").items()}
        taken: set[str] = set()
        rows: Rows = {}
        for context, names in sorted(meta.get("traces", {}).items(), key=lambda one: len(contexts.get(one[0], {}))):
            for name, trace in names.items():
                if trace.get("dtype", "float") in _NUMBERS and not name.startswith(_OF_THE_MACHINE):
                    called = metric_name(name, contexts.get(context, {}), taken)
                    taken.add(called)
                    self._take(called, (context, name), trace.get("version", 1), rows, reading)
        return _settings(meta.get("attrs", {})), rows

    def _take(self, called: str, series: tuple[int, str], version: int, rows: Rows, reading: LogReading) -> None:
        """Add the values of one metric; the time of a step is that of its first metric."""
        way = ("seqs", *(() if version == 1 else (f"v{version}",)), "chunks", self._run, *series)
        places = self._places(way, version, called, reading)
        moments: dict[bytes, float] = {}
        for key, stored in self._items(*way, "val"):
            value = value_of(stored)
            if value is None:
                reading.skips.add(f"{shown(called)} is not a number", 0)
            elif key in places:  # while a trainer writes, the value may be stored before its step
                step = places[key]
                if step not in rows:
                    moments = moments or dict(self._items(*way, "time"))
                    rows[step] = (moments.get(key) or 0.0, {})
                rows[step][1][called] = value
        if any("epoch" not in rows[step][1] for step in places.values() if step in rows):
            for key, epoch in self._items(*way, "epoch"):
                read = None if epoch is None else value_of(epoch)
                if read is not None and places.get(key) in rows:
                    rows[places[key]][1].setdefault("epoch", read)

    def _places(self, way: tuple[str | int, ...], version: int, called: str, reading: LogReading) -> dict[bytes, int]:
        """Return the step of each key of a metric: from the key or, since Aim 3.11, from a column of its own."""
        column = "val" if version == 1 else "step"
        places = {}
        for key, stored in self._items(*way, column):
            try:
                places[key] = step_of(self._storage.way(key)[0] if version == 1 else stored)
            except ValueError as error:
                reading.skips.add(f"{shown(called)}: {error}", 0)
        return places

    def _tree(self, *way: str) -> dict[Any, Any]:
        """Return everything below a path; empty where there is nothing."""
        try:
            return self._storage.tree((key, value) for key, value in self._below(self._meta, *way) if value)
        except KeyError:
            return {}

    def _items(self, *way: str | int) -> Iterator[tuple[bytes, Any]]:
        """Keys and values of a column."""
        for key, value in self._below(self._series, *way):
            if key:
                yield key, self._storage.value(value)

    def _below(self, database: Any, *way: str | int) -> Iterator[tuple[bytes, bytes]]:
        prefix = self._storage.path(way)
        entries = database.iteritems()
        entries.seek(prefix)
        for key, value in entries:
            if not key.startswith(prefix):
                return
            yield key[len(prefix) :], value


def _whole(storage: _Storage, path: Path) -> Any:
    """Open a database. Raises ``BlockingIOError`` if its files changed meanwhile."""
    before = _files(path)
    database = storage.opened(path)
    if _files(path) != before:
        raise BlockingIOError("it is being written to")
    return database


def _files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def metric_name(name: str, context: Mapping[str, object], taken: Collection[str] = ()) -> str:
    """Return the name of the metric ``name`` in its context: a held-out context becomes a prefix, a training one is
    dropped.

    If another metric has that name, the whole context is appended.

    >>> metric_name("reward", {"subset": "train"}), metric_name("reward", {"subset": "val", "rank": 1})
    ('reward', 'val/reward[rank=1]')
    >>> metric_name("loss", {"subset": "train"}, taken={"loss"})
    'loss[subset=train]'
    """
    before, after = "", dict(context)
    for key, value in context.items():
        word = value.lower() if isinstance(value, str) else ""
        if word in _TRAINING or word in _HELD_OUT:
            before = f"{_HELD_OUT[word]}/" if word in _HELD_OUT else before
            del after[key]
    called = before + name + _in_brackets(after)
    return called if called not in taken else name + _in_brackets(context)


def _in_brackets(context: Mapping[str, object]) -> str:
    return f"[{','.join(f'{key}={value}' for key, value in context.items())}]" if context else ""


def _settings(attributes: Mapping[str, Any]) -> dict[str, JSON]:
    """Return the hyperparameters and all other settings, without Aim's facts about the machine."""
    given = attributes.get(_SETTINGS)
    others = {name: value for name, value in attributes.items() if not str(name).startswith(_OF_THE_MACHINE)}
    if isinstance(given, dict):
        others = {name: value for name, value in others.items() if name != _SETTINGS} | given
    return {str(name): _plain(value) for name, value in others.items()}


def _plain(value: Any) -> JSON:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _message(error: Exception) -> str:
    """Return the text of an error; RocksDB's come as bytes."""
    text = error.args[0] if error.args else ""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else described(error)


class AimRepository(DirectoryImporter):
    """Importer of a repository of Aim."""

    name: ClassVar[str] = "aim"
    expects: ClassVar[str] = "repository of Aim (.aim)"

    def reading(self, path: str) -> AimReading:
        """Return a new reader of the repository at ``path``."""
        return AimReading(path)

    def files(self, directory: Path) -> Iterator[Path]:
        """Return the files of the metric databases in ``directory``, which change with every write."""
        return directory.glob(f"{_SERIES}/*/*")
