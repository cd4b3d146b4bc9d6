"""Tables of a run for other tools (CSV, Parquet, JSON lines, traces), and the properties that recur among spikes.

A *culprit* is a token that gradient localisation found responsible for a gradient spike. The table of spikes has a row
for each culprit.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlwatch import codec
from rlwatch.columns import Column
from rlwatch.errors import MissingExtraError
from rlwatch.ports import Store
from rlwatch.records import CULPRITS, JSON, LOCALISED, STAGES, STALLED, Event, RunInfo, SpikeBatch
from rlwatch.wording import one_line

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa  # type: ignore[import-untyped]


COLUMNS: Mapping[str, Column] = {
    "run_id": Column("str", "id of the run"),
    "run": Column("str", "its name"),
    "step": Column("int", "optimizer step whose gradient spiked"),
    "attempt": Column("int", "process that trained it; a resume is a new one"),
    "rank": Column("int", "rank that had the token; missing where the step was not localised"),
    "place": Column("int", "0 is the worst culprit of its step"),
    "microbatch": Column("int", "micro-batch of the step on that rank"),
    "sequence": Column("int", "response among those of the step on that rank, as the trainer shuffled them"),
    "position": Column("int", "position in the response, tokens"),
    "text_position": Column("int", "characters of the response before the token, where text is kept"),
    "token_id": Column("int", "id in the vocabulary"),
    "text": Column("str", "text of the token, where text is kept"),
    "before": Column("str", "text before it"),
    "after": Column("str", "text after it"),
    "prompt_index": Column("int", "row of the dataset that the prompt is"),
    "prompt": Column("str", "the prompt, where text is kept"),
    "group": Column("str", "prompt group: the same for all responses to one prompt in one generation"),
    "sample": Column("int", "number of the response within its group"),
    "rollout": Column("str", "rollout: its number in the generation over all ranks, or the trainer's own id"),
    "task": Column("str", "task or data source"),
    "sampler_version": Column("int", "step of the policy that sampled the response"),
    "reward": Column("float", "reward of the response"),
    "reward_parts": Column("str", "JSON object: reward function -> what it gave"),
    "logp": Column("float", "log-prob under the policy, nats"),
    "old_logp": Column("float", "under the policy that the update began with, nats"),
    "rollout_logp": Column("float", "as the rollout engine reported it, nats"),
    "ref_logp": Column("float", "under the reference, nats"),
    "entropy": Column("float", "of the next-token distribution, nats"),
    "ratio": Column("float", "exp(logp - old_logp)"),
    "advantage": Column("float", "of the token"),
    "coefficient": Column("float", "dL/dlogp"),
    "entropy_coefficient": Column("float", "dL/dentropy"),
    "contribution": Column("float", "signed part of the gradient norm; all tokens of the step add up to it"),
    "share": Column("float", "contribution / norm"),
    "own_norm": Column("float", "norm of the token's own gradient; missing where it was not verified"),
    "layers": Column("str", "JSON object: layer -> share of own_norm squared"),
    "cause": Column("str", "class of the token"),
    "why": Column("str", "why, in a sentence"),
    "norm": Column("float", "gradient norm of the step, before clipping"),
    "threshold": Column("float", "norm from which on the step was a spike"),
    "tokens": Column("int", "response tokens of the step, all ranks"),
    "verdict": Column("str", "level to blame: token, response, prompt group ..."),
    "step_cause": Column("str", "class of the step"),
    "method": Column(
        "str",
        "how contributions were found: fd (finite difference), richardson, jvp (forward mode), "
        "reverse (through the backward), bisection, or trace",
    ),
    "gap": Column("float", "(sum of contributions - norm) / norm"),
    "complete": Column("bool", "whether the gap is within tolerance"),
    "message": Column("str", "what was found, in a sentence"),
    "why_not": Column("str", "why the step was not localised; empty where it was"),
}
"""Columns of the table of spikes, in order. ``docs/localisation.md`` lists them."""

OF_EVENT = {"step_cause": "cause"} | {
    name: name for name in ("norm", "threshold", "tokens", "verdict", "method", "gap", "complete", "message", "why_not")
}
"""Column of the table of spikes -> field of the step's event from which its value comes."""
UNLESS_KNOWN = ("prompt_index", "prompt", "group", "sample", "rollout", "task", "sampler_version", "reward_parts",
    "text_position")  # fmt: skip
"""Columns for which the recorder wrote -1 or an empty text where the trainer did not know the value."""
Row = dict[str, JSON]


