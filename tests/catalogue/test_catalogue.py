"""The catalogue: whole, true of the detectors, and the only place that lists kinds."""

import ast
import re
from pathlib import Path

import pytest

from rlwatch import catalogue
from rlwatch.alerts.rules import default_rules
from rlwatch.catalogue import FindingKind, kinds
from rlwatch.catalogue.__main__ import PAGES, page
from rlwatch.detectors.registry import detector_classes
from rlwatch.errors import ConfigError
from rlwatch.metrics import Family
from rlwatch.records import Severity

ROOT = Path(__file__).parents[2]
ALL = list(kinds().values())
OF_DETECTORS = [kind for kind in ALL if kind.detector]
RULES = {rule.name for rule in default_rules()}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_an_entry_is_whole(kind: FindingKind):
    """Words for a person, a family every page has, a rule there is."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", kind.name)
    assert min(len(text) for text in (kind.title, kind.cause, kind.happened)) > 3
    assert kind.meaning.endswith(".")
    assert kind.do
    assert kind.family in {family.value for family in Family}
    assert kind.rule in RULES
    assert kind.inhibits in ("", "all", "effects", "warnings")
    assert not set(kind.leads_to) - set(kinds())
    assert not {used["action"] for used in kind.do} - set(catalogue.actions())


def test_titles_are_unique():
    """Two kinds of one name would be one to a reader."""
    assert len({kind.title for kind in ALL}) == len(ALL)


@pytest.mark.parametrize("kind", OF_DETECTORS, ids=lambda kind: kind.name)
def test_the_detector_of_an_entry_reports_it(kind: FindingKind):
    """Family and kinds of the class are those of its entries."""
    made = catalogue.detector_class(kind)

    assert made in detector_classes()
    assert kind.name in made.kinds
    assert made.family == kind.family


def test_every_detector_in_the_package_has_an_entry():
    """A class that nothing runs would be forgotten."""
    defined = {
        f"{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}.{node.name}"
        for path in (ROOT / "rlwatch" / "detectors").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and any(getattr(to, "id", "") == "name" for to in _assigned(node))
    }

    assert defined == {f"{detector.__module__}.{detector.__qualname__}" for detector in detector_classes()}


def _assigned(node: ast.ClassDef) -> list[ast.expr]:
    """Left-hand sides that have a value."""
    plain = [to for line in node.body if isinstance(line, ast.Assign) for to in line.targets]
    return plain + [line.target for line in node.body if isinstance(line, ast.AnnAssign) and line.value is not None]


@pytest.mark.parametrize("name", sorted(catalogue.collapse_kinds()))
def test_a_collapse_can_be_critical(name: str):
    """Only critical ones refuse a reset."""
    assert kinds()[name].severity is Severity.CRITICAL


def test_a_kind_that_nobody_knows_is_named_by_its_name():
    """A detector of one's own, an event, a command."""
    mine = catalogue.entry("my_own-kind")

    assert (mine.title, mine.label, mine.cause) == ("My own kind", "my own kind", "My own kind")
    assert (mine.happened, mine.collapse, mine.undone) == ("my own kind was found", False, False)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("entropy_collapse", "entropy collapse"),
        ("nonfinite", "NaN or infinity"),
        ("kl_saturation", "KL to the reference saturated"),
        ("mismatch_blind", "mismatch invisible to KL"),
        ("k3_bias", "k3 estimator is biased"),
    ],
)
def test_a_title_within_a_sentence_keeps_its_abbreviations(name: str, label: str):
    """KL stays KL."""
    assert kinds()[name].label == label


def test_a_detector_that_does_not_exist_is_named():
    """With the entry that wants it."""
    with pytest.raises(ConfigError, match=r"entry odd names the detector 'nowhere\.Odd'"):
        catalogue.detector_class(FindingKind("odd", "Odd", "Odd", "odd", detector="nowhere.Odd"))
    with pytest.raises(ConfigError, match=r"entry odd names the detector 'base\.Odd'"):
        catalogue.detector_class(FindingKind("odd", "Odd", "Odd", "odd", detector="base.Odd"))


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_up_to_date(path: str):
    """Run ``python -m rlwatch.catalogue`` in the root after an entry was changed."""
    text = (ROOT / path).read_text()

    assert "<!-- catalogue: " in text or " detectors" in text
    assert page(text) == text


def test_the_number_of_detectors_is_that_of_the_registry():
    """The pages that say it in figures are made from the catalogue."""
    said = [number for path in PAGES for number in re.findall(r"\b(\d+) detectors\b", (ROOT / path).read_text())]

    assert said
    assert set(said) == {str(len(detector_classes()))}


LITERALS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Call, ast.BoolOp, ast.Compare)


def listed(path: Path) -> list[tuple[int, list[str]]]:
    """Literals of a file that hold three kinds or more, and the line each begins at."""
    found, known = {}, kinds().keys()

    def below(node: ast.AST) -> set[str]:
        """Kinds named in a node, each node looked at once."""
        names = {node.value} & known if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
        for part in ast.iter_child_nodes(node):
            names |= below(part)
        if len(names) >= 3 and isinstance(node, LITERALS):
            found[node.lineno] = sorted(names)
        return names

    below(ast.parse(path.read_text()))
    return sorted(found.items())


def test_no_other_place_lists_kinds():
    """Knowledge of kinds is a field of the catalogue: three names in one literal are a second list."""
    files = [path for room in ("rlwatch", "app") for path in sorted((ROOT / room).rglob("*.py"))]
    lists = {str(path.relative_to(ROOT)): listed(path) for path in files}

    assert len(files) > 100
    assert {path: found for path, found in lists.items() if found} == {}


def test_a_second_list_would_be_seen(tmp_path: Path):
    """In any form."""
    file = tmp_path / "mine.py"
    forms = (
        "X = ('nonfinite', 'kl_drift', 'no_signal')",
        "X = {'nonfinite': 1, 'kl_drift': 2, 'no_signal': 3}",
        "x = k in ['nonfinite', 'kl_drift', 'no_signal']",
        "f('nonfinite', 'kl_drift', 'no_signal')",
        "x = k == 'nonfinite' or k == 'kl_drift' or k == 'no_signal'",
    )
    for form in forms:
        file.write_text(form)

        assert listed(file), form
    file.write_text("X = ('nonfinite', 'kl_drift')\nY = ('no_signal',)")
    assert listed(file) == []
