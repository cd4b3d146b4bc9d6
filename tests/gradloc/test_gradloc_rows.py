"""A localisation in columns: culprits, their responses, and the event that says what was found."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_step import plant, policy, rollouts, take_step

from rlwatch.gradloc.culprits import StepLevels, culprit_of, culprits_of_trace, describe, on_host, step_levels
from rlwatch.gradloc.nonfinite import trace
from rlwatch.gradloc.report import (
    Cost,
    ExcessFactor,
    Localisation,
    Method,
    NonfiniteTrace,
    OwnGradient,
    TensorKind,
    TokenAt,
)
from rlwatch.gradloc.rows import MOST_LAYERS, culprit_batches, event_body, response_batch
from rlwatch.records import CULPRITS, RESPONSES
from rlwatch.store.sqlite.rows import pack_columns, unpack_columns

pytestmark = pytest.mark.torch


def decode(ids):
    """Token 17 is ``<17>``."""
    return "".join(f"<{i}>" for i in ids)


@pytest.fixture(scope="module")
def step():
    """Eight responses in four micro-batches; a token e^5 off its old policy; contributions made up."""
    model = policy(hidden=16, layers=1)
    batch, (place,) = plant(rollouts(model), "ratio", 1, math.exp(5.0))
    rewards = torch.arange(8.0)
    passes = take_step(model, batch, micro_batches=4, rewards=rewards)
    draw = torch.Generator().manual_seed(5)
    contributions = [torch.randn(one.shape, generator=draw).double() * one.tokens.mask for one in passes.all]
    return batch, passes, on_host(passes), contributions, TokenAt(0, place[0] // 2, place[0] % 2, place[1])


def report(step, *tokens, own=True, **more):
    """On ``tokens``, the first of which was verified."""
    _, _, hosts, contributions, at = step
    levels = step_levels(hosts)
    culprits = [
        culprit_of(
            describe(hosts, one),
            levels,
            norm=4.0,
            contribution=float(contributions[one.microbatch][one.row, one.position]),
            own=OwnGradient(3.5, {"model.layers.0": 0.75, "lm_head": 0.25}) if own and i == 0 else None,
        )
        for i, one in enumerate(tokens or [at])
    ]
    return Localisation(norm=4.0, method=Method.FD, gap=1e-4, complete=True, culprits=culprits, **more)


def test_every_number_of_a_culprit_is_that_of_its_token(step):
    """Read from the device once for each pass, in the units of the loss."""
    batch, passes, _, _, at = step
    (culprit,) = report(step).culprits
    row, one = 2 * at.microbatch + at.row, passes.all[at.microbatch]

    assert culprit.numbers == pytest.approx(
        {
            "logp": one.tokens.logp[at.row, at.position].item(),
            "old_logp": batch.old[row, at.position].item(),
            "ref_logp": batch.ref[row, at.position].item(),
            "entropy": one.tokens.entropy[at.row, at.position].item(),
            "ratio": math.exp(one.tokens.logp[at.row, at.position].item() - batch.old[row, at.position].item()),
            "advantage": batch.advantages[row, at.position].item(),
            "reward": float(row),
            "coefficient": one.coefficients["logp"][at.row, at.position].item(),
        },
        rel=1e-6,
    )
    assert (culprit.sequence, culprit.token_id) == (row, batch.response[row, at.position].item())
    assert culprit.cause is ExcessFactor.TOKEN_RATIO
    assert culprit.share == culprit.contribution / 4.0


def test_the_response_of_a_culprit_is_judged_without_it(step):
    """One token 5 nats off is not a response that drifted."""
    _, passes, hosts, _, at = step
    one = passes.all[at.microbatch].tokens
    apart = (one.logp - one.old_logp)[at.row][one.mask[at.row]]
    token = one.logp[at.row, at.position] - one.old_logp[at.row, at.position]

    others = apart[apart != token]
    found = hosts[at.microbatch].response(at)

    assert found.log_ratio == pytest.approx(float(others.quantile(0.5)), rel=1e-5)
    assert found.rollout_log_ratio is None


def test_levels_of_a_step_have_one_number_of_each_response(step):
    """Not one of each token: long responses count once."""
    batch, _, hosts, _, _ = step
    sizes = batch.advantages[:, 0].abs()

    levels = step_levels(hosts, top_share=0.5)

    assert levels.advantages.middle == pytest.approx(sizes.quantile(0.5).item())
    assert (levels.rewards.middle, levels.top_share) == (3.5, 0.5)


def test_culprits_are_kept_in_columns_worst_first(step):
    """As documented of spike batches: int64, float64 and text; what was not verified has no layers."""
    *_, at = step
    other = replace(at, position=0)

    (batch,) = culprit_batches(7, report(step, at, other))

    assert (batch.step, batch.reason, batch.rank, len(batch)) == (7, CULPRITS, 0, 2)
    columns = batch.columns
    assert columns["position"].tolist() == [at.position, 0]
    assert columns["verified"].tolist() == [1, 0]
    assert columns["own_norm"].tolist() == [3.5, 0.0]
    assert [json.loads(text) for text in columns["layers"]] == [{"model.layers.0": 0.75, "lm_head": 0.25}, {}]
    assert columns["cause"][0] == "token ratio"
    assert "times as likely" in columns["why"][0]
    assert len(columns["why"]) == len(columns["cause"]) == 2
    assert {columns[name].dtype.kind for name in ("microbatch", "sequence", "position", "token_id")} == {"i"}
    assert "text" not in columns
    assert "rollout_logp" not in columns
    assert list(unpack_columns(pack_columns(columns)[1])) == list(columns)


def test_culprits_of_several_ranks_make_a_batch_each(step):
    """In order of the ranks, each worst first; texts only of those whose ids are here."""
    _, _, hosts, _, at = step
    ours = report(step).culprits[0]
    theirs = replace(ours, at=replace(at, rank=2), sequence=0)

    batches = culprit_batches(1, replace(report(step), culprits=[theirs, ours]), hosts, decode=decode)

    assert [(batch.rank, len(batch)) for batch in batches] == [(0, 1), (2, 1)]
    assert batches[0].columns["text"] == [f"<{ours.token_id}>"]
    assert batches[1].columns["text"] == [""]


def test_text_around_a_culprit_is_of_its_response_alone(step):
    """At most a dozen tokens on each side; nothing before the first, nothing of the padding after the last."""
    batch, _, hosts, _, _ = step
    last = int(batch.mask[0].sum()) - 1
    ids = batch.response[0].tolist()
    first = report(step, TokenAt(0, 0, 0, 0), TokenAt(0, 0, 0, last), TokenAt(0, 0, 0, 13 if last > 13 else 1))

    (found,) = culprit_batches(1, first, hosts, decode=decode)

    assert found.columns["before"][0] == ""
    assert found.columns["after"][0] == decode(ids[1:13])
    assert found.columns["before"][1] == decode(ids[max(0, last - 12) : last])
    assert found.columns["after"][1] == ""
    assert found.columns["text"][1] == decode([ids[last]])


def test_whole_responses_are_kept_with_their_contributions(step):
    """Every token inside the mask, in order, whether or not it is to blame."""
    batch, _, hosts, contributions, at = step
    row = 2 * at.microbatch + at.row
    length = int(batch.mask[row].sum())

    found = response_batch(3, report(step), hosts, contributions)

    assert (found.reason, found.step) == (RESPONSES, 3)
    assert found.columns["position"].tolist() == list(range(length))
    assert set(found.columns["sequence"]) == {row}
    assert found.columns["token_id"].tolist() == batch.response[row, :length].tolist()
    assert found.columns["contribution"].tolist() == contributions[at.microbatch][at.row, :length].tolist()
    assert found.columns["share"].tolist() == (found.columns["contribution"] / 4.0).tolist()
    assert "text" not in found.columns


def test_of_long_responses_a_stretch_around_each_culprit_is_kept(step):
    """Overlapping stretches are one; no more responses than asked for, the worst culprit's first."""
    _, _, hosts, contributions, _ = step
    found = report(step, *(TokenAt(0, m, 0, t) for m, t in ((2, 4), (0, 1), (2, 6), (1, 3))))

    batch = response_batch(1, found, hosts, contributions, context=2, most=2, decode=decode)

    pairs = list(zip(batch.columns["sequence"].tolist(), batch.columns["position"].tolist(), strict=True))
    assert pairs == [(4, t) for t in range(2, 9)] + [(0, t) for t in range(4)]
    assert batch.columns["text"][0] == f"<{batch.columns['token_id'][0]}>"


