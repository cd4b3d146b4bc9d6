"""Alert rules: which findings become alerts, after how many steps, and who is told.

The words are those of Prometheus alerting rules (``for``, ``keep_firing_for``, labels), except that
durations are counted in step numbers: a rule says the same of a live run and of a replay, and of a log
with one row every ten steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlwatch.alerts import checks
from rlwatch.alerts.kinds import HEARTBEAT_KINDS
from rlwatch.records import CRASH_FORECAST, Finding, Severity

WARNING_STEPS = 10
"""By default a warning must last this many steps: one odd step is not news. A critical one is told at once."""

FORECAST_STEPS = 2
"""By default a forecast of a failure must last this many steps: each is smoothed over rows already."""

KEEP_STEPS = 20
"""By default an alert outlives its condition by this many steps: a flickering one is one episode."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Turns findings into at most one alert per kind at a time.

    Parameters
    ----------
    name
        Letters, digits, ``_``, ``.`` and ``-``; part of the alert's identity.
    kinds, detectors
        Which findings it is about; empty means all.
    except_kinds
        Kinds it leaves to other rules.
    min_severity
        Findings below it count as absent.
    for_steps
        How long the condition must hold without a gap before the alert fires: it fires at the first
        evaluated step s with ``s - since >= for_steps``, where ``since`` is the first step it held. 0 fires
        at once.
    for_critical
        The same for a finding that is critical, at most ``for_steps``; None: as ``for_steps``.
    keep_firing_for
        How long a firing alert outlives its condition: it resolves at the first evaluated step s with
        ``s - gone >= keep_firing_for``, where ``gone`` is the first step without the condition. If the
        condition returns before that, the alert simply goes on and nobody is told twice.
    severity
        Overrides the finding's severity in the alert.
    labels
        Free text for receivers to route by.
    channels
        Names of the notifiers to tell; empty records the alert and tells nobody.
    repeat_minutes
        Says again that it fires, so often, until it is over or somebody acknowledges it; 0: once is enough.
    escalate_after_minutes, escalate_after_steps
        When nobody acknowledged it for so long after it was told (minutes), or so many steps after it fired or got
        worse; whichever comes first. 0: never.
    escalate_to, escalate_severity
        What escalating does: tells these channels too, at this severity if it is higher.
    only_live
        Repeats, escalates and tells late only while the run is live: of a run that ended nobody is told again.

    Raises
    ------
    ConfigError
        If a value makes no sense.

    >>> Rule("entropy", kinds=("entropy_collapse",), for_steps=10, for_critical=0).wait(Severity.CRITICAL)
    0
    """

    name: str
    kinds: tuple[str, ...] = ()
    detectors: tuple[str, ...] = ()
    min_severity: Severity = Severity.WARNING
    for_steps: int = 0
    keep_firing_for: int = 0
    severity: Severity | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    channels: tuple[str, ...] = ("console", "webhook")
    for_critical: int | None = None
    except_kinds: tuple[str, ...] = ()
    repeat_minutes: float = 0.0
    escalate_after_minutes: float = 0.0
    escalate_after_steps: int = 0
    escalate_to: tuple[str, ...] = ()
    escalate_severity: Severity | None = None
    only_live: bool = True

    def __post_init__(self) -> None:
        checks.rule_name(self.name)
        for key in ("kinds", "detectors", "channels", "except_kinds", "escalate_to"):
            object.__setattr__(self, key, checks.names(self.name, key, getattr(self, key)))
        for key in ("min_severity", "severity", "escalate_severity"):
            object.__setattr__(self, key, checks.severity(self.name, key, getattr(self, key)))
        for key in ("for_steps", "keep_firing_for", "for_critical", "escalate_after_steps"):
            checks.steps(self.name, key, getattr(self, key))
        for key in ("repeat_minutes", "escalate_after_minutes"):
            object.__setattr__(self, key, checks.minutes(self.name, key, getattr(self, key)))
        checks.flag(self.name, "only_live", self.only_live)
        checks.patience(self.name, self.for_steps, self.for_critical)
        after = self.escalate_after_minutes or self.escalate_after_steps
        checks.escalation(self.name, after, self.escalate_to, self.escalate_severity)
        object.__setattr__(self, "labels", checks.labels(self.name, self.labels))

    def matches(self, finding: Finding) -> bool:
        """Whether the rule is about this finding."""
        return (
            (not self.kinds or finding.kind in self.kinds)
            and finding.kind not in self.except_kinds
            and (not self.detectors or finding.detector in self.detectors)
            and finding.severity.rank >= self.min_severity.rank
        )

    def wait(self, severity: Severity) -> int:
        """Steps a finding of this severity must hold before the alert fires."""
        if severity is Severity.CRITICAL and self.for_critical is not None:
            return self.for_critical
        return self.for_steps


REPEAT_MINUTES = 240.0
"""By default a firing alert that nobody acknowledged is told again every four hours."""


FAMILIES: Mapping[str, tuple[str, ...]] = {
    "non-finite": ("nonfinite", "silent_freeze", "id0_run", "degenerate_batch"),
    "entropy": (
        "entropy_collapse",
        "entropy_explosion",
        "entropy_negative",
        "entropy_positive",
        "entropy_budget",
        "likelihood_displacement",
        "diversity_decay",
    ),
    "mismatch": (
        "off_policy_mask",
        "staleness",
        "mismatch_growth",
        "mismatch_level",
        "mismatch_tail",
        "mismatch_correlation",
        "mismatch_mask",
        "mismatch_blind",
        "moe_imbalance",
        "routing_mismatch",
        "retokenisation_drift",
        "prefix_break",
        "mask_leakage",
    ),
    "gradients": ("grad_spike", "layer_spike", "layer_heterogeneity"),
    "kl": (
        "kl_drift",
        "k3_saturation",
        "k3_bias",
        "clip_saturation",
        "weight_tail",
        "ratio_drift",
        "ratio_length_growth",
    ),
    "no-signal": ("no_signal", "zero_variance"),
    "reward": ("reward_drop", "reward_constant", "reward_hacking"),
    "length": ("length_explosion", "length_surge", "length_collapse"),
    "text": ("garbled_output", "repetition"),
    "throughput": ("long_tail", "throughput_drop"),
    "logging": ("metric_vanished",),
}
"""Rule -> what it is about, of the rules that differ in nothing else: a warning must last, a critical one need not."""


def default_rules() -> tuple[Rule, ...]:
    """One rule per failure, one for whatever else is found, one for the run itself; info tells nobody.

    >>> [rule.name for rule in default_rules()]  # doctest: +NORMALIZE_WHITESPACE
    ['non-finite', 'entropy', 'mismatch', 'gradients', 'kl', 'no-signal', 'reward', 'length', 'text', 'throughput',
     'logging', 'reset-due', 'reference', 'forecast', 'standstill', 'heartbeat', 'other']
    """
    named = (
        *(_family(name, *kinds) for name, kinds in FAMILIES.items()),
        # Maintenance, not an emergency: twice the patience, and no reminders.
        Rule(
            "reset-due",
            kinds=("kl_saturation", "reset_due"),
            for_steps=2 * WARNING_STEPS,
            keep_firing_for=2 * KEEP_STEPS,
        ),
        # Something that happened, not a state that must last: told at once.
        Rule("reference", kinds=("silent_reference_reset", "lost_reference_reset"), keep_firing_for=KEEP_STEPS),
        # Time is what a forecast is for: three rows of each step, two of a coarser log.
        Rule(
            "forecast",
            kinds=(CRASH_FORECAST,),
            for_steps=FORECAST_STEPS,
            for_critical=0,
            keep_firing_for=KEEP_STEPS,
            repeat_minutes=REPEAT_MINUTES,
        ),
        # While the counter stands no step goes by, so there is nothing to wait for.
        Rule("standstill", kinds=("stalled_steps",), keep_firing_for=KEEP_STEPS, repeat_minutes=REPEAT_MINUTES),
        # A run that fell silent is not live, and this is the news.
        Rule("heartbeat", kinds=HEARTBEAT_KINDS, repeat_minutes=REPEAT_MINUTES, only_live=False),
    )
    others = _family("other", except_kinds=tuple(kind for rule in named for kind in rule.kinds))
    return (*named, others)


def _family(name: str, *kinds: str, except_kinds: tuple[str, ...] = ()) -> Rule:
    return Rule(
        name,
        kinds=kinds,
        except_kinds=except_kinds,
        for_steps=WARNING_STEPS,
        for_critical=0,
        keep_firing_for=KEEP_STEPS,
        repeat_minutes=REPEAT_MINUTES,
    )
