"""Conversion of records (frozen dataclasses such as a finding or an alert) to plain values and back.

Stores, JSON, tables and messages between ranks use this one conversion. The fields of a record's dataclass define its
contents once, so a new field is written and read without further code. A record that an older rlwatch wrote lacks a new
field and gets its default. An older rlwatch that reads a record with an unknown field keeps the field in ``extra`` and
writes it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from functools import cache
from math import copysign
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

EXTRA = "extra"
"""Field of a record that holds fields unknown to this rlwatch."""
_T = TypeVar("_T")
_Convert = Callable[[Any], Any]


class Wide:
    """Base of records that hold fields which only a newer rlwatch knows: ``extra`` maps their names to plain values.

    The unknown fields are written back unchanged. :func:`wide` makes a subclass for each kind of record, so that
    records without unknown fields carry no ``extra``.
    """

    __slots__ = ()
    extra: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        kind = next(base for base in type(self).__mro__[1:] if is_dataclass(base))
        return decoded, (kind, encoded(self))


class Plan(NamedTuple):
    """Description of the fields of one record dataclass, by which records are encoded and decoded.

    Parameters
    ----------
    names
        Names of all fields, without ``extra``, in the order of the dataclass.
    known
        The names as a set.
    needed
        Names of the fields without a default.
    converts
        Pairs of a field's name and the function that converts a plain value to its type; only fields that need one.
    defaults
        Field name -> function that returns the field's default, or ``MISSING`` for a field without one.
    """

    names: tuple[str, ...]
    known: frozenset[str]
    needed: tuple[str, ...]
    converts: tuple[tuple[str, _Convert], ...]
    defaults: Mapping[str, Callable[[], Any]]
    """Field -> function that returns its default; ``MISSING`` for a field without one."""


_plans: dict[type, Plan] = {}


def plan_of(kind: type) -> Plan:
    """Return the cached :class:`Plan` of the record dataclass ``kind``: its fields, without ``extra``."""
    plan = _plans.get(kind)
    if plan is None:
        plan = _plans[kind] = _planned(kind)
    return plan


def _planned(kind: type) -> Plan:
    own = [each for each in fields(kind) if each.init and each.name != EXTRA]
    hints = {each.name: _hint(kind, each.type) for each in own}
    made = {each.name: _default(each) for each in own}
    converts = tuple((name, convert) for name, hint in hints.items() if (convert := converter(hint)) is not None)
    needed = tuple(name for name, default in made.items() if default() is MISSING)
    return Plan(tuple(hints), frozenset(hints), needed, converts, made)


def type_of(kind: type, name: str) -> Any:
    """Return the type annotation of the field ``name`` of the dataclass ``kind``; ``Any`` where it
    cannot be resolved.
    """
    return next((_hint(kind, each.type) for each in fields(kind) if each.name == name), Any)


_wide: dict[type, type] = {}


def wide(kind: type[_T]) -> type[_T]:
    """Return a subclass of the record dataclass ``kind`` with the field ``extra``, which holds fields unknown to this
    rlwatch.
    """
    if issubclass(kind, Wide):
        return kind
    if kind not in _wide:
        extra: Any = field(default_factory=dict, repr=False, hash=False, kw_only=True)
        extra_field = [(EXTRA, Mapping[str, Any], extra)]
        _wide[kind] = make_dataclass(kind.__name__, extra_field, bases=(Wide, kind), frozen=True, slots=True)
    return _wide[kind]


def encoded(record: Any) -> dict[str, Any]:
    """Return the fields of ``record`` by name, with those unknown to this rlwatch; for JSON, pass :func:`nearest` as
    default.

    >>> from rlwatch.records import Purge
    >>> list(encoded(Purge("r", "math", "seed-1", "ann", 5.0, "bob", 4.0)))
    ['run_id', 'project', 'name', 'by', 'at', 'deleted_by', 'deleted_at']
    """
    found = {name: getattr(record, name) for name in plan_of(type(record)).names}
    kept = getattr(record, EXTRA, None)
    return {**kept, **found} if kept else found


def decoded(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return a record of the dataclass ``kind`` made from plain ``values`` (field name -> value); the inverse of
    :func:`encoded`.

    Fields that this rlwatch does not know move to ``extra``. Raises ``ValueError`` for a missing field without default,
    or an invalid value.

    >>> from rlwatch.records import AuditEntry
    >>> decoded(AuditEntry, {"entry_id": "e1", "at": 5.0, "by": "ann", "act": "note", "text": "x", "mood": 1}).extra
    {'mood': 1}
    """
    return made(kind, read(kind, dict(values)))


