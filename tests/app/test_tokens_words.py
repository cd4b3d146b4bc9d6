"""Tokens in words and rows: what is told of them, and what is not."""

import math

import numpy as np
import pytest
from app_world import cells
from rlwatch_app import token_response, token_scale, token_steps, tokens_page
from rlwatch_app.token_steps import entries
from rlwatch_app.tokens import Token, culprits_of, response_of, tokens
from token_world import WORDS, Spiked, far_out

from rlwatch.records import CULPRITS, RESPONSES, SpikeBatch


def entry_of(spiked):
    (entry,) = entries([spiked.event()], spiked.batches()[:1], [])
    return entry


def token(**numbers):
    return Token(0, 0, 3, 812, 464, " the", numbers)


def test_the_headline_sets_the_norm_beside_what_is_usual():
    """A number alone says nothing."""
    assert token_steps.headline(entry_of(Spiked(4766)), 0.6) == (
        "Step 4\u202f766: gradient norm 12.3 (usual 0.6, threshold 1.9)"
    )
    assert token_steps.headline(entry_of(Spiked(1, norm=math.nan)), 0.6) == "Step 1: the gradient was NaN"
    assert token_steps.headline(entry_of(Spiked(1, norm=math.inf)), None) == "Step 1: the gradient was Inf"


def test_the_finding_says_who_how_and_how_surely():
    """Shares, method, completeness, verification, price."""
    spiked = Spiked(5, blamed=1)
    told = token_steps.finding(entry_of(spiked), culprits_of(spiked.batches()))

    assert told == [
        "One token holds 85% of it.",
        "Found by finite differences, complete to 0.02%, 1 token verified by a backward of their own.",
        "16\u202f384 tokens in the step; 2 forward passes and 8 backward passes; took 410\u202fms.",
    ]


def test_a_step_that_was_not_localised_says_because():
    """One sentence, whatever its own full stop."""
    spiked = Spiked(5, blamed=0, why_not="the batch is too large.")

    assert token_steps.finding(entry_of(spiked), [])[0] == "Not localised because the batch is too large."


def test_where_no_token_has_a_share_the_localisation_speaks_for_itself():
    """A layer, or the first number that is not finite; shares of tokens would say the wrong thing, or nothing."""
    layer, nan = (
        Spiked(5, cause="layer", message="layers.3 holds 90% of it"),
        Spiked(5, drop=("share",), message="the first NaN is an advantage"),
    )
    told = [token_steps.finding(entry_of(one), culprits_of(one.batches()))[0] for one in (layer, nan)]

    assert told == ["layers.3 holds 90% of it.", "The first NaN is an advantage."]


def test_far_out_tokens_only():
    """Nothing is claimed about the gradient."""
    (entry,) = entries([], [], [far_out(5, 4)])

    assert token_steps.finding(entry, []) == ["Its gradient was not localised. 4 tokens were outliers."]


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([], "No token stands out."),
        ([0.41], "One token holds 41% of it."),
        ([0.41, 0.2], "2 tokens hold 61% of it, the worst 41%."),
        ([0.62, 0.57, -0.23], "3 tokens hold 96% of it (119% along it, 23% against), the worst 62%."),
        ([math.nan, math.nan], "2 tokens to blame."),
        ([math.nan], "One token is to blame."),
    ],
)
def test_blame_in_one_sentence(shares, words):
    """Shares add up; where there is no direction there are none."""
    assert token_steps.share_words([token(share=share) for share in shares]) == words


def test_numbers_that_were_not_measured_are_absent_and_nan_is_reported():
    """Beside the culprit as in the tooltip; an own norm only where it was verified."""
    first, *_, last = tokens(Spiked(5, columns={"entropy": np.full(220, math.nan)}, drop=("ref_logp",)).batches()[0])

    assert dict(token_steps.exactly(first))["entropy"] == "NaN"
    assert "own norm" in dict(token_steps.exactly(first))
    assert "own norm" not in dict(token_steps.exactly(last))
    assert "logp reference" not in dict(token_steps.exactly(first))


def test_a_culprit_as_a_row():
    """Log-probs side by side, a dash for what was not measured, six digits on hovering, its key to choose it."""
    one = Token(
        1, 2, 3, 812, 464, " the", {"share": 0.41, "logp": -1.23456789}, {"cause": "layer"}, {"layers.27": 0.62}
    )
    row = tokens_page.CULPRITS_LAYOUT.row(one, one)

    said = cells({"cells": row.cells})
    assert said[:3] == ["·the", "rank 1 · micro-batch 2 · sequence 3 · position 812", "layer"]
    assert said[3:] == ["41%", "-", "-", "-", "-", "-1.23", "-", "-", "-", "layers.27 62%"]
    assert row.cells[8]["title"] == "-1.23457"
    assert (row.opens, row.chosen) == ("1.2.3.812", True)
    assert len(said) == len(tokens_page.CULPRITS_LAYOUT.columns)


def test_a_far_out_token_as_a_row():
    """There is nothing behind it to open."""
    (row, *_) = (tokens_page.FAR_OUT_LAYOUT.row(one) for one in tokens(far_out(5)))

    assert (row.opens, row.chosen) == ("", False)
    assert len(row.cells) == len(tokens_page.FAR_OUT_LAYOUT.columns)