def test_responses_of_other_ranks_are_theirs_to_keep(step):
    """This rank does not have their numbers."""
    _, _, hosts, contributions, _ = step

    assert response_batch(1, report(step), hosts, contributions, rank=1) is None


def test_columns_that_some_responses_lack_are_left_out(step):
    """Micro-batches need not know the same; a number is never made up."""
    batch, passes, _, contributions, _ = step
    passes.all[1].tokens = replace(passes.all[1].tokens, ref_logp=None)
    try:
        hosts = on_host(passes)
    finally:
        passes.all[1].tokens = replace(passes.all[1].tokens, ref_logp=batch.ref[2:4])
    found = report(step, TokenAt(0, 0, 0, 1), TokenAt(0, 1, 0, 1))

    assert "ref_logp" not in response_batch(1, found, hosts, contributions).columns
    assert "ref_logp" in response_batch(1, found, hosts, contributions, most=1).columns


def test_nan_stays_nan(step):
    """A measured NaN is in the column; the culprit's class says so."""
    model = policy(hidden=16, layers=1)
    batch = rollouts(model)
    batch.advantages[1, 2] = math.nan
    passes = take_step(model, batch, micro_batches=2)
    hosts, found = on_host(passes), trace(model, passes)
    (culprit,) = culprits_of_trace(hosts, found)

    (kept,) = culprit_batches(1, Localisation(norm=math.nan, culprits=[culprit], method=Method.TRACE))

    assert (culprit.at, culprit.cause, culprit.why) == (TokenAt(0, 0, 1, 2), ExcessFactor.NON_FINITE, found.message)
    assert math.isnan(kept.columns["advantage"][0])
    assert math.isnan(kept.columns["coefficient"][0])
    assert np.isfinite(kept.columns["old_logp"][0])
    assert not {"contribution", "share"} & set(kept.columns)


