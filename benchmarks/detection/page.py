"""The page of figures, and those of them that README.md repeats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from detection import cadence, tables
from detection.record import Recorded
from detection.score import AFTER_ROWS, AFTER_STEPS, BEFORE, EARLY, JOINED_ROWS, LEVELS, TWINS, score
from detection.tables import OURS, Table, markdown

POOLED = ("real_runs", "real_runs_2", "wild")
BEGIN, END = "<!-- figures of docs/detection.md: written by `make bench-detect` -->", "<!-- /figures -->"
TITLES = {
    "samples": "Our own recorded logs",
    "real_runs": "Public runs, first set (`../shared/real_runs`)",
    "real_runs_2": "Public runs, second set (`../shared/real_runs_2`)",
    "wild": "Logs as their owners left them (`../shared/wild`)",
    "synth": "Pathologies that rlprobe makes",
    "corpus": "The sample of our corpus",
}

INTRODUCTION = f"""# What is found, when, and at what price

This page has the alarms of rlwatch, of simple rules and of other packages on runs that were not made for this
comparison. Written by {{command}}
at `{{state}}`; only the words are written by hand. The public runs are outside this repository,
most without a licence: without them only our own logs are judged.

## Definitions

- **Event**: a run labelled crash or instability, with the onset step of its failure. **Hit**: an alarm at or above
  the level from {BEFORE} steps before the onset to {AFTER_STEPS} steps, or {AFTER_ROWS} rows if that is more, after
  it. **Early**: {BEFORE} to {EARLY} steps before. **Lead**: median steps from the first alarm of that window to the
  onset, of the events hit; below 0 is after it. **Ever**: an alarm in the window or at any time later.
- **Placebo**: the share of healthy runs that alarm in the same steps, averaged over events. These are healthy twins
  (same repository, same steps between rows) if {TWINS} reach the onset, else all healthy runs of the set that do.
  **P** (column p): the chance of as many hits if events were hit as often as these are alarmed ((k + .5)/(n + 1)
  each). With a window of 110 steps in runs of 200, hits without their placebo mean nothing.
- **False**: episodes of alarms on healthy runs and earlier than {BEFORE} steps before an onset; alarms within
  {JOINED_ROWS} rows of the first are one. **Healthy alarmed**: runs with any alarm. A **transient** recovered by
  itself: counted if a critical alarm is still active at its end. A **dead** run never learns and must be reported;
  *again* counts those reported more than once.
- **Levels**: a critical alarm; any (warnings too), with forecasts and without, forecasts alone. An alarm is the
  moment an alert fires or worsens; the rows of findings show the cost of the alert rules' wait.
- **Intervals** of 95 % are in brackets: first over independent runs (Wilson's; of rates Poisson's), then over whole
  repositories drawn with replacement, if there are three or more. Runs of one repository fail alike, so the second
  is the more reliable one.

## Runs in view when thresholds were chosen

- `real_runs`: thresholds of detectors and alert rules were chosen with these in view. In-sample.
- `real_runs_2` and `wild`: no threshold was chosen with them up to 8a240a0. Since then this command prints them to
  developers of detectors, so count them as in-sample: an improvement on them alone proves nothing. Sets kept aside
  decide that.
- Labels of `real_runs_2` were made from the numbers before any detector ran; some are in doubt, and both ways are
  shown. Its crashes are of one repository. A single reader judged `wild` healthy, except for one directory, which is
  not counted.
- *Two witnesses* is a rule that others wrote with part of the public runs in view. Its clause for extremes is
  missing, because it is not published. Its details here (first 8 rows as the base, means of two rows, its own noise
  from the changes of earlier rows) were fixed before it was run, once. Its authors report 14 of 21 events at 7 % of
  healthy runs, on other runs; the published part does not reproduce that here.
- *Joint evidence, limit from other projects*: the detector `joint_collapse` alone, critical beyond the values of
  healthy runs of the other projects of the set (conformal: no more than 3 % of them). The limit is out of sample;
  the composition of the evidence was chosen with the public runs in view.
- Simple rules, and the peers by their own code and defaults, were not tuned here. The tool rlprobe runs at every
  25th step, as in its own callback, so logs with rows at other steps are judged seldom. No method receives the KL by
  position that rlprobe makes for one of its pathologies. A peer that is missing from a set took too long for
  its longest run.
