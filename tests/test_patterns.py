"""Regular expressions that are compiled at their first use."""

import re

import pytest

from rlwatch.patterns import lazy_pattern


def test_a_lazy_pattern_does_what_a_compiled_one_does():
    """With its flags, again and again."""
    lazy, compiled = lazy_pattern(r"(a+)\d", re.IGNORECASE), re.compile(r"(a+)\d", re.IGNORECASE)

    for text in ("xAA1 a2", "AA1", "none"):
        for method in ("search", "match", "fullmatch"):
            found, wanted = (getattr(each, method)(text) for each in (lazy, compiled))
            assert (found and found.span()) == (wanted and wanted.span())
        assert lazy.findall(text) == compiled.findall(text)
        assert lazy.sub("-", text) == compiled.sub("-", text)


def test_a_wrong_pattern_is_refused_at_its_first_use():
    """The expressions of rlwatch have tests; an unknown method is refused, too."""
    wrong = lazy_pattern("(")

    with pytest.raises(re.error):
        wrong.search("a")
    with pytest.raises(AttributeError):
        _ = lazy_pattern("a").nothing
