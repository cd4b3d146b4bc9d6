"""Entropy and log-probs from logits: exact, in a workspace of fixed size, apart for each side of the advantage."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlwatch.tensors.entropy import token_entropy, token_logp_entropy
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64


class LargestCopy(TorchDispatchMode):
    """The largest number of elements of a tensor made, views of ``given`` left out."""

    def __init__(self, given):
        super().__init__()
        self.given, self.elements = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != self.given:
                self.elements = max(self.elements, x.numel())
        return result


def drawn(*shape, seed=0, scale=3.0, dtype=D):
    return (scale * torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))).to(dtype)


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def test_entropy_of_known_distributions():
    """H(.5, .3, .2), the softmax of (2, 1, 0), and the uniform one over a whole vocabulary."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=D)

    assert token_entropy(p.log()).item() == pytest.approx(1.0296530140645737, abs=1e-14)
    assert token_entropy(torch.tensor([2.0, 1.0, 0.0], dtype=D)).item() == pytest.approx(0.8323955818399387, abs=1e-14)
    assert token_entropy(torch.zeros(151936, dtype=D)).item() == pytest.approx(math.log(151936), abs=1e-9)


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(1, 6), st.integers(1, 90), st.integers(0, 2**31))
def test_entropy_is_that_of_its_definition_however_it_is_cut(vocabulary, rows, tile, seed):
    """-sum p log p, 0 <= H <= ln V, unchanged by a shift; log-probs those of log_softmax."""
    logits = drawn(rows, vocabulary, seed=seed, scale=30.0)
    log_p = logits.log_softmax(-1)
    ids = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))

    logp, h = token_logp_entropy(logits, ids, tile=tile)

    torch.testing.assert_close(h, -(log_p.exp() * log_p).sum(-1), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(logp, log_p.gather(-1, ids[:, None])[:, 0], rtol=1e-11, atol=1e-12)
    assert ((h >= 0) & (h <= math.log(vocabulary) + 1e-12)).all()
    torch.testing.assert_close(h, token_entropy(logits + 1000.0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    """The result is that of the widened logits, not of their rounding."""
    logits = drawn(5, 64, dtype=dtype)
    ids = torch.arange(5)

    for got, expected in zip(token_logp_entropy(logits, ids), token_logp_entropy(logits.float(), ids), strict=True):
        assert got.dtype is torch.float32
        assert torch.equal(got, expected)


def test_a_whole_vocabulary_of_half_precision_logits_is_accurate_to_float32():
    """Better than float32's log_softmax: what is summed is at most 1."""
    logits = drawn(2, 151936, dtype=torch.bfloat16)
    log_p = logits.double().log_softmax(-1)

    torch.testing.assert_close(token_entropy(logits).double(), -(log_p.exp() * log_p).sum(-1), rtol=5e-7, atol=0)


@pytest.mark.parametrize("shape", [(6, 151936), (2, 3, 151936)])
def test_no_copy_of_the_logits_is_ever_made(shape):
    """Nothing larger than a tile, for whole tensors and for the usual slice without the last position."""
    logits = drawn(*shape, dtype=torch.bfloat16)
    ids = torch.zeros(shape[:-1], dtype=torch.int64)

    for whole, wanted in ((logits, ids), (logits[..., :-1, :], ids[..., :-1])):
        with LargestCopy(logits) as copies:
            token_logp_entropy(whole, wanted, tile=2**14)
        assert 0 < copies.elements <= 2**14


def test_the_search_for_copies_can_fail():
    """A float32 copy of all logits is seen."""
    logits = drawn(6, 1000, dtype=torch.bfloat16)
    with LargestCopy(logits) as copies:
        logits.float().log_softmax(-1)

    assert copies.elements == 6000


@pytest.mark.parametrize("tile", [1, 2, 1000])
def test_impossible_tokens_add_nothing_and_broken_rows_show(tile):
    """-inf is a forbidden token; NaN, +inf and nothing but -inf are NaN, in their own row only."""
    rows = [[0.0, 0.0, -math.inf], [-math.inf, 5.0, -math.inf], [math.nan, 0.0, 0.0], [0.0, math.inf, 0.0]]
    logits = torch.tensor([*rows, [-math.inf] * 3], dtype=D)

    logp, h = token_logp_entropy(logits, torch.tensor([1, 0, 0, 0, 0]), tile=tile)

    assert h[:2].tolist() == pytest.approx([math.log(2), 0.0])
    assert logp[:2].tolist() == pytest.approx([-math.log(2), -math.inf])
    assert h[2:].isnan().all()
    assert logp[2:].isnan().all()


def test_logits_far_apart_do_not_overflow():
    """A certain token among impossible ones, in half precision too."""
    h = token_entropy(torch.tensor([[6e4, -6e4], [-6e4, -6e4]], dtype=torch.float16))

    assert h.tolist() == pytest.approx([0.0, math.log(2)])


def test_an_id_outside_the_vocabulary_has_no_log_prob():
    """-100 marks padding: NaN there, and no index goes astray."""
    logp, h = token_logp_entropy(torch.zeros(3, 4), torch.tensor([-100, 4, 3]))

    assert logp.isnan().tolist() == [True, True, False]
    assert h.tolist() == pytest.approx([math.log(4)] * 3)


def test_a_temperature_divides_the_logits():
    """As the rollout engine does; without a copy."""
    logits, ids = drawn(4, 9), torch.tensor([0, 3, 8, 1])

    for got, expected in zip(
        token_logp_entropy(logits, ids, temperature=0.7), token_logp_entropy(logits / 0.7, ids), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"tile": 0}, "at least 1 element, got 0"), ({"temperature": 0.0}, "temperature must be positive, got 0.0")],
)
def test_impossible_settings_are_refused(setting, message):
    """The message names the value."""
    with pytest.raises(ValueError, match=message):
        token_entropy(torch.zeros(1, 3), **setting)


