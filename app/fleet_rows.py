"""Rows and columns of the list of runs, and its display options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlencode

from rlwatch.columns import RUNS, title_of

from . import format as fmt
from . import table
from .fleet import (
    HIGH,
    NO_CURVE,
    NOT_GROUPED,
    RISK,
    SORTS,
    URGENT,
    Fleet,
    RunEntry,
    Spark,
    groups,
    in_order,
    kl,
    matching,
    mean_spark,
    mean_words,
    risk,
    run_entries,
    sparks,
    why,
)
from .health import LOOKS, StatusWord, Word
from .thinning import in_unit_square

GROUP = "group:"
"""Prefix of the message of a click on a group; the group's name follows."""
REWARD = "reward/mean"
RISK_COLUMN = "risk, 50 steps"
"""Column of the chance of a failure, which only runs with a forecast have."""


@dataclass(frozen=True, slots=True)
class FleetColumn:
    """A column of the list of runs: its style, and functions that return its cell for one run and for a group."""

    style: str
    of_run: Callable[[RunEntry, Mapping[str, Spark], float], table.Cell]
    of_group: Callable[[Sequence[RunEntry], float], table.Cell] = lambda *_: table.text("")


def _state(entry: RunEntry) -> table.Cell:
    health = entry.health
    at = f"@{health.since}" if health.word in (Word.COLLAPSED, Word.KILLED) and health.since is not None else ""
    return table.mark(health.look.shape, health.look.colour, health.word.value + at)


def _states(members: Sequence[RunEntry]) -> table.Cell:
    """Return the state of the most urgent member, and how many members share it."""
    worst: StatusWord = min((entry.health for entry in members), key=lambda health: health.order)
    count = sum(entry.health.word is worst.word for entry in members)
    text = f"{count} {worst.word.value}" if count < len(members) else worst.word.value
    return table.mark(worst.look.shape, worst.look.colour, text)


def _why_of(members: Sequence[RunEntry]) -> table.Cell:
    needing = [entry for entry in members if entry.health.needs_you]
    if not needing:
        return table.text("", quiet=True)
    need = "needs" if len(needing) == 1 else "need"
    return table.text(f"{len(needing)} of {len(members)} {need} attention: {fmt.shorten(why(needing[0]), 120)}")


def has_risk(entry: RunEntry) -> bool:
    """Return True if the column of risks has something to show for a run."""
    forecast = entry.vitals.forecast
    return forecast is not None and (forecast.p50 is not None or bool(forecast.limits_only and forecast.alarm))


def _risk(entry: RunEntry, curves: Mapping[str, Spark]) -> table.Cell:
    """Return the chance of a failure within 50 steps and its trend, with a shape if it is an alarm; empty if ended."""
    forecast, look = entry.vitals.forecast, LOOKS[Word.AT_RISK]
    if forecast is not None and forecast.limits_only and forecast.alarm:
        return table.mark(look.shape, look.colour, "near a limit")
    if forecast is None or forecast.p50 is None:
        title = "" if forecast is None else forecast.absent or forecast.limits_only
        return table.text(fmt.NOTHING, quiet=True, title=title)
    way = curves[RISK].trend if RISK in curves else ""
    chance = fmt.chance(forecast.p50) + (f" {way}" if way in {"↑", "↓"} else "")
    if not forecast.alarm:
        return table.text(chance, quiet=True)
    return table.mark(look.shape, look.colour, chance)


def _number(name: str) -> FleetColumn:
    def of_run(entry: RunEntry, curves: Mapping[str, Spark], now: float) -> table.Cell:  # noqa: ARG001
        value = entry.vitals.values.get(name)
        way = curves[name].trend if name in curves and value is not None and math.isfinite(value) else ""
        return table.text(fmt.number(value), way)

    def of_group(members: Sequence[RunEntry], now: float) -> table.Cell:  # noqa: ARG001
        return table.text(mean_words([entry.vitals.values.get(name) for entry in members]))

    return FleetColumn("right tight", of_run, of_group)


def _titled(name: str) -> str:
    return title_of(RUNS, name)


