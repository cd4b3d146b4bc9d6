"""Names of a log as text: what they were taken for; the same for scan, import and watch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from rlwatch.cli.console import say
from rlwatch.metrics import known, like_rewards, taken, unjudged, unread
from rlwatch.wording import plural

SHOWN = 12
"""Names in a line."""
MOST_ROLES = 200


def reading_lines(names: Collection[str], source: str) -> list[str]:
    """Lines that say what a run's names were read as, and which nothing reads; a known trainer's need no telling.

    >>> for line in reading_lines(["reward", "avg_kl", "lr", "H", "timing_s/gen"], ""): print(line)
    read as: lr as optim/lr, reward as reward/mean; guessed: avg_kl as policy/kl_ref
    unknown metrics, not used: H
    1 metric recognised but not used: speed
    """
    told = [each for each in taken(names, source) if each.metric]
    guessed = [f"{each.name} as {each.metric}" for each in told if each.guess]
    plainly = [
        f"{each.name} as {each.metric}" for each in told if not (source or each.guess or each.name == each.metric)
    ]
    whole = any(each.metric == "reward/mean" for each in told)
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
    """A line that says how to name the reward, where none is read and names sound like one.

    >>> map_hint(["attack_reward", "defend_reward", "loss"], "")
    ['no metric is recognised as the reward; map one with --map reward=attack_reward (or defend_reward)']
    """
    likely = like_rewards(unread(names, source))
    if not likely or "reward/mean" in known(names, source):
        return []
    other = f" (or {some(likely[1:])})" if likely[1:] else ""
    return [f"no metric is recognised as the reward; map one with --map reward={likely[0]}{other}"]


def role_lines(names: Collection[str], source: str) -> list[tuple[str, str, str]]:
    """Name, metric and reason of each of a run's names: which took which role, and why the others took none.

    >>> role_lines(["avg_reward", "acc"], "")[1]
    ('acc', '', 'superseded by avg_reward, a closer match for reward/mean')
    """
    return [(each.name, each.metric, each.why) for each in taken(names, source)]


def print_roles(names: Collection[str], source: str) -> None:
    """Print them, one a line, those that are read first."""
    told = role_lines(names, source)
    for name, metric, why in told[:MOST_ROLES]:
        say(f"  {name}: {metric or 'not used'} ({why})", style="dim")
    if len(told) > MOST_ROLES:
        say(f"  and {len(told) - MOST_ROLES:,} more names", style="dim")


def print_names(names: Collection[str], source: str, printed: Callable[..., object] = say) -> None:
    """Print these lines."""
    for line in reading_lines(names, source):
        printed(line, style="dim")


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
