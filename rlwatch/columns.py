"""Columns of runs, findings, alerts and events: each with its kind of value, its meaning, its title and its format.

The one list that tables of every interface take theirs from: the command line, the dashboard, reports and DataFrames.
An interface chooses columns by name and draws a format in its own way. A field that a record gets is a column of its
table without another line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import NoneType
from typing import Any, get_args

from rlwatch import codec
from rlwatch.records import Alert, Event, Finding, RunInfo
from rlwatch.wording import cell, duration, number, one_line, step

LONGEST = 300
"""Characters of a text in a table."""


class Format(StrEnum):
    """Form in which a value is shown to people."""

    TEXT = "text"
    STEP = "step"
    NUMBER = "number"
    AGE = "age"
    """A time in seconds, in words."""
    SEVERITY = "severity"
    STATUS = "status"
    """State of a run, or of an alert."""
    KIND = "kind"
    """The name of a failure."""


_RIGHT = (Format.STEP, Format.NUMBER, Format.AGE)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Parameters
    ----------
    kind
        ``"int"``, ``"float"``, ``"bool"`` or ``"str"``. A value that is not known is missing, never NaN.
    meaning
        What it holds, with its unit.
    title
        Its title where people read it; empty: its name.
    format
        How its values are shown to people.
    """

    kind: str
    meaning: str
    title: str = ""
    format: Format = Format.TEXT

    @property
    def right(self) -> bool:
        """True of numbers, which are aligned to the right."""
        return self.format in _RIGHT


def title_of(columns: Mapping[str, Column], name: str) -> str:
    """The title of a column.

    >>> title_of(FINDINGS, "onset_step"), title_of(FINDINGS, "severity")
    ('onset', 'severity')
    """
    return columns[name].title or name.replace("_", " ")


def heads(columns: Mapping[str, Column], names: Iterable[str]) -> list[str]:
    """Titles of columns, with ``>`` before those of numbers.

    >>> heads(FINDINGS, FINDINGS_SHOWN)
    ['severity', 'kind', '>onset', '>detected', 'what']
    """
    return [f"{'>' * columns[name].right}{title_of(columns, name)}" for name in names]


def text_of(column: Column, value: Any) -> str:
    """A value in words, on one line.

    >>> text_of(FINDINGS["step"], 12), text_of(FINDINGS["score"], float("nan")), text_of(FINDINGS["metric"], "")
    ('12', 'NaN', '-')
    """
    if column.format is Format.STEP:
        return step(value)
    if column.format is Format.NUMBER:
        return number(value)
    if column.format is Format.AGE:
        return duration(value)
    plain = value.value if isinstance(value, Enum) else value
    return one_line(plain if isinstance(plain, str) else cell(plain), LONGEST) or "-"


_KINDS = {int: "int", float: "float", bool: "bool"}
_FORMATS = {"int": Format.NUMBER, "float": Format.NUMBER}


def columns_of(kind: type, known: Mapping[str, Column], left_out: Iterable[str] = ()) -> dict[str, Column]:
    """``known``, and after them a column for every other field of the record but those ``left_out``."""
    more = {}
    for name in codec.plan_of(kind).names:
        if name not in known and name not in left_out:
            hint = codec.type_of(kind, name)
            inner = (
                next((one for one in get_args(hint) if one is not NoneType), hint)
                if NoneType in get_args(hint)
                else hint
            )
            of = _KINDS.get(inner, "str")
            more[name] = Column(of, "", format=_FORMATS.get(of, Format.TEXT))
    return {**known, **more}