def spike_table(store: Store, run: RunInfo) -> list[Row]:
    """Return the localised gradient spikes of ``run``: a row for each culprit (a token responsible for the spike).

    Rows are ordered by step, in each step the largest culprit first. A spike without culprits has one row. Each row has
    all of :data:`COLUMNS`: None is a value that is not known, NaN and infinities are measured values.
    """
    steps: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for batch in store.spikes(run.run_id, reason=CULPRITS):
        steps[batch.step, batch.attempt] += culprits_of(batch)
    bodies = {
        (event.step, event.attempt): event.body
        for event in store.events(run.run_id)
        if event.kind == LOCALISED and event.step is not None
    }
    rows: list[Row] = []
    for at in sorted({*steps, *bodies}, key=lambda at: (at[1], at[0])):
        body: Mapping[str, Any] = bodies.get(at, {})
        whole = {name: body.get(field) for name, field in OF_EVENT.items()}
        head = {"run_id": run.run_id, "run": run.name, "step": at[0], "attempt": at[1]}
        worst_first = sorted(steps.get(at, []), key=_size, reverse=True)
        tokens: list[Row] = [{**row, "place": place} for place, row in enumerate(worst_first)] or [{}]
        rows += [dict.fromkeys(COLUMNS) | token | whole | head for token in tokens]
    return rows


def culprits_of(batch: SpikeBatch) -> list[Row]:
    """Return the culprits (tokens responsible for a gradient spike) in one recorded batch, as rows by name of the
    column.

    Rows are in the order of recording. Unknown values are None. A culprit whose own gradient was not verified has no
    ``own_norm`` and no ``layers``.
    """
    columns = {name: list(getattr(values, "tolist", lambda v=values: v)()) for name, values in batch.columns.items()}
    rows = [{name: values[i] for name, values in columns.items() if name in COLUMNS} for i in range(len(batch))]
    for i, row in enumerate(rows):
        row["rank"] = batch.rank
        row |= {name: None for name in UNLESS_KNOWN if row.get(name) in (-1, "")}
        if not columns.get("verified", [1] * len(rows))[i]:
            row["own_norm"] = None
            row.pop("layers", None)
    return rows


def _size(row: Row) -> float:
    """Return the size by which culprits of several ranks are ordered; infinity for NaN, which comes first."""
    sizes = [abs(row[name]) for name in ("own_norm", "contribution") if isinstance(row.get(name), float)]
    return max((math.inf if math.isnan(size) else size for size in sizes), default=math.inf)


# What recurs.

RECUR = ("token", "position", "prompt", "task", "cause", "layer")
"""Properties that the culprits (tokens responsible for spikes) of several steps may have in common."""


@dataclass(frozen=True, slots=True)
class RecurringProperty:
    """A value that the culprits (tokens responsible for gradient spikes) of several steps have in common.

    Parameters
    ----------
    property, value
        Name of the property, one of :data:`RECUR`, and the common value as text.
    steps
        Number of steps with a culprit that has this value.
    of
        Number of all steps with culprits.
    """

    property: str
    value: str
    steps: int
    of: int


def recurring(rows: Iterable[Row], most: int = 3) -> list[RecurringProperty]:
    """Return the properties that culprits (tokens responsible for gradient spikes) of two or more steps have in common.

    Parameters
    ----------
    rows
        Rows of :func:`spike_table`.
    most
        Largest number of values for each property of :data:`RECUR`; the most frequent values come first.
    """
    seen: dict[str, dict[str, set[tuple[Any, Any]]]] = {name: defaultdict(set) for name in RECUR}
    steps = set()
    for row in rows:
        if row.get("position") is None:
            continue
        at = (row.get("attempt"), row["step"])
        steps.add(at)
        for name, value in _properties(row).items():
            seen[name][value].add(at)
    found = []
    for name, values in seen.items():
        counts = Counter({value: len(where) for value, where in values.items() if len(where) > 1})
        found += [RecurringProperty(name, value, count, len(steps)) for value, count in counts.most_common(most)]
    return found


