"""Write docs/detectors.md and its pictures: ``python benchmarks/detector_pictures.py``, in a clone's root.

With ``--words`` only descriptions and limits are written anew, in seconds: the pictures stay as they are.

Each detector has tests in ``tests/detectors``: synthetic runs in which it must fire, and near ones in which it must
not. They are run here, every row that a detector takes is written down, and of each kind one run of either sort is
drawn: the metric that it names, where it began and where it was said. What a detector goes by is its own docstring, and
its limits are the constants of its module.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlwatch.catalogue import FindingKind, kinds
from rlwatch.detectors.base import BaseDetector
from rlwatch.detectors.registry import default_detectors
from rlwatch.metrics import Family
from rlwatch.records import ClosedStep, Finding
from rlwatch.wording import el, joined, number

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures" / "detectors"
PAGE = ROOT / "docs" / "detectors.md"
SOURCE = "https://arxiv.org/abs/"
WIDTH, HEIGHT, GAP = 340, 130, 24
SILENT = re.compile(r"\b(no|not|none|nothing|never|silent|calm|left alone|usual|without|harmless|one odd)\b")
"""Words of a test that says what must not be found."""
SHORTEST, LONGEST, POINTS = 12, 700, 120
LINE, SOFT, RED = "#3b82f6", "#8a8a8a", "#dc2626"
"""Read on white and on dark grey alike."""


@dataclass
class Played:
    """What a detector saw in a test, and said."""

    test: str
    rows: list[ClosedStep] = field(default_factory=list)
    said: list[Finding] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The name of the test as a sentence."""
        return (
            re.sub(r"\[.*", "", self.test.rpartition("::")[2])
            .removeprefix("test_")
            .replace("_", " ")
            .partition(" (")[0]
        )


def recorded() -> dict[type, list[Played]]:
    """Runs by detector, from the tests of detectors."""
    played: dict[int, tuple[BaseDetector, Played]] = {}
    original = BaseDetector.update

    def update(self: BaseDetector, step: ClosedStep) -> list[Finding]:
        found = original(self, step)
        _, run = played.setdefault(id(self), (self, Played(os.environ.get("PYTEST_CURRENT_TEST", ""))))
        run.rows.append(step)
        run.said += found
        return found

    BaseDetector.update = update  # type: ignore[method-assign]
    tests = sorted(map(str, (ROOT / "tests" / "detectors").glob("test_detect_*.py")))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *tests])
    finally:
        BaseDetector.update = original  # type: ignore[method-assign]
    found = defaultdict(list)
    for detector, run in played.values():
        steps = [row.step for row in run.rows]
        if SHORTEST <= len(steps) <= LONGEST and steps == sorted(set(steps)):
            found[type(detector)].append(run)
    return found


