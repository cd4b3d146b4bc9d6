"""The kinds of finding that rules can be about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rlwatch.catalogue import kinds
from rlwatch.records import JSON

if TYPE_CHECKING:
    from rlwatch.alerts.policy import Inhibition
    from rlwatch.alerts.rules import Rule

SILENT, CRASHED = "run_silent", "run_crashed"
HEARTBEAT_KINDS = (SILENT, CRASHED)
"""Kinds that no detector reports: whoever watches the store judges them (:mod:`rlwatch.monitor.heartbeat`)."""


def builtin_kinds() -> tuple[str, ...]:
    """The kinds there are without detectors of one's own."""
    return tuple(kinds())


def unknown_kinds(
    rules: Iterable[Rule],
    inhibitions: Iterable[Inhibition] = (),
    actions: Iterable[Mapping[str, JSON]] = (),
    known: Sequence[str] | None = None,
) -> list[str]:
    """One sentence for each kind that a rule, an inhibition or an action (its table) names and nothing reports."""
    known = builtin_kinds() if known is None else known
    named = [(f"rule {rule.name!r}", kind) for rule in rules for kind in (*rule.kinds, *rule.except_kinds)]
    named += [("inhibit", kind) for inhibition in inhibitions for kind in (*inhibition.when, *inhibition.mutes)]
    named += [
        (f"action {name!r}", kind) for name, about in ((a["name"], a["kinds"]) for a in actions) for kind in about
    ]
    problems = []
    for who, kind in named:
        if kind not in known:
            near = get_close_matches(kind, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(known)}"
            problems.append(f"{who} names the kind {kind!r}, which no detector reports; {hint}")
    return problems
