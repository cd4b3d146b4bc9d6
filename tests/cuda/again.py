"""Tests of other rooms, to be run once more on a GPU: only what the device may change is among them."""

import ast
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent.parent


def again(chosen):
    """The tests ``{"room/module": (names)}`` under names of their own, as a module collects them."""
    found = {}
    for where, names in chosen.items():
        stem = where.rpartition("/")[2]
        module = import_module(stem)
        found |= {f"{name}__{stem.removeprefix('test_')}": getattr(module, name) for name in names}
    return found


def missing(chosen):
    """Names that are no tests (any more), told without importing what they need."""
    return [
        f"{where}: {name}"
        for where, names in chosen.items()
        for name in names
        if name
        not in {part.name for part in ast.parse((TESTS / f"{where}.py").read_text()).body if hasattr(part, "name")}
    ]
