"""The page of the results, written by the command; and the runs in two small files, to be looked at again."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from real_model.plan import Fault, Run
from real_model.score import Scored, name_of, replayed, scored

RUNS, SERIES = "runs.json", "series.parquet"

WORDS = """# A real model, broken on purpose

GRPO (TRL) on SmolLM2-135M-Instruct with full fine-tuning, watched at `full`: healthy runs, and runs with a planted
fault. `python benchmarks/real_model page` writes every figure of this page, from runs of
`python benchmarks/real_model run`. The page has failures as well as successes: no threshold was changed for these runs.

{made}

## How it was measured

- **Tasks**: sums; the larger of two numbers; the first letter of a word. A program verifies.
  {answers}
- **Faults** begin at step {begins} and last, except for the overflow (three steps). Both faults of the learning rate
  change the optimizer's rate, so TRL's log still shows the scheduler's. *Stale sampler*: the engine keeps the weights
  of that step. *top_p*: the engine samples with 0.8 and returns the log-probs it drew from. TRL's correction is off in
  both. *Overflow at padding*: one old log-prob behind the end of a response is -200, a ratio beyond float32. A loop
  that masks its loss afterwards gets a gradient of NaN; TRL 1.16 does not, so this fault did nothing here.
  *Entropy bonus*: weight 0.5.
- **Failed**: the first step from which on the mean share of right answers over five steps is below half of that of the
  ten steps before the fault. The share is the true verifier's, which rlwatch does not see if the reward is broken.
- **Alarm**: the first finding that is a warning or critical, at or after the fault. Steps are counted from the fault;
  0 is its own step. **Forecast**: the first forecast that is an alarm.
- **Cause**: the cause in the headline at the end of the run. *Right* if it is the changed hyperparameter.

"""


NOW = """## The same series, judged by the detectors of today

