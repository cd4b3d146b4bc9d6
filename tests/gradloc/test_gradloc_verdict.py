"""The verdict on a spiked step, its cause and its cure: against the run's own history."""

import math
from dataclasses import replace

import pytest
import torch
from spiked_run import Run, places
from tiny_step import LOSSES, cispo, dapo, dapo_entropy, dapo_kl, gspo, plant, take_step

from rlwatch.gradloc.culprits import describe, on_host
from rlwatch.gradloc.report import BlameLevel, ExcessFactor, TokenAt


def changed(batch, **rows):
    """``batch`` with a field changed: name -> function of the copy."""
    fields = {}
    for name, change in rows.items():
        fields[name] = getattr(batch, name).clone()
        change(fields[name])
    return replace(batch, **fields)


def test_a_batch_whose_advantages_are_all_large_names_no_token_and_costs_no_pass():
    """Twelve times as large as ever: the history tells, before anything is run again."""
    run = Run()
    batch = run.batch()
    report = run.look(replace(batch, advantages=12 * batch.advantages))

    assert (report.verdict, report.cause) == (BlameLevel.BATCH, ExcessFactor.ADVANTAGE_SCALE)
    assert (report.culprits, report.count) == ((), 0)
    assert (report.cost.forwards, report.cost.backwards) == (0, 0)
    assert "advantages are" in report.message
    assert "times their usual scale" in report.message
    assert 6 < report.grew["advantage"] < 24


def test_a_loss_that_is_normalised_otherwise_is_its_normaliser():
    """Advantages are as ever: what they are multiplied with is not."""
    run = Run()
    report = run.look(run.batch(), lambda out, b, total: 20 * dapo(out, b, total))

    assert (report.verdict, report.cause) == (BlameLevel.BATCH, ExcessFactor.NORMALISER)
    assert report.cost.forwards == 0


def test_a_kl_weight_that_grew_is_said_for_the_whole_batch():
    """And what the norm would be with the usual one: run again, to the digit."""
    run = Run(dapo_kl)
    batch = run.batch()
    report = run.look(batch, lambda out, b, total: dapo_kl(out, b, total, beta=30.0))

    assert (report.verdict, report.cause) == (BlameLevel.BATCH, ExcessFactor.KL_TERM)
    assert report.culprits == ()
    assert report.cures[0].after == pytest.approx(run.norm(batch), rel=0.05)


def test_an_entropy_weight_that_grew_is_said_for_the_whole_batch():
    """Its part of the norm comes of the contributions."""
    run = Run(dapo_entropy)
    batch = run.batch()
    report = run.look(batch, lambda out, b, total: dapo_entropy(out, b, total, coef=15.0))

    assert (report.verdict, report.cause) == (BlameLevel.BATCH, ExcessFactor.ENTROPY_TERM)
    assert report.cures[0].after == pytest.approx(run.norm(batch), rel=0.05)


def test_a_term_that_tokens_have_no_part_in_is_not_from_tokens_and_soon_said():
    """Six forwards and one backward of each response, where it took 64 and 72."""
    run = Run()
    batch = run.batch()
    report = run.look(batch, lambda out, b, total: dapo(out, b, total) + penalty(run.model))

    assert (report.verdict, report.cause) == (BlameLevel.OUTSIDE, ExcessFactor.OTHER_TERM)
    assert report.culprits == ()
    assert report.cost.forwards <= 6
    assert report.cost.backwards <= len(batch.ids)
    assert report.cures[0].after == pytest.approx(run.norm(batch), rel=0.05)


def penalty(model):
    """Weight decay in the loss, far too large."""
    return sum(p.square().sum() for p in model.parameters()) * 0.1


def test_a_step_in_which_nothing_stands_out_has_no_culprit():
    """Healthy: a proper answer."""
    run = Run()
    report = run.look(run.batch())

    assert report.verdict is BlameLevel.BATCH
    assert report.culprits == []
    assert "no culprit" in report.message
    assert "nothing that was measured grew" in report.message


def test_a_run_that_has_no_history_yet_says_so():
    """Of what all tokens share nothing can be said."""
    run = Run(steps=3)
    report = run.look(run.batch())

    assert report.grew == {}
    assert "not known yet" in report.message