def columns_seen(columns: Mapping[str, Column], rows: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """``columns``, and one for every other name in ``rows``: fields that only a newer rlwatch knows."""
    seen = {name: type(value) for row in rows for name, value in row.items() if name not in columns}
    return {**columns, **{name: Column(_KINDS.get(of, "str"), "") for name, of in seen.items()}}


LEFT_OUT_OF_RUNS = (
    "config", "state", "state_reason", "heartbeat_at", "last_ts", "host", "pid", "curation", "edited_at", "edited_by",
    "logged_name", "logged_tags", "stage", "stage_since",
)  # fmt: skip
"""Fields of a run and its curation that its row has in another form, or not at all; any other one is in it."""
RUNS: Mapping[str, Column] = columns_of(
    RunInfo,
    {
        "run_id": Column("str", "id", "run"),
        "name": Column("str", "name"),
        "project": Column("str", "project"),
        "source": Column("str", "trainer", "trainer"),
        "status": Column("str", "running, paused, stale, dead, finished, unfinished or crashed", format=Format.STATUS),
        "verdict": Column("str", "what became of it, in a word: collapsed@198"),
        "says": Column("str", "the verdict in a line"),
        "urgency": Column("str", "as bad as it is now: warning or critical; missing where all is well"),
        "level": Column("str", "worst severity ever, also of what is over; missing where nothing was found"),
        "judged": Column("bool", "whether anything that matters is logged"),
        "tags": Column("str", "the trainer's and people's, joined by commas"),
        "notes": Column("str", "what people noted"),
        "archived": Column("bool", "whether a user archived it"),
        "attempt": Column("int", "processes that trained it", format=Format.NUMBER),
        "last_step": Column("int", "last step", "step", Format.STEP),
        "created_at": Column("float", "Unix seconds", "started"),
        "age_s": Column("float", "seconds since it was last seen", "last seen", Format.AGE),
        "reward": Column("float", "last value", format=Format.NUMBER),
        "entropy": Column("float", "last value", format=Format.NUMBER),
        "KL": Column("float", "last value, to the reference", format=Format.NUMBER),
        "grad norm": Column("float", "last value", format=Format.NUMBER),
    },
    LEFT_OUT_OF_RUNS,
)
"""Columns of a table of runs."""
FINDINGS: Mapping[str, Column] = columns_of(
    Finding,
    {
        "step": Column("int", "step at which it was found", "detected", Format.STEP),
        "onset_step": Column("int", "step at which it began, looking back", "onset", Format.STEP),
        "attempt": Column("int", "process that trained the step", format=Format.NUMBER),
        "kind": Column("str", "kind, of docs/findings.md", format=Format.KIND),
        "severity": Column("str", "info, warning or critical", format=Format.SEVERITY),
        "stage": Column("str", "moment of its life: began, worsened, eased or resolved"),
        "metric": Column("str", "metric it was found in"),
        "message": Column("str", "what was found, in a sentence", "what"),
        "score": Column("float", "how far beyond its threshold; 1 is at it", format=Format.NUMBER),
        "baseline": Column("float", "the run's own reference level", format=Format.NUMBER),
        "detector": Column("str", "detector"),
        "family": Column("str", "family"),
        "evidence": Column("str", "JSON object: the numbers it rests on"),
        "seq": Column("int", "number of the row after which it was found", format=Format.NUMBER),
    },
)
"""Columns of a table of findings."""
FINDINGS_SHOWN = ("severity", "kind", "onset_step", "step", "message")
"""Those that a terminal and a report have room for."""
ALERTS: Mapping[str, Column] = columns_of(
    Alert,
    {
        "alert_id": Column("str", "id", "id"),
        "rule": Column("str", "rule that fired"),
        "kind": Column("str", "kind of finding", format=Format.KIND),
        "severity": Column("str", "warning or critical", format=Format.SEVERITY),
        "state": Column("str", "pending, firing or resolved", format=Format.STATUS),
        "onset_step": Column("int", "step at which it began, looking back", "onset", Format.STEP),
        "step": Column("int", "step at which it was last seen", "step", Format.STEP),
        "resolved_step": Column("int", "step at which it was resolved", "resolved at", Format.STEP),
        "fired_at": Column("float", "Unix seconds", "fired"),
        "resolved_at": Column("float", "Unix seconds", "over"),
        "message": Column("str", "what was found", "what"),
        "reason": Column("str", "why it fired"),
        "run_id": Column("str", "id of the run", "run"),
        "detector": Column("str", "detector that found it"),
        "evidence": Column("str", "JSON object: the numbers it rests on"),
    },
)
"""Columns of a table of alerts."""
EVENTS: Mapping[str, Column] = columns_of(
    Event,
    {
        "step": Column("int", "step", format=Format.STEP),
        "attempt": Column("int", "process", format=Format.NUMBER),
        "kind": Column("str", "kind", "event"),
        "ts": Column("float", "Unix seconds"),
        "body": Column("str", "JSON object", "what"),
        "seq": Column("int", "number among the rows and events of the run", format=Format.NUMBER),
    },
)
"""Columns of a table of events."""
