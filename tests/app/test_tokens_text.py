"""Token text on a page: everything seen, nothing that moves, joins or hides other text."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app.tokens import LIMIT, MOST_COMBINING, inert, pieces

anything = st.text(st.characters(exclude_categories=[]), max_size=60)


def body(text, limit=LIMIT):
    """What is shown of the characters themselves, without marks."""
    return "".join(part for part, mark in pieces(text, limit) if not mark)


@given(anything)
def test_nothing_unseen_is_left(text):
    """No control, format, blank or direction character reaches the page, whatever the token holds."""
    shown = inert(text).replace(" characters", "").replace("… ", "…")

    assert {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"} == set()


@given(anything.filter(bool))
def test_no_token_is_invisible(text):
    """Each token with text shows something, so that it can be pointed at."""
    assert inert(text)


@given(anything)
def test_ordinary_text_is_itself(text):
    """Letters, digits and symbols are shown as they are, in order."""
    plain = "".join(char for char in text if char.isascii() and char.isprintable() and char != " ")

    assert inert(plain, 100) == plain


@given(anything)
def test_accents_stay_on_their_own_letter(text):
    """A token never begins with a combining character, nor piles more than a few on one letter."""
    run = 0
    for part, mark in pieces(text):
        assert mark or not unicodedata.category(part[0]).startswith("M")
        for char in part:
            run = run + 1 if unicodedata.category(char).startswith("M") else 0
            assert run <= MOST_COMBINING


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("   ", "···"),
        ("\n\n", "↵↵"),
        ("\ta", "⇥a"),
        ("\u202egnp.exe", "‹U+202E›gnp.exe"),
        ("a\u2066b", "a‹U+2066›b"),
        ("\u200b", "‹U+200B›"),
        ("\x00\x1b[31m", "‹U+0000›‹U+001B›[31m"),
        ("\u3164", "‹U+3164›"),
        ("\ud800", "‹U+D800›"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        (" \u0301", "·◌\u0301"),
        ("<b>&amp;", "<b>&amp;"),
        ("שלום", "שלום"),
        ("", ""),
    ],
)
def test_what_has_no_look_gets_one(text, shown):
    """Spaces, line ends, controls, direction marks, lone surrogates, accents without a letter."""
    assert inert(text) == shown


def test_a_long_token_is_cut_and_says_so():
    """200 characters: the first of them and how many there are."""
    assert body("a" * 200) == "a" * LIMIT
    assert pieces("a" * 200)[-1] == ("… 200 characters", True)
    assert inert("a" * LIMIT) == "a" * LIMIT


def test_a_tower_of_accents_is_cut_down():
    """One letter with a hundred accents would climb over the page."""
    assert len(inert("e" + "\u0301" * 30)) == 1 + MOST_COMBINING


def test_marks_are_distinguished_from_text():
    """A real middle dot is text, a space is a mark: they are drawn differently."""
    assert pieces("· ") == [("·", False), ("·", True)]