def test_a_factor_that_made_the_coefficient_smaller_is_never_its_cause():
    """Advantage x 6000 and ratio 0.05: twenty times smaller, and still far beyond all others."""
    run = Run(cispo)
    batch, [place] = plant(run.batch(), "advantage", 1, 6000.0)
    report = run.look(changed(batch, old=lambda old: old[place].add_(3.0)))

    assert (report.verdict, report.cause) == (BlameLevel.TOKEN, ExcessFactor.REWARD_OUTLIER)
    assert places(report) == {place}
    assert "advantage" in report.because


def test_a_kl_term_of_no_weight_is_never_the_cause():
    """Advantage x 300 at beta 0.001, and a reference 4 nats away: the loss weighs that with next to nothing."""
    run = Run(lambda out, b, total: dapo_kl(out, b, total, beta=0.001))
    batch, [place] = plant(run.batch(), "advantage", 1, 300.0)
    report = run.look(changed(batch, ref=lambda ref: ref[place].add_(4.0)))

    assert (report.verdict, report.cause) == (BlameLevel.TOKEN, ExcessFactor.REWARD_OUTLIER)
    assert "reference" not in report.message


def test_a_kl_term_that_has_weight_is():
    """The same gap at beta 0.1, without the advantage."""
    run = Run(dapo_kl)
    batch, [place] = plant(run.batch(), "kl", 1, math.e**6)
    report = run.look(batch)

    assert (report.verdict, report.cause) == (BlameLevel.TOKEN, ExcessFactor.KL_TERM)
    assert places(report) == {place}
    assert "under the reference" in report.because


@pytest.mark.parametrize("name", ["dapo", "grpo", "cispo", "dapo_kl", "dapo_entropy"])
def test_the_cure_reaches_the_norm_that_it_promises(name):
    """Advantages clipped as it says, and the step run again."""
    run = Run(LOSSES[name])
    batch, _ = plant(run.batch(), "advantage", 1, 400.0)
    cure = run.look(batch).cures[0]
    after = run.norm(replace(batch, advantages=batch.advantages.clamp(-cure.value, cure.value)))

    assert cure.kind == "clip advantages"
    assert cure.after == pytest.approx(after, rel=0.01)
    assert cure.before == pytest.approx(run.norm(batch), rel=1e-4)


def test_a_response_to_blame_is_blamed_as_a_whole():
    """All its advantages x 60: no token of it, and every other one together holds next to nothing."""
    run = Run()
    batch = changed(run.batch(), advantages=lambda a: a[4].mul_(60.0))
    report = run.look(batch)

    assert (report.verdict, report.cause) == (BlameLevel.RESPONSE, ExcessFactor.REWARD_OUTLIER)
    assert {row for row, _ in places(report)} == {4}
    assert "sequence 4 makes 9" in report.statement
    assert report.units[0].share > 0.9


@pytest.mark.parametrize("level", ["response", "token"])
def test_where_no_contributions_can_be_computed_the_largest_gradients_are_said_and_no_share(level):
    """A share of 0 % would be a number that nobody knows."""
    run = Run()
    at = 4 if level == "response" else (4, 3)
    batch = changed(run.batch(), advantages=lambda a: a[at].mul_(60.0))

    def refuses(*_):
        if not torch.is_grad_enabled():
            raise RuntimeError("no kernel without a graph")

    run.model.register_forward_pre_hook(refuses)
    report = run.look(batch)

    assert (report.verdict.value, report.units) == (level, ())
    assert "sequence 4" in report.statement
    assert "the largest gradient" in report.statement
    assert "%" not in report.message
    assert report.culprits[0].sequence == 4


def test_shares_of_units_add_up_and_what_cancels_shows():
    """To one but for the gap; what pushes and what pulls are told apart."""
    run = Run()
    report = run.look(changed(run.batch(), advantages=lambda a: a[4].mul_(60.0)))

    assert sum(unit.share for unit in report.units) == pytest.approx(1.0, abs=2e-3)
    assert all(unit.share == pytest.approx(unit.up + unit.down) for unit in report.units)
    assert all(unit.down <= 0 <= unit.up for unit in report.units)


