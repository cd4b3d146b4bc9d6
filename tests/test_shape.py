"""The shape of the house: names that say something, and an import that costs a trainer nothing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for room in ("rlwatch", "app") for p in (ROOT / room).rglob("*.py"))
HEAVY = ("torch", "pandas", "sklearn", "streamlit", "pydantic", "typer", "transformers", "httpx", "numpy")


def test_nothing_is_called_utils():
    """A newcomer finds the room from the name."""
    forbidden = {"utils", "util", "helpers", "helper", "misc", "common", "manager"}

    assert [str(p) for p in FILES if p.stem in forbidden] == []


def test_importing_rlwatch_pulls_in_nothing_heavy():
    """Importing rlwatch costs a trainer nothing until it is used."""
    code = f"import rlwatch, sys; print([m for m in {HEAVY!r} if m in sys.modules])"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"


def test_recording_a_run_needs_numpy_and_nothing_else():
    """The trainer-side install is numpy: init, log and finish work without any extra."""
    heavy = tuple(m for m in (*HEAVY, "rich", "tenacity") if m != "numpy")
    code = (
        "import rlwatch, sys\n"
        "with rlwatch.init(store='memory://light') as run:\n"
        "    for step in range(3): run.log({'entropy': 0.5, 'grad_norm': 1.0}, step=step)\n"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]", out.stderr


def test_the_public_names_are_few_and_real():
    """At most a dozen names, each of which can be had."""
    import rlwatch

    assert len(rlwatch.__all__) <= 12
    assert all(getattr(rlwatch, name) is not None for name in rlwatch.__all__)


def test_an_unknown_name_is_an_attribute_error():
    """Lazy loading must not turn typos into import errors."""
    import rlwatch

    with pytest.raises(AttributeError, match="no attribute 'scann'"):
        rlwatch.scann  # noqa: B018


QUESTION = re.compile(r"(What|Whether|Which|How|Who|Whose|Why|Where|When)\b")


def test_no_docstring_begins_with_a_question_word():
    """The first line is an imperative or a noun phrase that stands alone."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if QUESTION.match(text):
                    wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")

    assert wrong == []
