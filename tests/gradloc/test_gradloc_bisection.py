"""The published search for culprits: what it finds, at which price, what it cannot find, and old defects."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_step import dapo, dapo_entropy, plant, policy, rollouts, take_step
from torch import nn

from rlwatch.gradloc.bisection import follow_larger, search
from rlwatch.gradloc.passes import Outputs, RandomState, RecordedPasses
from rlwatch.gradloc.report import TokenAt
from rlwatch.gradloc.verification import verify
from rlwatch.tensors.tokens import TokenBatch

NOISE = 2.5
"""Threshold of a single token whose gradient at the logits is noise: its norm there is sqrt(2) at most."""


class Toy:
    """Linear softmax: features -> 8 logits; the loss of a token is -A logp / Z. ``ranks`` share the weights."""

    def __init__(self, advantages, *, micro_batches=1, ranks=1, seed=0, width=4, vocab=8):
        """``advantages``: one number a token, split evenly over ranks and then micro-batches of one sequence.

        ``vocab``: how many of the logits tokens are drawn from.
        """
        draw = torch.Generator().manual_seed(seed)
        self.model = nn.Linear(width, 8)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=draw) * 0.1)
        n = len(advantages)
        features = torch.nn.functional.normalize(torch.randn(n, width, generator=draw), dim=1)
        chosen = torch.randint(0, vocab, (n, 1), generator=draw)
        self.ranks = []
        for share in torch.arange(n).chunk(ranks):
            self.ranks.append(RecordedPasses())
            for part in share.chunk(micro_batches):
                a = torch.as_tensor(advantages)[part][None]
                self.add(self.ranks[-1], features[part], chosen[part], a, total=n / ranks)
        self.normaliser = n

    def add(self, passes, x, chosen, advantages, total):
        def forward(rows=None):
            return Outputs(self.model(x).log_softmax(-1).gather(-1, chosen).T)

        out = forward()
        mask = torch.ones(out.logp.shape, dtype=torch.bool)
        passes.add(forward, out, TokenBatch(out.logp.detach(), mask), random=RandomState.now())
        (-(advantages * out.logp).sum() / total).backward()

    def search(self, *, single=NOISE, **more):
        return search(self.model, self.ranks[0], normaliser=self.normaliser, single_token_threshold=single, **more)


def noise(n, seed=3):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).clamp(-1.5, 1.5)


def planted(n, *at, size=1e4):
    advantages = noise(n)
    for place in at:
        advantages[place] = size
    return advantages


def positions(result):
    return [hit.at.position for hit in result.hits]


@pytest.mark.parametrize("at", [0, 77_777])
def test_one_culprit_in_a_hundred_thousand_tokens(at):
    """Exactly it, with its own norm, at the published price; the trace narrows down to it."""
    toy = Toy(planted(100_000, at))

    found = toy.search()

    assert positions(found) == [at]
    assert found.probes <= 1 + 2 * math.ceil(math.log2(100_000))
    own = verify(toy.model, toy.ranks[0], [found.hits[0].at])[found.hits[0].at]
    assert found.hits[0].norm == pytest.approx(own.norm, rel=1e-5)
    assert found.why_not == ""
    assert not found.exhausted
    assert [segment.count for segment in found.trace][:3] == [100_000, 50_000, 50_000]


def test_two_culprits_in_different_halves_are_both_found():
    """Depth first, and then back up."""
    assert sorted(positions(Toy(planted(4096, 100, 4000)).search())) == [100, 4000]


def test_a_culprit_in_the_third_micro_batch():
    """Micro-batches are enumerated first: M probes more, none of them wasted on tokens of the others."""
    found = Toy(planted(4096, 2500), micro_batches=4).search()

    assert [hit.at for hit in found.hits] == [TokenAt(0, 2, 0, 2500 - 2048)]
    assert found.probes <= 4 + 2 * 10


def test_culprits_in_two_micro_batches_are_both_followed():
    """The released code follows the largest only (defect iv)."""
    toy = Toy(planted(1024, 10, 1000), micro_batches=4)

    assert {(hit.at.microbatch, hit.at.position) for hit in toy.search().hits} == {(0, 10), (3, 1000 - 768)}


def test_a_cancelling_pair_is_a_false_negative():
    """+g and -g in the same half: the norm of that half is the noise's. Verification of candidates does find them."""
    advantages, toy = planted(1024, 100), None
    advantages[101] = -1e4
    toy = Toy(advantages)
    passes = toy.ranks[0]

    def same_token_twice(rows=None, forward=passes.all[0].forward):
        logp = forward().logp
        return Outputs(torch.cat([logp[:, :101], logp[:, 100:101], logp[:, 102:]], 1))

    passes.all[0].forward = same_token_twice
    found = toy.search()
    own = verify(toy.model, passes, [TokenAt(0, 0, 0, 100), TokenAt(0, 0, 0, 101)])

    assert found.hits == []
    assert found.why_not == "no micro-batch of the step is above its threshold"
    assert all(each.norm > 100 * NOISE / toy.normaliser for each in own.values())


