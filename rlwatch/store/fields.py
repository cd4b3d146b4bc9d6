"""Map the fields of records (runs, findings, alerts...) to columns of database tables, and back.

The columns are those of the schemas and stay as they are. Every other field of a record, also one that is added later,
goes into a JSON object (:func:`rlwatch.codec.beyond`). For findings and edits that is the column ``body``. For batches
of tokens or completions it is the head of the packed columns. For all others it is ``extra``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from math import isnan, nan
from operator import attrgetter, index
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from rlwatch import codec
from rlwatch.errors import StoreError
from rlwatch.records import (
    JSON,
    Acknowledgement,
    Alert,
    AuditEntry,
    Command,
    Event,
    Finding,
    ForecastAnswer,
    ForecastRecord,
    OutboxMessage,
    Purge,
    RunInfo,
    Silence,
    StepRecord,
)

_T = TypeVar("_T")
_Convert = Callable[[Any], Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_ENCODER = json.JSONEncoder(default=codec.nearest, separators=(",", ":"))
_DECODER = json.JSONDecoder()
_INT64 = range(-(1 << 63), 1 << 63)


def dumps(value: JSON) -> str:
    """Return ``value`` as JSON text, with NaN, Infinity and -Infinity as literals.

    Raises ``StoreError`` if it has none, as with a cycle, or a tuple as a key.

    >>> dumps({"kl": float("nan"), "top": (1, float("-inf"))})
    '{"kl":NaN,"top":[1,-Infinity]}'
    """
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot be kept as JSON ({error}); got {str(value)[:200]}") from error


def loads(text: str) -> JSON:
    """Return the value of JSON ``text`` that :func:`dumps` wrote. Raises ``ValueError`` if the text is damaged."""
    return _DECODER.decode(text) if type(text) is str else json.loads(text)


def plain(text: str) -> str:
    r"""Return ``text`` as UTF-8 can hold it: lone surrogates (undecodable bytes of argv, for example) become escapes.

    >>> plain("ok"), plain(chr(0xDC80))
    ('ok', '\\udc80')
    """
    text = str(text)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def whole(value: int) -> int:
    """Return ``value`` as a Python integer, as a column of 64 bits can hold it; numpy integers are accepted.

    Raises ``TypeError`` for a float and ``OverflowError`` for a number beyond 64 bits.
    """
    number = index(value)  # numpy integers too
    if number not in _INT64:
        raise OverflowError(f"{number} does not fit in 64 bits")
    return number


class FieldTable(Generic[_T]):
    """Mapping between records of one dataclass and rows of one database table.

    Parameters
    ----------
    kind
        The dataclass of the records.
    name
        The table's name.
    columns
        Names of the columns that hold a field, separated by spaces, in the order of the schema.
    elsewhere
        Names of fields that are stored elsewhere (the run's id is the name of a directory) or recomputed on reading.
    renamed
        Column -> name of the field that it holds, where the two differ.
    """

    def __init__(
        self,
        kind: type[_T],
        name: str,
        columns: str,
        *,
        elsewhere: str = "run_id",
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.name, self.columns = kind, name, tuple(columns.split())
        self.fields = tuple((renamed or {}).get(column, column) for column in self.columns)
        self.held = frozenset((*self.fields, *elsewhere.split()))
        self._hints = [codec.type_of(kind, field) for field in self.fields]
        self._values = attrgetter(*self.fields)
        self._writes: dict[Callable[[str], str], list[tuple[int, _Convert]]] = {}
        self._made = _maker(kind, self.fields, self._hints)
        self._moments = tuple(f for f, hint in zip(self.fields, self._hints, strict=True) if hint == float | None)
        self._moments_of = frozenset(self._moments)
        self._outside = tuple(name for name in codec.plan_of(kind).names if name not in self.held)

    def select(self, which: str = "", *first: str) -> str:
        """Return SQL that reads this table's columns, preceded by the columns named ``first``.

        ``which``: the clauses after FROM, such as WHERE and ORDER BY.
        """
        return f"SELECT {', '.join((*first, *self.columns))} FROM {self.name} {which}"  # noqa: S608  (our own names)

    def insert(self, mark: str, *first: str, doing: str = "INSERT", upon: str = "") -> str:
        """Return SQL that inserts a row of this table, preceded by the columns named ``first``.

        ``mark``: the driver's placeholder of a parameter (``?`` or ``%s``). ``doing``: the verb, such as ``INSERT OR
        REPLACE``. ``upon``: the text after ON CONFLICT; empty for none.
        """
        columns = (*first, *self.columns)
        put = f"{doing} INTO {self.name} ({', '.join(columns)}) VALUES ({', '.join([mark] * len(columns))})"
        return f"{put} ON CONFLICT {upon}" if upon else put

    def upsert(self, mark: str, *first: str, key: str, kept: Collection[str] = ()) -> str:
        """Return SQL that inserts a row, or updates the row that has the same ``key``.

        ``mark``: the driver's placeholder of a parameter. ``first``: columns to write before those of this table; an
        update leaves them as they are. ``key``: a column, or several separated by ``", "``. ``kept``: columns that an
        update does not change.
        """
        changed = [column for column in self.columns if column not in (*key.split(", "), *kept)]
        values = ", ".join(f"{column} = excluded.{column}" for column in changed)
        return self.insert(mark, *first, upon=f"({key}) DO UPDATE SET {values}")

    def row(self, record: _T, text: Callable[[str], str] = plain) -> list[Any]:
        """Return the values of the table's columns for ``record``, in the order of the columns.

        ``text`` converts strings to strings that the database accepts. Raises ``TypeError``, ``ValueError`` or
        ``OverflowError`` for a value that its column cannot hold.
        """
        row = list(self._values(record))
        for place, write in self._writes.get(text) or self._writers(text):
            row[place] = write(row[place])
        return row

    def _writers(self, text: Callable[[str], str]) -> list[tuple[int, _Convert]]:
        self._writes[text] = [(place, _writer(hint, text)) for place, hint in enumerate(self._hints)]
        return self._writes[text]

    @property
    def whole(self) -> bool:
        """True if the columns hold every field of a record, so that none needs a JSON object."""
        return not self._outside and not self._moments

    def body(self, record: _T) -> dict[str, Any]:
        """Return all fields of ``record`` that no column holds, by name, also those with their default value."""
        if type(record) is self.kind:
            return {name: getattr(record, name) for name in self._outside}
        return {name: value for name, value in codec.encoded(record).items() if name not in self.held}

    def rest(self, record: _T) -> Mapping[str, Any]:
        """Return the fields of ``record``, by name, that no column holds and that differ from their default value."""
        if not self._outside and not self._moments and type(record) is self.kind:
            return _NOTHING
        rest = codec.beyond(record, self.held)
        for name in self._moments:  # a column stores a NaN as NULL, so a NaN goes into the JSON object
            moment = getattr(record, name)
            if moment is not None and isnan(moment):
                rest[name] = moment
        return rest

    def rest_text(self, record: _T) -> str:
        """Return the fields of :meth:`rest` as JSON text; empty if there are none, which is the usual case."""
        rest = self.rest(record)
        return dumps(rest) if rest else ""

    def merged(self, kept: str, record: _T) -> str:
        """Return the JSON text that replaces ``kept``, the stored JSON of an earlier version of ``record``.

        Fields that this version of rlwatch does not know stay as they were. Empty if nothing is left.
        """
        known = codec.plan_of(type(record)).known
        unknown = {name: value for name, value in loads(kept).items() if name not in known} if kept else {}
        body = {**unknown, **self.rest(record)}
        return dumps(body) if body else ""

    def record(self, row: Sequence[Any], rest: str | None = None, **known: Any) -> _T:
        """Build the record from the columns of a database ``row``.

        ``rest``: JSON text of the fields without a column; None or empty if there are none. ``known``: values of fields
        that are stored elsewhere. Raises ``ValueError`` for a value that its field cannot have.
        """
        if rest:
            stored = codec.read(self.kind, loads(rest))
            if codec.EXTRA in stored or not self._moments_of.isdisjoint(stored):
                over = {name: stored.pop(name) for name in (*self._moments, codec.EXTRA) if name in stored}
                unknown = over.pop(codec.EXTRA, _NOTHING)
                return codec.enriched(self.record(row, **known, **stored), {**unknown, **over})
            known |= stored
        try:
            return self._made(row, **known) if known else self._made(row)
        except TypeError as error:
            lacking = [name for name in codec.plan_of(self.kind).needed if name not in {*self.fields, *known}]
            raise ValueError(f"{self.kind.__name__} is damaged: {error} {', '.join(lacking)}".strip()) from error


def _maker(kind: type[_T], fields: Sequence[str], hints: Sequence[Any]) -> Callable[..., _T]:
    """Return a function that builds a record from a row: one expression, as if it were written by hand for these
    columns.
    """
    reads = [_reader(hint) for hint in hints]
    given = []
    for place, (name, hint, read) in enumerate(zip(fields, hints, reads, strict=True)):
        if read is not None:
            given.append(f"{name}=read{place}(row[{place}])")
        elif hint is float:  # SQLite keeps a NaN as NULL
            given.append(f"{name}=nan if row[{place}] is None else row[{place}]")
        else:
            given.append(f"{name}=row[{place}]")
    names: dict[str, Any] = {"kind": kind, "nan": nan} | {f"read{place}": read for place, read in enumerate(reads)}
    text = f"lambda row, **known: kind({', '.join(given)}, **known)"
    made: Callable[..., _T] = eval(text, names)  # noqa: S307  (names of fields and numbers, as dataclasses do)
    return made


def _writer(hint: Any, text: Callable[[str], str]) -> _Convert:
    """Return the function that converts a value of the type ``hint`` to the value of its column."""
    if get_origin(hint) in (Union, UnionType):
        inner = next(one for one in get_args(hint) if one is not NoneType)
        write, missing = _writer(inner, text), "" if isinstance(inner, type) and issubclass(inner, Enum) else None
        return lambda value: missing if value is None else write(value)
    if not isinstance(hint, type):  # a mapping, a tuple
        return dumps
    if issubclass(hint, Enum):
        return attrgetter("value")
    writes: dict[type, _Convert] = {str: text, bool: bool, int: whole, float: float}
    return writes.get(hint, dumps)


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """Return the function that converts a column's value to the type ``hint``; None where the two are the same."""
    of = get_origin(hint)
    if of in (Union, UnionType):
        inner = next(one for one in get_args(hint) if one is not NoneType)
        if isinstance(inner, type) and issubclass(inner, Enum):
            member = codec.member_of(inner)
            return lambda value: member(value) if value else None
        return None
    convert = codec.converter(hint)
    if hint is bool or (isinstance(hint, type) and issubclass(hint, Enum)):
        return convert
    if isinstance(hint, type) and hint in (str, int, float):
        return None
    return loads if convert is None else lambda value: convert(loads(value))


RUN = FieldTable(
    RunInfo,
    "run",
    "project name source created_at config tags attempt state state_reason heartbeat_at host pid",
    elsewhere="run_id last_step last_ts curation",
)
RECORD = FieldTable(StepRecord, "record", "seq attempt rank step ts", elsewhere="metrics")
EVENT = FieldTable(Event, "event", "seq attempt step ts kind body")
FINDING = FieldTable(Finding, "finding", "seq attempt step onset_step detector kind severity")
FORECAST = FieldTable(ForecastRecord, "forecast", "seq attempt step ts body", elsewhere="metrics")
COMMAND = FieldTable(
    Command,
    "command",
    "command_id kind args force status requested_by why idempotency_key created_at expires_at claimed_at finished_at "
    "finished_step result",
)
ALERT = FieldTable(
    Alert,
    "alert",
    "alert_id rule kind severity state onset_step step message reason detector evidence fired_at resolved_step "
    "resolved_at",
)
MESSAGE = FieldTable(
    OutboxMessage,
    "outbox",
    "message_id alert_id channel payload status attempts next_attempt_at lease_until last_error created_at sent_at",
)
ACKNOWLEDGEMENT = FieldTable(
    Acknowledgement, "acknowledgement", "alert_id acknowledged_by why at severity", renamed={"acknowledged_by": "by"}
)
SILENCE = FieldTable(
    Silence,
    "silence",
    "silence_id silenced_by why created_at until run project kind rule labels alerts up_to",
    elsewhere="",
    renamed={"silenced_by": "by"},
)
AUDIT = FieldTable(
    AuditEntry,
    "audit",
    "entry_id at done_by act text run alert",
    elsewhere="",
    renamed={"done_by": "by", "run": "run_id", "alert": "alert_id"},
)
ANSWER = FieldTable(
    ForecastAnswer, "forecast_answer", "attempt step right answered_by why at", renamed={"answered_by": "by"}
)
PURGE = FieldTable(
    Purge,
    "purge",
    "run_id project name purged_by at deleted_by deleted_at",
    elsewhere="",
    renamed={"purged_by": "by"},
)
