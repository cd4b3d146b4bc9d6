"""Every kind of command: what it takes, its defaults, and one clear error for what it does not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.control.commands import COMMAND_KINDS, Choice, Number, Step, command_kind, request
from rlwatch.errors import ConfigError
from rlwatch.records import RunInfo
from rlwatch.store.url import open_store

NAMES = (
    "reset-reference",
    "save-checkpoint",
    "lower-lr",
    "raise-lr",
    "set-kl-coef",
    "rollback",
    "set-clip",
    "set-grad-clip",
    "set-entropy-coef",
    "set-is-correction",
    "sync-weights",
    "hold",
    "skip-step",
    "undo",
    "pause",
    "resume",
    "stop",
)


@pytest.fixture
def store(request):
    opened = open_store(f"memory://kinds-{request.node.name}")
    opened.open_run(RunInfo("r"))
    return opened


def test_these_are_the_kinds():
    """Each with words for people."""
    assert tuple(COMMAND_KINDS) == NAMES
    assert all(kind.name == name and kind.meaning for name, kind in COMMAND_KINDS.items())
    assert all(argument.meaning for kind in COMMAND_KINDS.values() for argument in kind.args.values())


@pytest.mark.parametrize(
    ("kind", "given_args", "args"),
    [
        ("reset-reference", {}, {"optimizer": "clear"}),
        ("reset-reference", {"optimizer": "keep"}, {"optimizer": "keep"}),
        ("save-checkpoint", {}, {}),
        ("lower-lr", {"scale": 0.3}, {"scale": 0.3, "until": None, "freeze": "no"}),
        ("lower-lr", {"scale": 1, "until": 400}, {"scale": 1, "until": 400, "freeze": "no"}),
        ("set-kl-coef", {"value": 0}, {"value": 0}),
        ("rollback", {}, {"to": "last-good"}),
        ("rollback", {"to": 0}, {"to": 0}),
        ("pause", {}, {"minutes": 60.0}),
        ("pause", {"minutes": 0.5}, {"minutes": 0.5}),
        ("resume", {}, {}),
        ("stop", {}, {"save": "yes"}),
        ("stop", {"save": "no"}, {"save": "no"}),
    ],
)
def test_arguments_are_kept_and_defaults_filled_in(store, kind, given_args, args):
    """What the trainer gets is complete."""
    assert request(store, "r", kind, args=given_args).args == args


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        (
            "reset",
            {},
            "unknown command 'reset'; known: hold, lower-lr, pause, raise-lr, reset-reference, resume, rollback, "
            "save-checkpoint, set-clip, set-entropy-coef, set-grad-clip, set-is-correction, set-kl-coef, skip-step, "
            "stop, sync-weights, undo",
        ),
        ("reset-reference", {"lr": "0"}, "reset-reference has no argument 'lr'; it takes: optimizer"),
        ("reset-reference", {"optimizer": "drop"}, "reset-reference optimizer='drop' is not one of clear, keep"),
        ("resume", {"now": "yes"}, "resume has no argument 'now'; it takes none"),
        (
            "lower-lr",
            {},
            "lower-lr needs scale: a number above 0 and at most 1 (fraction of the scheduled learning rate)",
        ),
        ("lower-lr", {"scale": 0}, "lower-lr scale=0 is not a number above 0 and at most 1"),
        ("lower-lr", {"scale": 1.01}, "lower-lr scale=1.01 is not a number above 0 and at most 1"),
        ("lower-lr", {"scale": "0.5"}, "lower-lr scale='0.5' is not a number above 0 and at most 1"),
        ("lower-lr", {"scale": True}, "lower-lr scale=True is not a number above 0 and at most 1"),
        ("lower-lr", {"scale": math.nan}, "lower-lr scale=nan is not a number above 0 and at most 1"),
        (
            "lower-lr",
            {"scale": 0.5, "until": 0},
            "lower-lr until=0 is not a step (an integer of at least 1) or none",
        ),
        (
            "lower-lr",
            {"scale": 0.5, "until": 1.5},
            "lower-lr until=1.5 is not a step (an integer of at least 1) or none",
        ),
        ("set-kl-coef", {}, "set-kl-coef needs value: a number of at least 0 (the new coefficient)"),
        ("set-kl-coef", {"value": -0.1}, "set-kl-coef value=-0.1 is not a number of at least 0"),
        ("set-kl-coef", {"value": math.inf}, "set-kl-coef value=inf is not a number of at least 0"),
        ("pause", {"minutes": 0}, "pause minutes=0 is not a number above 0 and at most 1440 minutes"),
        (
            "rollback",
            {"to": "yesterday"},
            "rollback to='yesterday' is not last-good or the step of a snapshot (an integer of at least 0)",
        ),
        ("stop", {"save": True}, "stop save=True is not one of yes, no"),
    ],
)
def test_a_wrong_request_says_what_is_allowed_and_queues_nothing(store, kind, args, message):
    """Before a row is written."""
    with pytest.raises(ConfigError) as error:
        request(store, "r", kind, args=args)

    assert str(error.value) == message
    assert store.commands("r") == []


anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()))


@given(
    st.dictionaries(
        st.sampled_from(["optimizer", "scale", "until", "value", "minutes", "to", "low", "batches", "save", "x"]),
        anything,
    )
)
def test_whatever_is_given_is_accepted_whole_or_refused_with_a_config_error(args):
    """Nothing else is raised, and nothing that is not allowed passes."""
    for kind in COMMAND_KINDS.values():
        try:
            read = kind.read(args)
        except ConfigError:
            continue
        assert read.keys() == kind.args.keys() >= args.keys()
        assert all(argument.fits(read[name]) for name, argument in kind.args.items())


@given(st.floats() | st.integers() | st.sampled_from([10**400, -(10**400), 2**1023, True, "1", None, [1]]))
def test_a_number_lies_in_its_range(value):
    """NaN lies in none, nor does an integer that no float holds; what is no number is none."""
    number = value if type(value) in (int, float) and abs(value) < 2**1024 else math.nan

    assert Number("m", low=0.0, high=1.0, above=True).fits(value) == (0 < number <= 1)
    assert Number("m", low=0.0).fits(value) == (0 <= number < math.inf)


def test_types_say_what_they_allow():
    """The words of the errors and of the help."""
    assert Choice(("a", "b"), "m").allowed == "one of a, b"
    assert Choice(("a", "b"), "m").default == "a"
    assert Number("m", high=2, unit="s").allowed == "a number of at least 0 and at most 2 s"
    assert Step("m").fits(None)
    assert not Step("m").fits(True)


def test_what_may_be_vetoed_is_marked():
    """``force`` means something there only."""
    assert {name for name, kind in COMMAND_KINDS.items() if kind.vetoed} == {
        "reset-reference",
        "save-checkpoint",
        "set-kl-coef",
        "raise-lr",
        "undo",
    }
    assert command_kind("pause") is COMMAND_KINDS["pause"]
