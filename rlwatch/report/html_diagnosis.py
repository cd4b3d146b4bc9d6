"""Why and what to do, as HTML."""

from __future__ import annotations

import re

from rlwatch.diagnosis import Action, Cause, Diagnosis
from rlwatch.report.markup import Markup, el, joined

FEW = 4
"""Actions shown at once; the rest is behind a fold."""
SEES = {
    "measured": "measured by us on toy-sized paired runs",
    "published": "in a paper",
    "reported": "in issues and logs",
    "folklore": "people do it; no evidence",
}


def verdict(said: Diagnosis) -> Markup:
    """The likeliest cause, how sure and why; or that none can be named."""
    if not said.causes:
        return el("p", "Nothing was found that needs an explanation.")
    first = said.causes[0]
    if not said.enough:
        return el("div", el("p", _sentence(said.why_not)), cls="cause weak")
    return el(
        "div",
        el("div", f"{first.title} ", el("span", first.sure.value, cls="badge"), cls="name"),
        el("p", _sentence(first.summary)),
        el("p", f"How sure: {first.sure.value}, because {first.why}.", cls="soft"),
        cls=f"cause {first.sure.value}",
    )


def actions(said: Diagnosis) -> Markup:
    """The likeliest cause's actions in order; of a guess behind a fold."""
    if not said.causes or not said.causes[0].actions:
        return Markup()
    first = said.causes[0]
    withheld = el("p", _sentence(first.withheld), cls="warning") if first.withheld else Markup()
    rest = [*map(_action, first.actions[FEW:])]
    more = (
        el("details", el("summary", f"{len(rest)} more"), el("ol", *rest, cls="do", start=FEW + 1))
        if rest
        else Markup()
    )
    order = joined(withheld, el("ol", *map(_action, first.actions[:FEW]), cls="do"), more)
    if said.enough:
        return order
    fold = el("summary", "No cause is sure enough to act on. What people do about the first sign:")
    return el("details", fold, order)


def causes(said: Diagnosis) -> Markup:
    """All but the first."""
    return joined(*map(_other, said.causes[1:]))


def options(text: str) -> Markup:
    """Option names in backticks as code.

    >>> options("`beta=0.0` drops <it>")
    '<code>beta=0.0</code> drops &lt;it&gt;'
    """
    parts = re.split(r"`([^`]+)`", text)
    return joined(*(el("code", part) if place % 2 else part for place, part in enumerate(parts)))


def _action(action: Action) -> Markup:
    lines = [
        el("span", el("span", trainer, cls="who"), options(text), cls="opt") for trainer, text in action.options.items()
    ]
    return el(
        "li",
        el("b", action.name),
        el("span", action.strength.value, cls=f"badge {action.strength.value}", title=SEES[action.strength.value]),
        el("div", action.what),
        *lines,
        el("div", f"{action.evidence} Source: {action.source}.", cls="soft"),
    )


def _other(cause: Cause) -> Markup:
    return joined(
        el("h3", cause.title, el("span", cause.sure.value, cls="badge")),
        el("p", _sentence(cause.summary)),
        el("p", _sentence(cause.why), cls="soft"),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].removesuffix(".") + "." if text else ""
