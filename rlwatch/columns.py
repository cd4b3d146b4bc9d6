"""Columns of the tables of runs, findings, alerts and events: the kind of value, meaning, title and format of each
column.

The tables of the command line, the dashboard, reports and DataFrames all take their columns from this list. An
interface chooses columns by name and draws a format in its own way. A new field of a record becomes a column of its
table without further code.
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
"""Number of characters after which a text in a table is cut off."""


class Format(StrEnum):
    """The form in which an interface shows a value of a column to people, such as a step, an age or a severity."""

    TEXT = "text"
    STEP = "step"
    NUMBER = "number"
    AGE = "age"
    """A duration in seconds, shown in words."""
    SEVERITY = "severity"
    STATUS = "status"
    """State of a run, or of an alert."""
    KIND = "kind"
    """The name of a kind of failure."""


_RIGHT = (Format.STEP, Format.NUMBER, Format.AGE)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the type of its values, their meaning, its title and its format.

    Parameters
    ----------
    kind
        ``"int"``, ``"float"``, ``"bool"`` or ``"str"``. A value that is not known is missing, never NaN.
    meaning
        Meaning of the values, with their unit.
    title
        Title that people read; empty: the column's name.
    format
        Form in which the values are shown to people.
    """

    kind: str
    meaning: str
    title: str = ""
    format: Format = Format.TEXT

    @property
    def right(self) -> bool:
        """True if the column holds numbers, which a table aligns to the right."""
        return self.format in _RIGHT


def title_of(columns: Mapping[str, Column], name: str) -> str:
    """Return the title of the column ``name``: its own title, or its name with spaces instead of underscores.

    >>> title_of(FINDINGS, "onset_step"), title_of(FINDINGS, "severity")
    ('onset', 'severity')
    """
    return columns[name].title or name.replace("_", " ")


def heads(columns: Mapping[str, Column], names: Iterable[str]) -> list[str]:
    """Return the titles of the columns ``names``; a ``>`` before a title marks a column of numbers.

    >>> heads(FINDINGS, FINDINGS_SHOWN)
    ['severity', 'kind', '>onset', '>detected', 'what']
    """
    return [f"{'>' * columns[name].right}{title_of(columns, name)}" for name in names]


def text_of(column: Column, value: Any) -> str:
    """Return ``value`` as one line of text in the format of its ``column``; ``-`` for an empty text.

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
    """Return the columns ``known``, then one for each other field of the record dataclass ``kind``
    except ``left_out``.
    """
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
    """Return ``columns``, then one for each other name in ``rows``: such fields come from a newer rlwatch."""
    seen = {name: type(value) for row in rows for name, value in row.items() if name not in columns}
    return {**columns, **{name: Column(_KINDS.get(of, "str"), "") for name, of in seen.items()}}


LEFT_OUT_OF_RUNS = (
    "config", "state", "state_reason", "heartbeat_at", "last_ts", "host", "pid", "curation", "edited_at", "edited_by",
    "logged_name", "logged_tags", "stage", "stage_since",
)  # fmt: skip
"""Fields of a run that a table of runs omits or has in another form. Every other field is a column."""
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
"""The columns of findings that fit into a terminal or a report."""
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
