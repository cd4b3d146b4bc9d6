"""The check of the prose: long sentences and words of the list, outside of code, tables and generated text."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

PROSE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "prose.py"))
LONG = f"A sentence {'with words ' * 20}ends."


def problems(text: str) -> list[str]:
    return PROSE["problems"]({"docs/page.md": text})


def test_a_long_sentence_is_refused_with_its_place_and_what_to_do():
    """The line is that of the paragraph."""
    (found,) = problems(f"# Title\n\nShort. {LONG}\n")

    assert found == f"docs/page.md:3: 43 words, 40 are allowed; split it: {LONG}"


def test_a_word_of_the_list_is_refused_with_what_to_write_instead():
    """In its sentence, whatever its case."""
    (found,) = problems("It works.\n\n* Nobody reads\n  `that`. It works.\n")

    assert found.startswith("docs/page.md:3: 'Nobody' in: Nobody reads `that`.\n    write instead: name the person")


@pytest.mark.parametrize(
    "text",
    [
        f"```text\n{LONG} Nobody.\n```\n",
        f"| a | b |\n|---|---|\n| {LONG} Nobody | b |\n",
        f"## Nobody {LONG}\n",
        f"<!-- catalogue: rules -->\n{LONG} Nobody.\n<!-- end -->\n",
        "See `nobody` and [the page](nobody.md), or the callback of Hugging Face.\n",
        f"{LONG[:-100]}. Then {LONG[-100:]}\n",
    ],
    ids=["block", "table", "heading", "generated", "code and address", "two sentences"],
)
def test_what_is_no_prose_is_left_out(text: str):
    """Code, tables, headings, generated parts and addresses."""
    assert problems(text) == []


def test_a_ceiling_only_falls(monkeypatch: pytest.MonkeyPatch):
    """Too many uses are listed; too few ask for a lower ceiling."""
    monkeypatch.setitem(PROSE["WORDS"], "oddly", (2, "rarely", "a test"))

    assert problems("Oddly so. Oddly not.\n") == []
    assert problems("Oddly so.\n") == ["oddly: 1 uses; lower its ceiling in docs/prose.py from 2"]
    assert len(problems("Oddly, oddly, oddly so.\n")) == 4


def test_a_word_of_the_code_is_refused_above_its_ceiling_with_the_files_that_use_it_most(
    monkeypatch: pytest.MonkeyPatch,
):
    """Parts of names count, longer words do not."""
    monkeypatch.setitem(PROSE["CODE_WORDS"], "oddly", (2, "rarely"))
    sources = {"a.py": "oddly = 1  # oddlyish\n", "b.py": "is_oddly(oddly_so)\n"}

    assert PROSE["code_problems"]({"a.py": sources["a.py"]}) == []
    (found,) = PROSE["code_problems"](sources)
    assert found == "oddly: 3 uses in the code, 2 are allowed; write: rarely. Most: b.py 2, a.py 1"
