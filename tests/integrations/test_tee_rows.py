"""Which entries of another tracker's row are numbers, and which number is a step."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.integrations.tee import flatten, scalars, snapshot, step_index

NUMBERS = {
    "int": 3,
    "float": 0.5,
    "nan": math.nan,
    "inf": -math.inf,
    "numpy": np.float32(0.25),
    "numpy int": np.int64(7),
    "one element": np.array([[2.0]]),
    "decimal": Decimal("1.5"),
    "tensor": torch.tensor(4.0),
    "tensor of one": torch.tensor([[5.0]], dtype=torch.bfloat16),
}
OTHERS = {
    "flag": True,
    "numpy flag": np.bool_(True),
    "text": "1.5",
    "bytes": b"1",
    "list": [1.0],
    "array": np.zeros(3),
    "no elements": np.zeros(0),
    "tensors": torch.zeros(2),
    "empty tensor": torch.zeros(0),
    "object": object(),
    "set": {1},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_one_number_is_kept(name):
    """Whatever holds it, with its value."""
    value = NUMBERS[name]
    got = scalars({"x": value})

    assert float(got["x"]) == pytest.approx(float(value.item() if hasattr(value, "item") else value), nan_ok=True)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_one_number_is_left_out(name):
    """Silently: tables, images and text are no mistake."""
    assert scalars({"x": OTHERS[name], "y": 1.0}) == {"y": 1.0}


def test_none_is_not_a_measurement_unless_it_stands_for_nan():
    """Absent, or as the trainer's own convention says."""
    assert scalars({"x": None}) == {}
    assert math.isnan(scalars({"x": None}, null=math.nan)["x"])


def test_dicts_inside_a_row_are_named_by_their_path():
    """As wandb names them; a deeper one too."""
    row = {"a": {"b": 1, "c": {"d": 2}}, "e": 3, "f": {}}

    assert dict(flatten(row)) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_reading_a_row_waits_for_no_device():
    """A tensor is passed on as it is: on the meta device any read of its value would raise."""
    unreadable = torch.zeros((), device="meta")

    assert scalars({"x": unreadable})["x"] is unreadable
    assert step_index(unreadable) is None


def test_a_snapshot_keeps_what_a_tensor_was():
    """It may be overwritten by the next step before it is recorded."""
    loss = torch.tensor(1.0, requires_grad=True)
    kept = snapshot({"loss": loss, "lr": 0.1})
    with torch.no_grad():
        loss.fill_(2.0)

    assert float(kept["loss"]) == 1.0
    assert not kept["loss"].requires_grad
    assert kept["lr"] == 0.1


@given(st.integers(0, 2**53 - 1))
def test_an_integer_is_a_step_however_it_is_written(n):
    """As int, float or numpy scalar."""
    assert step_index(n) == step_index(np.int64(n)) == step_index(float(n)) == step_index(np.float64(n)) == n


@given(st.floats().filter(lambda x: not (x >= 0 and x == int(x) if math.isfinite(x) else False)))
def test_no_other_float_is_a_step(x):
    """Fractions, negatives, nan and inf."""
    assert step_index(x) is None


@pytest.mark.parametrize("value", [True, "3", None, [3], 2**53, 1e300, np.array([1, 2])])
def test_what_is_not_a_number_or_too_large_is_no_step(value):
    """Beyond 2**53 a float cannot tell one step from the next."""
    assert step_index(value) is None
