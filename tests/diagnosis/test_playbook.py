"""Advice: ordered, sourced, honest about its evidence, and in the words of the trainer in use."""

import re

import pytest
from playbook_options import actions

from rlwatch import catalogue
from rlwatch.diagnosis import Strength, advice, kinds
from rlwatch.diagnosis.suspects import RESET
from rlwatch.errors import ConfigError

BOOK = catalogue.kinds()
COLLAPSES = sorted(catalogue.collapse_kinds())
CRASHES = [kind for kind, entry in BOOK.items() if entry.undone]


def test_an_unknown_kind_has_none():
    """A detector of one's own may report what the catalogue does not know."""
    assert advice("made_up") is None


@pytest.mark.parametrize("kind", kinds())
def test_advice_says_what_it_means_and_what_to_do(kind):
    """No empty field, and no action named twice."""
    known = advice(kind)

    assert known.title
    assert known.meaning.endswith(".")
    assert known.actions
    assert len({action.id for action in known.actions}) == len(known.actions)


@pytest.mark.parametrize("kind", kinds())
def test_each_action_gives_its_source_and_evidence(kind):
    """Where it comes from and how strong it is, also where the evidence speaks against it."""
    for action in advice(kind).actions:
        assert action.name
        assert action.what.endswith(".")
        assert action.source
        assert action.strength in Strength
        assert action.evidence.endswith(".")


@pytest.mark.parametrize("kind", COLLAPSES)
def test_no_collapse_is_answered_with_a_reference_reset(kind):
    """It makes the bad policy the anchor: it saved 0 of 14 runs."""
    known = advice(kind)

    assert [a.id for a in known.actions if a.id == RESET] == []
    assert not re.search(r"reset[^.]*reference|reference[^.]*reset", " ".join(a.what for a in known.actions))


@pytest.mark.parametrize("kind", CRASHES)
def test_a_collapse_is_answered_by_undoing_and_removing_the_cause(kind):
    """Roll back first, then take away what drove it; a learning rate is lowered at the latest third."""
    order = [action.id for action in advice(kind).actions]

    assert order[0] == "roll-back"
    assert "lower-lr" in order[:3]


def test_only_a_plateau_is_answered_with_a_reference_reset():
    """The plateau kinds, and no other."""
    assert sorted(k for k in kinds() if RESET in {a.id for a in advice(k).actions}) == ["kl_saturation", "reset_due"]


def test_importance_sampling_is_not_sold_as_a_repair():
    """Measured: switched on alone at the alarm it saved 0 of 4 and 1 of 4."""
    order = {action.id: place for place, action in enumerate(advice("mismatch_growth").actions)}

    assert order["repair-sync"] < order["lower-lr"] < order["tis"]
    assert "0 of 4" in advice("mismatch_growth").actions[order["tis"]].evidence
    assert advice("mismatch_growth").actions[order["tis"]].strength is not Strength.MEASURED


@pytest.mark.parametrize("source", ["trl/grpo", "verl", "openrlhf"])
def test_a_trainer_sees_its_own_options_only(source):
    """And what rlwatch offers itself."""
    trainer = source.partition("/")[0]

    assert {name for action in actions(source) for name in action.options} == {trainer, "rlwatch"}


def test_without_a_trainer_all_options_are_given():
    """A log whose trainer nobody knows."""
    (clip,) = [action for action in advice("entropy_collapse").actions if action.id == "clip-higher"]

    assert set(clip.options) == {"trl", "verl", "openrlhf"}


def test_a_trainer_variant_overrides_its_family():
    """RLOO lacks options GRPO has."""
    texts = {action.id: action.options.get("trl") for action in actions("trl/rloo")}

    assert texts["tis"] == "no option in RLOO"
    assert texts["clip-higher"] == "`epsilon=0.2`, `epsilon_high=0.28`"


@pytest.mark.parametrize("kind", kinds())
def test_what_a_kind_leads_to_exists(kind):
    """Causal chains are made of kinds the catalogue has."""
    entry = BOOK[kind]

    assert [effect for effect in entry.leads_to if effect not in BOOK] == []
    assert kind not in entry.leads_to
    assert entry.reach > 0


@pytest.mark.parametrize("kind", [kind for kind, entry in BOOK.items() if entry.symptom])
def test_a_symptom_follows_from_something(kind):
    """Or it would be told as a cause whenever it is found."""
    assert [cause for cause, entry in BOOK.items() if kind in entry.leads_to]


def test_a_kind_that_uses_an_unknown_action_is_refused(monkeypatch):
    """The mistake is named."""
    monkeypatch.setattr(catalogue, "actions", dict)

    with pytest.raises(ConfigError, match="entropy_collapse uses the action 'roll-back'"):
        advice("entropy_collapse")


def test_every_action_is_used():
    """An action no kind uses is dead text."""
    assert set(catalogue.actions()) - {action.id for action in actions()} == set()


def test_advice_is_plain_data():
    """For JSON: no enum, no mapping proxy."""
    import json

    assert json.loads(json.dumps(advice("nonfinite", "verl").to_dict()))["actions"][0]["strength"] == "reported"