def read(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Convert the plain values in ``given`` to constructor arguments of the dataclass ``kind``, in place, and return
    ``given``.

    Fields that ``kind`` does not have move to ``given["extra"]``. Raises ``ValueError`` for a value that is no member
    of the field's enum.
    """
    plan = plan_of(kind)
    for name, convert in plan.converts:
        if name in given:
            given[name] = convert(given[name])
    if not plan.known.issuperset(given):
        given[EXTRA] = {name: given.pop(name) for name in list(given) if name not in plan.known}
    return given


def made(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """Return a record of the dataclass ``kind`` with the constructor arguments ``given``, as :func:`read` returns them.

    Raises ``ValueError`` that names the missing fields.
    """
    try:
        return (wide(kind) if EXTRA in given else kind)(**given)
    except TypeError as error:
        lacking = [name for name in plan_of(kind).needed if name not in given]
        why = f"lacks {', '.join(lacking)}" if lacking else f"is damaged ({error})"
        raise ValueError(f"{kind.__name__} {why}; got {', '.join(sorted(given)) or 'nothing'}") from error


def beyond(record: Any, columns: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of ``record`` that have no column of their own and differ from their default, by name.

    Stores keep these in one JSON column. ``columns``: names of the fields that have a column. Fields unknown to this
    rlwatch are included, first.
    """
    found = {}
    for name, default in plan_of(type(record)).defaults.items():
        if name not in columns and not _same(value := getattr(record, name), default()):
            found[name] = value
    kept = getattr(record, EXTRA, None)
    return {**kept, **found} if kept else found


def enriched(record: _T, rest: Mapping[str, Any]) -> _T:
    """Return a copy of ``record`` with the fields in ``rest``, which :func:`beyond` returned when the record was
    stored.

    Raises ``ValueError`` for an invalid value in ``rest``.
    """
    if not rest:
        return record
    given = read(type(record), dict(rest))
    if EXTRA in given and not isinstance(record, Wide):
        return wide(type(record))(**{**encoded(record), **given})
    if EXTRA in given:
        given[EXTRA] = {**getattr(record, EXTRA), **given[EXTRA]}
    return replace(record, **given)  # type: ignore[type-var]


def nearest(value: object) -> Any:
    """Return a JSON value for an enum, record, mapping, set, numpy array or scalar; the text of anything else.

    For ``json.dumps(default=nearest)``.
    """
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return encoded(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, 0-d tensors
        return value.tolist()
    if hasattr(value, "items"):
        return dict(value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


def _default(of: Field[Any]) -> Callable[[], Any]:
    """Return a function that returns the field's default; for a field without one it returns ``MISSING``."""
    return (lambda: of.default) if of.default_factory is MISSING else of.default_factory


def _same(value: Any, default: Any) -> bool:
    """Return whether ``value`` is exactly the default: 0 is not False, -0.0 is not 0.0, and NaN equals NaN."""
    if value is default:
        return True
    if type(value) is not type(default):
        return False
    if isinstance(value, float):
        return value == default and copysign(1.0, value) == copysign(1.0, default)
    return bool(value == default) if isinstance(value, str | int | tuple | dict | list | Enum) else False


def _hint(kind: type, annotation: Any) -> Any:
    """Return the type of an annotation; ``Any`` if its module lacks the name (such as ``np`` for type checkers)."""
    if not isinstance(annotation, str):
        return annotation
    return _resolved(tuple(dict.fromkeys(owner.__module__ for owner in kind.__mro__)), annotation)


@cache
def _resolved(modules: tuple[str, ...], annotation: str) -> Any:
    """Return the type of an annotation by the names of the first module that has them; cached, as most fields have one
    of a few annotations.
    """
    for module in modules:
        names = vars(sys.modules.get(module, SimpleNamespace()))
        try:
            return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), globalns=names)["it"]
        except NameError:
            continue
    return Any


def converter(hint: Any) -> _Convert | None:
    """Return a function that converts a plain (JSON) value to the type ``hint``; None where the plain value is already
    one.
    """
    of = get_origin(hint)
    if of in (Union, UnionType):
        inner = [one for one in get_args(hint) if one is not NoneType]
        convert = converter(inner[0]) if len(inner) == 1 else None
        return None if convert is None else _unless_none(convert)
    if hint is tuple or of is tuple:
        each = converter(get_args(hint)[0]) if get_args(hint) else None
        return tuple if each is None else lambda values: tuple(map(each, values))
    if hint in (set, frozenset) or of in (set, frozenset):
        made: _Convert = of or hint
        return made
    if not isinstance(hint, type):
        return None
    if issubclass(hint, Enum):
        return member_of(hint)
    if is_dataclass(hint):
        return lambda value: decoded(hint, value)
    if hint is bool:
        return bool
    return None


def _unless_none(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def member_of(kind: type[Enum]) -> _Convert:
    """Return a function that converts a value to the member of the enum ``kind``; it raises ``ValueError`` for other
    values.
    """
    members = {member.value: member for member in kind}

    def member(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError):
            return kind(value)

    return member
