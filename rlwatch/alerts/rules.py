"""Alert rules: which findings become alerts, after how many steps, and who is told.

The words are those of Prometheus alerting rules (``for``, ``keep_firing_for``, labels), except that
durations are counted in step numbers: a rule says the same of a live run and of a replay, and of a log
with one row every ten steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from rlwatch.alerts import checks
from rlwatch.records import Finding, Severity

BUILTIN_KINDS = (
    "nonfinite",
    "entropy_collapse",
    "entropy_explosion",
    "mismatch_growth",
    "grad_spike",
    "layer_spike",
    "layer_heterogeneity",
    "kl_drift",
    "kl_saturation",
    "silent_reference_reset",
    "lost_reference_reset",
    "no_signal",
    "reward_drop",
    "length_explosion",
)
"""The kinds of finding the shipped detectors report."""

WARNING_STEPS = 10
"""By default a warning must last this many steps: one odd step is not news. A critical one is told at once."""

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

    def __post_init__(self) -> None:
        checks.rule_name(self.name)
        for key in ("kinds", "detectors", "channels", "except_kinds"):
            object.__setattr__(self, key, checks.names(self.name, key, getattr(self, key)))
        for key in ("min_severity", "severity"):
            object.__setattr__(self, key, checks.severity(self.name, key, getattr(self, key)))
        for key in ("for_steps", "keep_firing_for", "for_critical"):
            checks.steps(self.name, key, getattr(self, key))
        checks.patience(self.name, self.for_steps, self.for_critical)
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


def unknown_kinds(rules: Iterable[Rule], known: Sequence[str] = BUILTIN_KINDS) -> list[str]:
    """One sentence for each kind a rule names that nothing reports: such a rule would never fire."""
    problems = []
    for rule in rules:
        for kind in (*rule.kinds, *rule.except_kinds):
            if kind not in known:
                near = get_close_matches(kind, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(known)}"
                problems.append(f"rule {rule.name!r} names the kind {kind!r}, which no detector reports; {hint}")
    return problems


def default_rules() -> tuple[Rule, ...]:
    """One rule per failure, plus one for the kinds of detectors of one's own; info tells nobody.

    >>> [rule.name for rule in default_rules()]  # doctest: +NORMALIZE_WHITESPACE
    ['non-finite', 'entropy', 'mismatch', 'gradients', 'kl', 'reset-due', 'reference', 'no-signal', 'reward',
     'length', 'other']
    """
    return (
        _family("non-finite", "nonfinite"),
        _family("entropy", "entropy_collapse", "entropy_explosion"),
        _family("mismatch", "mismatch_growth"),
        _family("gradients", "grad_spike", "layer_spike", "layer_heterogeneity"),
        _family("kl", "kl_drift"),
        # Maintenance, not an emergency: twice the patience.
        Rule("reset-due", kinds=("kl_saturation",), for_steps=2 * WARNING_STEPS, keep_firing_for=2 * KEEP_STEPS),
        # Something that happened, not a state that must last: told at once.
        Rule("reference", kinds=("silent_reference_reset", "lost_reference_reset"), keep_firing_for=KEEP_STEPS),
        _family("no-signal", "no_signal"),
        _family("reward", "reward_drop"),
        _family("length", "length_explosion"),
        Rule(
            "other",
            except_kinds=BUILTIN_KINDS,
            for_steps=WARNING_STEPS,
            for_critical=0,
            keep_firing_for=KEEP_STEPS,
        ),
    )


def _family(name: str, *kinds: str) -> Rule:
    return Rule(name, kinds=kinds, for_steps=WARNING_STEPS, for_critical=0, keep_firing_for=KEEP_STEPS)
