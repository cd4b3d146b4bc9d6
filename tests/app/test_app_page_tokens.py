"""The page of a run's tokens, as Streamlit draws it, and the ways to it from the run's page."""

import json
import math

import numpy as np
import pytest
from app_world import cells, finding, html, no_traceback, run_page, tables, write_run
from rlwatch_app.token_response import MOST_DRAWN
from rlwatch_app.tokens_page import LISTED, open_step, st
from token_world import HOSTILE, Spiked, far_out, tokens_page, write_spikes

from rlwatch.records import CULPRITS, RESPONSES, RunState, SpikeBatch


def rows(page, key):
    """What a table says, row by row."""
    return [cells(row) for row in tables(page)[key]["rows"]]


def drawn(page):
    """The tokens of the response as they are sent to the browser."""
    return tables(page)["response"]["tokens"]


def captions(page):
    return " ".join(caption.value for caption in page.caption)


def test_a_localised_step_shows_who_did_it(store_dir):
    """The sentence, the culprits, the layers and the response with culprits outlined."""
    write_spikes(store_dir, [Spiked(20, blamed=2)])
    page = tokens_page()

    assert no_traceback(page)
    assert "Step 20: gradient norm 12.3 (usual 2, threshold 1.9)" in html(page)
    assert "2 tokens hold 85% of it" in html(page)
    assert [row[2] for row in rows(page, "culprits")] == ["token ratio"] * 2
    assert [one["key"] for one in drawn(page) if one["culprit"]] == sorted(
        (row["id"] for row in tables(page)["culprits"]["rows"]), key=lambda key: int(key.split(".")[-1])
    )
    assert "rl-layers" in html(page)
    assert [row["chosen"] for row in tables(page)["culprits"]["rows"]] == [True, False]
    assert tables(page)["response"]["chosen"] == tables(page)["culprits"]["rows"][0]["id"]


def test_everything_sent_is_strict_json(store_dir):
    """NaN and infinities of every quantity among it."""
    broken = np.tile([math.nan, math.inf, -math.inf, 1.0], 55)
    names = ("entropy", "contribution", "share", "advantage", "ratio", "logp")
    write_spikes(store_dir, [Spiked(20, norm=math.nan, cause="non-finite", columns=dict.fromkeys(names, broken))])
    page = tokens_page(by="entropy")

    assert no_traceback(page)
    json.dumps(tables(page), allow_nan=False)
    assert {one["level"] for one in drawn(page)} == {"nan", "inf", "-inf", 1.0}
    assert "the gradient was NaN" in html(page)


def test_steps_are_listed_newest_first_and_filtered_by_cause(store_dir):
    """Localised ones and those with far-out tokens alike."""
    write_spikes(store_dir, [Spiked(5), Spiked(9, cause="layer")], far=[7])
    page = tokens_page()
    assert [row[0] for row in rows(page, "token-steps")] == ["9", "7", "5"]

    page = tokens_page(cause="layer")

    assert page.multiselect(key="cause").value == ["layer"]
    assert [row[0] for row in rows(page, "token-steps")] == ["9"]


def test_the_address_names_step_and_token(store_dir):
    """A link shows the same to everybody."""
    write_spikes(store_dir, [Spiked(5, blamed=3), Spiked(9)])
    key = "0.1.3.100"
    page = tokens_page(step=5, token=key)

    assert "Step 5:" in html(page)
    assert tables(page)["response"]["chosen"] == key
    assert "position 100" in html(page)
    assert [row[0] for row, data in zip(rows(page, "token-steps"), tables(page)["token-steps"]["rows"], strict=True)
            if data["chosen"]] == ["5"]  # fmt: skip


def test_a_newer_step_does_not_turn_the_page(store_dir):
    """Whoever reads keeps the step; the list shows that there is a newer one."""
    write_spikes(store_dir, [Spiked(5)])
    page = tokens_page()
    assert page.query_params["step"] == "5"
    write_spikes(store_dir, [Spiked(9, attempt=2)], steps=40)

    page.run()

    assert "Step 5:" in html(page)
    assert [row[0] for row in rows(page, "token-steps")] == ["9", "5"]


def test_the_quantity_that_colours_is_chosen_and_kept_in_the_address(store_dir):
    """Only what was measured is offered."""
    write_spikes(store_dir, [Spiked(5, drop=("rollout_logp",))])
    page = tokens_page(by="entropy")
    control = page.segmented_control(key="by")
    assert control.options == ["contribution", "log ratio", "entropy", "advantage"]
    assert control.value == "entropy"
    assert all(0 <= one["level"] <= 1 for one in drawn(page))
    assert "nats" in html(page)