def test_of_a_trace_each_rank_describes_its_own_tokens(step):
    """The numbers of the others are not here."""
    _, _, hosts, _, at = step
    named = (replace(at, rank=1), at)

    found = culprits_of_trace(hosts, NonfiniteTrace(TensorKind.INPUT, "advantages", "said", tokens=named))

    assert [(culprit.at, culprit.why) for culprit in found] == [(at, "said")]


def test_the_event_says_what_was_first_where_there_was_no_direction():
    """Its kind, name and origin, the broken links of the chain, and how much is broken."""
    found = NonfiniteTrace(
        TensorKind.PARAMETER, "a.weight", "said", chain=("parameters", "logp"), broken={"parameters": 1, "logp": 8}
    )

    body = json.loads(json.dumps(event_body(Localisation(math.nan, method=Method.TRACE, trace=found))))

    assert body["trace"] == {
        "kind": "parameter",
        "name": "a.weight",
        "origin": "unknown",
        "layer": "",
        "index": [],
        "dtype": "",
        "count": 0,
        "chain": ["parameters", "logp"],
        "broken": {"parameters": 1, "logp": 8},
        "id0_frac": None,
    }
    assert "trace" not in event_body(Localisation(1.0))


def test_the_event_says_in_short_what_was_found(step):
    """JSON: at most five culprits, the sixteen largest layers and what is left of the others."""
    layers = {f"layers.{i}": 2.0**-i for i in range(1, 20)}
    found = report(step, *(TokenAt(0, 0, 0, t) for t in range(7)), layers=layers, cost=Cost(2, 8, 0.5), notes=["a"])

    body = json.loads(json.dumps(event_body(replace(found, threshold=1.5, tokens=99, cause=ExcessFactor.TOKEN_RATIO))))

    assert (body["norm"], body["threshold"], body["tokens"], body["method"], body["gap"]) == (4.0, 1.5, 99, "fd", 1e-4)
    assert (body["cause"], body["complete"], body["why_not"], body["notes"]) == ("token ratio", True, "", ["a"])
    assert [culprit["position"] for culprit in body["culprits"]] == [0, 1, 2, 3, 4]
    assert body["culprits"][0]["own_norm"] == 3.5
    assert event_body(replace(found, message="the first NaN is an advantage"))["message"].startswith("the first NaN")
    assert len(body["layers"]) == MOST_LAYERS + 1
    assert body["layers"]["others"] == pytest.approx(sum(list(layers.values())[16:]))
    assert body["cost"] == {"forwards": 2, "backwards": 8, "seconds": 0.5}


def test_a_culprit_without_a_direction_has_no_share(step):
    """Bisection finds it, and cannot say what it contributes."""
    _, _, hosts, _, at = step

    culprit = culprit_of(describe(hosts, at), StepLevels())

    assert (culprit.contribution, culprit.share, culprit.own) == (None, None, None)
    (batch,) = culprit_batches(1, Localisation(norm=4.0, culprits=[culprit], method=Method.BISECTION))
    assert "share" not in batch.columns
