"""What methods told of sets of runs: made, kept as JSON, and compared with what another state of the code told."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from detection.methods import Judge, Peer
from detection.runs import Labelled
from detection.score import Alarm, Run, Told

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recorded:
    """A set of runs and, by method, what was told of each.

    ``every``: steps from row to row where rows were joined, 0 as they were logged; ``how`` they were joined.
    """

    runs: tuple[Run, ...]
    told: dict[str, tuple[Told, ...]]
    every: int = 0
    how: str = ""

    def kept(self, strict: bool) -> tuple[tuple[Run, ...], dict[str, tuple[Told, ...]]]:
        """All of it, or without the runs whose label is in doubt."""
        places = [i for i, run in enumerate(self.runs) if not (strict and run.doubt)]
        return tuple(self.runs[i] for i in places), {
            method: tuple(told[i] for i in places) for method, told in self.told.items()
        }


def record(
    labelled: Sequence[Labelled], judges: Mapping[str, Judge], peers: Mapping[str, Peer], *, jobs: int, title: str
) -> Recorded:
    """Let every method judge every run; a bar on stderr shows how far it is. A peer that takes too long is left out."""
    told: dict[str, list[Told]] = {name: [Told()] * len(labelled) for name in judges}
    rows = [len(run.run.steps) for run in labelled]
    done = 0
    for place, answers in _answers(labelled, judges, jobs):
        done += rows[place]
        _bar(title, done, sum(rows))
        for name, answer in zip(judges, answers, strict=True):
            told[name][place] = answer
    with ThreadPoolExecutor(jobs) as threads:
        answered = threads.map(lambda judge: _in_time(judge, labelled), peers.values())
        beside = dict(zip(peers, answered, strict=True))
    for name in (name for name, answers in beside.items() if answers is None):
        print(f"{title}: not judged by {name}, which took too long")
    whole = {name: tuple(each) for name, each in told.items()}
    return Recorded(tuple(run.run for run in labelled), whole | {name: each for name, each in beside.items() if each})


def _in_time(judge: Peer, labelled: Sequence[Labelled]) -> tuple[Told, ...] | None:
    try:
        return tuple(judge(labelled))
    except subprocess.TimeoutExpired:
        return None


_work: tuple[Sequence[Labelled], Sequence[Judge]] = ((), ())


def _answers(labelled: Sequence[Labelled], judges: Mapping[str, Judge], jobs: int) -> Iterator[tuple[int, list[Told]]]:
    """Longest runs first, so that no process ends long after the others."""
    global _work  # forked: neither runs nor methods are sent
    _work = (labelled, tuple(judges.values()))
    order = sorted(range(len(labelled)), key=lambda i: -len(labelled[i].run.steps))
    if jobs < 2:
        yield from map(_judge, order)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_judge, order)


def _judge(place: int) -> tuple[int, list[Told]]:
    labelled, judges = _work
    return place, [judge(labelled[place]) for judge in judges]


def _bar(title: str, done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        filled = 30 * done // max(1, total)
        sys.stderr.write(f"\r{title}: [{'#' * filled}{' ' * (30 - filled)}] {done}/{total} rows")
        sys.stderr.write("\n" if done == total else "")
        sys.stderr.flush()


# On disk.


def write(path: Path, recorded: Mapping[str, Recorded]) -> None:
    """Keep what was told, with the state of the code that told it."""
    sets = {
        name: {"every": each.every, "how": each.how, "runs": [asdict(run) for run in each.runs], "told": _plain(each)}
        for name, each in recorded.items()
    }
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps({"state": state(), "sets": sets}, indent=1))
    beside.replace(path)


def _plain(recorded: Recorded) -> dict[str, dict[str, Any]]:
    return {
        method: {run.name: asdict(each) for run, each in zip(recorded.runs, told, strict=True)}
        for method, told in recorded.told.items()
    }


def read(path: Path) -> tuple[str, dict[str, Recorded]]:
    """The state of the code, and what it told."""
    held = json.loads(path.read_text())
    return held["state"], {name: _recorded(each) for name, each in held["sets"].items()}


def _recorded(held: Mapping[str, Any]) -> Recorded:
    runs = tuple(Run(**{**run, "steps": tuple(run["steps"])}) for run in held["runs"])
    told = {method: tuple(_told(by_run[run.name]) for run in runs) for method, by_run in held["told"].items()}
    return Recorded(runs, told, held.get("every", 0), held.get("how", ""))


def _told(held: Mapping[str, Any]) -> Told:
    alarms, findings = (tuple(Alarm(**alarm) for alarm in held[name]) for name in ("alarms", "findings"))
    return Told(alarms, held["critical_at_end"], findings, held.get("verdict", ""))


def state() -> str:
    """The commit, and whether something is not committed."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or "unknown"


# What changed.


def changes(before: Recorded, after: Recorded, method: str) -> Iterator[str]:
    """A line for each run of which something else is told; runs that only one of them has are named."""
    old = dict(zip((run.name for run in before.runs), before.told.get(method, ()), strict=False))
    new = dict(zip((run.name for run in after.runs), after.told.get(method, ()), strict=False))
    for run in after.runs:
        if run.name not in old or run.name not in new:
            yield f"only after: {run.name}: {_said(new[run.name].alarms) or 'nothing'}"
            continue
        was, now = _firsts(old[run.name].alarms), _firsts(new[run.name].alarms)
        parts = [f"+ {_line(key, now[key])}" for key in now if key not in was]
        parts += [f"- {_line(key, was[key])}" for key in was if key not in now]
        parts += [f"{key[0]} {key[1]} {was[key]} -> {now[key]}" for key in now if key in was and was[key] != now[key]]
        if old[run.name].critical_at_end != new[run.name].critical_at_end:
            parts.append("critical at its end" if new[run.name].critical_at_end else "no longer critical at its end")
        if parts:
            yield f"{_label(run)} {run.name}: {'; '.join(parts)}"
    for name in old:
        if name not in new:
            yield f"only before: {name}"


def each(recorded: Recorded, method: str) -> Iterator[str]:
    """A line for each run of which something is told or that is not healthy."""
    for run, told in zip(recorded.runs, recorded.told[method], strict=True):
        if run.severity != "healthy" or told.alarms:
            stands = " (critical at its end)" if told.critical_at_end else ""
            yield f"{_label(run)} {run.name}: {_said(told.alarms) or 'nothing'}{stands}"


def _label(run: Run) -> str:
    onset = "" if run.onset is None else f" at {run.onset:g}"
    return f"[{run.severity}{onset}{', DOUBT' if run.doubt else ''}; {len(run.steps)} rows to {run.steps[-1]}]"


def _firsts(alarms: Sequence[Alarm]) -> dict[tuple[str, str], int]:
    """The first step of each kind at each severity."""
    firsts: dict[tuple[str, str], int] = {}
    for alarm in alarms:
        key = (alarm.kind, "critical" if alarm.critical else "warning")
        firsts[key] = min(alarm.step, firsts.get(key, alarm.step))
    return firsts


def _said(alarms: Sequence[Alarm]) -> str:
    return ", ".join(_line(key, step) for key, step in _firsts(alarms).items())


def _line(key: tuple[str, str], step: int) -> str:
    return f"{' '.join(filter(None, key))} {step}"
