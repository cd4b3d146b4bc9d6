"""The shape of the house: small files, small functions, a light import, floors that hold."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for room in ("rlwatch", "app") for p in (ROOT / room).rglob("*.py"))
HEAVY = ("torch", "pandas", "sklearn", "streamlit", "pydantic", "typer", "transformers", "httpx", "numpy")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.name}", code_lines(node)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: prose is not size."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def test_files_stay_small():
    """Median, tail and a hard cap: the tail separates joy from dread."""
    sizes = [lines(path) for path in FILES]

    assert statistics.median(sizes) <= 115
    assert percentile(sizes, 0.9) <= 220
    assert [(str(p), lines(p)) for p in FILES if lines(p) > 350] == []


def test_functions_stay_small():
    """Most functions are a few lines, none is a page."""
    sizes = dict(item for path in FILES for item in functions(path))

    assert statistics.median(sizes.values()) <= 8
    assert percentile(list(sizes.values()), 0.9) <= 30
    assert {name: size for name, size in sizes.items() if size > 60} == {}


def test_there_is_at_least_as_much_test_as_code():
    """Non-blank lines of tests against non-blank lines of code."""
    tests = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "rlwatch" / "testing").rglob("*.py")]

    def count(paths: list[Path]) -> int:
        return sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())

    assert count(tests) >= count([p for p in FILES if "testing" not in p.parts])


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
