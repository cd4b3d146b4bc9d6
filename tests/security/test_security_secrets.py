"""Nothing that is a secret is stored, shown or sent, and nothing that is none is blacked out."""

from __future__ import annotations

import json

import pytest
from secret_examples import ORDINARY, SECRETS

from rlwatch.redaction import recordable


@pytest.mark.parametrize("what", SECRETS)
def test_a_secret_is_not_recorded(what: str):
    """By its name, however spelt and nested, or by its shape."""
    config, secret = SECRETS[what]
    kept = json.dumps(recordable(config))

    assert secret not in kept
    assert "[redacted]" in kept


def test_ordinary_hyper_parameters_are_recorded_as_they_are():
    """Of TRL, verl and OpenRLHF; none is taken for a secret."""
    wrong = {name: kept for name, value in ORDINARY.items() if (kept := recordable({name: value})[name]) != value}

    assert wrong == {}
    assert len(ORDINARY) >= 200
