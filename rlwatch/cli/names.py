"""``rlwatch names``: list the metrics and their names in each trainer, or look up the metric that a given name is read
as.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from rlwatch.cli.console import print_json, print_table, print_text
from rlwatch.cli.options import FormatOption, OutputFormat, TrainerOption, examples
from rlwatch.metrics import (
    BY_NAME,
    OPEN,
    TABLE,
    Family,
    Metric,
    Reading,
    known,
    like_rewards,
    resolve,
    taken,
    unjudged,
    unread,
)
from rlwatch.wording import nearest, one_line, plural

# The mapping of a log's metric names as text, for scan, import and watch.


SHOWN = 12
"""Most metric names that are printed in one line."""
MOST_ROLES = 200


def reading_lines(names: Collection[str], source: str) -> list[str]:
    """Return lines on the metrics that a run's ``names`` are read as, and on the names that are not used.

    ``source`` is the trainer; the usual mapping of a known trainer is not listed.

    >>> for line in reading_lines(["reward", "avg_kl", "lr", "H", "timing_s/gen"], ""): print(line)
    read as: lr as optim/lr, reward as reward/mean; guessed: avg_kl as policy/kl_ref
    unknown metrics, not used: H
    1 metric recognised but not used: speed
    """
    used = [each for each in taken(names, source) if each.metric]
    guessed = [f"{each.name} as {each.metric}" for each in used if each.guess]
    plainly = [
        f"{each.name} as {each.metric}" for each in used if not (source or each.guess or each.name == each.metric)
    ]
    whole = any(each.metric == "reward/mean" for each in used)
    parts = [f"read as: {some(plainly)}"] if plainly else []
    parts += [f"guessed: {some(guessed)}"] if guessed else []
    lines = ["; ".join(parts)] if parts else []
    strange = unread(names, source)
    lines += map_hint(names, source)
    if unknown := [name for name in strange if not unjudged(name, whole=whole)]:
        lines.append(f"unknown metrics, not used: {some(unknown)}")
    if counted := Counter(reason for name in strange if name not in unknown and (reason := unjudged(name))):
        reasons = [f"{n} {reason}" for reason, n in counted.most_common()] if len(counted) > 1 else list(counted)
        lines.append(f"{plural(counted.total(), 'metric')} recognised but not used: {some(reasons)}")
    return lines


def map_hint(names: Collection[str], source: str) -> list[str]:
    """Return a hint to map the reward, if none of the metric ``names`` is read as the reward and some resemble it;
    else [].

    >>> map_hint(["attack_reward", "defend_reward", "loss"], "")
    ['no metric is recognised as the reward; map one with --map reward=attack_reward (or defend_reward)']
    """
    likely = like_rewards(unread(names, source))
    if not likely or "reward/mean" in known(names, source):
        return []
    other = f" (or {some(likely[1:])})" if likely[1:] else ""
    return [f"no metric is recognised as the reward; map one with --map reward={likely[0]}{other}"]


def role_lines(names: Collection[str], source: str) -> list[tuple[str, str, str]]:
    """Return for each metric name of a run: the name, the metric it is read as ("" if it is not used), and the reason.

    >>> role_lines(["avg_reward", "acc"], "")[1]
    ('acc', '', 'superseded by avg_reward, a closer match for reward/mean')
    """
    return [(each.name, each.metric, each.why) for each in taken(names, source)]


def print_roles(names: Collection[str], source: str) -> None:
    """Print for each metric name of a run the metric it is read as and the reason, one a line, names that are used
    first.
    """
    roles = role_lines(names, source)
    for name, metric, why in roles[:MOST_ROLES]:
        print_text(f"  {name}: {metric or 'not used'} ({why})", style="dim")
    if len(roles) > MOST_ROLES:
        print_text(f"  and {len(roles) - MOST_ROLES:,} more names", style="dim")


def print_names(names: Collection[str], source: str, printed: Callable[..., object] = print_text) -> None:
    """Print how a run's metric ``names`` are read, as lines of :func:`reading_lines`; ``printed`` prints one line."""
    for line in reading_lines(names, source):
        printed(line, style="dim")


def some(names: Sequence[str]) -> str:
    """Return the first 12 of ``names``, separated by commas, and the number of further ones."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


# ``rlwatch names``: list the metrics, or look up names.


EPILOG = examples(
    "rlwatch names", "rlwatch names --find entropy", "rlwatch names actor/entropy my_kl --source verl || echo 'unknown'"
)
_CLOSENESS = ("the canonical name", "the same quantity", "a proxy")


def names(
    asked: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Metric names from your log to look up.")
    ] = None,
    *,
    find: Annotated[str, typer.Option("--find", metavar="TEXT", help="Search metrics by name or meaning.")] = "",
    source: TrainerOption = "",
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List the metrics that rlwatch knows, with units and trainer names; or look up how given names are read.

    Exit code 1 if a given name is unknown.
    """
    if asked:
        rows = [_lookup(name, source) for name in asked]
        if output is OutputFormat.JSON:
            print_json(rows)
        else:
            print_table(
                ("name", "read as", "how"),
                [[one_line(str(row[part])) for part in ("name", "metric", "how")] for row in rows],
            )
        if not all(row["known"] for row in rows):
            raise typer.Exit(1)
        return
    chosen = [metric for metric in (*TABLE, *OPEN) if find.lower() in f"{metric.name} {metric.meaning}".lower()]
    if output is OutputFormat.JSON:
        print_json([{**asdict(metric), "family": metric.family.value} for metric in chosen])
    elif not chosen:
        print_text(f"no metric has {find!r} in its name or meaning; rlwatch names lists all {len(TABLE) + len(OPEN)}")
    else:
        for family in Family:
            _print(family, [metric for metric in chosen if metric.family is family])


def _lookup(name: str, source: str) -> dict[str, str | bool]:
    """Return how one name is read."""
    found = resolve(name, source)
    if found is not None:
        return {"name": name, "metric": found.metric.name, "how": _how(found), "known": True}
    reason = unjudged(name)
    if reason:
        return {"name": name, "metric": "", "how": f"recognised, not used: {reason}", "known": True}
    every = {*BY_NAME, *(alias.name for metric in TABLE for alias in metric.aliases)}
    near = nearest(name, sorted(every), 2, 0.75)
    hint = f"; close to it: {', '.join(near)}" if near else ""
    return {"name": name, "metric": "", "how": f"unknown, not used{hint}", "known": False}


def _how(reading: Reading) -> str:
    if reading.guess:
        return "guessed from the name"
    closeness = _CLOSENESS[reading.closeness]
    of = reading.alias.source if reading.alias is not None else ""
    return f"{closeness}, in runs of {of}" if of else closeness


def _print(family: Family, metrics: Iterable[Metric]) -> None:
    rows = [(metric.name, f"{metric.unit} {metric.span}".strip(), metric.meaning, metric.called) for metric in metrics]
    if rows:
        print_table(("metric", "unit, range", "meaning", "names in trainers"), rows, title=family.value)
        print_text()
