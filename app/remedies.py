"""A diagnosis in the words of a run's page: the likely cause in a line, what to do in another, all in a fold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlwatch.diagnosis import Action, Cause, Diagnosis
from rlwatch.records import Alert, AlertState, RunInfo, RunState

from .markup import Markup, el, joined

FIRST = 3
"""Actions named in the line."""


def in_trouble(run: RunInfo, alerts: Sequence[Alert]) -> bool:
    """Whether a person asks why: something fires, or the run crashed."""
    return run.state is RunState.CRASHED or any(alert.state is AlertState.FIRING for alert in alerts)


def cause_line(said: Diagnosis) -> Markup:
    """``Likely  Train-inference mismatch (strong): it came first...``; or why no cause can be named."""
    label = el("span", "Likely", cls="label")
    if not said.enough:
        return el("div", label, said.why_not, cls="rl-why")
    first = said.causes[0]
    return el("div", label, el("b", first.title), f" ({first.sure.value}: {first.why})", cls="rl-why")


def do_line(said: Diagnosis) -> Markup:
    """``Do  1 roll back...; 2 lower...``; nothing where no cause is sure enough to act on."""
    if not said.enough or not said.causes[0].actions:
        return Markup()
    named = [f"{place} {action.name}" for place, action in enumerate(said.causes[0].actions[:FIRST], 1)]
    withheld = f"  ·  {said.causes[0].withheld}" if said.causes[0].withheld else ""
    return el("div", el("span", "Do", cls="label"), "  ·  ".join(named) + withheld, cls="rl-why")


def full(said: Diagnosis) -> Markup:
    """Evidence in time order, every action with its options, evidence and source, and the other causes."""
    first, *others = said.causes
    return joined(
        el("div", first.summary, cls="rl-step"),
        el("ol", *map(_action, first.actions), cls="rl-do"),
        *(el("div", _other(other), cls="rl-quiet") for other in others),
    )


def _other(cause: Cause) -> str:
    return f"or: {cause.title} ({cause.sure.value}): {cause.summary}; {cause.why}"


def _action(action: Action) -> Markup:
    options = [
        el("div", el("span", f"{trainer} ", cls="rl-project"), _options(text))
        for trainer, text in action.options.items()
    ]
    return el(
        "li",
        el("b", action.name),
        f" ({action.strength.value}). {action.what}",
        *options,
        el("div", f"{action.evidence} Source: {action.source}.", cls="rl-quiet"),
    )


def _options(text: str) -> Markup:
    """What stands in backticks as code."""
    parts = re.split(r"`([^`]+)`", text)
    return joined(*(el("code", part) if place % 2 else part for place, part in enumerate(parts)))
