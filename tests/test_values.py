"""The quick ``dataclass`` of rlwatch: its classes behave as those of the standard decorator."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, field, make_dataclass, replace
from typing import Any, ClassVar

import pytest

from rlwatch import values


def classes(dataclass: Any) -> dict[str, type]:
    """One class of each kind that rlwatch has, made by ``dataclass``."""

    @dataclass(frozen=True, slots=True)
    class Plain:
        """A record."""

        limit: ClassVar[int] = 3
        name: str
        step: int = 0
        tags: tuple[str, ...] = ()
        body: Mapping[str, Any] = field(default_factory=dict, compare=False)
        hidden: str = field(default="h", repr=False)

        @property
        def long(self) -> str:
            """A property."""
            return self.name * self.limit

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Named:
        """Keywords only."""

        value: float
        other: float | None = None

    @dataclass(frozen=True, slots=True)
    class Derived:
        """With a value that follows from others."""

        low: float
        high: float = 1.0
        middle: float = field(init=False, compare=False)
        made: list[int] = field(init=False, default_factory=list)
        unit: str = field(init=False, default="s")

        def __post_init__(self) -> None:
            object.__setattr__(self, "middle", (self.low + self.high) / 2)
            if self.high < self.low:
                raise ValueError("the wrong way round")

    @dataclass(frozen=True, slots=True)
    class Single:
        """One field."""

        value: float

    @dataclass(frozen=True, slots=True)
    class Own:
        """With functions of its own."""

        value: float

        def __repr__(self) -> str:
            return "mine"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self))

        def __hash__(self) -> int:
            return 7

    @dataclass(frozen=True, slots=True)
    class Nothing:
        """No field."""

    return {each.__name__: each for each in (Plain, Named, Derived, Single, Own, Nothing)}


QUICK, STANDARD = classes(values.dataclass), classes(dataclasses.dataclass)
MADE = {
    "Plain": [(("a",), {}), (("a", 2), {"tags": ("x",)}), (("a",), {"body": {"k": 1}}), (("b",), {"hidden": "?"})],
    "Named": [((), {"value": 1.0}), ((), {"value": math.nan, "other": 2.0})],
    "Derived": [((0.0,), {}), ((0.0, 3.0), {})],
    "Single": [((math.nan,), {}), ((2.0,), {})],
    "Own": [((1.0,), {}), ((2.0,), {})],
    "Nothing": [((), {})],
}


@pytest.mark.parametrize("name", MADE)
def test_a_quick_class_is_made_shown_compared_and_hashed_as_a_standard_one(name):
    """Among all its instances."""
    quick, standard = ([kind[name](*args, **kw) for args, kw in MADE[name]] for kind in (QUICK, STANDARD))

    assert [repr(each) for each in quick] == [repr(each) for each in standard]
    assert [[one == other for other in quick] for one in quick] == [
        [one == other for other in standard] for one in standard
    ]
    assert not any(one == other for one, other in zip(quick, standard, strict=True)) or name == "Own"
    if name not in ("Plain", "Derived"):
        assert [hash(each) for each in quick] == [hash(each) for each in standard]
    assert QUICK[name].__init__.__qualname__ == STANDARD[name].__init__.__qualname__
    assert QUICK[name].__match_args__ == STANDARD[name].__match_args__
    assert QUICK[name].__slots__ == STANDARD[name].__slots__
    signatures = [
        [(each.name, each.kind, each.annotation) for each in inspect.signature(kind[name]).parameters.values()]
        for kind in (QUICK, STANDARD)
    ]
    assert signatures[0] == signatures[1]


def test_hashes_leave_out_what_is_not_compared_and_need_hashable_values():
    """As the standard ones."""
    for kind in (QUICK, STANDARD):
        one, other = (kind["Plain"]("a", body=body) for body in ({}, {"k": 1}))
        assert one == other
        assert hash(one) == hash(other)
        with pytest.raises(TypeError):
            hash(kind["Derived"](0.0))


def test_wrong_arguments_and_what_post_init_refuses_are_raised():
    """A missing one, one too many, an unknown name."""
    for kind in (QUICK, STANDARD):
        for args, kw in (((), {}), (("a", 1, (), {}, "h", 2), {}), (("a",), {"nothing": 1})):
            with pytest.raises(TypeError, match="__init__"):
                kind["Plain"](*args, **kw)
        with pytest.raises(TypeError):
            kind["Named"](1.0)
        with pytest.raises(ValueError, match="wrong way"):
            kind["Derived"](2.0)


def test_no_field_can_be_assigned_deleted_or_added():
    """By any name."""
    for kind in (QUICK, STANDARD):
        one = kind["Plain"]("a")
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'step'"):
            one.step = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'step'"):
            del one.step
        with pytest.raises((FrozenInstanceError, TypeError, AttributeError)):
            one.unknown = 2
        assert (one.step, one.long) == (0, "aaa")


def test_instances_are_replaced_copied_and_matched():
    """And a factory makes each instance its own."""
    for kind in (QUICK, STANDARD):
        one = kind["Plain"]("a", 1, body={"k": [1]})
        assert replace(one, step=2) == kind["Plain"]("a", 2)
        assert dataclasses.asdict(one) == {"name": "a", "step": 1, "tags": (), "body": {"k": [1]}, "hidden": "h"}
        deep = copy.deepcopy(one)
        assert deep == copy.copy(one) == one
        assert deep.body == one.body
        assert deep.body["k"] is not one.body["k"]
        assert kind["Plain"]("a").body is not kind["Plain"]("a").body
        assert kind["Derived"](0.0, 3.0).middle == 1.5


def test_a_standard_subclass_has_the_fields_of_both_and_is_frozen():
    """As records with unknown fields are made."""
    for kind in (QUICK, STANDARD):
        more = make_dataclass(
            "More", [("extra", int, field(default=0, kw_only=True))], bases=(kind["Plain"],), frozen=True, slots=True
        )
        assert repr(more("a", extra=2)).endswith("extra=2)")
        with pytest.raises(FrozenInstanceError):
            more("a").step = 1


@values.dataclass(frozen=True, slots=True)
class Pickled:
    """At the top of a module, so that pickle finds it."""

    name: str
    inner: tuple[Pickled, ...] = ()


@values.dataclass(frozen=True, slots=True)
class Wider(Pickled):
    """A subclass."""

    more: int = 0


@values.dataclass(slots=True)
class Changing:
    """Not frozen: the standard decorator's."""

    value: int = 0


def test_instances_are_pickled_and_other_settings_are_the_standard_ones():
    """Within others, too."""
    one = Pickled("a", (Pickled("b"),))
    assert pickle.loads(pickle.dumps(one)) == one
    wider = Wider("a", more=3)
    assert (wider, wider == one, wider.more) == (pickle.loads(pickle.dumps(wider)), False, 3)
    changing = Changing()
    changing.value = 3
    assert changing == Changing(3)