@pytest.mark.parametrize("level", [BlameLevel.GROUP, BlameLevel.TASK])
def test_responses_of_one_prompt_or_task_are_blamed_together(level):
    """Two of two; of a task: two groups of two."""
    run = Run()
    rows = [2, 3] if level is BlameLevel.GROUP else [2, 3, 6, 7]
    batch = changed(run.batch(), advantages=lambda a: a.index_fill_(0, torch.tensor(rows), 60.0))
    groups = [f"prompt {row // 2}" for row in range(8)]
    tasks = ["code" if row in {2, 3, 6, 7} else "math" for row in range(8)]
    report = run.look(batch, groups=groups, tasks=tasks)

    assert report.verdict is level
    assert ("sequences 2 to 3" if level is BlameLevel.GROUP else "the task code") in report.statement


def test_a_task_of_which_one_prompt_is_to_blame_is_not_blamed_itself():
    """No other response of it has a signal: the prompt explains as much with less."""
    run = Run()
    batch = changed(run.batch(), advantages=lambda a: (a[6:8].zero_(), a[2:4].fill_(60.0)))
    tasks = ["code" if row in {2, 3, 6, 7} else "math" for row in range(8)]
    report = run.look(batch, groups=[f"prompt {row // 2}" for row in range(8)], tasks=tasks)

    assert report.verdict is BlameLevel.GROUP
    assert "sequences 2 to 3" in report.statement


def test_a_response_whose_ratio_counts_is_blamed_for_one_token():
    """Sequence-level ratios: one token of the old policy moves the coefficient of every token of its response."""
    run = Run(gspo)
    batch = changed(run.batch(), advantages=lambda a: a[2].fill_(-1.0), old=lambda old: old[2, 3].sub_(60.0))
    report = run.look(batch)

    assert (report.verdict, report.cause) == (BlameLevel.RESPONSE, ExcessFactor.SEQUENCE_RATIO)
    assert {row for row, _ in places(report)} == {2}


def test_one_token_beside_which_the_others_are_nothing_is_said_to_be_one():
    """Three more stand out, each a fraction of it: they are recorded and counted, and not blamed."""

    def shift(old):
        old[2, 3] -= 7.0
        for row in (4, 5, 6):
            old[row, 5] -= 2.0

    run = Run()
    report = run.look(
        changed(run.batch(), advantages=lambda a: [a[row].fill_(-1.0) for row in (2, 4, 5, 6)], old=shift)
    )

    assert (report.verdict, report.cause) == (BlameLevel.TOKEN, ExcessFactor.TOKEN_RATIO)
    assert report.count == len(report.culprits) == 4
    assert report.statement.startswith("one token, position 3 of sequence 2, makes ")
    assert "(3 more stand out, with " in report.statement
    assert report.units[0].tokens == 1
    assert sum(unit.share for unit in report.units) == pytest.approx(1.0, abs=0.01)


def test_neighbours_are_one_stretch():
    """Eight tokens one after the other."""
    run = Run()
    report = run.look(changed(run.batch(), advantages=lambda a: a[4, 2:10].mul_(80.0)))

    assert report.verdict in {BlameLevel.STRETCH, BlameLevel.RESPONSE}
    assert {(4, at) for at in range(2, 10)} >= places(report)


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("kind", ["advantage", "kl"])
def test_all_that_matter_are_recorded_and_counted(kind, k):
    """Not eight at most: whoever stands out, and nobody else."""
    run = Run(dapo_kl)
    batch, planted = plant(run.batch(), kind, k, 300.0)
    report = run.look(batch)

    assert places(report) <= set(planted)
    assert len(places(report)) >= 0.9 * k
    assert report.count == len(report.culprits)
    assert report.explained == pytest.approx(1.0)