def test_a_token_is_called_by_its_text_else_by_its_id():
    """A token decoded to nothing still has its id."""
    assert Token(0, 0, 0, 0, 7, " a").label == "·a"
    assert Token(0, 0, 0, 0, 7).label == Token(0, 0, 0, 0, 7, "").label == "id 7"
    assert Token(0, 0, 0, 0).label == "(no text)"


def test_culprits_of_several_ranks_are_worst_first():
    """Each rank lists its own; what is not a number leads."""

    def batch(rank, *contributions):
        columns = {"contribution": np.array(contributions), "position": np.arange(len(contributions))}
        return SpikeBatch(1, columns, CULPRITS, rank=rank)

    found = culprits_of([batch(0, 5.0, 1.0), batch(1, -3.0, math.nan)])

    assert [one.key for one in found] == ["1.0.0.1", "0.0.0.0", "1.0.0.0", "0.0.0.1"]


def test_the_response_of_a_token_is_found_by_rank_microbatch_and_sequence():
    """Each position once, in order, though it was recorded in pieces."""
    columns = {
        "microbatch": np.array([0, 1, 1, 1, 1]),
        "sequence": np.array([3, 3, 3, 3, 4]),
        "position": np.array([0, 9, 8, 8, 1]),
        "logp": np.array([-1.0, -2.0, -3.0, -3.0, -5.0]),
    }
    batches = [SpikeBatch(1, columns, RESPONSES, rank=0), SpikeBatch(1, columns, RESPONSES, rank=1)]
    found = response_of(batches, Token(1, 1, 3, 9))

    assert found.positions.tolist() == [8, 9]
    assert found.column("logp").tolist() == [-3.0, -2.0]
    assert found.column("entropy") is None
    assert found.batch.rank == 1
    assert response_of(batches, Token(1, 1, 7, 0)) is None


@pytest.mark.parametrize("layers", ["{", "[1]", '{"a": "x"}', "null", "3"])
def test_layers_that_are_no_json_object_are_no_layers(layers):
    """Whatever another version wrote."""
    batch = SpikeBatch(1, {"position": np.array([0]), "layers": [layers]}, CULPRITS)

    assert tokens(batch)[0].layers == {}


def test_tokens_that_recur_are_counted_by_id():
    """The most frequent first; causes, steps and the largest share over the run; who did it once is not listed."""
    words = (" a", " b")
    batches = [Spiked(step, blamed=2, words=words, length=30, seed=step).batches()[0] for step in (5, 9, 12)]
    found = tokens_page.recurring(batches)

    everything = [one for batch in batches for one in tokens(batch)]
    assert [one.times for one in found] == sorted((one.times for one in found), reverse=True)
    assert sum(one.times for one in found) == len(everything)
    first = found[0]
    mine = [one for one in everything if one.token_id == first.token.token_id]
    assert first.share == max(one.numbers["share"] for one in mine)
    said = cells({"cells": tokens_page.recurring_row(first).cells})
    assert said[3] == f"token ratio {first.times}"
    assert tokens_page.recurring([Spiked(5, blamed=1).batches()[0]]) == []


def test_a_token_without_id_recurs_by_its_text():
    """And one without either is not mistaken for another."""
    with_text = SpikeBatch(1, {"text": ["a", "a"], "position": np.arange(2)}, CULPRITS)
    nothing = SpikeBatch(1, {"position": np.arange(2)}, CULPRITS)

    assert [one.times for one in tokens_page.recurring([with_text])] == [2]
    assert tokens_page.recurring([nothing]) == []


def test_layers_are_one_bar_the_largest_by_name():
    """What was grouped when recorded, what is small and what is not a number is not named; shares fill the bar."""
    shares = {"a": 0.4, "b": 0.2, "c": 0.1, "d": 0.08, "e": 0.07, "others": 0.15, "f": math.nan}
    bar = token_scale.bar("Layers", shares, token_scale.palette(shares))

    assert token_scale.largest(shares) == ["a", "b", "c", "d"]
    assert "all others 22%" in bar
    assert "width:40.00%" in bar
    assert token_scale.bar("Layers", {}, {}) == ""
    assert "<script" not in token_scale.bar("x", {"<script>": 1.0}, {})


def test_a_layer_has_one_colour_in_both_bars():
    """And every named layer of either has one of its own."""
    whole, own = {"a": 0.5, "b": 0.5}, {"b": 0.6, "c": 0.4}
    colours = token_scale.palette(whole, own)

    assert list(colours) == ["a", "b", "c"]
    assert len(set(colours.values())) == 3


def test_the_view_of_a_response_holds_text_colour_and_numbers():
    """Strings only where a reader sees them; the version changes with the content alone."""
    spiked = Spiked(5, length=20, blamed=1)
    culprits, recorded = spiked.batches()
    found = response_of([recorded], tokens(culprits)[0])
    blamed = {tokens(culprits)[0].key: "layer"}

    data = token_response.response_data(found, list(range(20)), [0.5] * 20, blamed)
    again = token_response.response_data(found, list(range(20)), [0.5] * 20, blamed)
    other = token_response.response_data(found, list(range(20)), [0.4] * 20, blamed)

    assert data["version"] == again["version"] != other["version"]
    assert [one["culprit"] for one in data["tokens"]].count(True) == 1
    assert data["names"][:2] == ["share of norm", "contribution"]
    assert all(len(one["values"]) == len(data["names"]) for one in data["tokens"])
    assert "".join(text for one in data["tokens"] for text, mark in one["text"] if not mark).strip()
    assert not data["ids"]
    assert set(spiked.response["text"]) <= set(WORDS)
