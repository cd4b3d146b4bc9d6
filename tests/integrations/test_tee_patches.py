"""Looking at another library's functions: called once, unchanged, and put back."""

import pytest

from rlwatch.integrations.tee import Patches


class Library:
    """Somebody else's."""

    def add(self, a, b=1):
        if b == 0:
            raise ValueError("no zeros")
        return a + b


@pytest.fixture
def kind():
    return type("Fresh", (), {"add": Library.add})


def test_a_looked_at_function_is_called_once_with_what_it_was_given(kind):
    """Before and after see the same arguments; the result is the function's."""
    seen, patches = [], Patches()
    patches.around(
        kind,
        "add",
        before=lambda _, *args, **kwargs: seen.append(("before", args, kwargs)) or "kept",
        after=lambda kept, _, *args, **kwargs: seen.append((kept, args, kwargs)),
    )

    assert kind().add(2, b=3) == 5
    assert seen == [("before", (2,), {"b": 3}), ("kept", (2,), {"b": 3})]
    assert kind.add.__doc__ == Library.add.__doc__


def test_an_exception_passes_and_nobody_looks_after(kind):
    """What failed did not happen."""
    seen, patches = [], Patches()
    patches.around(kind, "add", after=lambda *args: seen.append(args))
    with pytest.raises(ValueError, match="no zeros"):
        kind().add(1, 0)

    assert seen == []


def test_undo_restores_and_bound_functions_only_pass_on(kind):
    """Somebody may have kept the bound method."""
    seen, patches = [], Patches()
    patches.around(kind, "add", before=lambda *args: seen.append(args))
    kept = kind().add
    patches.undo()
    patches.undo()

    assert kind.add is Library.add
    assert kept(1) == 2
    assert seen == []


def test_what_others_replaced_after_us_stays(kind):
    """Their function goes on to call ours, which passes on."""
    patches = Patches()
    patches.around(kind, "add")
    ours = kind.add
    kind.add = lambda self, a: ours(self, a) * 10
    patches.undo()

    assert kind().add(1) == 20


def test_what_a_function_returns_can_be_seen(kind):
    """And is returned as it is."""
    seen, patches = [], Patches()
    patches.passing(kind, "add", seen.append)
    results = [kind().add(1), kind().add(2)]
    patches.undo()
    kind().add(3)

    assert results == seen == [2, 3]
