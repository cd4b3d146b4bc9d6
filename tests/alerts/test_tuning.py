"""Tuning rules by the file in a store: one rule of it written, the rest left, and what a rule would have done."""

import pytest

from rlwatch.alerts.config import load_config
from rlwatch.alerts.rules import Rule, default_rules
from rlwatch.alerts.tuning import not_tried, read_tuning, tried, with_rule, without_rule, write_tuning
from rlwatch.errors import ConfigError
from rlwatch.records import Finding, RunInfo, Severity, Stage, StepRecord
from rlwatch.store.url import open_store

FILE = """# of the team
default_rules = true

[[rules]]  # noisy on our data
name = "kl"
for_steps = 40  # was 10

# before the next one
[[rules]]
name = "mine"
kinds = ["kl_drift"]
"""


def applied(root, name):
    return next(rule for rule in load_config(store_root=root, env={}).rules if rule.name == name)


def test_a_rule_is_written_in_its_place_and_nothing_else_is_touched(tmp_path):
    """Comments of others stay where they are; what applies is what was asked."""
    (tmp_path / "rlwatch.toml").write_text(FILE)
    before = read_tuning(tmp_path)
    assert list(before.tables) == ["kl", "mine"]
    write_tuning(before, with_rule(before, Rule("kl", for_steps=5, keep_firing_for=20, for_critical=0)))

    text = (tmp_path / "rlwatch.toml").read_text()
    assert text.startswith("# of the team")
    assert "# before the next one" in text
    assert text.count("[[rules]]") == 2
    assert applied(tmp_path, "kl").for_steps == 5
    assert applied(tmp_path, "mine").kinds == ("kl_drift",)


def test_a_rule_is_added_to_no_file_and_taken_back(tmp_path):
    """The file is made for its owner alone; without its rule the default applies."""
    before = read_tuning(tmp_path)
    write_tuning(before, with_rule(before, Rule("entropy", for_steps=3, for_critical=0)))
    assert (tmp_path / "rlwatch.toml").stat().st_mode & 0o077 == 0
    assert applied(tmp_path, "entropy").for_steps == 3

    kept = read_tuning(tmp_path)
    write_tuning(kept, without_rule(kept, "entropy"))
    assert applied(tmp_path, "entropy") == next(rule for rule in default_rules() if rule.name == "entropy")
    with pytest.raises(ConfigError, match="has no rule 'entropy'; it has none"):
        without_rule(read_tuning(tmp_path), "entropy")


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (Rule("mine", kinds=("kl_drfit",)), "did you mean 'kl_drift'"),
        (Rule("mine", severity=Severity.INFO), "not obeyed: severity of rule mine"),
    ],
)
def test_what_such_a_file_may_not_say_is_refused_before_it_is_written(tmp_path, rule, problem):
    """Each with what it is."""
    with pytest.raises(ConfigError, match=problem):
        with_rule(read_tuning(tmp_path), rule)


def test_what_a_rule_says_by_default_is_written_too(tmp_path):
    """At once, never again: left out, the default rule would keep its own patience."""
    before = read_tuning(tmp_path)
    write_tuning(before, with_rule(before, Rule("kl", for_critical=0)))
    kept = applied(tmp_path, "kl")
    assert (kept.for_steps, kept.keep_firing_for, kept.repeat_minutes) == (0, 0, 0.0)


def test_what_is_critical_is_told_no_later_than_by_default(tmp_path):
    """Whoever can write a store cannot keep it back."""
    before = read_tuning(tmp_path)
    write_tuning(before, with_rule(before, Rule("entropy", for_steps=500, for_critical=0)))
    assert applied(tmp_path, "entropy").wait(Severity.CRITICAL) == 0


def test_a_file_that_changed_meanwhile_or_is_a_link_is_left_alone(tmp_path):
    """Somebody else was at it; a link may lead anywhere."""
    before = read_tuning(tmp_path)
    (tmp_path / "rlwatch.toml").write_text("# theirs")
    with pytest.raises(ConfigError, match="was changed meanwhile"):
        write_tuning(before, with_rule(before, Rule("mine", kinds=("kl_drift",))))
    assert (tmp_path / "rlwatch.toml").read_text() == "# theirs"

    (tmp_path / "rlwatch.toml").unlink()
    (tmp_path / "own.toml").write_text("# mine")
    (tmp_path / "rlwatch.toml").symlink_to(tmp_path / "own.toml")
    with pytest.raises(ConfigError, match="is a link"):
        read_tuning(tmp_path)


def found(step, stage=Stage.BEGAN, severity=Severity.WARNING, attempt=1):
    return Finding("d", "kl_drift", severity, step, step, "m", seq=step, attempt=attempt, stage=stage)


@pytest.fixture
def store(tmp_path):
    """A run of 100 steps with a drift from 10 to 30, another from 50 on that gets critical at 60."""
    opened = open_store(tmp_path)
    writer = opened.open_run(RunInfo("r"))
    writer.write([StepRecord(step, {"kl": 0.1}) for step in range(1, 101)])
    writer.write([found(10), found(30, Stage.RESOLVED), found(50), found(60, Stage.WORSENED, Severity.CRITICAL)])
    writer.close()
    return opened


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("x", kinds=("kl_drift",)), [(10, "warning", 30), (50, "warning", None)]),
        (Rule("x", kinds=("kl_drift",), keep_firing_for=30), [(10, "warning", None)]),
        (Rule("x", kinds=("kl_drift",), for_steps=15), [(25, "warning", 30), (65, "critical", None)]),
        (Rule("x", kinds=("kl_drift",), for_steps=15, for_critical=0), [(25, "warning", 30), (60, "critical", None)]),
        (Rule("x", kinds=("kl_drift",), min_severity=Severity.CRITICAL), [(60, "critical", None)]),
        (Rule("x", kinds=("reward_drop",)), []),
    ],
)
def test_when_a_rule_would_have_fired_and_until_when(store, rule, expected):
    """By what was found and when it was over."""
    assert [(f.step, f.severity.value, f.until) for f in tried(store, store.run("r"), rule)] == expected


def test_what_was_run_again_does_not_fire_twice(store):
    """The first attempt counts up to where the second began."""
    writer = store.open_run(RunInfo("r"))
    writer.write([StepRecord(step, {"kl": 0.1}, attempt=2) for step in range(40, 80)])
    writer.close()

    assert [fired.step for fired in tried(store, store.run("r"), Rule("x", kinds=("kl_drift",)))] == [10]


def test_heartbeats_cannot_be_tried():
    """No finding tells of them."""
    assert not_tried(Rule("x", kinds=("run_silent", "kl_drift"))) == ("run_silent",)
