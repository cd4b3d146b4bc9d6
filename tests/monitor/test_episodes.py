"""Life of a finding: it begins, worsens, eases, is over; what is told of each, and that nothing flaps."""

import math

import pytest

from rlwatch.alerts.rules import Rule
from rlwatch.monitor import Monitor, MonitorOutcome
from rlwatch.monitor.episodes import Way
from rlwatch.records import Finding, Severity, StepRecord

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING
SOUND = [0.74, 0.72, 0.75, 0.73] * 5


class Latched:
    """Critical from the first row in which its metric is below ``limit``, or not finite, and never over."""

    name, family, kinds, requires = "latched", "Reward", ("fallen",), (("reward/mean",),)

    def __init__(self, metric="reward/mean", limit=0.5, ends=math.inf):
        self.metric, self.limit, self.ends, self.since = metric, limit, ends, None

    def update(self, step):
        value = step.metrics.get(self.metric)
        if self.since is None and value is not None and not value >= self.limit:
            self.since = step.step
        if self.since is None or step.step >= self.ends:
            return []
        return [
            Finding(self.name, "fallen", CRITICAL, step.step, self.since, f"{self.metric} fell", metric=self.metric)
        ]

    def arrival(self, step):
        return []

    def notice(self, event):
        pass


def lived(*columns, detector=None, gap=1, rules=None):
    """Outcome of a run with these columns, (name, values) each, a row every ``gap`` steps."""
    made = detector or Latched()
    monitor, outcome = (
        Monitor(run_id="run", detectors=lambda: [made], rules=[Rule("r")] if rules is None else rules),
        [],
    )
    for i in range(len(columns[0][1])):
        row = {name: values[i] for name, values in columns}
        outcome.append(monitor.observe(StepRecord(i * gap, row, seq=i + 1)))
    return monitor, sum(outcome, MonitorOutcome())


def told(outcome):
    """(stage, severity, step) of all that was told, in order."""
    everything = sorted((*outcome.findings, *outcome.recoveries), key=lambda f: (f.seq, f.stage.better))
    return [(f.stage.value, f.severity.value, f.step) for f in everything]


def reward(*stretches):
    return "reward", [value for values, rows in stretches for value in (values * rows)[:rows]]


@pytest.mark.parametrize("gap", [1, 5])
def test_a_recovery_lowers_what_its_detector_latched(gap):
    """Half of the way back for ten steps eases it; little of it left for twenty ends it; each with its numbers."""
    _, outcome = lived(reward((SOUND, 20), ([0.1], 10), ([0.7, 0.72], 40)), gap=gap)
    back = 31 * gap  # a level of three rows is back with its second

    stages = told(outcome)
    assert [(stage, severity) for stage, severity, _ in stages] == [
        ("began", "critical"),
        ("eased", "warning"),
        ("resolved", "info"),
    ]
    assert 10 <= stages[1][2] - back <= 10 + 3 * gap
    eased, over = outcome.recoveries
    assert "reward/mean back at 0.7" in eased.message
    assert "0.735 before" in eased.message
    assert eased.evidence["farthest"] == 0.1
    assert over.message.startswith("recovered at step ")


def test_what_stays_down_stays_critical():
    """Less than half of the way back is no recovery, however long it lasts."""
    monitor, outcome = lived(reward((SOUND, 20), ([0.1], 10), ([0.38], 100)))

    assert told(outcome) == [("began", "critical", 20)]
    assert [finding.severity for finding in monitor.active] == [CRITICAL]


def test_a_metric_that_is_back_while_the_reward_is_not_has_not_recovered():
    """An entropy that bounces off the bottom of a run that is lost."""
    entropy = "entropy", [1.0, 1.02, 0.98, 1.01] * 5 + [0.05] * 10 + [0.9] * 60
    rewards = reward((SOUND, 20), ([0.5, 0.3, 0.1], 3), ([0.05], 67))

    _, outcome = lived(rewards, entropy, detector=Latched("policy/entropy"))
    alone = lived(entropy, detector=Latched("policy/entropy"))[1]

    assert told(outcome) == [("began", "critical", 20)]
    assert [stage for stage, *_ in told(alone)] == ["began", "eased", "resolved"]


