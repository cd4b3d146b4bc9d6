"""A detector is loaded with the first row that has one of its metrics, and then judges as if it had been there."""

import errno
import gc
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import FunctionType, ModuleType

import pytest

from rlwatch.detectors import __main__ as writer
from rlwatch.detectors.base import BaseDetector, DetectorSet, stretches
from rlwatch.detectors.index import FILE, DetectorEntry, LazyDetector, entries, not_run
from rlwatch.detectors.registry import default_detectors, detector_classes, lazy_detectors
from rlwatch.records import ClosedStep
from rlwatch.testing.detector_contract import broken_run, whole_run
from rlwatch.testing.small_batches import FAILURES, small_run

RUNS = {
    "broken": broken_run(),
    "sound": whole_run(3, 300, 5),
    **{failure or "sound small": small_run(7, failure=failure, every=1).rows for failure in ("", *FAILURES)},
}
LOADED = """
import json, sys
from rlwatch.detectors.base import DetectorSet
from rlwatch.detectors.registry import lazy_detectors
from rlwatch.records import ClosedStep

detectors, found = DetectorSet(lazy_detectors()), []
for names in ([], ["mismatch/weights_differ"], ["text/retok_exact", "verifier/errors/math"]):
    detectors.update(ClosedStep(1, dict.fromkeys(names, 0.0)))
    found.append(sorted(name for name in sys.modules if name.startswith("rlwatch.detectors.")))
json.dump(found, sys.stdout)
"""


def test_only_what_a_row_concerns_is_loaded():
    """In a process of its own, whose modules are known."""
    made = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, check=True, text=True)
    first, second, third = map(set, json.loads(made.stdout))

    assert second - first == {"rlwatch.detectors.mismatch.weights_differ"}
    assert third - second == {"rlwatch.detectors.rollouts.token_ids", "rlwatch.detectors.reward.verifier_health"}
    assert not {"rlwatch.detectors.mismatch.mismatch_mask", "rlwatch.detectors.machine"} & third


def test_a_command_that_only_names_detectors_loads_none():
    """Neither them nor numpy: it lists what a run did not log."""
    code = "import sys, rlwatch.view as v; v.registered(); print('numpy' in sys.modules, *sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    ours = {name for name in made if name.startswith("rlwatch.detectors.")}

    assert made[0] == "False"
    assert ours == {"rlwatch.detectors.index", "rlwatch.detectors.registry"}


def rows_that_begin_late(run):
    """The rows of a run, of which some metrics are first logged after a third, others after two thirds."""
    rows = RUNS[run]
    for i, row in enumerate(rows):
        third = 3 * i // len(rows)
        yield replace(row, metrics={name: row.metrics[name] for j, name in enumerate(row.metrics) if j % 3 <= third})


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_late_ones_judge_as_those_from_the_start(run, ahead):
    """Row by row and over stretches, also where a metric is first logged in the middle of the run."""
    early, late = DetectorSet(default_detectors()), DetectorSet(lazy_detectors())

    for stretch in stretches(list(rows_that_begin_late(run))):
        if ahead:
            early.ahead(stretch)
            late.ahead(stretch)
        for row in stretch:
            assert late.update(row) == early.update(row)
    assert [one.name for one in late] == [one.name for one in early]
    assert sum(isinstance(one, LazyDetector) for one in late) < sum(one.waits for one in entries())


@pytest.mark.parametrize("make", [default_detectors, lazy_detectors])
def test_there_is_one_of_each_however_it_is_loaded(make):
    """KL to the reference asks other detectors for signs of a collapse: those of the run, not further ones."""
    panel = DetectorSet(make())
    for row in rows_that_begin_late("broken"):
        panel.update(row)

    found, left = dict[int, object](), [panel]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, type | ModuleType | FunctionType):
            found[id(one)] = one
            left += gc.get_referents(one)
    kinds = Counter(type(one) for one in found.values() if isinstance(one, BaseDetector))
    running = {type(one) for one in panel}
    assert {kind for kind, count in kinds.items() if count > 1} == set()
    assert sum(kind in running for kind in kinds) > 20


def test_what_was_not_run_is_the_same_loaded_or_not():
    """In the same words and order."""
    seen = {"reward/mean", "policy/entropy", "grad_layer/3"}

    assert not_run(lazy_detectors(), seen) == not_run(default_detectors(), seen) == not_run(entries(), seen)


def test_the_index_is_up_to_date():
    """Run ``python -m rlwatch.detectors`` after a detector was changed."""
    assert FILE.read_text(encoding="utf-8") == writer.index()
    assert writer.main(["--check"]) == 0


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_an_entry_says_what_its_class_says(entry: DetectorEntry):
    """Lists of what could not be judged are made from entries."""
    made = entry.load()

    assert made in detector_classes()
    assert (entry.name, entry.family, entry.kinds) == (made.name, made.family, made.kinds)
    assert entry.requires == made.requires


class Starved:
    """The entry of lost explained variance, whose module cannot be read ``fails`` times, as without descriptors."""

    def __init__(self, fails):
        self.fails, self.tries = fails, 0
        self.entry = next(entry for entry in entries() if entry.name == "value_divergence")

    def __getattr__(self, name):
        return getattr(self.entry, name)

    def load(self):
        """Raise, unless there are descriptors by now."""
        self.tries += 1
        if self.tries <= self.fails:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.entry.load()


def value_run():
    """A critic that diverges after 40 rows."""
    return [ClosedStep(i, {"critic/value_loss": 0.1 if i < 40 else 1.5 ** (i - 40)}) for i in range(80)]


@pytest.mark.parametrize("fails", [1, 20, 45])
def test_one_that_cannot_be_loaded_yet_takes_the_rows_it_missed(fails):
    """It does not forget its baseline: from then on it finds what it would have found."""
    starved = Starved(fails)
    whole, late = starved.entry.load()(), DetectorSet([LazyDetector(starved, {})])

    expected = [whole.update(row) for row in value_run()]
    found = [late.update(row) for row in value_run()]

    assert any(expected)
    assert found[:fails] == [[]] * fails
    assert found[fails:] == expected[fails:]


def test_one_that_can_never_be_loaded_is_given_up_with_its_reason(caplog):
    """Like one that raises, and the others go on."""
    starved = Starved(10**6)
    late = DetectorSet([LazyDetector(starved, {})])
    for i in range(250):
        assert late.update(ClosedStep(i, {"critic/value_loss": 0.1})) == []

    assert starved.tries == 201
    assert list(late.broken) == ["value_divergence"]
    assert "Too many open files" in late.broken["value_divergence"]
    assert len(caplog.records) == 1
