"""How hard a token pushes: the size of the gradient of its own logit."""

import math

import pytest
import torch

from rlwatch.tensors.tokens import TokenBatch, screen, top_tokens

pytestmark = pytest.mark.torch
D = torch.float64


def table(**columns):
    """Rows of the table as dictionaries, worst first."""
    batch = TokenBatch(mask=torch.ones_like(columns["logp"]), **columns)
    top = top_tokens(batch)
    return [dict(zip(("score", *top.names), row.tolist(), strict=True)) for row in top.rows]


@pytest.mark.parametrize("advantage", [2.5, -2.5])
def test_it_is_the_gradient_of_the_loss_with_respect_to_the_tokens_logit(advantage):
    """-r A of one token under a softmax, differentiated by autograd."""
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=D, requires_grad=True)
    old = torch.tensor(-1.1, dtype=D)
    logp = logits.log_softmax(-1)[0]
    (-(logp - old).exp() * advantage).backward()

    got = screen(logp, torch.tensor(advantage, dtype=D), (logp - old).exp().detach())

    assert got.item() == pytest.approx(abs(logits.grad[0].item()), rel=1e-12)


def test_on_policy_the_ratio_is_one():
    """|A| (1 - p), accurate for a token that is almost certain."""
    got = screen(torch.tensor([-1e-9, -50.0]), torch.tensor([3.0, -3.0]), None)

    assert got.tolist() == pytest.approx([3e-9, 3.0])


def test_the_table_has_it_where_advantages_are_known():
    """A certain token pushes nothing, a surprising one as much as its advantage."""
    logp = torch.tensor([[0.0, -20.0]])

    rows = table(logp=logp, advantages=torch.tensor([-2.0]))

    assert [row["screen"] for row in rows] == pytest.approx([2.0, 0.0])
    assert "ratio" not in rows[0]
    assert "screen" not in table(logp=logp)[0]


def test_what_is_no_number_has_no_screen():
    """NaN, not 0."""
    row = table(logp=torch.tensor([[math.nan]]), advantages=torch.tensor([1.0]))[0]

    assert (row["score"], math.isnan(row["screen"])) == (math.inf, True)


def test_numbers_are_of_the_token_they_stand_beside():
    """In a batch of several rows, for advantages of responses and of tokens."""
    logp = -torch.arange(12.0).view(3, 4)
    for advantages in (torch.tensor([1.0, 2.0, 3.0]), torch.arange(12.0).view(3, 4)):
        per_token = advantages.view(3, -1).expand(3, 4)
        for row in table(logp=logp, advantages=advantages, ids=torch.arange(12).view(3, 4)):
            at = int(row["sequence"]), int(row["position"])
            assert row["logp"] == logp[at]
            assert row["token_id"] == at[0] * 4 + at[1]
            assert row["advantage"] == per_token[at]