def test_a_response_of_which_nothing_was_measured(store_dir):
    """Every token has the look of the missing, and the legend says so."""
    names = ("contribution", "share", "logp", "old_logp", "rollout_logp", "ratio", "entropy", "advantage")
    write_spikes(store_dir, [Spiked(5, drop=names)])
    page = tokens_page()

    assert no_traceback(page)
    assert {one["level"] for one in drawn(page)} == {None}
    assert "not measured" in html(page)
    assert not page.segmented_control


def test_a_very_long_response_is_bounded_and_says_what_was_left_out(store_dir):
    """16 384 tokens: the culprits are in what is drawn, and gaps are counted."""
    write_spikes(store_dir, [Spiked(5, length=16384, blamed=8)])
    page = tokens_page()

    data = tables(page)["response"]
    assert len(data["tokens"]) <= MOST_DRAWN
    assert sum(one["culprit"] for one in data["tokens"]) == 8
    assert len(data["tokens"]) + sum(left for left, _ in data["gaps"]) == 16384
    assert "of 16\u202f384 recorded tokens drawn, around the chosen token and the culprits" in captions(page)


def test_without_text_there_are_ids_and_the_way_to_text(store_dir):
    """Text is opt-in; the page says how."""
    write_spikes(store_dir, [Spiked(5, text=False)])
    page = tokens_page()

    assert tables(page)["response"]["ids"]
    assert all(one["text"][0][0].isdigit() for one in drawn(page))
    assert "watch(trainer, text=True)" in captions(page)
    assert rows(page, "culprits")[0][0].startswith("id ")


def test_hostile_text_reaches_no_html(store_dir):
    """Markup, scripts, controls and directions in tokens: escaped or made visible, everywhere."""
    write_spikes(store_dir, [Spiked(5, words=HOSTILE, length=60, blamed=20)])
    for by in ("contribution", "entropy"):
        page = tokens_page(by=by)
        assert no_traceback(page)
        assert "<script" not in html(page)
        assert "<img" not in html(page)
        everything = html(page) + json.dumps(tables(page), ensure_ascii=False)
        assert not set(everything) & set("\u202e\u200b\x00\x1b")


def test_hostile_words_of_the_trainer_reach_no_html(store_dir):
    """Reasons, notes and names of layers come from the run, too."""
    evil = "<script>alert(1)</script>"
    one = Spiked(5, cause=evil, why_not=evil, message=evil)
    one.layers = {evil: 1.0}
    write_spikes(store_dir, [one])

    assert "<script" not in html(tokens_page())
    assert "<script" not in html(run_page())


def test_a_step_that_was_not_localised_says_why(store_dir):
    """And shows what is known of its layers."""
    write_spikes(store_dir, [Spiked(5, blamed=0, why_not="the attention is fused")])
    page = tokens_page()

    assert "Not localised because the attention is fused." in html(page)
    assert "culprits" not in tables(page)
    assert "rl-layers" in html(page)


def test_a_step_with_far_out_tokens_only(store_dir):
    """Their table, and no claim about the gradient."""
    write_spikes(store_dir, far=[5])
    page = tokens_page()

    assert "Its gradient was not localised. 4 tokens were outliers." in html(page)
    assert len(rows(page, "far-out")) == 4


def test_a_culprit_whose_response_was_not_recorded(store_dir):
    """The text around it is shown instead."""
    columns = {"position": np.array([7]), "text": [" the"], "before": ["find"], "after": ["\n<b>"], "share": np.ones(1)}
    write_run(store_dir, events=[Spiked(5).event(), SpikeBatch(5, columns, CULPRITS, ts=1.0)])
    page = tokens_page()

    assert no_traceback(page)
    assert "find" in html(page)
    assert "↵&lt;b&gt;" in html(page)
    assert "was not recorded" in html(page)


@pytest.mark.parametrize("token", ["<script>", "0.1.3.99999", "0.1.3.9999999999999999999"])
def test_a_token_nobody_recorded_is_the_worst_culprit(store_dir, token):
    """Mistyped and hostile addresses end on the page, not in a traceback."""
    write_spikes(store_dir, [Spiked(5)])
    page = tokens_page(step=5, token=token)

    assert no_traceback(page)
    assert tables(page)["culprits"]["rows"][0]["chosen"]


def test_a_step_nobody_recorded(store_dir):
    """Said in words, with the list of those that are known."""
    write_spikes(store_dir, [Spiked(5)])
    page = tokens_page(step=4)

    assert no_traceback(page)
    assert "No token data for this step." in html(page)
    assert len(rows(page, "token-steps")) == 1


@pytest.mark.parametrize("run_id", ["", "../../etc/passwd"])
def test_an_unknown_run_is_a_message(store_dir, run_id):
    """As on the run's page."""
    write_run(store_dir)
    page = tokens_page(run_id)

    assert no_traceback(page)
    assert page.warning or page.error or page.info


def test_a_run_without_any_says_when_there_would_be_some(store_dir):
    """Empty is a state, not a fault."""
    write_run(store_dir)
    page = tokens_page()

    assert no_traceback(page)
    assert "gradient spikes" in captions(page)