"""


BECAME = (
    "The table has the final state of the runs of each label. A *transient* should end healthy or recovered, a crash or"
    " a lasting instability never. A log has no end of its process, so none of these counts as killed."
)


def page(recorded: Mapping[str, Recorded], *, state: str, command: str) -> str:
    """The whole page."""
    parts = [INTRODUCTION.format(command=command, state=state)]
    together = pooled(recorded)
    if together:
        parts += [
            "## All public runs, labels without doubt\n",
            f"{tables.counted(together, strict=True)}.\n",
            "In short; the first line is out of sample, the others are not:\n",
            f"{readme(recorded)}\n",
            f"{whole(recorded)}\n",
            "In full:\n",
            markdown(tables.methods(together, strict=True)) + "\n",
            Path(__file__).with_name("missed.md").read_text(),
        ]
    for name, told in recorded.items():
        if not told.every:
            parts += _section(recorded, name, told)
    return "\n".join(parts)


def _section(recorded: Mapping[str, Recorded], name: str, told: Recorded) -> list[str]:
    parts = [f"## {TITLES.get(name, name)}\n"]
    everybody = dict.fromkeys(method for each in recorded.values() for method in each.told)
    if absent := [method for method in everybody if method not in told.told]:
        parts.append(f"Not judged here by {', '.join(absent)}.\n")
    for strict in [False, True] if any(run.doubt for run in told.runs) else [False]:
        said = "Labels without doubt: " if strict else ""
        parts += [
            f"{said}{tables.counted(told, strict=strict)}.\n",
            markdown(tables.methods(told, strict=strict)) + "\n",
        ]
        if became := tables.verdicts(told, strict=strict):
            parts += [f"{BECAME}\n", markdown(became) + "\n"]
    if others := cadence.sparser(recorded, name):
        parts += [
            "The next table has rlwatch with rows further apart, as trainers log them: the mean over so many"
            " steps, or the last value. For runs alarmed as they were logged, the first alarm is *where it was* if"
            " it comes within 10 steps or two rows. A run of 40 steps has only two rows of 20, so runs that still"
            " have ten rows by then are counted separately. For runs not alarmed, *quiet stays quiet*. Only runs"
            " with closer rows are included. `benchmarks/detection/cadence.toml` lists the losses by kind of"
            " finding, and a test allows no more than these.\n",
            markdown(tables.cadences(told, others, strict=any(run.doubt for run in told.runs))) + "\n",
        ]
    if name == "synth":
        parts += [
            "The first alarm of each method and its first critical one, with their steps; the trouble begins at step"
            " 250.\n",
            markdown(tables.pathologies(told)) + "\n",
        ]
    if name in POOLED:
        parts += ["By repository, rlwatch:\n", markdown(tables.projects(told)) + "\n"]
    return parts


def pooled(recorded: Mapping[str, Recorded]) -> Recorded | None:
    """The public sets as one, of the methods that judged all of them; None unless all are there."""
    if not all(name in recorded for name in POOLED):
        return None
    sets = [recorded[name] for name in POOLED]
    runs = tuple(replace(run, name=f"{name}: {run.name}") for name in POOLED for run in recorded[name].runs)
    shared = [method for method in sets[0].told if all(method in each.told for each in sets)]
    return Recorded(runs, {method: tuple(told for each in sets for told in each.told[method]) for method in shared})


KEPT_ASIDE = ("163 runs unseen during development, at e2ce90e", "14/22 [0.43-0.80]", "10/11", "10/114 [0.05-0.15]")
"""Figures of rlwatch at critical that others measured on runs they keep aside (two sets, 114 of them healthy)."""
RULE = "static rules"
"""The simple rule that finds most."""


def readme(recorded: Mapping[str, Recorded]) -> str:
    """Return the table of README.md: runs kept aside, then all public runs, beside the simple rule that finds most."""
    together = pooled(recorded)
    assert together is not None
    runs, told = together.kept(strict=True)
    table: Table = [("runs", "failures found in time", "crashes", "healthy runs alarmed"), KEPT_ASIDE]
    seen = f"{len(runs)} public runs, seen when thresholds were chosen"
    for name, method, level in ((seen, OURS, "critical"), (f"the same, {RULE} (one threshold each)", RULE, "any")):
        if method in told:
            s = score(runs, told[method], LEVELS[level])
            table.append((name, _first(tables.rate(s.hits)), tables.count(s.crashes), _first(tables.rate(s.healthy))))
    return markdown(table)


def _first(rate: str) -> str:
    """Return a rate with the first of its intervals, that of independent runs."""
    return rate.split(";", maxsplit=1)[0] + "]" if ";" in rate else rate


def whole(recorded: Mapping[str, Recorded]) -> str:
    """Return the table of all public runs, labels without doubt, of every method."""
    together = pooled(recorded)
    assert together is not None
    runs, told = together.kept(strict=True)
    table: Table = [
        ("method", "events in time", "of crashes", "placebo", "p", "healthy runs alarmed", "false alarms in 1000 rows")
    ]
    for method, answers in told.items():
        for level in ["critical", "any"] if method == OURS else ["any"]:
            s = score(runs, answers, LEVELS[level])
            table.append(
                (
                    f"{method}, {level}" if method == OURS else method,
                    tables.rate(s.hits),
                    tables.count(s.crashes),
                    tables.mean(s.placebo),
                    tables.chance(s.p, s.events),
                    tables.rate(s.healthy),
                    tables.rate(s.per_1000_rows),
                )
            )
    return markdown(table)


def into_readme(path: Path, recorded: Mapping[str, Recorded]) -> None:
    """Put the table in its place, between its two marks; nothing where not all public sets were judged."""
    if pooled(recorded):
        block = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
        path.write_text(block.sub(lambda _: f"{BEGIN}\n{readme(recorded)}\n{END}", path.read_text()))
