"""Records as plain values and back: one conversion for stores, JSON, tables and messages between ranks.

The fields of a record's dataclass define its contents once, so a new field is written and read without further code. A
record of an older rlwatch lacks it and gets its default; an older rlwatch that reads it keeps it in ``extra`` and
writes it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from math import copysign
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

EXTRA = "extra"
"""Field of a record that holds fields unknown to this rlwatch."""
_T = TypeVar("_T")
_Convert = Callable[[Any], Any]


class Wide:
    """A record with fields that only a newer rlwatch knows: ``extra``, by name. They are written back unchanged.

    :func:`wide` makes a subclass for each kind of record, so that other records carry no extra field.
    """

    __slots__ = ()
    extra: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        kind = next(base for base in type(self).__mro__[1:] if is_dataclass(base))
        return decoded, (kind, encoded(self))


class Plan(NamedTuple):
    """The fields of a kind of record: their names, those without a default, the converters of plain values (where they
    need one), and the makers of their defaults.
    """

    names: tuple[str, ...]
    known: frozenset[str]
    needed: tuple[str, ...]
    converts: tuple[tuple[str, _Convert], ...]
    defaults: Mapping[str, Callable[[], Any]]
    """Field -> converter from a plain value; without fields that hold plain values."""


_plans: dict[type, Plan] = {}


def plan_of(kind: type) -> Plan:
    """Return the plan of a dataclass, without its field ``extra``."""
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
    """Return the type of a field; ``Any`` where it is unknown."""
    return next((_hint(kind, each.type) for each in fields(kind) if each.name == name), Any)


_wide: dict[type, type] = {}


def wide(kind: type[_T]) -> type[_T]:
    """Return the subclass of this kind of record with unknown fields."""
    if issubclass(kind, Wide):
        return kind
    if kind not in _wide:
        extra: Any = field(default_factory=dict, repr=False, hash=False, kw_only=True)
        extra_field = [(EXTRA, Mapping[str, Any], extra)]
        _wide[kind] = make_dataclass(kind.__name__, extra_field, bases=(Wide, kind), frozen=True, slots=True)
    return _wide[kind]


def encoded(record: Any) -> dict[str, Any]:
    """Return the fields of ``record`` by name, unknown ones included. For JSON their values need :func:`nearest`.

    >>> from rlwatch.records import Purge
    >>> list(encoded(Purge("r", "math", "seed-1", "ann", 5.0, "bob", 4.0)))
    ['run_id', 'project', 'name', 'by', 'at', 'deleted_by', 'deleted_at']
    """
    found = {name: getattr(record, name) for name in plan_of(type(record)).names}
    kept = getattr(record, EXTRA, None)
    return {**kept, **found} if kept else found


def decoded(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return the record. Raises ``ValueError`` for a missing field without default, or an invalid value.

    >>> from rlwatch.records import AuditEntry
    >>> decoded(AuditEntry, {"entry_id": "e1", "at": 5.0, "by": "ann", "act": "note", "text": "x", "mood": 1}).extra
    {'mood': 1}
    """
    return made(kind, read(kind, dict(values)))


def read(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Convert plain values to arguments of ``kind``, in place; unknown fields move to ``extra``."""
    plan = plan_of(kind)
    for name, convert in plan.converts:
        if name in given:
            given[name] = convert(given[name])
    if not plan.known.issuperset(given):
        given[EXTRA] = {name: given.pop(name) for name in list(given) if name not in plan.known}
    return given


def made(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """Return the record of these arguments. Raises ``ValueError`` that names the missing ones."""
    try:
        return (wide(kind) if EXTRA in given else kind)(**given)
    except TypeError as error:
        lacking = [name for name in plan_of(kind).needed if name not in given]
        why = f"lacks {', '.join(lacking)}" if lacking else f"is damaged ({error})"
        raise ValueError(f"{kind.__name__} {why}; got {', '.join(sorted(given)) or 'nothing'}") from error


def beyond(record: Any, columns: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields outside ``columns`` that differ from their default, then the unknown ones."""
    found = {}
    for name, default in plan_of(type(record)).defaults.items():
        if name not in columns and not _same(value := getattr(record, name), default()):
            found[name] = value
    kept = getattr(record, EXTRA, None)
    return {**kept, **found} if kept else found


def enriched(record: _T, rest: Mapping[str, Any]) -> _T:
    """Return ``record`` with the fields that :func:`beyond` returned."""
    if not rest:
        return record
    given = read(type(record), dict(rest))
    if EXTRA in given and not isinstance(record, Wide):
        return wide(type(record))(**{**encoded(record), **given})
    if EXTRA in given:
        given[EXTRA] = {**getattr(record, EXTRA), **given[EXTRA]}
    return replace(record, **given)  # type: ignore[type-var]


def nearest(value: object) -> Any:
    """Return the JSON value for enums, records, mappings, sets, numpy; else the text: ``json.dumps(default=...)``."""
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
    """Return the maker of the field's default; for a field without one it makes ``MISSING``."""
    return (lambda: of.default) if of.default_factory is MISSING else of.default_factory


def _same(value: Any, default: Any) -> bool:
    """Return whether a value is the default exactly: 0 is not False, -0.0 is not 0.0, and NaN equals NaN."""
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
    for owner in kind.__mro__:
        names = vars(sys.modules.get(owner.__module__, SimpleNamespace()))
        try:
            return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), globalns=names)["it"]
        except NameError:
            continue
    return Any


def converter(hint: Any) -> _Convert | None:
    """Return the converter from a plain value to this type; None where it is plain already."""
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
    """Return a function from values to members, which raises ``ValueError`` for other values."""
    members = {member.value: member for member in kind}

    def member(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError):
            return kind(value)

    return member