COLUMNS: Mapping[str, FleetColumn] = {
    _titled("last_step"): FleetColumn(
        "right tight",
        lambda entry, *_: table.text(fmt.step(entry.run.last_step)),
        lambda members, _: table.text(fmt.step(max((e.run.last_step or 0 for e in members), default=0))),
    ),
    _titled("reward"): _number(REWARD),
    _titled("entropy"): _number("policy/entropy"),
    _titled("KL"): FleetColumn(
        "right tight wide roomy",
        lambda entry, *_: table.text(fmt.number(kl(entry.vitals))),
        lambda members, _: table.text(mean_words([kl(entry.vitals) for entry in members])),
    ),
    _titled("grad norm"): _number("optim/grad_norm"),
    RISK_COLUMN: FleetColumn(
        "right tight",
        lambda entry, curves, _: _risk(entry, curves),
        lambda members, _: _worst_risk(members),
    ),
    "why": FleetColumn(
        "long",
        lambda entry, *_: table.text(fmt.shorten(why(entry), 160), quiet=not entry.health.needs_you),
        lambda members, _: _why_of(members),
    ),
    _titled("notes"): FleetColumn(
        "long", lambda entry, *_: table.text(fmt.shorten(entry.run.curation.notes, 160), quiet=True)
    ),
    _titled("source"): FleetColumn(
        "tight", lambda entry, *_: table.text(fmt.shorten(entry.run.source, 40), quiet=True)
    ),
    _titled("created_at"): FleetColumn(
        "right tight", lambda entry, _, now: table.text(fmt.age(entry.run.created_at or None, now))
    ),
    "last step": FleetColumn(
        "right tight",
        lambda entry, _, now: table.text(fmt.age(entry.run.last_ts, now)),
        lambda members, now: table.text(fmt.age(max((e.run.last_ts or 0.0 for e in members), default=0) or None, now)),
    ),
}
"""Columns that can be chosen, in display order; state and run always come first."""
DEFAULT_COLUMNS = ("step", "reward", "entropy", "KL", RISK_COLUMN, "why", "last step")
DEFAULT_CURVES = (REWARD,)
SORTED_BY = {RISK_COLUMN: "risk"}
"""Sort key of each column whose name differs from its sort key."""


def _worst_risk(members: Sequence[RunEntry]) -> table.Cell:
    worst = max((chance for entry in members if (chance := risk(entry)) is not None), default=None)
    return table.text(fmt.NOTHING if worst is None else f"up to {fmt.chance(worst)}", quiet=True)


def used_columns(columns: Sequence[str], entries: Iterable[RunEntry]) -> list[str]:
    """Return the columns of the list; the risk is left out of the default ones if no run in ``entries`` has any."""
    unused = list(columns) == list(DEFAULT_COLUMNS) and not any(map(has_risk, entries))
    return [name for name in columns if not (unused and name == RISK_COLUMN)]


@dataclass(frozen=True, slots=True)
class FleetRow:
    """A line of the list of runs: one run, or a group by its ``name``."""

    entries: tuple[RunEntry, ...]
    name: str | None = None
    unfolded: bool = False
    member: bool = False


@dataclass(frozen=True, slots=True)
class FleetView:
    """Columns, curves and order of the drawn list. ``picked``: ids of the ticked rows; None: rows have no checkbox."""

    columns: Sequence[str] = DEFAULT_COLUMNS
    curves: Sequence[str] = DEFAULT_CURVES
    sort: str = ""
    now: float = 0.0
    picked: frozenset[str] | None = field(default=None)

    def _kinds(self) -> list[tuple[str, FleetColumn | None]]:
        """Return the columns in order; a curve (None) follows the number that it belongs to, other curves come last."""
        found: list[tuple[str, FleetColumn | None]] = []
        for name, kind in COLUMNS.items():
            if name in self.columns:
                found.append((name, kind))
                found += [(REWARD, None)] if name == "reward" and REWARD in self.curves else []
        placed = {name for name, kind in found if kind is None}
        at = next((place for place, (name, _) in enumerate(found) if name == RISK_COLUMN), len(found))
        found[at:at] = [(name, None) for name in self.curves if name not in placed]
        return found

    def heads(self) -> list[table.TableColumn]:
        """Return the headers of all columns of the list."""
        found = [table.TableColumn("state", "tight"), self._head(_titled("run_id"), "long")]
        for name, kind in self._kinds():
            if kind is None:
                labelled = name == REWARD and "reward" in self.columns
                found.append(table.TableColumn("" if labelled else name, "tight" + (" wide roomy" if labelled else "")))
            else:
                found.append(self._head(name, kind.style))
        return found

    def _head(self, name: str, style: str) -> table.TableColumn:
        sort = SORTED_BY.get(name, name)
        by, _, way = self.sort.rpartition(", ")
        turned = ("descending" if way == HIGH else "ascending") if by == sort else ""
        return table.TableColumn(name, style, sort if sort in SORTS else "", turned)

    def rows(self, lines: Sequence[FleetRow]) -> list[table.TableRow]:
        """Return the table rows for ``lines``; curves are read for these runs only."""
        return [self.run_row(line) if line.name is None else self._group_row(line.name, line) for line in lines]

    def run_row(self, line: FleetRow) -> table.TableRow:
        """Return the table row for a line that is a single run."""
        (entry,) = line.entries
        run = entry.run
        asked = [REWARD] if "reward" in self.columns else []
        asked += [RISK] if entry.vitals.forecast is not None else []
        curves = sparks(run, entry.vitals, dict.fromkeys((*self.curves, *asked)))
        cells = [_state(entry), table.run_link(run.run_id, run.project, run.name, run.tags, run.curation.notes)]
        for name, kind in self._kinds():
            cells.append(self._curve(name, curves.get(name)) if kind is None else kind.of_run(entry, curves, self.now))
        quiet = not entry.health.needs_you and (entry.health.ended or entry.health.word is Word.STALE)
        picked = None if self.picked is None else run.run_id in self.picked
        return table.TableRow(cells, opens=run.run_id, picked=picked, quiet=quiet, member=line.member)

    def _curve(self, name: str, one: Spark | None) -> table.Cell:
        known = one or NO_CURVE
        has_number = name == REWARD and "reward" in self.columns
        label = "" if has_number else " ".join((fmt.number(known.value), known.trend)).strip()
        return table.spark(*in_unit_square(known.curve), label)

    def _group_row(self, name: str, line: FleetRow) -> table.TableRow:
        members = line.entries
        curves = [sparks(entry.run, entry.vitals, self.curves) for entry in members]
        cells = [_states(members), table.group(name, len(members))]
        for column, kind in self._kinds():
            if kind is not None:
                cells.append(kind.of_group(members, self.now))
                continue
            held = [one[column] for one in curves if column in one]
            has_number = column == REWARD and "reward" in self.columns
            label = "" if has_number else mean_words([one.value for one in held])
            cells.append(table.spark(*in_unit_square(*mean_spark(held)), label))
        picked = None if self.picked is None else all(entry.run.run_id in self.picked for entry in members)
        return table.TableRow(cells, opens=GROUP + name, picked=picked, unfolded=line.unfolded)


