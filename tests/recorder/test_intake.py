"""Taking metrics from the training thread: anything that is one number, nothing that waits."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlwatch.recorder.intake import admit, numbers, step_index
from rlwatch.recorder.losses import Counters


class CountSyncs(TorchDispatchMode):
    """Counts what makes a host wait for a device."""

    def __init__(self):
        super().__init__()
        self.syncs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.syncs += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def taken(metrics):
    counters = Counters()
    return numbers(admit(metrics, 1, 0.0), counters), counters


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=True, allow_infinity=True), max_size=8))
def test_floats_pass_bit_for_bit(metrics):
    """NaN and infinities are values like any other."""
    out, counters = taken(metrics)

    assert {k: np.float64(v).tobytes() for k, v in metrics.items()} == {
        k: np.float64(v).tobytes() for k, v in out.items()
    }
    assert counters.snapshot() == {}


def test_numpy_scalars_ints_and_bools_become_floats():
    """What trainers really hand over."""
    out, _ = taken({"a": np.float32(0.5), "b": 3, "c": np.int64(4), "d": True, "e": np.array(2.5)})

    assert out == {"a": 0.5, "b": 3.0, "c": 4.0, "d": 1.0, "e": 2.5}


def test_none_means_not_measured():
    """Absent, and no reason to warn."""
    out, counters = taken({"a": None, "b": 1.0})

    assert out == {"b": 1.0}
    assert counters.snapshot() == {}


@pytest.mark.parametrize("bad", ["0.5", b"1", [1.0, 2.0], object(), np.zeros(3), torch.zeros(2), {"x": 1}])
def test_what_is_not_one_number_is_left_out_and_counted(bad):
    """A string is not a number, not even if it looks like one."""
    out, counters = taken({"bad": bad, "good": 1.0})

    assert out == {"good": 1.0}
    assert counters["bad_values"] == 1


class Lost:
    """A number that cannot be had any more."""

    def __float__(self):
        raise RuntimeError("the device is gone")


class Detachable:
    """Not a tensor, though it has a method of one."""

    def detach(self):
        """Whatever that means here."""


ODD = {
    "complex tensor": torch.tensor(1j),
    "complex tensor without imaginary part": torch.tensor(complex(0.5, 0.0)),
    "tensor without data": torch.ones(1, device="meta"),
    "empty tensor": torch.zeros(0),
    "sparse tensor of two": torch.ones(2).to_sparse(),
    "complex": 1j,
    "complex of numpy": np.complex64(1),
    "complex array": np.array(1j),
    "huge integer": 10**400,
    "lost number": Lost(),
    "no tensor": Detachable(),
}


@pytest.mark.parametrize("bad", ODD.values(), ids=ODD)
def test_one_odd_value_costs_no_other_and_is_never_shown_as_another_number(bad):
    """The real part of a complex number, say: what is no real number was not measured."""
    out, counters = taken({"bad": bad, "tensor": torch.tensor(2.0), "good": 1.0})

    assert out == {"tensor": 2.0, "good": 1.0}
    assert counters["bad_values"] == 1


def test_a_sparse_tensor_of_one_number_is_that_number():
    """Where it is stored does not matter."""
    assert taken({"a": torch.tensor(3.0).to_sparse()})[0] == {"a": 3.0}


def test_sixty_tensors_cost_no_sync():
    """Logging 0-d tensors never waits for a device; float() on each would wait sixty times."""
    metrics = {f"m{i}": torch.tensor(float(i)) for i in range(60)}

    with CountSyncs() as counted:
        entry = admit(metrics, 1, 0.0)

    assert counted.syncs == 0
    assert numbers(entry, Counters()) == {f"m{i}": float(i) for i in range(60)}


def test_a_tensor_may_be_overwritten_right_after_the_call():
    """The value is the one at the time of the call."""
    value = torch.tensor(1.0)
    entry = admit({"v": value}, 1, 0.0)
    value.fill_(99.0)

    assert numbers(entry, Counters()) == {"v": 1.0}


def test_tensors_of_any_dtype_shape_one_and_with_a_graph_are_taken():
    """Integers, bf16, requires_grad, shape (1,)."""
    out, _ = taken(
        {
            "int": torch.tensor(7),
            "bf16": torch.tensor(0.5, dtype=torch.bfloat16),
            "graph": torch.tensor(2.0, requires_grad=True) * 2,
            "one": torch.tensor([3.0]),
            "nan": torch.tensor(float("nan")),
        }
    )

    assert math.isnan(out.pop("nan"))
    assert out == {"int": 7.0, "bf16": 0.5, "graph": 4.0, "one": 3.0}


def test_conversion_may_happen_on_another_thread():
    """The writer thread reads what the training thread queued."""
    entry, out = admit({"t": torch.tensor(1.5), "f": 2.0}, 1, 0.0), {}
    worker = threading.Thread(target=lambda: out.update(numbers(entry, Counters())))
    worker.start()
    worker.join()

    assert out == {"t": 1.5, "f": 2.0}


WHOLE = [0, 5, np.int32(7), torch.tensor(3), 2.0, np.float64(3.0), np.float32(4.0), np.float16(5.0), np.array(6.0)]


@pytest.mark.parametrize("step", WHOLE)
def test_whole_steps_of_any_make_are_taken(step):
    """Whatever counts, also as a float: an epoch times rows over batches."""
    assert step_index(step) == int(step)
    assert type(step_index(step)) is int


NO_STEPS = [-1, 1.5, -2.0, np.float32(0.5), np.True_, "3", None, True, float("nan"), float("inf"), 2.0**60]


@pytest.mark.parametrize("step", NO_STEPS)
def test_a_step_that_is_none_says_what_it_got(step):
    """Negative, fractional, text, no number, too large to be exact."""
    with pytest.raises(ValueError, match="step must be an integer >= 0, got"):
        step_index(step)


class Part(torch.Tensor):
    """Looks like a DTensor, of which another rank holds the other part."""

    def full_tensor(self):
        raise AssertionError("a collective on one rank alone hangs training")

    def item(self):
        raise AssertionError("so does this")

    __float__ = item


def test_a_tensor_in_parts_is_refused_without_touching_it(caplog):
    """Reading it is a collective; the message says what to pass instead."""
    counters = Counters()
    part = torch.tensor(1.0).as_subclass(Part)

    assert numbers(admit({"grad_norm": part, "loss": 2.0}, 1, 0.0), counters) == {"loss": 2.0}
    assert counters["bad_values"] == 1
    assert "pass its full_tensor()" in caplog.text
