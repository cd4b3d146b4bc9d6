"""What people read: complete, short, and without a command of anybody else's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_examples import MESSAGE, PAYLOAD, message_with

from rlwatch.notify.payload import BREAK, chat_text, defused, headline, shortened

TEXT = chat_text(PAYLOAD, "m-0123456789").replace(BREAK, "")

anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*PAYLOAD, "kind", "evidence"]), inner),
    max_leaves=10,
)


def test_the_whole_reads_like_this():
    """In the order in which people ask."""
    assert TEXT.splitlines() == [
        "[firing CRITICAL] entropy_collapse at step 412 in math/seed3",
        "entropy fell from 0.31 to 0.02",
        "Since: step 398, fired 2025-06-15 15:06 UTC",
        "Evidence: entropy = 0.02, baseline = 0.31, below = NaN",
        "Meaning: Entropy collapse: the policy hardly explores any more",
        "Most likely cause (strong): Train-inference mismatch: the mismatch grew from step 301; entropy fell from 398",
        "Earlier alerts: mismatch_growth since step 301",
        "Action 1: Clip-Higher: raise the upper clip ('epsilon_high' 0.28)",
        "Action 2: Lower rate: halve the learning rate",
        "Also: kl_drift (warning)",
        "Reason: it held for 10 steps",
        "Dashboard: http://host:8501/run?run=run-1",
        "Message m-0123456789",
    ]


def test_what_is_over_needs_no_advice():
    """And says where it ended."""
    over = message_with(event="resolved", alert={"resolved_step": 431, "state": "resolved"})
    text = chat_text(over.payload, over.message_id)

    assert text.startswith("[resolved CRITICAL]")
    assert "resolved at step 431" in text
    assert "Action 1" not in text


@pytest.mark.parametrize("limit", [60, 150, 300, 800, 2000])
def test_where_room_is_short_the_first_line_the_link_and_the_id_stay(limit: int):
    """What is left out is the least important."""
    text = chat_text(PAYLOAD, "m-0123456789", limit)

    assert len(text.encode()) <= limit
    assert text.startswith("[firing")
    if limit >= 150:
        assert text.endswith("Message m-0123456789")
        assert "http://host:8501/run?run=run-1" in text


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(list(PAYLOAD)), anything), st.integers(40, 3000))
def test_any_payload_becomes_text_within_the_limit(payload: dict, limit: int):
    """Whatever is missing or of another kind."""
    text = chat_text(payload, "m-1", limit)

    assert text
    assert len(text.encode()) <= limit


@pytest.mark.parametrize(
    "hostile",
    [
        "@everyone look",
        "@here",
        "<!channel>",
        "<@U012AB3CD>",
        "<#C123>",
        '<at user_id="all">all</at>',
        "<a href=x>",
        "[click](https://evil.example)",
        "https://evil.example/login",
        "`code`",
        "**loud**",
        "||hidden||",
        "~~gone~~",
    ],
)
def test_what_others_wrote_commands_nothing(hostile: str):
    """Not on Slack, Discord, Teams, Telegram, Feishu; wherever in the message it is."""
    everywhere = message_with(
        alert={"message": hostile, "kind": hostile, "reason": hostile},
        run={"name": hostile, "project": hostile},
        finding={"evidence": {hostile: hostile}},
        also=[{"kind": hostile}],
        advice={"title": hostile, "actions": [{"name": hostile, "options": {"trl": hostile}}]},
        links={"dashboard": f"https://host/ {hostile}"},
    )

    assert hostile not in chat_text(everywhere.payload, "m-1", 20_000)


@given(st.text(max_size=60))
def test_plain_words_stay_as_they_are_and_nothing_breaks_the_line(text: str):
    """Only breaks are put between."""
    safe = defused(text)

    assert "\n" not in safe
    assert safe.replace(BREAK, "") == " ".join("".join(c if c.isprintable() else " " for c in text).split()).replace(
        "`", "'"
    ).replace(BREAK, "")


def test_metric_names_and_comparisons_can_be_read():
    """They are what most messages are about."""
    assert defused("actor/entropy_loss < 0.1 && kl > 3*mad") == "actor/entropy_loss < 0.1 && kl > 3*mad"


@given(st.text(), st.integers(3, 50))
def test_a_cut_is_shown_and_cuts_no_character(text: str, limit: int):
    """Bytes of UTF-8 are what services count."""
    cut = shortened(text, limit)

    assert len(cut.encode()) <= limit or cut == "…"
    assert cut.endswith("…") or cut == text.encode("utf-8", errors="replace").decode()


def test_a_message_that_is_no_alert_says_what_it_has():
    """A trial message, or one of a newer version."""
    assert headline({"event": "test", "text": "only a test"}) == "[test] only a test"
    assert headline(MESSAGE.payload).startswith("[firing CRITICAL]")