def test_a_lone_culprit_below_the_noise_of_the_step_is_missed():
    """The price of sqrt(N): it stands out by itself, but not among 4096 tokens."""
    assert Toy(planted(4096, 9, size=20.0)).search().hits == []


def test_nothing_above_its_threshold_is_an_answer():
    """The released code crashes there (defect i)."""
    found = Toy(noise(256)).search()

    assert found.hits == []
    assert found.probes == 1
    assert found.why_not == "no micro-batch of the step is above its threshold"


def test_tokens_that_stand_out_together_only():
    """A drift that all tokens share is above the noise of many, and no token is to blame."""
    toy = Toy(torch.full((32,), 1.0), vocab=1)
    found = toy.search(single=2.0)

    assert found.hits == []
    assert found.why_not == "tokens are above their threshold together only, no single one is"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_above_any_threshold(broken):
    """The released code does not notice, and one NaN spoils all its probes (defect ii)."""
    found = Toy(planted(512, 300, size=broken), micro_batches=2).search()

    assert [(hit.at.microbatch, hit.at.position) for hit in found.hits] == [(1, 44)]
    assert not math.isfinite(found.hits[0].norm)
    assert all(math.isfinite(s.norm) for s in found.trace if s.tokens is not None and 44 not in s.tokens)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_small_segments(n):
    """One token is not split into it and nothing (defect v); odd numbers are."""
    found = Toy(planted(n, n - 1)).search()

    assert positions(found) == [n - 1]
    assert all(segment.count for segment in found.trace)
    assert found.probes == (1 if n == 1 else found.probes)


def test_an_empty_batch_is_said_to_be_one():
    """No micro-batches, or none with a token that counts."""
    empty = Toy(planted(4, 1))
    empty.ranks[0].all[0].tokens.mask.zero_()

    assert empty.search().why_not == "the step has no response tokens to search"
    empty.ranks[0].clear()
    assert empty.search().why_not == "the step has no response tokens to search"


def test_the_budget_ends_it_with_what_was_found():
    """Never a probe more than allowed."""
    toy = Toy(planted(1024, 5, 700, size=1e5))
    whole = toy.search().probes

    for budget in (0, 1, 2, 21, whole - 1):
        found = toy.search(budget=budget)
        assert found.probes <= budget
        assert found.exhausted
        assert found.why_not == f"the search was ended by its budget of {budget} probes"
    assert len(toy.search(budget=whole - 1).hits) >= 1
    assert not toy.search(budget=whole).exhausted


def test_a_probe_that_fails_is_said():
    """Out of memory, say: no exception in training."""
    toy = Toy(planted(64, 5))
    toy.ranks[0].all[0].forward = lambda rows=None: (_ for _ in ()).throw(MemoryError)

    assert toy.search().why_not == "a probe of 64 tokens failed on 1 of 1 ranks"


def test_a_loss_is_not_divided_by_nothing():
    """The normaliser is the caller's to know."""
    toy = Toy(noise(4))

    with pytest.raises(ValueError, match="normaliser"):
        search(toy.model, toy.ranks[0], normaliser=0, single_token_threshold=1.0)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 200), st.data())
def test_the_larger_half_leads_to_a_lone_culprit(n, data):
    """Without any threshold, at 2 probes a level."""
    at = data.draw(st.integers(0, n - 1))
    toy = Toy(planted(n, at, size=1e5))

    found = follow_larger(toy.model, toy.ranks[0], culprits=1)

    assert positions(found) == [at]
    assert found.probes <= 2 * math.ceil(math.log2(n))


def test_the_larger_half_finds_several_one_after_the_other():
    """What was found is left out of the next round; where nothing is left, it ends."""
    toy = Toy(planted(512, 1, 200, 201, 500, size=1e5), micro_batches=2)

    found = follow_larger(toy.model, toy.ranks[0], culprits=4)
    assert {hit.at.microbatch * 256 + hit.at.position for hit in found.hits} == {1, 200, 201, 500}
    few = Toy(planted(3, 1))
    assert sorted(positions(follow_larger(few.model, few.ranks[0], culprits=10))) == [0, 1, 2]
    assert follow_larger(few.model, few.ranks[0], culprits=3, budget=3).exhausted


def test_what_was_probed_is_not_probed_again():
    """Further culprits cost less than the first, and are the ones that stand out most without those before."""
    places = [3, 90, 500, 501, 900, 1000]
    toy = Toy(planted(1024, *places, size=1e6), micro_batches=2)

    found = follow_larger(toy.model, toy.ranks[0], culprits=6)

    assert sorted(hit.at.microbatch * 512 + hit.at.position for hit in found.hits) == places
    assert found.probes <= 0.85 * 6 * (2 + 2 * 9)
    assert follow_larger(toy.model, toy.ranks[0], culprits=1).probes == 2 + 2 * 9
    own = verify(toy.model, toy.ranks[0], [hit.at for hit in found.hits])
    assert [hit.norm for hit in found.hits] == pytest.approx([each.norm for each in own.values()], rel=1e-4)