The tables above are of the day of the runs. These are the stored series of the same runs, replayed by
`rlwatch.scan`. They were in view when detectors were changed since, so they show what is said now and prove nothing.
Localisation is not replayed.
"""


def write(results: Path, page: Path, keep: Path | None) -> None:
    """Read the runs in ``results``: result files, or the two files that ``keep`` wrote."""
    read, cost = load(results)
    if keep is not None:
        kept(results, read, cost, keep)
    runs = [scored(one) for one in read]
    words = text(runs, read, cost)
    stored = (results if keep is None else keep) / SERIES
    if stored.exists():
        words += "\n" + "\n".join(of_today(runs, {name_of(one["run"]): one["run"] for one in read}, stored)) + "\n"
    page.write_text(words)


def of_today(runs: Sequence[Scored], told_by: Mapping[str, Mapping[str, Any]], stored: Path) -> list[str]:
    said = replayed(stored)
    rows = [NOW, "| run | alarm | critical | headline |", "|---|---|---|---|"]
    loud = []
    for run in in_order(runs):
        now = said[Run(**{**told_by[run.name], "fault": run.fault}).name]
        begins = 0 if run.fault is Fault.NONE else run.begins
        alarm, critical = (None if step is None else step - begins for step in (now.warned, now.critical))
        loud += [run.name] if run.fault is Fault.NONE and now.warned is not None else []
        rows.append(f"| {run.name} | {told(alarm)} | {told(critical)} | {clean(now.headline)} |")
    healthy = sum(run.fault is Fault.NONE for run in runs)
    return [*rows, "", f"Alarms on {len(loud)} of {healthy} healthy runs."]


def in_order(runs: Sequence[Scored]) -> list[Scored]:
    order = list(Fault)
    return sorted(runs, key=lambda run: (order.index(run.fault), run.task, run.name))


def load(results: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    if (results / RUNS).exists():
        held = json.loads((results / RUNS).read_text())
        return held["runs"], held["cost"]
    read = [json.loads(path.read_text()) for path in sorted(results.glob("*.json")) if path.stem != "cost"]
    cost = results / "cost.json"
    return read, json.loads(cost.read_text()) if cost.exists() else None


def kept(results: Path, read: Sequence[Any], cost: Any, keep: Path) -> None:
    """All results in one file, and all series in another: a column for each metric, a row for each step of each run."""
    keep.mkdir(parents=True, exist_ok=True)
    (keep / RUNS).write_text(json.dumps({"runs": read, "cost": cost}, separators=(",", ":")))
    tables = []
    for path in sorted(results.glob("*.parquet")):
        table = pq.read_table(path)
        tables.append(table.append_column("run", pa.array([path.stem] * table.num_rows)))
    if tables:
        together = pa.concat_tables(tables, promote_options="default")
        pq.write_table(together, keep / SERIES, compression="zstd", compression_level=19)


def text(runs: Sequence[Scored], read: Sequence[Any], cost: Any) -> str:
    runs = in_order(runs)
    faulty, healthy = [r for r in runs if r.fault is not Fault.NONE], [r for r in runs if r.fault is Fault.NONE]
    size = read[0]["size"] if read else {"answers": 0, "longest": 0, "begins": 0}
    many = f"{size['answers']} answers of at most {size['longest']} tokens a step, in groups of {size.get('group', 8)}."
    head = WORDS.format(made=made(read), answers=many, begins=size["begins"])
    return head + "\n".join([*summary(faulty, healthy), *of_faults(faulty), *of_healthy(healthy), *costs(cost)]) + "\n"


def made(read: Sequence[Any]) -> str:
    devices = sorted({one["device"] for one in read})
    versions = sorted({", ".join(f"{k} {v}" for k, v in one["versions"].items()) for one in read})
    seconds = [one["seconds_a_step"] for one in read]
    middle = f"{statistics.median(seconds):.1f} s a step, several runs in parallel" if seconds else ""
    return f"{len(read)} runs on {', '.join(devices)} ({'; '.join(versions)}); {middle}."


def summary(faulty: Sequence[Scored], healthy: Sequence[Scored]) -> list[str]:
    failed = [run for run in faulty if run.failed is not None]
    in_time = [run for run in failed if run.warned is not None and run.warned <= run.failed]
    critical = [run for run in failed if run.critical is not None]
    ahead = [run for run in failed if run.forecast is not None and run.forecast < run.failed]
    named = [run for run in faulty if run.right_cause]
    early = [run for run in faulty if run.false_alarms]
    loud = [run for run in healthy if run.false_alarms]
    quiet = [run for run in faulty if run.failed is None]
    wrong, none = sum(run.right_cause is False for run in faulty), sum(run.right_cause is None for run in faulty)
    return [
        "## In short\n",
        f"- {len(failed)} of {len(faulty)} runs with a fault failed. An alarm came no later than the failure in"
        f" {len(in_time)}, at any time in {found(run.warned for run in failed)}, a critical one in"
        f" {len(critical)}.",
        f"- Of the {len(quiet)} that did not fail, {found(run.warned for run in quiet)} had an alarm after it.",
        f"- The cause was named rightly in {len(named)} of {len(faulty)}, wrongly in {wrong}, not at all in {none}.",
        f"- A forecast was an alarm before the failure in {len(ahead)} of {len(failed)}.",
        f"- Alarms on {len(loud)} of {len(healthy)} healthy runs, and before its fault on {len(early)} of the others.",
        "",
    ]


def of_faults(runs: Sequence[Scored]) -> list[str]:
    rows = [
        "## Runs with a fault\n",
        "| fault | task | right before, at the end | failed | alarm | critical | forecast | kinds | cause | right |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        verdict = {True: "yes", False: "no", None: ""}[run.right_cause]
        cause = f"{run.cause}, from {told(run.onset)}" if run.cause else "none"
        kinds = ", ".join(run.kinds) or "none"
        times = " | ".join(told(step) for step in (run.failed, run.warned, run.critical, run.forecast))
        shares = f"{run.level:.2f}, {run.end:.2f}"
        rows.append(f"| {run.fault.value} | {run.task} | {shares} | {times} | {kinds} | {cause} | {verdict} |")
    rows += ["", "The headlines, and the named tokens:", ""]
    for run in runs:
        named = f" Tokens: {run.tokens}." if run.tokens else ""
        rows.append(f"- {run.name}: {clean(run.headline)}.{named}")
    early = [run for run in runs if run.false_alarms]
    rows += ["", *[f"Before its fault {run.name} had {', '.join(run.false_alarms)}." for run in early], ""]
    return rows


def of_healthy(runs: Sequence[Scored]) -> list[str]:
    rows = [
        "## Healthy runs\n",
        "| run | right at the start, at the end | alarms | headline |",
        "|---|---|---|---|",
    ]
    for run in runs:
        alarms = ", ".join(run.false_alarms) or "none"
        rows.append(f"| {run.name} | {run.start:.2f}, {run.end:.2f} | {alarms} | {clean(run.headline)} |")
    return [*rows, ""]


def costs(cost: Any) -> list[str]:
    if cost is None:
        return []
    seconds = {way: statistics.median(turn["seconds"] for turn in turns) for way, turns in cost["ways"].items()}
    cpu = {way: statistics.median(turn["cpu_seconds"] for turn in turns) for way, turns in cost["ways"].items()}
    more = seconds["full"] - seconds["unwatched"]
    each = "; ".join(f"{way} {milliseconds(turns)}" for way, turns in cost["ways"].items())
    return [
        "## What watching costs\n",
        f"Alone on {cost['device']}, in turn, median of the steps after the first of each: a step takes"
        f" {1e3 * seconds['unwatched']:.0f} ms unwatched and {1e3 * seconds['full']:.0f} ms at `full` with localising"
        f" ({1e3 * more:+.0f} ms, {more / seconds['unwatched']:+.1%}); CPU time of the process"
        f" {1e3 * cpu['unwatched']:.0f} and {1e3 * cpu['full']:.0f} ms. Each turn: {each}.",
        "",
    ]


def found(steps: Iterable[int | None]) -> int:
    return sum(step is not None for step in steps)


def milliseconds(turns: Sequence[Any]) -> str:
    return ", ".join(f"{1e3 * turn['seconds']:.0f}" for turn in turns) + " ms"


def told(step: int | None) -> str:
    return "never" if step is None else f"{step:+d}" if step else "0"


def clean(words: str) -> str:
    return " ".join(words.replace("|", "/").split()).rstrip(".")
