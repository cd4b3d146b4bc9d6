"""Rows of unequal length, however they come, as one padded tensor."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlwatch.tensors.padded import Padded, _asked, longest_row

pytestmark = pytest.mark.torch
ROWS = [[0.5, 1.5, 2.5], [3.5], []]


def jagged(rows, **kwargs):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged, **kwargs)


def strided(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows])


def narrowed(rows):
    """Rows that lie apart in a wider tensor, as torch.nested.narrow leaves them."""
    wide = torch.full((len(rows), 5), 99.0)
    for i, row in enumerate(rows):
        wide[i, 1 : 1 + len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nested.narrow(wide, 1, torch.ones_like(lengths), lengths, layout=torch.jagged)


def tensors(rows):
    return [torch.tensor(row) for row in rows]


def arrays(rows):
    return [torch.tensor(row).numpy() for row in rows]


@pytest.mark.parametrize("make", [jagged, strided, narrowed, tensors, arrays, list])
def test_every_way_of_giving_rows_is_the_same(make):
    """Values left, NaN right, and which is which."""
    got = Padded.of(make(ROWS))

    assert got.values.shape == got.valid.shape == (3, 3)
    assert got.valid.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert got.values[got.valid].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert got.values[~got.valid].isnan().all()
    assert got.lengths == (3, 1, 0)


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=7), min_size=1, max_size=5))
def test_nothing_is_lost_or_added(rows):
    """Whatever the rows."""
    got = Padded.of([torch.tensor(row) for row in rows])

    assert [values[on].tolist() for values, on in zip(got.values, got.valid, strict=True)] == rows


def test_a_whole_tensor_stays_as_it_is():
    """No copy, no claim about padding, no graph."""
    x = torch.randn(2, 3, requires_grad=True)
    got = Padded.of(x * 1)

    assert got.valid is None
    assert got.lengths is None
    assert not got.values.requires_grad
    assert Padded.of(x.detach()).values.data_ptr() == x.data_ptr()


def test_numbers_are_a_row_of_their_own():
    """A list of numbers, or of 0-d tensors, is (B,)."""
    assert Padded.of([1, 2.5]).values.tolist() == [1.0, 2.5]
    assert Padded.of([torch.tensor(1), torch.tensor(2)]).values.tolist() == [1, 2]
    assert Padded.of([]).values.shape == (0,)


def test_whole_numbers_stay_whole_and_are_padded_with_zero():
    """Token ids have no NaN; types that differ meet in one that holds them all."""
    got = Padded.of([[3, 4], [5], []])
    mixed = Padded.of([[1], [0.5]])

    assert got.values.dtype == torch.int64
    assert got.values.tolist() == [[3, 4], [5, 0], [0, 0]]
    assert mixed.values.tolist() == [[1.0], [0.5]]


def test_half_precision_and_further_dimensions_are_kept():
    """Rows of vectors (logits, routes) in bf16."""
    rows = [torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(1, 4, dtype=torch.bfloat16)]
    for x in (rows, torch.nested.nested_tensor(rows, layout=torch.jagged)):
        got = Padded.of(x)
        assert got.values.shape == (2, 3, 4)
        assert got.values.dtype == torch.bfloat16
        assert torch.equal(got.values[0], rows[0])
        assert got.values[1, 1:].isnan().all()


@pytest.mark.parametrize("rows", [[[]], [[], []]])
@pytest.mark.parametrize("make", [jagged, tensors])
def test_rows_without_a_token_are_rows(make, rows):
    """Zero wide, but there."""
    got = Padded.of(make(rows))

    assert got.values.shape == (len(rows), 0)
    assert got.lengths == (0,) * len(rows)


def test_rows_and_numbers_do_not_mix():
    """Nobody knows what was meant."""
    with pytest.raises(ValueError, match="some of its rows are single numbers"):
        Padded.of([[1, 2], 3])


def test_what_is_jagged_elsewhere_is_refused():
    """Only the second dimension can be that of tokens."""
    x = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(2, 4)], layout=torch.strided)
    y = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(4, 2)], layout=torch.jagged).transpose(1, 2)

    with pytest.raises((ValueError, RuntimeError)):
        Padded.of(x)
    with pytest.raises(ValueError, match="jagged in another dimension"):
        Padded.of(y)


class Waits(TorchDispatchMode):
    """Remembers what would make the CPU wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "nonzero", "masked_select", "equal"}:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_jagged_tensor_that_knows_its_longest_row_is_not_asked(monkeypatch):
    """On a device that would be a wait; whoever does not know it can be told."""
    monkeypatch.setattr("rlwatch.tensors.padded._known", lambda lengths: None)  # as on a device
    x = torch.nested.nested_tensor_from_jagged(torch.arange(4.0), torch.tensor([0, 3, 4, 4]), max_seqlen=3)
    y = torch.nested.nested_tensor_from_jagged(torch.arange(4.0), torch.tensor([0, 3, 4, 4]))

    with Waits() as waits:
        known, told = Padded.of(x), Padded.of(y, longest=3)

    assert waits.seen == []
    assert known.values.shape == told.values.shape == (3, 3)
    assert (longest_row(x), longest_row(y), longest_row(torch.zeros(2))) == (3, None, None)


def test_on_a_device_an_unknown_longest_row_is_refused_with_the_way_out():
    """Rather than waiting for it."""

    class OnDevice:
        is_cuda = True

    with pytest.raises(ValueError, match="make it with max_seqlen="):
        _asked(OnDevice(), None)