# The part of the list that is asked for.

NORMAL, ARCHIVED, DELETED = "", "archived, too", "deleted"


def listed(every: Fleet, which: str, now: float) -> list[RunEntry]:
    """Return the entries of the list of runs in its order: active runs, or with ``which`` all runs in ``every``."""
    return [entry for entry in run_entries(every, now) if which or not entry.run.curation.archived]


@dataclass(frozen=True, slots=True)
class ListView:
    """Filters and display options of the list of runs, all kept in the page's address.

    ``picked``: ids of the ticked rows; None: rows have no checkbox.
    """

    projects: Sequence[str] = ()
    states: Sequence[str] = ()
    tags: Sequence[str] = ()
    text: str = ""
    columns: Sequence[str] = DEFAULT_COLUMNS
    curves: Sequence[str] = DEFAULT_CURVES
    sort: str = URGENT
    group: str = NOT_GROUPED
    unfolded: frozenset[str] = frozenset()
    which: str = NORMAL
    picked: frozenset[str] | None = None

    def lines(self, entries: Sequence[RunEntry]) -> list[FleetRow]:
        """Return the lines of the list for ``entries`` after filtering: runs or, if grouped, groups, with the runs of
        each unfolded group below it.
        """
        fitting = matching(entries, projects=self.projects, states=self.states, tags=self.tags, text=self.text)
        ordered = in_order(fitting, self.sort)
        if self.group == NOT_GROUPED:
            return [FleetRow((entry,)) for entry in ordered]
        found: list[FleetRow] = []
        for name, members in groups(ordered, self.group).items():
            unfolded = name in self.unfolded
            found.append(FleetRow(tuple(members), name, unfolded))
            found += [FleetRow((entry,), member=True) for entry in members] if unfolded else []
        return found

    def drawn(self, now: float) -> FleetView:
        """Return the display options of the list's rows at the time ``now`` (Unix seconds)."""
        return FleetView(self.columns, self.curves, self.sort, now, self.picked)

    def query(self) -> str:
        """Return the filters and display options as a URL query, which :meth:`of_query` reads."""
        several = {name: list(getattr(self, name)) for name in SEVERAL}
        boxes = {} if self.picked is None else {"picked": sorted(self.picked) or [""]}
        one = {name: getattr(self, name) for name in ("text", "sort", "group", "which")}
        return urlencode({**several, "unfolded": sorted(self.unfolded), **one, **boxes}, doseq=True)

    @classmethod
    def of_query(cls, all_of: Callable[[str], Sequence[str]]) -> ListView:
        """Read filters and display options from a URL query; ``all_of`` returns all values of a parameter."""
        made = cls(
            **{name: [value for value in all_of(name) if value] for name in SEVERAL},  # type: ignore[arg-type]
            text=next(iter(all_of("text")), ""),
            sort=next(iter(all_of("sort")), ""),
            group=next(iter(all_of("group")), ""),
            which=next(iter(all_of("which")), ""),
            unfolded=frozenset(all_of("unfolded")),
        )
        picked = all_of("picked")
        return replace(made, picked=frozenset(filter(None, picked))) if picked else made


SEVERAL = ("projects", "states", "tags", "columns", "curves")
"""Fields of the list's options with any number of values."""