def test_the_shape_of_the_tokens_is_kept_and_no_graph():
    """Any leading dimensions, none, or empty ones."""
    for shape in [(), (0,), (2, 0), (2, 3), (2, 3, 4)]:
        logits = drawn(*shape, 5).requires_grad_()
        logp, h = token_logp_entropy(logits, torch.zeros(shape, dtype=torch.int64))
        assert logp.shape == h.shape == token_entropy(logits).shape == shape
        assert not any(x.requires_grad for x in (logp, h))


def test_a_jagged_tensor_keeps_its_rows():
    """Responses of unequal length without padding."""
    logits, ids = drawn(5, 7), torch.tensor([0, 1, 2, 3, 4])
    offsets = torch.tensor([0, 2, 5])
    jagged = torch.nested.nested_tensor_from_jagged(logits, offsets)

    logp, h = token_logp_entropy(jagged, torch.nested.nested_tensor_from_jagged(ids, offsets))

    assert torch.equal(h.values(), token_entropy(logits))
    assert torch.equal(logp.values(), token_logp_entropy(logits, ids)[0])
    assert torch.equal(token_entropy(jagged).offsets(), offsets)


def batch(entropy, advantages, mask=None):
    h = torch.tensor(entropy, dtype=D)
    return TokenBatch(
        logp=-h,
        mask=torch.ones_like(h) if mask is None else torch.tensor(mask),
        entropy=h,
        advantages=torch.tensor(advantages, dtype=D),
    )


def test_entropy_is_distinguished_by_the_sign_of_the_advantage():
    """Tokens of no advantage are on neither side, masked ones nowhere."""
    rows = [[1.0, 2.0, 99.0], [5.0, 6.0, 7.0], [8.0, 8.0, 8.0]]
    got = numbers(observe(batch(rows, [1.0, -1.0, 0.0], [[1, 1, 0], [1, 1, 1], [1, 1, 1]])))

    assert (got["policy/entropy_pos"], got["policy/entropy_neg"]) == (1.5, 6.0)
    assert got["policy/entropy"] == pytest.approx(45 / 8)


def test_advantages_of_tokens_split_a_response():
    """Each token goes to the side of its own advantage."""
    got = numbers(observe(batch([[1.0, 2.0, 3.0]], [[1.0, -1.0, -2.0]])))

    assert (got["policy/entropy_pos"], got["policy/entropy_neg"]) == (1.0, 2.5)


def test_a_side_that_may_lack_a_token_is_not_reported_as_whole():
    """An advantage that is no number makes both sides none; outside the mask it does not matter."""
    got = numbers(observe(batch([[1.0, 2.0]], [[1.0, math.nan]])))
    unharmed = numbers(observe(batch([[1.0, 2.0]], [[1.0, math.nan]], [[1, 0]])))

    assert math.isnan(got["policy/entropy_pos"])
    assert math.isnan(got["policy/entropy_neg"])
    assert unharmed["policy/entropy_pos"] == 1.0


def test_a_side_without_tokens_is_not_measured():
    """All answers right: there is no entropy of negative advantage, rather than 0."""
    stats = observe(batch([[1.0, 2.0]], [1.0]))

    assert stats["policy/entropy_neg"].count == 0
    assert stats["policy/entropy_pos"].count == 2


def test_entropy_percentiles_skip_padding():
    """p10 and p90 are over the masked tokens, and belong to the costlier statistics."""
    h = torch.cat([torch.linspace(0, 1, 11, dtype=D), torch.full((5,), 99.0, dtype=D)]).view(1, -1)
    tokens = TokenBatch(logp=-h, mask=torch.cat([torch.ones(11), torch.zeros(5)]).view(1, -1), entropy=h)

    got = numbers(observe(tokens))

    assert got["policy/entropy_p10"] == pytest.approx(0.1)
    assert got["policy/entropy_p90"] == pytest.approx(0.9)
    assert got["policy/entropy"] == pytest.approx(0.5)
    assert "policy/entropy_p10" not in observe(tokens, full=False)