def test_the_first_spike_of_a_run_appears_by_itself(store_dir):
    """Whoever waits on the empty page sees it."""
    write_run(store_dir)
    page = tokens_page()
    write_spikes(store_dir, [Spiked(5, attempt=2)], steps=40)

    page.run()

    assert "Step 5:" in html(page)


def test_a_damaged_run_is_a_message(store_dir):
    """Not a traceback."""
    write_run(store_dir)
    for path in (store_dir / "run-1").glob("run.db-*"):
        path.unlink()
    (store_dir / "run-1" / "run.db").write_bytes(b"not a database" * 1000)
    page = tokens_page()

    assert no_traceback(page)
    assert page.error or page.warning


def test_thousands_of_batches_are_a_bounded_list(store_dir):
    """5 000 steps with far-out tokens: the newest are listed, the others counted or reached by address."""
    far = [
        SpikeBatch(s, {"position": np.arange(2), "ratio": np.ones(2)}, "far-out tokens", ts=1.0) for s in range(5000)
    ]
    write_run(store_dir, events=far)
    page = tokens_page()

    assert len(rows(page, "token-steps")) == LISTED
    assert "older" in captions(page)
    older = tokens_page(step=3)
    assert "2 tokens were outliers" in html(older)
    assert len(rows(older, "far-out")) == 2


def test_tokens_that_recur_are_listed(store_dir):
    """Over the run, with the number of steps it looked at."""
    write_spikes(store_dir, [Spiked(step, blamed=4) for step in (5, 9, 12)])
    page = tokens_page()
    assert rows(page, "recurring")
    assert "Over 3 localised steps" in captions(page)


def test_choosing_a_step_forgets_the_token(store_dir, monkeypatch):
    """It was another step's."""
    params = {"run": "r", "step": "5", "token": "0.1.3.7"}
    monkeypatch.setattr(st, "query_params", params)

    open_step("2.9")

    assert params == {"run": "r", "step": "9", "attempt": "2"}


def test_a_finished_run_is_still(store_dir):
    """Nothing to refresh."""
    write_spikes(store_dir, [Spiked(5)], state=RunState.FINISHED)

    assert not tokens_page().toggle


def test_the_runs_page_names_the_tokens_that_did_it(store_dir):
    """Of the newest localised step, worst first, few of them."""
    write_spikes(store_dir, [Spiked(5), Spiked(9, blamed=5)])
    page = run_page()

    assert no_traceback(page)
    assert "Culprit tokens" in html(page)
    assert "step 9" in html(page)
    assert "and 2 more" in html(page)
    assert page.button(key="tokens")


def test_the_runs_page_is_silent_where_nothing_was_localised(store_dir):
    """Far-out tokens alone are no verdict."""
    write_spikes(store_dir, far=[5])
    page = run_page()

    assert "Culprit tokens" not in html(page)


def test_a_finding_of_a_localised_step_leads_to_its_tokens(store_dir):
    """By a link beside it; findings of other steps have none."""
    found = [finding(step=20, onset_step=12), finding(kind="grad_spike", step=5, onset_step=5, seq=5)]
    write_spikes(store_dir, [Spiked(20)], findings=found)
    links = {row[1]: data["cells"][-1] for row, data in
             zip(rows(run_page(), "findings"), tables(run_page())["findings"]["rows"], strict=True)}  # fmt: skip

    assert links["entropy collapse"]["href"] == "tokens?run=run-1&step=20"
    assert links["entropy collapse"]["id"] == "20"
    assert links["gradient spike"]["kind"] == "text"


def test_localised_steps_do_not_crowd_the_events(store_dir):
    """They have a page of their own."""
    write_spikes(store_dir, [Spiked(20)])

    assert "events" not in tables(run_page())


def test_batches_of_the_response_of_another_attempt_are_not_mixed_in(store_dir):
    """A resumed run comes past a step again: each attempt has its own tokens."""
    write_spikes(store_dir, [Spiked(5, length=40)])
    write_spikes(store_dir, [Spiked(5, length=90, attempt=2)], steps=40)

    assert len(drawn(tokens_page(step=5))) == 90
    assert len(drawn(tokens_page(step=5, attempt=1))) == 40


def test_a_response_recorded_in_part(store_dir):
    """What was not recorded is said where it is missing."""
    one = Spiked(5, length=40, blamed=1)
    recorded = {name: column[10:] for name, column in one.response.items()}
    culprits = one.batches()[0]
    write_run(store_dir, events=[one.event(), culprits, SpikeBatch(5, recorded, RESPONSES, ts=1.0), far_out(5)])
    page = tokens_page()

    assert tables(page)["response"]["gaps"][0] == [0, 10]
    assert rows(page, "far-out")
