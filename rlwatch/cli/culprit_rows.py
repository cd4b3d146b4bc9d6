"""Culprits of gradient localisation as rows, and how a terminal shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from rlwatch.cli.console import say
from rlwatch.cli.fitting import print_fitting
from rlwatch.cli.spike_rows import rows_of
from rlwatch.cli.wording import number, one_line, step
from rlwatch.records import CULPRITS, JSON, LOCALISED, Event, SpikeBatch

MOST_CULPRITS = 50
MOST_SUMMARIES = 3

Row = dict[str, JSON]


def culprit_rows(batches: Sequence[SpikeBatch], most: int = MOST_CULPRITS) -> list[Row]:
    """At most ``most`` culprits, newest step first, within a step as they were recorded: worst first."""
    newest = sorted((b for b in batches if b.reason == CULPRITS), key=lambda batch: -batch.step)
    rows = [row for batch in newest for row in rows_of(batch)]
    return [row | {"layers": _layers(row)} for row in rows[:most]]


def localisations(events: Sequence[Event], most: int = MOST_CULPRITS) -> list[Row]:
    """What each localisation said of its step, newest first."""
    found = [event for event in events if event.kind == LOCALISED]
    return [{"step": event.step, **event.body} for event in reversed(found[-most:])]


def print_culprits(rows: Sequence[Row], summaries: Sequence[Row]) -> None:
    """A few lines on the newest localisations, then the culprits in a table; nothing where there are neither."""
    for summary in summaries[:MOST_SUMMARIES]:
        say(f"step {step(summary.get('step'))}: {_summary(summary)}", style="bold")
        for line in _details(summary):
            say(f"  {line}")
    if rows:
        ranks = len({row["rank"] for row in rows}) > 1
        shown = {name: show for name, show in _SHOWN.items() if ranks or name != ">rank"}
        cells = [[show(row) for show in shown.values()] for row in rows]
        known = [i for i in range(len(shown)) if any(line[i] != "-" for line in cells)]
        headers = [list(shown)[i] for i in known]
        print_fitting(
            headers,
            [[line[i] for i in known] for line in cells],
            _IMPORTANCE,
            title="Culprits, those of the newest step first",
        )


def _summary(found: Mapping[str, JSON]) -> str:
    """``gradient norm 8.31 (threshold 1.2), token ratio; by fd, gap 1e-04, complete``."""
    threshold, gap, method = found.get("threshold"), found.get("gap"), found.get("method")
    limit = "" if threshold is None else f" (threshold {number(threshold)})"
    text = f"gradient norm {number(found.get('norm'))}{limit}"
    if found.get("culprits"):
        text += f", {found.get('cause') or 'unexplained'}"
    if method:
        text += f"; by {method}"
    if gap is not None:
        text += f", gap {number(gap)}, {'complete' if found.get('complete') else 'incomplete'}"
    return text


def _details(found: Mapping[str, JSON]) -> list[str]:
    lines = [f"not localised: {found['why_not']}"] if found.get("why_not") else []
    if found.get("message"):
        lines.append(str(found["message"]))
    chain = (found.get("trace") or {}).get("chain")
    if chain:
        lines.append(f"not finite, in order of time: {', '.join(chain)}")
    lines += [f"note: {note}" for note in found.get("notes") or []]
    cost = found.get("cost") or {}
    if cost.get("forwards") or cost.get("backwards"):
        passes = f"{cost.get('forwards', 0)} forwards, {cost.get('backwards', 0)} backwards"
        lines.append(f"cost: {passes}, {number(float(cost.get('seconds') or 0.0))} s")
    return lines


def _layers(row: Row) -> dict[str, float]:
    """The stored JSON object; empty where there is none."""
    text = row.get("layers")
    found = json.loads(text) if isinstance(text, str) and text else {}
    return found if isinstance(found, dict) else {}


def _token(row: Row) -> str:
    """Its text where that was kept, and its id."""
    token, text = row.get("token_id"), row.get("text")
    known = "-" if token is None else str(token)
    return f"{one_line(repr(text), 16)} {known}" if text else known


def _layer(row: Row) -> str:
    """The layer with the largest share of the token's own gradient."""
    layers = row["layers"]
    if not layers:
        return "-"
    name = max(layers, key=layers.__getitem__)
    return f"{name.removeprefix('model.')} {layers[name]:.0%}"


def _share(row: Row) -> str:
    share = row.get("share")
    return "-" if share is None else f"{share:.1%}"


def _own(row: Row) -> str:
    return number(row.get("own_norm")) if row.get("verified") else "-"


def _plain(name: str) -> Callable[[Row], str]:
    return lambda row: number(row.get(name))


_SHOWN: Mapping[str, Callable[[Row], str]] = {
    ">step": lambda row: step(row["step"]),
    ">rank": lambda row: str(row["rank"]),
    ">seq": lambda row: str(row.get("sequence", "-")),
    ">pos": lambda row: str(row.get("position", "-")),
    "token": _token,
    "cause": lambda row: str(row.get("cause", "-")),
    ">share": _share,
    ">contribution": _plain("contribution"),
    ">own norm": _own,
    ">ratio": _plain("ratio"),
    ">advantage": _plain("advantage"),
    ">reward": _plain("reward"),
    ">logp": _plain("logp"),
    ">old": _plain("old_logp"),
    ">rollout": _plain("rollout_logp"),
    ">ref": _plain("ref_logp"),
    ">entropy": _plain("entropy"),
    ">coefficient": _plain("coefficient"),
    "layer": _layer,
    "why": lambda row: str(row.get("why") or "-"),
}
_IMPORTANCE = (
    "step", "rank", "seq", "pos", "token", "cause", "share", "own norm", "ratio", "advantage", "logp", "layer",
    "entropy", "contribution", "old", "rollout", "ref", "reward", "coefficient",
)  # fmt: skip