def test_weights_that_are_nan_do_not_recover():
    """No level is known of what is no number, whatever it was before."""
    _, outcome = lived(reward((SOUND, 20), ([math.nan], 60)))

    assert [stage for stage, *_ in told(outcome)] == ["began"]


def test_noise_is_no_way_to_come_back():
    """What stands in another metric is not taken back by a reward that wanders as it always did."""
    wandering = [0.5, 0.9, 0.3, 0.7, 0.6, 0.2, 0.8, 0.4]
    columns = reward((wandering, 120)), ("kl", [0.01] * 30 + [5.0] * 90)

    class Anywhere(Latched):
        def update(self, step):
            return [
                Finding(self.name, "fallen", CRITICAL, step.step, 30, "kl rose", metric="reward/mean")
                for _ in range(step.step >= 30)
            ]

    assert told(lived(*columns, detector=Anywhere())[1]) == [("began", "critical", 30)]


def test_what_falls_again_is_worse_again_and_the_next_recovery_must_last_twice_as_long():
    """No flapping: critical, eased, critical, and then not eased for as short a time as before."""
    up = 15
    _, outcome = lived(reward((SOUND, 20), ([0.1], 10), ([0.72], up), ([0.1], 15), ([0.72], up), ([0.1], 20)))

    assert [(stage, severity) for stage, severity, _ in told(outcome)] == [
        ("began", "critical"),
        ("eased", "warning"),
        ("worsened", "critical"),
    ]


def test_an_episode_that_returns_after_it_was_over_is_a_new_one():
    """With an onset of its own, though its detector dates it as before."""
    _, outcome = lived(reward((SOUND, 20), ([0.1], 10), ([0.72], 60), ([0.1], 20)))

    assert [stage for stage, *_ in told(outcome)] == ["began", "eased", "resolved", "began"]
    first, second = (finding.onset_step for finding in outcome.findings)
    assert first == 20
    assert 90 <= second <= 92


def test_what_its_detector_ends_is_over():
    """With the numbers where it recovered; and that it goes on where the metric has not come back."""
    back = lived(reward((SOUND, 20), ([0.1], 5), ([0.72], 15)), detector=Latched(ends=28))[1]
    monitor, down = lived(reward((SOUND, 20), ([0.1], 40)), detector=Latched(ends=32))

    assert back.recoveries[-1].message == "recovered at step 28 after 8 steps: reward/mean back at 0.72, 0.735 before"
    assert not down.recoveries
    assert [alert.severity for alert in monitor.firing] == [CRITICAL]


def test_that_its_metric_is_not_logged_any_more_is_no_recovery():
    """Nobody knows; it stands as it stood."""
    detector = Latched("policy/entropy", ends=30)
    entropy = "entropy", [1.0] * 20 + [0.05] * 10
    monitor = Monitor(run_id="run", detectors=lambda: [detector], rules=[])
    outcome = MonitorOutcome()
    for step in range(60):
        row = {"entropy": entropy[1][step]} if step < 30 else {"reward": 0.5}
        outcome += monitor.observe(StepRecord(step, row, seq=step + 1))

    assert told(outcome) == [("began", "critical", 20)]


def test_the_alert_eases_and_resolves_with_the_numbers():
    """Told once each; critical is told before warning, warning before the end."""
    rules = [Rule("r", keep_firing_for=5)]
    _, outcome = lived(reward((SOUND, 20), ([0.1], 10), ([0.72], 60)), rules=rules)

    story = [(t.reason.value, t.alert.severity.value) for t in outcome.transitions]
    assert story == [("fired_at_once", "critical"), ("eased", "warning"), ("resolved", "critical")]
    eased, over = (t.alert for t in outcome.transitions[1:])
    assert eased.reason.endswith(": reward/mean back at 0.72, 0.735 before")
    assert over.reason.startswith("recovered at step ")
    assert over.reason.endswith(": reward/mean back at 0.72, 0.735 before")


