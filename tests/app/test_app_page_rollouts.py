"""The page of a run's rollouts, as Streamlit draws it."""

import math

import numpy as np
import pytest
from app_world import cells, html, no_traceback, tables, write_run
from rlwatch_app.rollouts_text import HEAD, TAIL, pair_of, text_block
from rollout_world import LATE, batch, rollouts_page, write_rollouts
from token_world import Spiked

from rlwatch.records import CompletionBatch
from rlwatch.rollouts import TextSpan


def rows(page, key="rollouts"):
    """What a table says, row by row, by column."""
    table = tables(page)[key]
    labels = [column["label"] for column in table["columns"]]
    return [dict(zip(labels, cells(row), strict=True)) for row in table["rows"]]


def test_rollouts_are_listed_newest_first_with_all_that_is_known(store_dir):
    """Prompt, answer with its end, reward and what made it up, length, group; how many there are."""
    write_rollouts(store_dir)
    page = rollouts_page()

    assert no_traceback(page)
    assert [row["step"] for row in rows(page)] == ["61"] * 8 + ["51"] * 8 + ["11"] * 8 + ["1"] * 8
    first = rows(page)[0]
    assert first["prompt"] == "What is 17 + 25?"
    assert "boxed{7}" in first["answer"]
    assert (first["reward"], first["by reward function"], first["advantage"]) == ("0", "math 0 · format 0.5", "-0.5")
    assert "32 rollouts of 4 steps; up to 64 generated per step" in html(page)
    assert "Let us see, step by step." in html(page)


def test_the_address_says_which_and_in_what_order(store_dir):
    """A link shows the same to everybody: order, filters, steps, prompt, and the one that is open."""
    write_rollouts(store_dir, long=9000)

    worst = rollouts_page(sort="worst reward", to=11)
    assert [row["step"] for row in rows(worst)] == ["11"] * 8 + ["1"] * 8
    assert rows(rollouts_page(sort="longest"))[0]["flags"] == "repeats itself"
    assert len(rows(rollouts_page(only="flagged"))) == 1
    assert len(rows(rollouts_page(only="reward not above 0"))) == 8
    assert {row["group"] for row in rows(rollouts_page(only="task algebra"))} == {"1"}
    one = rollouts_page(prompt="id2", from_=51, to=51, rollout="1.11.0.3")
    assert [row["step"] for row in rows(one)] == ["51", "51"]
    assert "Step 11" in html(one)
    assert "Factor x^2" in html(one)


def test_nothing_that_fits_and_nothing_at_all(store_dir):
    """Both are said, and how to keep completions."""
    write_rollouts(store_dir)
    write_run(store_dir, "run-2")

    assert "No rollouts match" in html(rollouts_page(prompt="no such prompt"))
    empty = rollouts_page("run-2")
    assert no_traceback(empty)
    assert "completions=True" in html(empty)
    assert no_traceback(rollouts_page("no-such-run"))


def test_what_the_policy_changed_its_mind_about_between_two_steps(store_dir):
    """By default a step and the one some 50 before it; first what is no longer right, then another answer."""
    write_rollouts(store_dir)
    page = rollouts_page()

    assert (page.selectbox(key="choose-at").value, page.selectbox(key="choose-beside").value) == (11, 61)
    turns = rows(page, "turns")
    assert [row["change"] for row in turns] == ["reward positive → 0"] * 2 + ["nothing"] * 2
    assert (turns[0]["answer before"], turns[0]["answer after"]) == ("42", "7")
    assert "4 prompts at both; 2 changed" in html(page)
    assert "Step 11, 2 answers" in html(page)
    assert "Step 61, 2 answers" in html(page)

    chosen = rollouts_page(at=1, beside=11, which="id3")
    assert {row["change"] for row in rows(chosen, "turns")} == {"nothing"}
    assert [row["chosen"] for row in tables(chosen)["turns"]["rows"]].count(True) == 1
    chosen.selectbox(key="choose-beside").set_value(LATE).run()
    assert chosen.query_params["beside"] == [str(LATE)] or chosen.query_params["beside"] == str(LATE)


