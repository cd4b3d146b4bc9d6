"""Rows are found again by their ids, whatever the sizes, without a table of all with all."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlwatch.tensors.padded import places_of

pytestmark = pytest.mark.torch


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that was made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.most = max(self.most, out.nbytes)
        return out


def by_hand(rows, known):
    there = [tuple(row) for row in known.tolist()]
    return [there.index(tuple(row)) if tuple(row) in there else -1 for row in rows.tolist()]


@pytest.mark.parametrize("kinds", [2, 1000])
@pytest.mark.parametrize(("rows", "known", "width"), [(7, 40, 3), (40, 7, 1), (5, 5, 64), (3, 4, 0)])
def test_every_row_is_found_where_it_first_is(kinds, rows, known, width):
    """Few kinds of tokens: rows that differ in one place only, and twice the same row."""
    g = torch.Generator().manual_seed(rows)
    there = torch.randint(0, kinds, (known, width), generator=g)
    ours = torch.cat([there[torch.randint(0, known, (rows,), generator=g)], torch.randint(0, kinds, (rows, width))])

    assert places_of([ours], [there]).tolist() == by_hand(ours, there)


def test_parts_are_compared_together():
    """A prompt with its completion: the same tokens on the other side of the border are another row."""
    prompts, completions = torch.tensor([[1, 2], [1, 2], [3, 4]]), torch.tensor([[5], [6], [5]])

    assert places_of([prompts[[2, 1]], completions[[2, 0]]], [prompts, completions]).tolist() == [2, 0]
    assert places_of([prompts[:1], torch.tensor([[7]])], [prompts, completions]).tolist() == [-1]


def test_swapped_tokens_and_large_ids_are_told_apart():
    """Also ids of 64 bits and below 0."""
    there = torch.tensor([[1, 2, 3], [3, 2, 1], [2**62, -1, 0], [-1, 2**62, 0]])

    assert places_of([there.flip(0)], [there]).tolist() == [3, 2, 1, 0]


def test_what_cannot_be_compared_is_no_place():
    """Other widths: nobody knows. No rows at all: none is the same."""
    assert places_of([torch.zeros(2, 3)], [torch.zeros(2, 4)]) is None
    assert places_of([torch.zeros(2, 3)], [torch.zeros(0, 3)]).tolist() == [-1, -1]
    assert places_of([torch.zeros(0, 3)], [torch.zeros(2, 3)]).tolist() == []


def test_nothing_is_made_that_grows_with_both_and_the_width():
    """64 rows among 1,024 of 512 tokens: a truth for each pair and token would be 32 MiB, the ids themselves are 4."""
    there = torch.randint(0, 9, (1024, 512))
    with Largest() as seen:
        found = places_of([there[:64]], [there])

    assert found.tolist() == list(range(64))
    assert seen.most <= there.nbytes
