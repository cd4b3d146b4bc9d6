"""Characters that no writer writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.text import Garbled, script_switches


def test_clean_text_is_not_garbled():
    """Layout, accents, emoji and punctuation are text."""
    assert Garbled.of("Ça va? — Oui,\n\tça va 🙂!\r\n") == Garbled(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("character", "garbled", "replacement"),
    [
        ("�", 0.25, 0.25),  # what a decoder puts in place of bytes that are no UTF-8
        ("\x00", 0.25, 0.0),  # control
        ("\ue000", 0.25, 0.0),  # private use
        ("\u0378", 0.25, 0.0),  # unassigned
        ("\ud800", 0.25, 0.0),  # half of a surrogate pair
        ("\u200d", 0.0, 0.0),  # joins emoji: written
        ("\n", 0.0, 0.0),
    ],
)
def test_every_kind_of_broken_character_counts_once(character, garbled, replacement):
    """As a share of all characters."""
    got = Garbled.of("ab c"[:3] + character)

    assert (got.garbled, got.replacement) == (garbled, replacement)


def test_an_empty_text_has_no_share():
    """Not 0: nothing was written."""
    assert Garbled.of("") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two", 0),
        ("the кот sat", 2),
        ("東京タワーです", 0),  # Han and kana are one system
        ("AI的answer是", 3),
        ("한국어 text", 1),
        ("𝐱 + ㎏ − ＡＢ ʰ", 0),  # letters of mathematics, units and full-width forms are of no system
        ("1, 2; 3!", 0),
        ("", 0),
    ],
)
def test_changes_between_writing_systems_are_counted_at_letters(text, expected):
    """Digits, spaces and marks belong to every script."""
    assert script_switches(text) == expected


def test_script_changes_are_per_hundred_characters():
    """So that lengths do not matter."""
    text = "abж" * 100

    assert Garbled.of(text).script_switches == pytest.approx(100 * 199 / 300)


@given(st.text(alphabet=st.characters(codec=None), min_size=1, max_size=200))
def test_shares_lie_within_their_range(text):
    """Whatever a model writes."""
    got = Garbled.of(text)

    assert 0 <= got.replacement <= got.garbled <= 1
    assert 0 <= got.script_switches < 100