def test_the_pair_shown_first_is_the_newest_and_one_some_fifty_steps_before():
    """Only of prompts that were recorded twice."""
    made = [{"step": step, "attempt": 1, "prompt_id": "a"} for step in (1, 5, 52, 60, 104)]

    assert pair_of(made) == (52, 104)
    assert pair_of(made[:1]) is None


def test_hostile_text_reaches_no_html(store_dir):
    """Markup, scripts, controls, directions, in prompts and answers: escaped or made visible, everywhere."""
    write_rollouts(store_dir, hostile=True)
    page = rollouts_page(rollout="1.61.0.0")

    assert no_traceback(page)
    shown = html(page)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert "<script" not in shown
    assert "<img" not in shown
    assert not set(shown) & set("\u202e\x00\x1b\u200b")


def test_a_long_answer_is_folded_in_its_middle():
    """Its beginning and its end are seen; what is marked is never hidden."""
    text = "a" * 40_000 + "?" + "b" * 90_000

    folded = text_block(text)
    assert f"{len(text) - HEAD - TAIL:,}".replace(",", "\u202f") in folded
    assert "open=" not in folded
    assert folded.count("b") > 90_000
    assert 'open="open"' in text_block(text, [TextSpan(40_000, 40_001, "token ratio")])
    assert "<details" not in text_block("short")


def test_marks_stand_where_the_culprits_are_and_their_text_is_text():
    """Also across a fold; overlapping ones do not double anything."""
    shown = text_block("see <b> and", [TextSpan(4, 7, '"><script>'), TextSpan(5, 7, "again")])

    assert shown.count("<mark") == 1
    assert "&lt;b&gt;</mark> and" in shown
    assert "<script" not in shown


def test_culprits_are_marked_in_the_completion_that_was_kept(store_dir):
    """Where the text recorded around a culprit is the text of the completion."""
    spiked = Spiked(61, blamed=1)
    culprits, response = spiked.batches()
    text = batch(61).columns["completion"][5]
    at = text.index("answer")
    where = {"text": ["answer"], "before": [text[at - 6 : at]], "after": [text[at + 6 : at + 12]],
             "text_position": np.array([at])}  # fmt: skip
    culprits.columns.update(where | {"prompt": ["Name a prime above 90."], "reward": np.array([1.0])})
    write_rollouts(store_dir, more=[spiked.event(), culprits, response])

    page = rollouts_page(only="with culprits")

    assert no_traceback(page)
    assert [row["flags"] for row in rows(page)] == ["culprit: token ratio"] * 2  # both samples say the same
    assert ">answer</mark>" in html(page)


def test_a_response_with_culprits_is_a_rollout_too(store_dir):
    """Where its text was kept: with the tokens in colours and the culprits outlined, as on the page of tokens."""
    spiked = Spiked(40, blamed=2)
    culprits, response = spiked.batches()
    culprits.columns.update({"before": [" We need"] * 2, "after": [" hence"] * 2, "prompt": ["How many?"] * 2})
    write_rollouts(store_dir, more=[spiked.event(), culprits, response])

    page = rollouts_page(from_=40, to=40)

    assert no_traceback(page)
    assert [(row["step"], row["prompt"], row["flags"]) for row in rows(page)] == [
        ("40", "How many?", "culprit: token ratio")
    ]
    assert sum(one["culprit"] for one in tables(page)["response"]["tokens"]) == 2


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_shown_as_such(store_dir, broken):
    """A reward of NaN is odd, and comes first among the worst; old records without a prompt's id have one."""
    columns = {"completion": ["x", "y"], "prompt": ["p", "q"], "reward": np.array([1.0, broken])}
    write_run(
        store_dir, events=[CompletionBatch(3, columns), CompletionBatch(53, {**columns, "completion": ["x", "z"]})]
    )
    page = rollouts_page(sort="worst reward")

    assert no_traceback(page)
    assert rows(page)[0]["reward"] in {"NaN", "Inf", "-Inf"}
    assert rows(page)[0]["flags"].startswith("reward")
    assert len(rows(page, "turns")) == 2
