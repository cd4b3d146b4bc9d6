"""A batch measured piece by piece is the batch measured at once."""

from functools import partial

import pytest
import torch

from rlwatch.integrations.step_tally import StepTally
from rlwatch.integrations.verl import batch as verl_batch
from rlwatch.tensors.tokens import TokenBatch

LENGTHS = [3, 7, 1, 4, 9, 2, 2, 5]


pieces = partial(verl_batch.pieces, cells=16)


@pytest.fixture
def batch():
    """Eight responses of 1 to 9 tokens; beyond them NaN."""
    torch.manual_seed(0)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    given = {
        name: (-torch.rand(mask.shape)).masked_fill(~mask, torch.nan) for name in ("logp", "ref_logp", "rollout_logp")
    }
    return TokenBatch(
        **given,
        mask=mask,
        entropy=torch.rand(mask.shape),
        advantages=torch.randn(mask.shape),
        ids=torch.randint(0, 50, mask.shape),
        staleness=torch.arange(8) % 3,
        truncation=2.0,
    )


def tally_of(parts):
    tally = StepTally()
    for part in parts:
        tally.add_batch(part)
    return tally


def metrics(tally):
    settled = {name: stat.settle() for name, stat in tally.stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def test_every_statistic_is_the_same(batch):
    """Means, extremes, tails, counts; of tokens and of whole responses."""
    whole, parts = metrics(tally_of([batch])), metrics(tally_of(pieces(batch, LENGTHS)))

    assert {"mismatch/kl", "policy/kl_ref_k3", "staleness/mean", "nonfinite/logp"} <= whole.keys()
    assert parts == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_extreme_tokens_keep_their_place(batch):
    """Row and position of the whole batch."""
    tables = [tally_of(parts).spikes for parts in ([batch], pieces(batch, LENGTHS))]
    whole, parts = (sorted(tuple(row) for row in table.rows[:, :3].tolist() if row[0] > 0) for table in tables)

    assert tables[0].names == tables[1].names
    assert len(whole) > 4
    assert parts == whole


def test_pieces_are_consecutive_narrow_and_small(batch):
    """No response is cut, none is missing; at most 16 cells unless one alone has more."""
    shapes = [tuple(piece.logp.shape) for piece in pieces(batch, LENGTHS)]

    assert shapes == [(2, 7), (2, 4), (1, 9), (3, 5)]
    assert [piece.staleness.shape[0] for piece in pieces(batch, LENGTHS)] == [2, 2, 1, 3]


@pytest.mark.parametrize("lengths", [[40], [40, 1], [0, 0]])
def test_long_and_empty_responses(batch, lengths):
    """A response longer than a piece is one; empty ones are there."""
    mask = torch.ones(len(lengths), 40)
    found = list(pieces(TokenBatch(logp=mask, mask=mask), lengths))

    assert sum(piece.logp.shape[0] for piece in found) == len(lengths)
    assert list(pieces(batch, [])) == []