def values(run: Played, metric: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, as they were logged."""
    return [(row.step, row.metrics[metric]) for row in run.rows if metric in row.metrics]


def moved(run: Played, metric: str) -> float:
    """How far a metric goes, relative to its size: a run in which nothing happens tells little."""
    finite = [value for _, value in values(run, metric) if math.isfinite(value)]
    return (max(finite) - min(finite)) / (max(map(abs, finite)) or 1.0) if finite else 0.0


def chosen(kind: FindingKind, runs: Sequence[Played]) -> tuple[Played, Played | None, str] | None:
    """A run in which the kind was found, the nearest in which it was not, and the metric that shows it."""

    def metric_of(run: Played) -> str:
        named = [finding.metric for finding in run.said if finding.kind == kind.name and finding.metric]
        shown = [metric for metric in (*named, *of_it) if len(values(run, metric)) >= SHORTEST]
        return shown[0] if shown else ""

    of_it = next((d.reads for d in default_detectors() if kind.name in d.kinds), ())
    fired = [run for run in runs if any(finding.kind == kind.name for finding in run.said) and metric_of(run)]
    if not fired:
        return None

    def late(run: Played) -> tuple[bool, int]:
        first = next(finding for finding in run.said if finding.kind == kind.name)
        place = sum(row.step <= first.onset_step for row in run.rows)
        return place < 8, abs(place - len(run.rows) // 2)

    one = min(fired, key=late)
    metric = metric_of(one)
    silent = [run for run in runs if not run.said and len(values(run, metric)) >= SHORTEST]
    module = one.test.partition("::")[0]

    def near(run: Played) -> tuple[bool, bool, float]:
        return bool(SILENT.search(run.words)), run.test.startswith(module), moved(run, metric)

    return one, max(silent, key=near, default=None), metric


# Pictures.


def panel(run: Played, metric: str, kind: str, left: int) -> Any:
    """One run: its metric, and where the finding began and was said."""
    points = values(run, metric)
    finite = [value for _, value in points if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    log = low > 0 and high > 50 * low
    scale = math.log10 if log else float
    low, high = scale(low), scale(high)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 0.5
    first, last = run.rows[0].step, run.rows[-1].step

    def x(step: int) -> float:
        return round(left + 44 + (step - first) / ((last - first) or 1) * (WIDTH - 54), 1)

    def y(value: float) -> float:
        return round(HEIGHT - 18 - (scale(value) - low + room) / (high - low + 2 * room) * (HEIGHT - 44), 1)

    def text(content: str, **where: Any) -> Any:
        return el("text", content, fill=SOFT, font_size=10, font_family="sans-serif", **where)

    every = max(1, len(points) // POINTS)
    kept = [at for i, at in enumerate(points) if i % every == 0 or not math.isfinite(at[1])]
    drawn = " ".join(f"{x(step)},{y(value)}" for step, value in kept if math.isfinite(value))
    parts = [el("polyline", points=drawn, fill="none", stroke=LINE, stroke_width=1.5)]
    for step, value in kept:
        if not math.isfinite(value):
            parts.append(el("line", x1=x(step), x2=x(step), y1=HEIGHT - 26, y2=HEIGHT - 18, stroke=RED))
    said = [finding for finding in run.said if finding.kind == kind]
    if said:
        begun, told = said[0].onset_step, said[0].step
        if begun >= first:
            parts.append(
                el("line", x1=x(begun), x2=x(begun), y1=24, y2=HEIGHT - 18, stroke=RED, stroke_dasharray="3 3")
            )
        parts.append(el("line", x1=x(told), x2=x(told), y1=24, y2=HEIGHT - 18, stroke=RED))
    ends = [10.0**end if log else end for end in (low, high)]
    parts += [
        text(number(ends[1]), x=left + 40, y=34, text_anchor="end"),
        text(number(ends[0]), x=left + 40, y=HEIGHT - 22, text_anchor="end"),
    ]
    parts += [
        text(str(first), x=left + 44, y=HEIGHT - 4),
        text(str(last), x=left + WIDTH - 10, y=HEIGHT - 4, text_anchor="end"),
    ]
    parts.append(
        el("line", x1=left + 44, x2=left + WIDTH - 10, y1=HEIGHT - 18, y2=HEIGHT - 18, stroke=SOFT, stroke_width=0.5)
    )
    verdict = f"said at step {said[0].step}" if said else "silent"
    parts.append(text(f"{metric}: {verdict}", x=left + 44, y=14))
    return joined(*parts)


def picture(kind: str, fired: Played, silent: Played | None, metric: str) -> str:
    """Both runs side by side."""
    panels = [panel(fired, metric, kind, 0)] + ([panel(silent, metric, kind, WIDTH + GAP)] if silent else [])
    wide = WIDTH * len(panels) + GAP * (len(panels) - 1)
    label = f"{kind}: a run in which it is found" + (", and one in which it is not" if silent else "")
    svg = el(
        "svg", *panels, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {wide} {HEIGHT}", role="img", aria_label=label
    )
    return f"{svg}\n"


# The page.


def limits(detector: type) -> list[tuple[str, str, str]]:
    """Constants of a detector's module that it names, with their values and words."""
    text = Path(inspect.getfile(detector)).read_text(encoding="utf-8")
    own = "".join(inspect.getsource(one) for one in detector.__mro__ if one.__module__ == detector.__module__)
    body, found = ast.parse(text).body, []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if (
            not isinstance(node, ast.Assign)
            or not isinstance(after, ast.Expr)
            or not isinstance(after.value, ast.Constant)
        ):
            continue
        target = node.targets[0]
        names = [one.id for one in target.elts] if isinstance(target, ast.Tuple) else [getattr(target, "id", "")]
        if any(re.search(rf"\b{name}\b", own) for name in names) and re.fullmatch(
            r"[-\d., ()e_]+", ast.unparse(node.value)
        ):
            found.append((", ".join(names), ast.unparse(node.value).strip("()"), str(after.value.value)))
    return found


def prose(text: str) -> str:
    """A docstring as Markdown on one line a paragraph."""
    plain = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", inspect.cleandoc(text)).replace("``", "`")
    return "\n\n".join(" ".join(part.split()) for part in plain.split("\n\n"))


def words(kind: FindingKind, detector: type) -> str:
    """What the page says of one kind above its picture: title, description, source and limits."""
    parts = [f"### {kind.title}: `{kind.name}`\n", prose(inspect.getdoc(detector) or ""), ""]
    if kind.source:
        parts += [f"Source: {kind.source}.", ""]
    rows = [
        f"| `{name}` | {value} | {' '.join(words.replace('``', '`').split()).replace('|', chr(92) + '|')} |"
        for name, value, words in limits(detector)
    ]
    if rows:
        parts += ["| limit | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


UNDRAWN = "No synthetic run of its tests is of a length that can be drawn."


def section(kind: FindingKind, detector: type, found: tuple[Played, Played | None, str] | None) -> str:
    """One kind of finding."""
    parts = [words(kind, detector)]
    if found is None:
        return "\n".join([*parts, f"{UNDRAWN}\n"])
    fired, silent, metric = found
    (PICTURES / f"{kind.name}.svg").write_text(picture(kind.name, fired, silent, metric))
    parts += [f"![{kind.name}: found on the left, silent on the right](pictures/detectors/{kind.name}.svg)", ""]
    told = next(finding for finding in fired.said if finding.kind == kind.name)
    parts.append(f"Left: {' '.join(told.message.split())} (*{fired.words}*).")
    if silent:
        parts.append(f"Right: no finding (*{silent.words}*).")
    return "\n".join([*parts, ""])


HEAD = """# Detectors, one by one

Written by `python benchmarks/detector_pictures.py`; do not edit. Each entry has a description from the code,
the limits of its module, and two synthetic runs from its own tests: one in which it must fire and a near one
in which it must not. The line is the metric that the finding names; dashed red is the onset, red the step of the
first report. Red ticks below are values that are not finite. [Findings](findings.md) explains each kind,
and [detection](detection.md) shows how often they are right on public runs. The runs here are
made to show a shape, not how often a detector is right. The name of the test is in brackets.
"""


def of_kind() -> dict[str, type]:
    """The detector of each kind that has one."""
    return {kind: type(detector) for detector in default_detectors() for kind in detector.kinds}


def page(runs: dict[type, list[Played]]) -> str:
    """The whole page; kinds in the order of their families."""
    detectors = of_kind()
    parts = [HEAD]
    for family in Family:
        known = [kind for kind in kinds().values() if kind.family == family.value and kind.name in detectors]
        if known:
            parts.append(f"## {family.value}\n")
            parts += [
                section(kind, detectors[kind.name], chosen(kind, runs.get(detectors[kind.name], []))) for kind in known
            ]
    return "\n".join(parts)


def reworded(text: str) -> str:
    """The page with the words of its sections written anew; a kind that has no section yet is refused."""
    for name, detector in of_kind().items():
        section_of = re.compile(
            rf"^### [^\n]*: `{name}`\n.*?(?=^!\[{name}: |^{re.escape(UNDRAWN)})", re.DOTALL | re.MULTILINE
        )
        found = section_of.search(text)
        if not found:
            raise SystemExit(f"{PAGE.name} has no section of {name}: run this without --words, which draws its runs")
        text = f"{text[: found.start()]}{words(kinds()[name], detector)}\n{text[found.end() :]}"
    return text


def unused(names: Iterable[str]) -> None:
    """Remove pictures of kinds that are gone."""
    for path in PICTURES.glob("*.svg"):
        if path.stem not in names:
            path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", action="store_true", help="write descriptions and limits anew, and no pictures")
    if parser.parse_args().words:
        PAGE.write_text(reworded(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        sys.exit()
    PICTURES.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(recorded()))
    unused(kinds())
    sys.stdout.write(f"{len(list(PICTURES.glob('*.svg')))} pictures\n")
