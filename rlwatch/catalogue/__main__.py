"""Write the parts of docs that derive from the catalogue: ``python -m rlwatch.catalogue [--check]``, in a clone's root.

Pages of ``docs/`` hold blocks between ``<!-- catalogue: NAME -->`` and ``<!-- end -->``. This program writes their
contents, and the number of detectors wherever it appears.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlwatch.catalogue import FindingKind, kinds, knobs
from rlwatch.metrics import OPEN, TABLE, Family

PAGES = ("README.md", "docs/findings.md", "docs/control.md", "docs/alerts.md", "docs/diagnosis.md", "docs/metrics.md")
BLOCK = re.compile(r"(<!-- catalogue: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
COUNT = re.compile(r"\b\d+ detectors\b")
WHOLE = "Of a run as a whole"
"""Heading of the kinds that no detector reports."""


def page(text: str) -> str:
    """Return the text of a page with its generated blocks and the number of detectors renewed.

    Raises ``KeyError`` for a block of an unknown name.
    """
    detectors = {kind.detector for kind in kinds().values() if kind.detector}
    blocks = BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)
    return COUNT.sub(f"{len(detectors)} detectors", blocks)


def findings() -> str:
    """Return Markdown tables of all kinds of findings, one for each family."""
    known = kinds().values()
    found = [(family, [k for k in known if k.detector and k.family == family.value]) for family in Family]
    tables = [_table(family.value, of_it) for family, of_it in found if of_it]
    return "\n".join((*tables, _table(WHOLE, (kind for kind in known if not kind.detector))))


def _table(heading: str, rows: Iterable[FindingKind]) -> str:
    head = f"## {heading}\n\n| kind | what it is | at worst | alert rule |\n|---|---|---|---|\n"
    return head + "".join(_row(kind) for kind in rows)


def _row(kind: FindingKind) -> str:
    worst = f"critical if {kind.critical_when}" if kind.critical_when else kind.severity.value
    words = f"**{kind.title}.** {kind.meaning}" + (f" Source: {kind.source}." if kind.source else "")
    return f"| `{kind.name}` | {words} | {worst}{', vetoes a reset' if kind.collapse else ''} | `{kind.rule}` |\n"


def collapses() -> str:
    """Return a Markdown list of the kinds of findings that veto a reset of the reference while they are critical."""
    return ", ".join(f"`{kind.name}`" for kind in kinds().values() if kind.collapse) + ".\n"


def rules() -> str:
    """Return a Markdown table of the default alert rules, with the kinds of findings of each."""
    names = dict.fromkeys(kind.rule for kind in kinds().values())
    rows = ((name, [kind.name for kind in kinds().values() if kind.rule == name]) for name in names)
    lines = [f"| `{name}` | {', '.join(f'`{kind}`' for kind in about)} |\n" for name, about in rows]
    return "| rule | kinds |\n|---|---|\n" + "".join(lines)


def knob_table() -> str:
    """Return a Markdown table of settings: the metrics that log each, and the change that is known to break runs."""
    ways = {"up": "x {0:g}", "down": "/ {0:g}", "both": "x or / {0:g}"}
    lines = ["| hyperparameter | metrics that are it | known to break runs | source |\n|---|---|---|---|\n"]
    for knob in knobs().values():
        metrics = ", ".join(f"`{name}`" for name in knob.metrics) or "-"
        lines.append(f"| {knob.title} | {metrics} | {ways[knob.hurts].format(knob.harm)} | {knob.source} |\n")
    return "".join(lines)


def metrics() -> str:
    """Return Markdown tables of all metrics by family: unit, range, meaning, and the trainers' names."""
    found = []
    for family in Family:
        rows = [metric for metric in (*TABLE, *OPEN) if metric.family is family]
        found.append(f"## {family.value}\n\n| metric | unit, range | meaning | trainers call it |\n|---|---|---|---|\n")
        for metric in rows:
            name = f"`{metric.name}...`" if metric.name.endswith("/") else f"`{metric.name}`"
            found.append(
                f"| {name} | {f'{metric.unit} {metric.span}'.strip()} | {metric.meaning} | {metric.called} |\n"
            )
        found.append("\n")
    return "".join(found).rstrip("\n") + "\n"


BLOCKS: Mapping[str, Callable[[], str]] = {
    "findings": findings,
    "collapses": collapses,
    "rules": rules,
    "knobs": knob_table,
    "metrics": metrics,
}


def main(arguments: list[str]) -> int:
    """Rewrite the pages that are out of date; with ``--check`` in ``arguments`` only list them.

    Returns the exit code: 1 if ``--check`` found one, else 0.
    """
    stale = []
    for path in map(Path, PAGES):
        text = path.read_text(encoding="utf-8")
        if (made := page(text)) != text:
            stale.append(str(path))
            if "--check" not in arguments:
                path.write_text(made, encoding="utf-8")
    if stale:
        sys.stdout.write(f"{'out of date' if '--check' in arguments else 'written'}: {', '.join(stale)}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