def _properties(row: Row) -> dict[str, str]:
    text, token, layers = row.get("text"), row.get("token_id"), _object(row.get("layers"))
    known = {
        "token": None if token is None else f"{one_line(repr(text), 24)} {token}" if text else str(token),
        "position": row["position"],
        "prompt": row.get("prompt_index"),
        "task": row.get("task") or None,
        "cause": row.get("cause"),
        "layer": max(layers, key=layers.__getitem__) if layers else None,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def _object(text: JSON) -> dict[str, float]:
    """Return the JSON object in the text of a column; empty where there is none."""
    try:
        found = json.loads(text) if isinstance(text, str) and text else text
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# The table for other tools.

NEEDED = "a table"


def arrow_table(rows: Sequence[Row], columns: Mapping[str, Column] = COLUMNS) -> pa.Table:
    """Return ``rows`` (column name -> value) as a pyarrow table with typed columns that carry their meaning as
    metadata.

    Raises ``MissingExtraError`` without pyarrow.
    """
    pa = pyarrow()
    types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
    fields = [pa.field(n, types[c.kind], metadata={"meaning": c.meaning}) for n, c in columns.items()]
    values = [pa.array([_typed(row.get(f.name), columns[f.name].kind) for row in rows], f.type) for f in fields]
    return pa.Table.from_arrays(values, schema=pa.schema(fields))


def data_frame(table: pa.Table) -> pd.DataFrame:
    """Return a pyarrow table as a DataFrame with pyarrow's types: NaN remains a measured value, ``<NA>`` is a missing
    one.

    Raises ``MissingExtraError`` without pandas.
    """
    try:
        import pandas as pd
    except ImportError:
        raise MissingExtraError("pandas", "export", NEEDED) from None
    return table.to_pandas(types_mapper=pd.ArrowDtype)


def pyarrow() -> Any:
    """Import and return the package pyarrow. Raises ``MissingExtraError`` where it is not installed."""
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingExtraError("pyarrow", "export", NEEDED) from None
    return pa


TABLES = {
    "history": "a row for each step of each process, a column for each metric",
    "findings": "a row for each finding, and where it eased or ended",
    "alerts": "a row for each alert, newest first",
    "forecasts": "a row for each forecast",
    "events": "a row for each event: resets, resumes, exceptions, notes",
    "completions": "a row for each completion that was recorded",
    "spikes": "a row for each culprit of a localised spike, and one for each spike that has none",
    "distributions": "a row for each step and quantity of tokens whose distribution was kept: its quantiles",
}
"""Name of each table that a run can be exported as -> description of its rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a run, ready to be written to a file.

    Parameters
    ----------
    columns
        Column name -> its type and meaning, in order.
    rows
        Function that returns the rows as dicts (column name -> value); None is a missing value.
    whole
        Function that returns the pyarrow table, where something faster than ``rows`` can make it.
    """

    columns: Mapping[str, Column]
    rows: Callable[[], Iterable[Row]]
    whole: Callable[[], pa.Table] | None = None
    """Makes the pyarrow table, where something faster than ``rows`` can."""

    def arrow(self) -> pa.Table:
        """Return the table as a pyarrow table, with types and descriptions. Raises ``MissingExtraError`` without
        pyarrow.
        """
        return self.whole() if self.whole is not None else arrow_table(list(self.rows()), self.columns)


def write_parquet(table: Table, path: Path) -> int:
    """Write ``table`` to ``path`` as a Parquet file; return the number of rows.

    Raises ``MissingExtraError`` without pyarrow, and ``OSError`` where the file cannot be written.
    """
    written = table.arrow()
    from pyarrow import parquet

    parquet.write_table(written, path)
    return int(written.num_rows)


def write_csv(table: Table, path: Path) -> int:
    """Write ``table`` to ``path`` as CSV in UTF-8; return the number of rows. Raises ``OSError``.

    A missing value is an empty cell, NaN is ``NaN``, infinities are ``Infinity`` and ``-Infinity``. A ``'`` is put
    before text (also a column's name) that a spreadsheet would evaluate as a formula.
    """
    number = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([_no_formula(name) for name in table.columns])
        for row in table.rows():
            number += 1
            known = (_typed(row.get(name), column.kind) for name, column in table.columns.items())
            writer.writerow([_no_formula(value) if isinstance(value, str) else _cell(value) for value in known])
    return number


_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r]")
"""Beginning of text that spreadsheets evaluate, also after blanks and in wide letters; users open a file by double
click.
"""
_JUST_A_NUMBER = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*")


def _no_formula(text: str) -> str:
    return f"'{text}" if _FORMULA.match(text) and not _JUST_A_NUMBER.fullmatch(text) else text


def write_jsonl(table: Table, path: Path) -> int:
    """Write ``table`` to ``path`` with one JSON object on each line; return the number of lines. Raises ``OSError``.

    Missing values are left out. JSON has no NaN and no infinities: they are the texts ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, which ``rlwatch scan`` reads as numbers.
    """
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for row in table.rows():
            number += 1
            known = {name: _typed(row.get(name), column.kind) for name, column in table.columns.items()}
            file.write(json.dumps({name: _cell(value) for name, value in known.items() if value is not None}) + "\n")
    return number


