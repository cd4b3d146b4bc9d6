"""``dataclass``, which makes frozen classes with slots in a third of the time that the standard decorator takes.

The standard decorator of Python 3.11 compiles seven functions for each class, which took a third of the time of
``import rlwatch`` and of loading the judge. For ``frozen=True, slots=True`` this one compiles only ``__init__``; the
other functions are shared, and read the fields of the class. All else is the same: fields, ``replace``,
``__match_args__``, equality, hashes, pickles, errors. Other settings, and subclasses of dataclasses, get the standard
decorator. Fields with ``hash=`` and ``InitVar`` are not supported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, fields, is_dataclass
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, ClassVar

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False, **others):
        """Make ``cls`` a dataclass, as :func:`dataclasses.dataclass` does with the same arguments."""

        def made(cls):
            if frozen and slots and not others and not any(map(is_dataclass, cls.__mro__[1:])):
                return _frozen(cls, kw_only=kw_only)
            return dataclasses.dataclass(cls, frozen=frozen, slots=slots, kw_only=kw_only, **others)

        return made if cls is None else made(cls)


def _frozen(cls: type, *, kw_only: bool) -> Any:
    own = vars(cls)
    made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=True, kw_only=kw_only)
    made.__dataclass_params__.frozen = True  # the standard decorator looks at it in subclasses
    compared = [each.name for each in fields(made) if each.compare]
    made.__compared__ = staticmethod(attrgetter(*compared) if len(compared) > 1 else _few(compared))
    for name, function in vars(_Shared).items():
        if callable(function) and own.get(name) is None:  # a class with an __eq__ of its own has None for __hash__
            setattr(made, name, function)
    if "__init__" not in own:
        made.__init__ = _init(made, fields(made))
    return made


def _few(names: Sequence[str]) -> Callable[[object], tuple[object, ...]]:
    """Return a function that returns the values of at most one attribute, as ``attrgetter`` does for several."""
    return lambda one: tuple(getattr(one, name) for name in names)


def _init(made: Any, known: Sequence[Field[Any]]) -> Any:
    """Compile the ``__init__`` of the class ``made``, which has the fields ``known``."""
    parameters, keywords, lines = ["self"], ["*"], []
    names: dict[str, Any] = {"_MISSING": MISSING}
    for each in known:
        name, value, default = each.name, each.name, ""
        if each.default_factory is not MISSING:
            names[f"_make_{name}"], default = each.default_factory, "=_MISSING"
            value = f"_make_{name}() if {name} is _MISSING else {name}" if each.init else f"_make_{name}()"
        elif each.default is not MISSING:
            names[f"_default_{name}"], default = each.default, f"=_default_{name}"
            value = name if each.init else f"_default_{name}"
        elif not each.init:
            continue  # set by __post_init__
        names[f"_set_{name}"] = getattr(made, name).__set__
        lines.append(f"  _set_{name}(self, {value})")
        if each.init:
            (keywords if each.kw_only else parameters).append(name + default)
    if hasattr(made, "__post_init__"):
        lines.append("  self.__post_init__()")
    arguments, body = ", ".join(parameters + keywords * (len(keywords) > 1)), "\n".join(lines) or "  pass"
    text = f"def make({', '.join(names)}):\n def __init__({arguments}):\n{body}\n return __init__"
    module, scope = sys.modules.get(made.__module__), dict[str, Any]()
    exec(text, {} if module is None else vars(module), scope)  # noqa: S102  (as the standard decorator does)
    init = scope["make"](**names)
    init.__qualname__ = f"{made.__qualname__}.__init__"
    init.__annotations__ = {**{each.name: each.type for each in known if each.init}, "return": None}
    return init


class _Shared:
    """Functions of every frozen class; ``__compared__`` of the class returns the values that are compared."""

    __compared__: Any
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @recursive_repr()
    def __repr__(self) -> str:
        shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
        return f"{self.__class__.__qualname__}({shown})"

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        values = self.__compared__
        return bool(values(self) == values(other))

    def __hash__(self) -> int:
        return hash(self.__compared__(self))

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dataclass_fields__ or not hasattr(self, "__dict__"):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dataclass_fields__ or not hasattr(self, "__dict__"):
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    def __getstate__(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]

    def __setstate__(self, state: list[Any]) -> None:
        for each, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, each.name, value)
