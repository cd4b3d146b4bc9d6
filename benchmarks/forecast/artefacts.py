"""The corpus outside the repository: shards that are named by their hash, fetched, sampled, and never written again.

The repository keeps ``corpus.toml`` (every shard with its hash, and the commands that made it), what is known of each
run (``NAME-runs.parquet``), all labels (``corpus-labels.csv``) and a sample of runs (``sample/``), which tests read.
Rows of the shards lie elsewhere: in a folder, or at a URL such as the assets of a release.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tomllib
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pc
import pyarrow.parquet as pq
from forecast.tables import put

from rlwatch.errors import RLWatchError

HERE = Path(__file__).parent
SHARDS, LABELS, SAMPLE = HERE / "corpus.toml", HERE / "corpus-labels.csv", HERE / "sample"
RUNS, SEED = 130, 1
"""Runs of the sample that is kept, and the seed it was chosen by."""
LEAST = 2
"""Runs of the sample from every source and outcome."""
BLOCK = 2**20


@dataclass(frozen=True)
class Shard:
    """A file of rows.

    ``sampled``: whether runs of the sample are chosen from this shard. It is settled once, so that the sample and what
    is measured on it stay as they are.
    """

    name: str
    sha256: str
    bytes: int
    runs: int
    rows: int
    sampled: bool = True
    made: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Name of the file of its rows."""
        return f"{self.name}.parquet"

    @property
    def records(self) -> str:
        """Name of the file that says what is known of its runs."""
        return f"{self.name}-runs.parquet"


def shards(path: Path = SHARDS) -> list[Shard]:
    """All shards, the oldest first."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["shard"]
    return [Shard(**table | {"made": tuple(table.get("made", ()))}) for table in tables]


def entry(path: Path) -> str:
    """Lines of ``corpus.toml`` for a shard that was just packed; the commands that made it are still to be added."""
    rows = pq.read_table(path, columns=["run"])
    runs = len(rows.column("run").unique())
    lines = ("[[shard]]", f'name = "{path.stem}"', f'sha256 = "{digest(path)}"', f"bytes = {path.stat().st_size}")
    return "\n".join((*lines, f"runs = {runs}", f"rows = {len(rows)}", "made = []"))


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: Path, source: str, *, listed: Sequence[Shard] | None = None, index: Path = HERE) -> list[Path]:
    """Put every shard into ``folder``, with what is known of its runs; what is there already is checked and kept.

    Parameters
    ----------
    source
        A folder or a URL that holds the files.
    listed
        The shards; those of ``corpus.toml`` if None.
    index
        Where the records of the runs lie.

    Raises
    ------
    RLWatchError
        If a shard cannot be had, or is not the one that its hash names. No half file is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_fetched(shard, folder, source, index) for shard in (shards() if listed is None else listed)]


def _fetched(shard: Shard, folder: Path, source: str, index: Path) -> Path:
    path = folder / shard.file
    if path.exists():
        _require_same(shard, path)
    else:
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with beside.open("wb") as into:
                _copy(shard, source, into)
            _require_same(shard, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    shutil.copyfile(index / shard.records, folder / shard.records)
    return path


def _require_same(shard: Shard, path: Path) -> None:
    if (got := digest(path)) != shard.sha256:
        raise RLWatchError(
            f"{path} has the hash {got}, and {shard.sha256} was expected: it is not the shard {shard.name!r} of "
            "corpus.toml; move it away, or give another --from"
        )


def _copy(shard: Shard, source: str, into: BinaryIO) -> None:
    """Copy the bytes of a shard from a folder or a URL."""
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(f"{source.rstrip('/')}/{shard.file}", timeout=60) as answer:
                shutil.copyfileobj(answer, into, BLOCK)
        else:
            with (Path(source) / shard.file).open("rb") as file:
                shutil.copyfileobj(file, into, BLOCK)
    except (OSError, urllib.error.URLError) as error:
        raise RLWatchError(
            f"{shard.file} cannot be had from {source}: {error}; corpus.toml says how to make it again"
        ) from error


@dataclass(frozen=True)
class Known:
    """Facts about a run without its rows: where it comes from, and what became of it."""

    run: str
    source: str
    outcome: str


def known(index: Path = HERE) -> list[Known]:
    """Every run that the sample may have: those of the shards that are sampled."""
    outcomes = {row["run"]: row["class"] for row in pc.read_csv(index / LABELS.name).to_pylist()}
    records = [pq.read_table(index / shard.records, columns=["run", "source"]) for shard in shards() if shard.sampled]
    return [Known(row["run"], row["source"], outcomes[row["run"]]) for row in pa.concat_tables(records).to_pylist()]


def chosen(runs: Sequence[Known], count: int = RUNS, seed: int = SEED) -> list[str]:
    """About ``count`` runs: of each source and outcome its share, and two at least; drawn by a hash of their names."""
    groups: dict[tuple[str, str], list[Known]] = defaultdict(list)
    for run in runs:
        groups[run.source, run.outcome].append(run)
    picked = set()
    for group in groups.values():
        share = max(LEAST, round(count * len(group) / len(runs)))
        picked |= {run.run for run in sorted(group, key=lambda run: _draw(seed, run.run))[:share]}
    return [run.run for run in runs if run.run in picked]


def _draw(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()


def sample(corpus: Path, out: Path, count: int = RUNS, seed: int = SEED) -> list[Path]:
    """Rows and records of the chosen runs, from a folder that :func:`fetch` filled. Returns the files."""
    wanted = pa.array(chosen(known(), count, seed))
    tables: Mapping[str, list[pa.Table]] = {"": [], "-runs": []}
    for shard in (each for each in shards() if each.sampled):
        for ending, parts in tables.items():
            table = pq.read_table(corpus / f"{shard.name}{ending}.parquet")
            parts.append(table.filter(pa.compute.is_in(table.column("run"), value_set=wanted)))
    out.mkdir(parents=True, exist_ok=True)
    joined = {ending: pa.concat_tables(parts, promote_options="permissive") for ending, parts in tables.items()}
    measured = [name for name in joined[""].column_names if joined[""].column(name).null_count < len(joined[""])]
    joined[""] = joined[""].select(measured)
    compression = {"": "brotli", "-runs": "zstd"}
    return [put(table, out / f"sample{ending}.parquet", compression[ending]) for ending, table in joined.items()]
