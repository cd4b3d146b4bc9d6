"""A diagnosis as text: why, how sure, in which order, and what to do first."""

from __future__ import annotations

from rlwatch.cli.console import say
from rlwatch.cli.wording import one_line, step
from rlwatch.diagnosis import Action, Cause, Diagnosis, Sureness
from rlwatch.records import Severity

LONGEST = 300
"""Characters of a line of somebody else's words."""
FEW = 3
"""Actions told unless everything is asked for."""
WORSE = (Severity.WARNING, Severity.CRITICAL)
STYLES = {Sureness.STRONG: "bold red", Sureness.PLAUSIBLE: "yellow", Sureness.WEAK: "dim"}


def print_diagnosis(diagnosis: Diagnosis, *, everything: bool = False) -> None:
    """The likeliest cause with its evidence and the first actions; the other causes in a line each."""
    if not any(evidence.severity in WORSE for cause in diagnosis.causes for evidence in cause.evidence):
        return
    first, *others = diagnosis.causes
    say("Diagnosis", style="bold")
    if diagnosis.enough:
        say(f"  most likely: {first.title} ({first.sure.value}: {first.why})", style=STYLES[first.sure])
    else:
        say(f"  {diagnosis.why_not}", style=STYLES[Sureness.WEAK])
    _print_evidence(first)
    for other in others:
        say(f"  or: {other.title} ({other.sure.value}): {other.summary}", style="dim")
    if diagnosis.enough or everything:
        _print_actions(first, everything=everything)


def _print_evidence(cause: Cause) -> None:
    for evidence in cause.evidence:
        seen = f" (seen at {step(evidence.seen_step)})" if evidence.seen_step is not None else ""
        said = evidence.message or evidence.text
        say(f"    step {step(evidence.step):>7}{seen:<18}  {evidence.kind}: {one_line(said, LONGEST)}")


def _print_actions(cause: Cause, *, everything: bool) -> None:
    if cause.actions:
        say("What to do, in order", style="bold")
    for place, action in enumerate(cause.actions if everything else cause.actions[:FEW], 1):
        _print_action(place, action)
    left = len(cause.actions) - FEW
    if left > 0 and not everything:
        say(f"  and {left} more: rlwatch report RUN, or --format json", style="dim")
    if cause.withheld:
        say(f"  {cause.withheld}", style="yellow")


def _print_action(place: int, action: Action) -> None:
    say(f"  {place}. {action.name} ({action.strength.value})")
    say(f"     {action.what}")
    for trainer, text in action.options.items():
        say(f"     {trainer}: {text}", style="cyan")
    say(f"     evidence: {action.evidence} [{action.source}]", style="dim")
