"""What of a configuration is kept: plain values, and no secret, however it is nested or written."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.redaction import HIDDEN as REDACTED
from rlwatch.redaction import MAX_TEXT, recordable


@pytest.mark.parametrize(
    "name", ["hub_token", "api_key", "apikey", "WANDB_API_KEY", "auth", "db.password", "key", "wandb.key"]
)
def test_values_of_names_that_look_like_secrets_are_blacked_out(name):
    """Whatever their case, whatever they are part of."""
    assert recordable({name: "s3cret"}) == {name: REDACTED}


@pytest.mark.parametrize("name", ["input_key", "label_key", "pad_token", "max_tokens", "keys", "monkey", "tokenizer"])
def test_names_that_only_sound_like_it_are_kept(name):
    """Columns of a data set, special tokens."""
    assert recordable({name: "value"}) == {name: "value"}


def test_numbers_and_flags_are_no_secrets():
    """``max_token=512`` is a setting."""
    assert recordable({"token": 512, "auth": True}) == {"token": 512, "auth": True}


@pytest.mark.parametrize("kind", [Namespace, SimpleNamespace])
def test_namespaces_are_kept_as_dictionaries(kind):
    """OpenRLHF's arguments are a tree of them."""
    args = kind(logger=kind(wandb=kind(key="s3cret", project="p")), lr=0.1)

    assert recordable({"args": args}) == {"args": {"logger": {"wandb": {"key": REDACTED, "project": "p"}}, "lr": 0.1}}


def test_secrets_within_the_text_of_an_object_are_blacked_out():
    """wandb keeps a namespace as its text; other objects are kept as theirs."""

    class Login:
        def __init__(self, *words):
            self.words = words

        def __repr__(self):
            return "Login(user={!r}, password={!r})".format(*self.words)

    kept = recordable({"a": "Namespace(wandb=namespace(key='s3cret', org=None))", "b": Login("ann", "s3cret")})

    assert kept["a"] == f"Namespace(wandb=namespace(key={REDACTED}, org=None))"
    assert "s3cret" not in kept["b"]
    assert "user='ann'" in kept["b"]


@given(st.text(alphabet=st.characters(blacklist_characters="'\\", blacklist_categories=("Cs",)), min_size=1))
def test_no_secret_gets_through_a_namespace_in_any_form(secret):
    """As an object, or as the text wandb makes of it."""
    marked = f"<<{secret}>>"
    kept = recordable({"object": Namespace(hub_token=marked), "text": f"namespace(hub_token='{marked}')"})

    assert marked not in repr(kept)


def test_long_texts_are_cut():
    """A prompt template is no reason for a large store."""
    assert len(recordable({"x": "y" * (2 * MAX_TEXT)})["x"]) == MAX_TEXT
