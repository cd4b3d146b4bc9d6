"""One look at the store: curves between steps, what fires, and patience with a run that is not there yet."""

import math

import numpy as np
from demo_world import NOW, World, alert

from rlwatch.demo.checks import KL, REWARD, look
from rlwatch.errors import StoreBusyError
from rlwatch.records import Severity
from rlwatch.store.memory import MemoryStore


def test_values_lie_between_the_steps_asked_for_both_included():
    """By step number, whatever row that is."""
    facts = World(steps=30, death=None).facts()

    assert np.allclose(facts.values(KL, 1, 3), [0.02, 0.04, 0.06])
    assert len(facts.values(REWARD, 30)) == 1
    assert len(facts.values(REWARD)) == facts.step == 30


def test_a_level_is_a_median_and_nan_where_nothing_was_measured():
    """One wild row does not move it; no rows are no level."""
    facts = World(steps=10, death=None).facts()

    assert facts.level(KL, 1, 5) == np.median([0.02, 0.04, 0.06, 0.08, 0.10])
    assert math.isnan(facts.level(KL, 11, 20))


def test_alerts_that_fire_come_oldest_first():
    """Of the severity asked for only."""
    later = alert("no_signal", Severity.CRITICAL, 250, fired_at=NOW + 5)
    facts = World(alerts=[alert("entropy_collapse", Severity.CRITICAL, 235), later]).facts()

    assert [a.kind for a in facts.firing(Severity.CRITICAL)] == ["entropy_collapse", "no_signal"]
    assert facts.firing(Severity.WARNING) == []


def test_a_run_that_has_not_begun_is_no_facts_yet():
    """The trainer is still importing."""
    assert look(MemoryStore("demo-nothing-here"), "demo-1") is None


def test_a_file_held_for_a_moment_is_no_facts_now():
    """The next look will do."""

    class Held:
        def run(self, run_id):
            raise StoreBusyError("held")

    assert look(Held(), "demo-1") is None
