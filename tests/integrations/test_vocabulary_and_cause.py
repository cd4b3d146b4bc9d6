"""Small parts every integration shares: the size of the vocabulary, and why training ended."""

from types import SimpleNamespace

import pytest

from rlwatch.integrations.compat import vocab_size_of
from rlwatch.integrations.crash import cause_of, reason_of


def test_a_model_that_says_its_vocabulary_is_believed():
    """Also where the text model is a part of a larger one."""
    text = SimpleNamespace(vocab_size=151_936)
    whole = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))

    assert vocab_size_of(SimpleNamespace(config=SimpleNamespace(vocab_size=32))) == 32
    assert vocab_size_of(whole) == 151_936


@pytest.mark.parametrize("model", [None, object(), SimpleNamespace(config=None), SimpleNamespace(config=object())])
def test_a_model_that_does_not_say_has_none(model):
    """No guess."""
    assert vocab_size_of(model) is None


def test_an_error_is_reported_with_its_place_and_its_last_lines():
    """The innermost frame; not more than thirty lines."""

    def fall():
        raise ValueError("\n".join(f"line {i}" for i in range(50)))

    with pytest.raises(ValueError) as caught:
        fall()
    told = cause_of(caught.value)

    assert told["error"] == reason_of(caught.value)
    assert told["error"].startswith("ValueError: line 0")
    assert told["type"] == "ValueError"
    assert told["where"].endswith("in fall")
    assert told["traceback"].splitlines() == [f"line {i}" for i in range(20, 50)]


def test_an_error_never_raised_has_no_place():
    """And a long message is cut."""
    told = cause_of(RuntimeError("x" * 1000))

    assert told["where"] == ""
    assert len(told["error"]) == 500