def _typed(value: Any, kind: str) -> Any:
    """Return ``value`` converted to the column's type; None if that is impossible (a row of another writer)."""
    if value is None:
        return None
    try:
        if kind == "float":
            return float(value)
        if kind == "int":
            return int(value)
        if kind == "bool":
            return bool(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if isinstance(value, str) else json.dumps(value, default=codec.nearest)


def _cell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# The stages of a run as a trace: the JSON of Chrome's Trace Event Format, which Perfetto reads as well.

_STEPS = 0
"""Number of the track of a rank that shows its steps; its stages are on the tracks after it."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A named interval of a trace: begin and end in microseconds since the trace began."""

    name: str
    begin: int
    end: int
    args: Mapping[str, JSON]

    def event(self, category: str, rank: int, track: int) -> dict[str, JSON]:
        return {
            "name": self.name,
            "cat": category,
            "ph": "X",
            "ts": self.begin,
            "dur": self.end - self.begin,
            "pid": rank,
            "tid": track,
            "args": dict(self.args),
        }


def trace_of(store: Store, run: RunInfo) -> dict[str, JSON]:
    """Return the stages (sampling, reward, update ...) of ``run`` as a trace in Chrome's Trace Event Format, ready for
    JSON.

    Each rank is a process of the trace, with one track of steps and one of stages. Stages that ran at the same time, on
    several threads, are on tracks of their own. A stall (the process lives but makes no progress) is an instant event
    with its stage and stacks. Times are microseconds since the first stage began; ``otherData["began"]`` is that moment
    in Unix seconds.
    """
    batches = store.spikes(run.run_id, reason=STAGES)
    stalls = [event for event in store.events(run.run_id) if event.kind == STALLED]
    begins = [float(begin) for batch in batches for begin in batch.columns["begin"]]
    zero = min([*begins, *(event.ts for event in stalls)], default=run.created_at)
    ranks = {batch.rank for batch in batches} | {_rank_of(event) for event in stalls}
    events: list[dict[str, JSON]] = []
    for rank in sorted(ranks):
        events += _tracks(rank, [batch for batch in batches if batch.rank == rank], zero)
    for event in stalls:
        events.append(
            {
                "name": STALLED,
                "cat": STALLED,
                "ph": "i",
                "s": "p",
                "ts": max(0, round((event.ts - zero) * 1e6)),
                "pid": _rank_of(event),
                "tid": _STEPS,
                "args": dict(event.body),
            }
        )
    other = {"run": run.run_id, "name": run.name, "began": zero}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _rank_of(event: Event) -> int:
    rank = event.body.get("rank")
    return rank if isinstance(rank, int) else 0


def _tracks(rank: int, batches: Sequence[SpikeBatch], zero: float) -> list[dict[str, JSON]]:
    steps, stages = [], []
    for batch in batches:
        args: dict[str, JSON] = {"step": batch.step, "attempt": batch.attempt}
        columns = (batch.columns[name] for name in ("stage", "begin", "seconds"))
        slices = [
            _Slice(str(stage), _micro(float(begin), zero), _micro(float(begin) + float(seconds), zero), args)
            for stage, begin, seconds in zip(*columns, strict=True)
        ]
        stages += slices
        begin, end = min(one.begin for one in slices), max(one.end for one in slices)
        steps.append(_Slice(f"step {batch.step}", begin, end, args))
    laid = [("step", _STEPS, one) for one in steps] + [("stage", lane, one) for lane, one in _lanes(stages)]
    names = {_STEPS: "steps", **{lane: "stages" if lane == 1 else f"stages {lane}" for _, lane, _ in laid if lane}}
    heads = [_head("process_name", rank, _STEPS, name=f"rank {rank}")]
    heads += [_head("process_sort_index", rank, _STEPS, sort_index=rank)]
    heads += [_head("thread_name", rank, track, name=name) for track, name in sorted(names.items())]
    return heads + [one.event(category, rank, track) for category, track, one in laid]


def _micro(seconds: float, zero: float) -> int:
    return max(0, round((seconds - zero) * 1e6))


def _head(kind: str, rank: int, track: int, **args: JSON) -> dict[str, JSON]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": args}


def _lanes(slices: Sequence[_Slice]) -> list[tuple[int, _Slice]]:
    """Pair each slice with the number of its track, from 1: slices on one track do not overlap, as the
    format demands.
    """
    ends: list[int] = []
    laid = []
    for one in sorted(slices, key=lambda one: (one.begin, one.end)):
        lane = next((number for number, end in enumerate(ends) if one.begin >= end), len(ends))
        ends[lane : lane + 1] = [one.end]
        laid.append((lane + 1, one))
    return laid


def write_trace(store: Store, run: RunInfo, file: Path) -> int:
    """Write the trace of ``run``'s stages (see :func:`trace_of`) to ``file`` as JSON; return the number of its
    intervals.

    Raises ``OSError`` where the file cannot be written.
    """
    trace = trace_of(store, run)
    file.write_text(json.dumps(trace, separators=(",", ":"), default=codec.nearest), encoding="utf-8")
    return sum(event["ph"] == "X" for event in trace["traceEvents"])
