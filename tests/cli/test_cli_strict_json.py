"""JSON that every parser accepts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from cli_helpers import strict
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.cli.console import dumps, plain
from rlwatch.records import Finding, RunInfo, Severity

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_any_value_becomes_strict_json(value: object) -> None:
    """NaN and infinities at any depth."""
    strict(dumps(value))


@given(VALUES)
def test_plain_values_are_a_fixed_point(value: object) -> None:
    """What is plain stays as it is."""
    once = plain(value)

    assert plain(once) == once


@pytest.mark.parametrize(
    ("value", "written"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (1.5, 1.5)]
)
def test_non_finite_numbers_are_written_as_named_strings(value: float, written: object) -> None:
    """And Python's ``float`` reads them back."""
    assert plain(value) == written
    assert repr(float(plain(value))) == repr(value)


def test_records_become_objects_with_all_their_fields() -> None:
    """Enumerations by their value, tuples as lists."""
    finding = Finding("d", "grad_spike", Severity.WARNING, 5, 4, "m", evidence={"values": (1.0, math.nan)})

    written = plain(finding)

    assert written["severity"] == "warning"
    assert written["evidence"] == {"values": [1.0, "NaN"]}
    assert set(written) == set(Finding.__dataclass_fields__)
    assert plain(RunInfo("r"))["tags"] == []


def test_numpy_values_are_written_as_numbers() -> None:
    """Scalars and arrays, non-finite ones by name."""
    assert plain({"a": np.float32(0.5), "b": np.array([1.0, np.nan]), "c": np.int64(3)}) == {
        "a": 0.5,
        "b": [1.0, "NaN"],
        "c": 3,
    }


def test_other_objects_are_written_as_text_and_sets_in_order() -> None:
    """Nothing makes writing fail."""

    @dataclass
    class Odd:
        path: complex = 1j

    assert plain(Odd()) == {"path": "1j"}
    assert plain({"b", "a"}) == ["a", "b"]


def test_the_text_is_ascii() -> None:
    """No terminal's encoding can break it."""
    text = dumps({"name": "实验 λ"})

    assert text.isascii()
    assert json.loads(text) == {"name": "实验 λ"}