class While:
    """A warning of a metric while ``holds`` of the step, whatever the metric does."""

    name, family, kinds, requires = "while", "Trust region", ("away",), (("policy/kl_ref",),)

    def __init__(self, metric, holds):
        self.metric, self.holds = metric, holds

    def update(self, step):
        if not self.holds(step.step):
            return []
        said = f"{self.metric} went away"
        return [Finding(self.name, "away", WARNING, step.step, min(step.step, 20), said, metric=self.metric)]

    def arrival(self, step):
        return []

    def notice(self, event):
        pass


CALM = [0.01, 0.012, 0.009, 0.011] * 5


@pytest.mark.parametrize(
    ("after", "reward_after", "over"),
    [
        pytest.param([2.0, 2.2], SOUND, False, id="as far away as it was when it was found"),
        pytest.param([2.0, 0.4], SOUND, False, id="now and then nearer"),
        pytest.param([0.011, 0.012], SOUND, True, id="back"),
        pytest.param([0.001, 0.002], SOUND, True, id="beyond where it was before, on the good side"),
        pytest.param([2.0, 2.2], [1.6, 1.5], True, id="away, but the reward has risen above where it was"),
    ],
)
def test_a_detector_that_falls_silent_ends_nothing_that_has_not_come_back(after, reward_after, over):
    """Its past moves along, and what it is compared with has become like it."""
    columns = ("policy/kl_ref", CALM + [2.1] * 12 + (after * 15)[:30]), ("reward/mean", SOUND * 1 + (SOUND * 1)[:12])
    columns[1][1].extend((reward_after * 15)[:30])
    _, outcome = lived(*columns, detector=While("policy/kl_ref", lambda step: 20 <= step < 32))

    assert [stage for stage, _, _ in told(outcome)] == (["began", "resolved"] if over else ["began"])


def test_what_was_so_from_the_first_row_is_over_only_where_it_becomes_otherwise():
    """Dead from the start with a rare row that differs, as its detector comes and goes; and a run that wakes up."""
    holds = lambda step: step % 16 < 8  # noqa: E731
    rare = ("reward/zero_std_frac", [float(step % 3 != 1) for step in range(80)])
    wakes = ("reward/zero_std_frac", [1.0] * 40 + [0.1, 0.2] * 20)

    dead = lived(rare, detector=While("reward/zero_std_frac", holds))[1]
    awake = lived(wakes, detector=While("reward/zero_std_frac", lambda step: step < 40))[1]

    assert [stage for stage, _, _ in told(dead)] == ["began"]
    assert [stage for stage, _, _ in told(awake)] == ["began", "resolved"]


def test_a_critical_finding_is_over_only_inside_the_band_that_its_metric_left():
    """Three quarters of the way back from a reward of -3 is not where it was."""
    falls = reward(([-0.02, 0.01, 0.0, -0.03], 20), ([-3.0], 10), ([-0.7, -0.75], 60))
    _, outcome = lived(falls, detector=Latched(limit=-0.5))

    assert [(stage, severity) for stage, severity, _ in told(outcome)] == [("began", "critical"), ("eased", "warning")]
    assert "half of the way back, at -0.7" in outcome.recoveries[-1].message


def test_a_departure_over_more_than_a_float_holds_ends_no_judging():
    """From 1e-30 up to 1e300, and then to 1e-310: the ratio of the two is no number, that of their logarithms is."""
    course = [1e-30] * 12 + [1e300] * 5 + [1e-310] * 12
    way = Way("m", [(step, {"m": value}) for step, value in enumerate(course)], onset=12)
    assert way.farthest == 1e300
    assert way.undone == 1.0

    rising = Way("m", [(step, {"m": value}) for step, value in enumerate([1e-310] * 12 + [1e300] * 9)], onset=12)
    assert (rising.undone, rising.inside) == (0.0, False)
