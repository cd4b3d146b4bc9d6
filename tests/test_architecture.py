"""docs/architecture.md describes the code: layers, packages, and every arrow of its pictures."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"^### (.+?)\n.*?```mermaid\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
NODE = re.compile(r'(\w+)\["((?:rlwatch|app)[\w.]*)(?:<br/>[^"]*)?"\]')
ARROW = re.compile(r'^\s*(\w+)\s*(-->|-\.->)(?:\|"?[^|]*"?\|)?\s*(\w+)', flags=re.MULTILINE)
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@cache
def modules() -> dict[str, Path]:
    """Every module of the package and of the app, by its dotted name."""
    found = {}
    for path in sorted(p for room in ("rlwatch", "app") for p in (ROOT / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of ours, wherever in the file and also for types alone."""
    return {name: set(_imported(name, path)) for name, path in modules().items()}


def _imported(name: str, path: Path):
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            names = [one if one in modules() else origin for one in (f"{origin}.{alias.name}" for alias in node.names)]
        yield from (one for one in names if one in modules() and one != name)


def reaches(room: str, other: str) -> bool:
    """Does a module of one room (a module, or a package with all below it) import one of the other?"""
    inside = [name for name in modules() if name == room or name.startswith(f"{room}.")]
    return any(one == other or one.startswith(f"{other}.") for name in inside for one in imports()[name])


def test_no_module_imports_itself_through_others():
    """No import cycle, not even in functions or for types: each module can be read after those below it."""
    left = {name: set(found) for name, found in imports().items()}
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]

    assert {name: sorted(found & left.keys()) for name, found in left.items()} == {}


def test_the_layers_of_the_page_are_those_that_are_checked():
    """The page and the import linter know one order."""
    (contract,) = [one for one in CONFIG["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    checked = [set(floor.replace(" ", "").split("|")) for floor in contract["layers"]]
    (block,) = re.findall(r"<!-- layers -->\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
    drawn = [set(re.findall(r"rlwatch\.\w+", line)) for line in block.splitlines() if "rlwatch." in line]

    assert checked == drawn


def test_every_package_is_on_the_page():
    """A newcomer finds each package, and none that is gone."""
    rooms = {name for name in modules() if name.count(".") == 1 and name.startswith("rlwatch.")} | {"app"}
    listed = set(re.findall(r"^\| `((?:rlwatch\.\w+|app))` \|", PAGE, flags=re.MULTILINE))

    assert rooms - listed == set(), "packages without a line in docs/architecture.md"
    assert listed - rooms == set(), "lines of docs/architecture.md about packages that are gone"


def test_there_is_a_picture_of_each_path():
    """The engine; a value, a finding, a command, a NaN, a spike."""
    words = " ".join(title.lower() for title, _ in PICTURES)

    assert len(PICTURES) == 6
    assert [
        one for one in ("from the call to the views", "value", "finding", "command", "nan", "spike") if one not in words
    ] == []


def test_every_module_of_the_engine_is_in_its_picture():
    """The table says what each does, the picture what passes between them."""
    (picture,) = [picture for title, picture in PICTURES if title == "From the call to the views"]
    table = PAGE.split("## The engine\n")[1].split("\n### ")[0]
    listed = set(re.findall(r"^\| [^|]+ \| `(rlwatch[\w.]+)` \|", table, flags=re.MULTILINE))

    assert len(listed) == 11
    assert listed - {module for _, module in NODE.findall(picture)} == set()


@pytest.mark.parametrize(("title", "picture"), PICTURES, ids=[title for title, _ in PICTURES])
def test_every_arrow_is_there(title, picture):
    """A solid arrow is an import, either way; a dotted one runs through rows or a port, so neither knows the other."""
    nodes = dict(NODE.findall(picture))
    arrows = ARROW.findall(picture)

    assert arrows
    assert sorted(set(nodes.values()) - set(modules())) == [], "boxes that are no module"
    wrong = []
    for left, arrow, right in arrows:
        if left not in nodes or right not in nodes:
            continue  # a box outside the package: a trainer, a person, a file
        one, other = nodes[left], nodes[right]
        tied = reaches(one, other) or reaches(other, one)
        if tied != (arrow == "-->"):
            wrong.append(f"{one} {arrow} {other}: {'an import' if tied else 'no import'} ties them")
    assert wrong == []
