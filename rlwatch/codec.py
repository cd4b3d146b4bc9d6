"""Records as plain values and back: one way for stores, JSON, tables and what ranks send each other.

What a record holds is said once, by the fields of its dataclass. A field that is added there is written and read
without another line: what an older rlwatch wrote lacks it and gets its default, and an older rlwatch that reads it
keeps it in ``extra`` and writes it back.
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
"""Field of a record under which fields are kept that this rlwatch does not know."""
_T = TypeVar("_T")
_Convert = Callable[[Any], Any]


class Wide:
    """A record with fields that only a newer rlwatch knows: ``extra``, by name. They are written back as they were.

    A class of its own for each kind of record (:func:`wide`), a subclass of it: other records carry nothing for this.
    """

    __slots__ = ()
    extra: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        kind = next(base for base in type(self).__mro__[1:] if is_dataclass(base))
        return decoded, (kind, encoded(self))


class Plan(NamedTuple):
    """The fields of a kind of record: their names, which have no default, how plain values of them are read (where they
    are not as they are), and what makes their defaults.
    """

    names: tuple[str, ...]
    known: frozenset[str]
    needed: tuple[str, ...]
    converts: tuple[tuple[str, _Convert], ...]
    defaults: Mapping[str, Callable[[], Any]]
    """Field -> how a plain value becomes its value; not of fields that hold what is plain already."""


_plans: dict[type, Plan] = {}


def plan_of(kind: type) -> Plan:
    """The plan of a dataclass. ``extra`` is none of its fields here."""
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
    """The type of a field; ``Any`` where it cannot be told."""
    return next((_hint(kind, each.type) for each in fields(kind) if each.name == name), Any)


_wide: dict[type, type] = {}


def wide(kind: type[_T]) -> type[_T]:
    """The class of records of this kind with fields that we do not know."""
    if issubclass(kind, Wide):
        return kind
    if kind not in _wide:
        extra: Any = field(default_factory=dict, repr=False, hash=False, kw_only=True)
        said = [(EXTRA, Mapping[str, Any], extra)]
        _wide[kind] = make_dataclass(kind.__name__, said, bases=(Wide, kind), frozen=True, slots=True)
    return _wide[kind]


def encoded(record: Any) -> dict[str, Any]:
    """The fields of ``record`` by name, and those that it only keeps. For JSON their values need :func:`nearest`.

    >>> from rlwatch.records import Purge
    >>> list(encoded(Purge("r", "math", "seed-1", "ann", 5.0, "bob", 4.0)))
    ['run_id', 'project', 'name', 'by', 'at', 'deleted_by', 'deleted_at']
    """
    found = {name: getattr(record, name) for name in plan_of(type(record)).names}
    kept = getattr(record, EXTRA, None)
    return {**kept, **found} if kept else found


def decoded(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """The record again. Raises ``ValueError`` where a field is missing that has no default, or is none of its kind.

    >>> from rlwatch.records import AuditEntry
    >>> decoded(AuditEntry, {"entry_id": "e1", "at": 5.0, "by": "ann", "act": "note", "text": "x", "mood": 1}).extra
    {'mood': 1}
    """
    return made(kind, read(kind, dict(values)))


def read(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Make arguments of ``kind`` of plain values, in place: each as its field has it, under ``extra`` those of none."""
    plan = plan_of(kind)
    for name, convert in plan.converts:
        if name in given:
            given[name] = convert(given[name])
    if not plan.known.issuperset(given):
        given[EXTRA] = {name: given.pop(name) for name in list(given) if name not in plan.known}
    return given


def made(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """The record of these arguments. Raises ``ValueError`` that says which are missing."""
    try:
        return (wide(kind) if EXTRA in given else kind)(**given)
    except TypeError as error:
        lacking = [name for name in plan_of(kind).needed if name not in given]
        why = f"lacks {', '.join(lacking)}" if lacking else f"is damaged ({error})"
        raise ValueError(f"{kind.__name__} {why}; got {', '.join(sorted(given)) or 'nothing'}") from error


def beyond(record: Any, columns: Collection[str] = ()) -> dict[str, Any]:
    """The fields that none of ``columns`` holds and that are not as they are by default, then what it only keeps."""
    found = {}
    for name, default in plan_of(type(record)).defaults.items():
        if name not in columns and not _same(value := getattr(record, name), default()):
            found[name] = value
    kept = getattr(record, EXTRA, None)
    return {**kept, **found} if kept else found


def enriched(record: _T, rest: Mapping[str, Any]) -> _T:
    """``record`` with what :func:`beyond` took from it."""
    if not rest:
        return record
    given = read(type(record), dict(rest))
    if EXTRA in given and not isinstance(record, Wide):
        return wide(type(record))(**{**encoded(record), **given})
    if EXTRA in given:
        given[EXTRA] = {**getattr(record, EXTRA), **given[EXTRA]}
    return replace(record, **given)  # type: ignore[type-var]


def nearest(value: object) -> Any:
    """For ``json.dumps(default=...)``: what JSON has for enums, records, mappings, sets, numpy; else the text."""
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
    """Maker of the field's default; of a field that has none it makes ``MISSING``."""
    return (lambda: of.default) if of.default_factory is MISSING else of.default_factory


def _same(value: Any, default: Any) -> bool:
    """True if it is the default to the bit: 0 is not False, -0.0 is not 0.0, and NaN is itself."""
    if value is default:
        return True
    if type(value) is not type(default):
        return False
    if isinstance(value, float):
        return value == default and copysign(1.0, value) == copysign(1.0, default)
    return bool(value == default) if isinstance(value, str | int | tuple | dict | list | Enum) else False


def _hint(kind: type, said: Any) -> Any:
    """The type that an annotation names; ``Any`` where its module does not say (``np`` for type checkers alone)."""
    if not isinstance(said, str):
        return said
    for owner in kind.__mro__:
        names = vars(sys.modules.get(owner.__module__, SimpleNamespace()))
        try:
            return get_type_hints(SimpleNamespace(__annotations__={"it": said}), globalns=names)["it"]
        except NameError:
            continue
    return Any


def converter(hint: Any) -> _Convert | None:
    """Return what makes a value of this type of a plain one; None where it is one already."""
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
    """Return a reader of members from their values, which raises ``ValueError`` for what is none."""
    members = {member.value: member for member in kind}

    def member(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError):
            return kind(value)

    return member