def test_the_count_is_the_true_one_where_fewer_are_named():
    """The cap says how many are recorded, not how many there are."""
    from rlwatch.gradloc.locate import LocateOptions

    run = Run(dapo_kl)
    batch, _ = plant(run.batch(), "kl", 20, 300.0)
    every = run.look(batch)
    some = run.look(batch, options=LocateOptions(culprits=3))

    assert len(some.culprits) == 3
    assert some.count == every.count >= 18
    assert 0 < some.explained < 1


def test_a_token_is_named_by_the_factor_that_carries_the_excess():
    """Off-policy by e^5, where the loss lets it count."""
    run = Run()
    batch, [place] = plant(run.batch(), "ratio", 1, math.e**5)
    report = run.look(batch)

    assert (report.verdict, report.cause) == (BlameLevel.TOKEN, ExcessFactor.TOKEN_RATIO)
    assert places(report) == {place}
    assert report.cures[0].kind == "clip ratios"
    assert report.cures[0].after < 0.2 * report.norm


@pytest.mark.parametrize("micro_batches", [2, 16])
@pytest.mark.parametrize("large", [4, 6])
def test_a_minority_of_large_responses_is_no_matter_of_the_batch(large, micro_batches):
    """Of 16 responses a few have advantages 20 times as large; a mean over micro-batches does not tell from all."""
    run = Run(batch=16, micro_batches=8)
    factor = torch.ones(16, 1)
    factor[torch.randperm(16, generator=torch.Generator().manual_seed(large))[:large]] = 20.0
    batch = run.batch()
    report = run.look(replace(batch, advantages=factor * batch.advantages), micro_batches=micro_batches)

    assert report.verdict is BlameLevel.RESPONSE
    assert report.cause is ExcessFactor.REWARD_OUTLIER
    rows = {16 // micro_batches * c.at.microbatch + c.at.row for c in report.culprits}
    assert rows <= set(torch.nonzero(factor[:, 0] > 1)[:, 0].tolist())
    assert (
        run.look(replace(batch, advantages=6 * batch.advantages), micro_batches=micro_batches).verdict
        is BlameLevel.BATCH
    )


def test_the_entropy_term_of_one_token_is_told_as_that_token():
    """It holds nearly all of the norm; the term of the others is as ever."""
    run = Run(dapo_entropy)
    batch = run.batch()
    spot, weight = (5, 3), torch.ones_like(batch.old)
    weight[spot] = 3000.0

    def loss(out, b, total):
        here = weight[[int(row) for row in rows_in(batch, b)]]
        return dapo(out, b, total) - 0.05 * (out.entropy * here * b.mask).sum() / total

    report = run.look(batch, loss)

    assert (report.verdict, report.cause, places(report)) == (BlameLevel.TOKEN, ExcessFactor.ENTROPY_TERM, {spot})
    assert "the entropy term weighs it" in report.message
    assert report.cures[0].after == pytest.approx(run.norm(batch), rel=0.1), "without its entropy, too"
    assert run.look(batch, lambda out, b, total: dapo_entropy(out, b, total, coef=15.0)).verdict is BlameLevel.BATCH


def rows_in(batch, part):
    """Rows of the batch that a part of it is."""
    return [next(i for i in range(len(batch.ids)) if torch.equal(batch.ids[i], ids)) for ids in part.ids]


def test_a_token_behind_the_end_of_its_response_is_told_as_that():
    """The mask counts what is no answer; a second turn, which begins behind what the environment wrote, is none."""
    run = Run()
    batch, [place] = plant(run.batch(), "advantage", 1, 6000.0)
    row, position = place
    end = max(0, position - 2)
    batch.ids[row, batch.prompt + end] = 2
    passes = take_step(run.model, batch, dapo, micro_batches=2)
    for one in passes.all:
        one.tokens = replace(one.tokens, eos=(2,))
    hosts = on_host(passes)
    at = TokenAt(0, row // 4, row % 4, position)

    assert hosts[at.microbatch].ended(at) == end
    assert f"stands behind the end token at position {end}: the mask counts" in describe(hosts, at).said("why")
    hosts[at.microbatch].mask[at.row, end + 1] = False
    assert describe(hosts, at).said("why") == "why"
    assert describe(hosts, TokenAt(0, row // 4, row % 4, end)).said("why") == "why", "the end token is of the answer"
