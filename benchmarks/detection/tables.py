"""Tables of figures: by method and level, by the steps between rows, by repository, pathology by pathology.

A table is a list of rows of cells, the first its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from detection.cadence import agreement
from detection.record import Recorded
from detection.score import LEVELS, Alarm, Rate, Score, Told, score

from rlwatch.state import State

OURS = "rlwatch"
VERDICTS = tuple(state.value for state in State)
Table = list[tuple[str, ...]]


def aligned(table: Table) -> str:
    """For a terminal."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def markdown(table: Table) -> str:
    """For a page."""
    head, *lines = ("| " + " | ".join(line) + " |" for line in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *lines])


# By method and level.

HEAD = (
    "method", "level", "hit", "of crashes", "early", "p early", "lead", "placebo", "p", "ever", "false in 1000 rows",
    "in 1000 steps", "healthy alarmed", "transients critical at end", "dead told",
)  # fmt: skip


def methods(recorded: Recorded, *, strict: bool) -> Table:
    """A line for each method and level at which it says anything of its own."""
    kept, told = recorded.kept(strict)
    table: Table = [HEAD]
    for method, answers in told.items():
        table += [_line(method, level, score(kept, answers, LEVELS[level])) for level in _levels(method, answers)]
        if method == OURS:
            for level in ("critical", "any"):
                found = score(kept, answers, LEVELS[level], findings=True)
                table.append(_line(f"{method}, findings before alert rules wait", level, found))
    return table


def counted(recorded: Recorded, *, strict: bool) -> str:
    """How many runs of each kind, and how many rows."""
    kept, _ = recorded.kept(strict)
    kinds = [run.severity for run in kept]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    projects = len({run.project for run in kept})
    return f"{len(kept)} runs of {projects} projects ({counts}), {sum(len(run.steps) for run in kept)} rows"


def _levels(method: str, answers: Sequence[Told]) -> list[str]:
    """Levels at which a method tells anything of its own: rules know one, and only ours has forecasts."""
    if method == OURS:
        return list(LEVELS)
    warns = any(not alarm.critical for answer in answers for alarm in answer.alarms)
    return ["critical", "any"] if warns else ["critical"]


def _line(name: str, level: str, s: Score) -> tuple[str, ...]:
    again = f", {s.dead_repeated} again" if s.dead_repeated else ""
    return (
        name,
        level,
        rate(s.hits),
        count(s.crashes),
        rate(s.early),
        chance(s.p_early, s.events),
        "-" if s.lead is None else f"{s.lead:.0f}",
        mean(s.placebo),
        chance(s.p, s.events),
        count(s.ever),
        rate(s.per_1000_rows),
        rate(s.per_1000_steps),
        rate(s.healthy),
        count(s.transients),
        count(s.dead) + again,
    )


def count(of: Rate) -> str:
    """Counts alone."""
    return f"{of.count:g}/{of.total:g}" if of.total else "-"


def rate(of: Rate) -> str:
    """Counts of a share, the value of another rate, and its intervals: of independent runs, and over projects."""
    if of.value is None:
        return "-"
    said = count(of) if of.scale == 1 else f"{of.value:.2f}"
    edges = [f"{low:.2f}-{high:.2f}" for low, high in filter(None, (of.exact, of.drawn))]
    return f"{said} [{'; '.join(edges)}]"


def mean(of: float | None) -> str:
    """A mean share."""
    return "-" if of is None else f"{of:.2f}"


def chance(p: float, events: int) -> str:
    """A chance; of no event there is none."""
    return f"{p:.2g}" if events else "-"


# What became of the runs.

LABELS = ("healthy", "transient", "instability", "crash", "dead")


def verdicts(recorded: Recorded, *, strict: bool, method: str = OURS) -> Table:
    """A line for each label: how many of its runs the method ends with which word; empty where it has none."""
    kept, told = recorded.kept(strict)
    words = [answer.verdict for answer in told.get(method, ())]
    shown = [word for word in VERDICTS if word in words]
    table: Table = [("label", *shown)] if shown else []
    for label in LABELS:
        own = [word for run, word in zip(kept, words, strict=True) if run.severity == label] if shown else []
        if own:
            table.append((label, *(str(own.count(word) or "-") for word in shown)))
    return table


# By the steps between rows.

CADENCE_HEAD = (
    "rows joined", "level", "hit", "of crashes", "early", "placebo", "p", "false in 1000 rows", "in 1000 steps",
    "healthy alarmed", "alarm where it was", "with ten rows by then", "quiet stays quiet", "later", "earlier", "lost",
    "new",
)  # fmt: skip


def cadences(dense: Recorded, others: Sequence[Recorded], *, strict: bool, method: str = OURS) -> Table:
    """A line for each way of logging and level: what it finds, and how many runs are told the same in time."""
    runs, told = dense.kept(strict)
    table: Table = [CADENCE_HEAD]
    for each in (dense, *others):
        kept, answers = each.kept(strict)
        for level in ("critical", "any"):
            s = score(kept, answers[method], LEVELS[level])
            same: tuple[str, ...] = ("-",) * 7
            if each.every:
                fate = agreement(runs, told[method], answers[method], each.every, LEVELS[level])
                fates = (fate.later, fate.earlier, fate.lost, fate.new)
                same = (rate(fate.same), rate(fate.able), rate(fate.quiet), *(str(number) for number in fates))
            table.append((
                f"{each.every}, {each.how}" if each.every else "as logged",
                level,
                rate(s.hits),
                count(s.crashes),
                rate(s.early),
                mean(s.placebo),
                chance(s.p, s.events),
                rate(s.per_1000_rows),
                rate(s.per_1000_steps),
                rate(s.healthy),
                *same,
            ))  # fmt: skip
    return table


# By repository, and pathology by pathology.


def projects(recorded: Recorded, *, method: str = OURS) -> Table:
    """A line for each project with an event or a false alarm: events hit, and healthy runs alarmed."""
    table: Table = [("repository", "hit, critical", "hit, any", "healthy critical", "healthy, any alarm")]
    by_project: dict[str, list[int]] = {}
    for i, run in enumerate(recorded.runs):
        by_project.setdefault(run.project, []).append(i)
    for project, places in sorted(by_project.items()):
        runs = [recorded.runs[i] for i in places]
        told = [recorded.told[method][i] for i in places]
        critical, every = (score(runs, told, LEVELS[level]) for level in ("critical", "any"))
        if every.events or every.healthy.count:
            table.append((project, *(count(of) for of in (critical.hits, every.hits, critical.healthy, every.healthy))))
    return table


def pathologies(recorded: Recorded) -> Table:
    """A line for each run of a synthetic set: the first alarm of each method at or after the onset, or before it."""
    table: Table = [("run", *recorded.told)]
    for i, run in enumerate(recorded.runs):
        table.append((run.name, *(_first(run.onset, told[i].alarms) for told in recorded.told.values())))
    return table


def _first(onset: float | None, alarms: Sequence[Alarm]) -> str:
    """The first alarm, and the first critical one where it is another; those before the onset are false."""
    return "; ".join(dict.fromkeys(_told(onset, alarms))) or "-"


def _told(onset: float | None, alarms: Sequence[Alarm]) -> Iterator[str]:
    for told in (alarms, [alarm for alarm in alarms if alarm.critical]):
        if told:
            first = min(told, key=lambda alarm: alarm.step)
            false = ", false" if onset is None or first.step < onset else ""
            yield f"{first.kind} {'critical' if first.critical else 'warning'} {first.step}{false}".strip()