def test_a_real_model_and_its_loss():
    """Any loss is searched as it is, entropy bonus included; training does not notice."""
    model = policy(dropout=0.2)
    batch, places = plant(rollouts(model, varied=False), "advantage", 1, 1e4)
    passes = take_step(model, batch, dapo_entropy, micro_batches=2)
    grads, random = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()

    found = search(model, passes, normaliser=int(batch.mask.sum()), single_token_threshold=50.0)

    assert [(passes.all[h.at.microbatch].first_row + h.at.row, h.at.position) for h in found.hits] == places
    own = verify(model, passes, [found.hits[0].at])
    assert found.hits[0].norm == pytest.approx(own[found.hits[0].at].norm, rel=1e-4)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_terms_of_a_masked_token_are_all_masked():
    """Log-prob and entropy of a token go together (vii): single norms are those of verification."""
    model = policy()
    batch = rollouts(model, batch=2, length=4, varied=False)
    passes = take_step(model, batch, dapo_entropy)

    found = follow_larger(model, passes, culprits=8)
    own = verify(model, passes, [hit.at for hit in found.hits])

    assert len(own) >= 4
    assert [hit.norm for hit in found.hits] == pytest.approx([each.norm for each in own.values()], rel=1e-4)


def test_responses_differ_in_length():
    """Tokens are counted through the mask, row by row: padding is never probed."""
    model = policy()
    batch, places = plant(rollouts(model), "advantage", 2, 1e5)
    passes = take_step(model, batch, dapo)

    found = search(model, passes, normaliser=int(batch.mask.sum()), single_token_threshold=50.0)

    assert {(hit.at.row, hit.at.position) for hit in found.hits} == set(places)
    assert found.trace[0].count == int(batch.mask.sum())


class Threads:
    """Several ranks in one process, a thread each."""

    def __init__(self, size):
        self.size = size
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=600)

    def run(self, work):
        """``work(world)`` on each rank; their results."""
        results = [None] * self.size
        errors = []

        def one(rank):
            try:
                results[rank] = work(Rank(self, rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class Rank:
    def __init__(self, threads, rank):
        self.threads, self.rank, self.size = threads, rank, threads.size

    def gather(self, values):
        self.threads.barrier.wait()
        self.threads.values[self.rank] = values.clone()
        self.threads.barrier.wait()
        return list(self.threads.values)

    def sum(self, values):
        return torch.stack(self.gather(values)).sum(0)

    def max(self, values):
        return torch.stack(self.gather(values)).amax(0)


@pytest.mark.parametrize(("ranks", "at"), [(2, 700), (4, 0), (4, 600), (3, 1000)])
def test_ranks_are_bisected(ranks, at):
    """The culprit's rank is found by halves, and every rank says the same of it."""
    n = 1024
    toy = Toy(planted(n, at), ranks=ranks)

    def one(world):
        return search(toy.model, toy.ranks[world.rank], normaliser=n, single_token_threshold=NOISE, world=world)

    results = Threads(ranks).run(one)

    each = math.ceil(n / ranks)
    assert all([hit.at for hit in found.hits] == [TokenAt(at // each, 0, 0, at % each)] for found in results)
    assert results[0].probes <= 1 + 2 * math.ceil(math.log2(ranks)) + 2 * math.ceil(math.log2(each))
    alone = Toy(planted(n, at)).search()
    assert results[0].hits[0].norm == pytest.approx(alone.hits[0].norm, rel=1e-4)


def test_culprits_on_two_ranks_are_both_followed():
    """The released code follows one rank (defect iv); a NaN on one spoils nothing on the other (ii)."""
    toy = Toy(planted(1024, 10, 1000, size=1e5), ranks=4)

    def one(world):
        return follow_larger(toy.model, toy.ranks[world.rank], culprits=2, world=world).hits, search(
            toy.model, toy.ranks[world.rank], normaliser=1024, single_token_threshold=NOISE, world=world
        ).hits

    for larger, thresholds in Threads(4).run(one):
        for hits in (larger, thresholds):
            assert {(hit.at.rank, hit.at.position) for hit in hits} == {(0, 10), (3, 1000 - 768)}


def test_ranks_may_have_different_numbers_of_micro_batches():
    """Those that a rank does not have are empty there."""
    toy = Toy(planted(64, 60), ranks=2, micro_batches=2)
    toy.ranks[0].all.pop()

    def one(world):
        return search(toy.model, toy.ranks[world.rank], normaliser=64, single_token_threshold=NOISE, world=world)

    assert [hit.at for hit in Threads(2).run(one)[0].hits] == [TokenAt(1, 1, 0, 12)]


def test_a_rank_that_fails_tells_the_others():
    """All stop, and all say so."""
    toy = Toy(planted(64, 60), ranks=2)
    toy.ranks[1].all[0].forward = lambda rows=None: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))

    def one(world):
        return search(toy.model, toy.ranks[world.rank], normaliser=64, single_token_threshold=NOISE, world=world)

    assert [r.why_not for r in Threads(2).run(one)] == ["a probe of 64 tokens failed on 1 of 2 ranks"] * 2
