"""Which runs in trouble are found, when, and at what price in false alarms: rlwatch, simple rules, and its peers.

    make bench-detect                                   # our own recorded logs, and ../shared/real_runs if it is there
    python benchmarks/detection --peers /tmp/peers      # with PyPI's rlwatch 0.5.1 and rldoctor 0.2.0, installed there
    python benchmarks/detection --runs runs.csv.gz --index index.csv   # runs of your own

Peers run by their own code, in environments of their own, on the same rows. Counts come before rates; the placebo is
how many of the events a method would have hit if it alarmed in them as it does in healthy runs over the same steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from detection import methods, runs  # noqa: E402
from detection.score import Score, score  # noqa: E402

from rlwatch.scanner import scan  # noqa: E402

PUBLIC = HERE.parent.parent.parent / "shared" / "real_runs"
PEERS = {
    "PyPI rlwatch 0.5.1": ("rlwatch==0.5.1", "peer_rlwatch.py"),
    "rldoctor 0.2.0": ("rldoctor==0.2.0", "peer_rldoctor.py"),
}
HEAD = (
    "method",
    "found in time",
    "found at all",
    "delay",
    "placebo",
    "p",
    "any alarm",
    "critical",
    "transients critical",
)


def main() -> None:
    """Print a table for each set of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder for the peers' environments; made if it is not there")
    parser.add_argument("--runs", type=Path, help="long CSV of runs")
    parser.add_argument("--index", type=Path, help="their labels")
    parser.add_argument("--each", action="store_true", help="also what was told of each run that is not healthy")
    args = parser.parse_args()
    compared = {
        "rlwatch (this one)": methods.ours,
        "static rules": methods.by_row(methods.static),
        "6 sd over 128 rows": methods.by_row(methods.ewma),
        "clock: 40th row": methods.by_row(methods.clock),
        "never": methods.by_row(methods.never),
    } | (peers(args.peers) if args.peers else {})
    for name, labelled in sets(args).items():
        table(name, labelled, compared)
        if args.each:
            each(labelled)


def each(labelled: list[runs.Labelled]) -> None:
    """Our alarms, run by run: the first of each kind."""
    for run in labelled:
        report = scan(run.records, source=run.source)
        first = {}
        for alarm in report.alarms:
            first.setdefault((alarm.kind, alarm.severity.value), alarm.step)
        if run.severity != "healthy" or first:
            told = ", ".join(f"{kind} {severity} {step}" for (kind, severity), step in first.items()) or "nothing"
            print(
                f"  {run.severity} at {run.onset}, {len(run.rows)} rows to {run.rows[-1][0]}, {run.name[:60]}: {told}"
            )


def sets(args: argparse.Namespace) -> dict[str, list[runs.Labelled]]:
    """The runs to judge on, by the name of their set."""
    if args.runs:
        return {args.runs.name: runs.long_csv(args.runs, args.index)}
    found = {"our own recorded logs": runs.sample_logs(HERE.parent.parent / "sample_logs")}
    if PUBLIC.is_dir():
        found["public runs"] = runs.long_csv(PUBLIC / "runs.csv.gz", PUBLIC / "index.csv")
    else:
        print(f"public runs are not here ({PUBLIC}): only our own are judged")
    return found


def peers(folder: Path) -> dict[str, methods.Method]:
    """Each in its own environment: one of them has our package's name."""
    made = {}
    for name, (package, worker) in PEERS.items():
        place = folder / package.replace("==", "-")
        if not (place / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            subprocess.run([place / "bin" / "pip", "install", "--quiet", package], check=True)
        made[name] = methods.peer(place / "bin" / "python", HERE / worker)
    return made


def table(name: str, labelled: list[runs.Labelled], compared: dict[str, methods.Method]) -> None:
    """One line a method."""
    kinds = [run.severity for run in labelled]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(f"\n{name}: {len(labelled)} runs ({counts}), {sum(len(run.rows) for run in labelled)} rows")
    lines = [HEAD, *(_line(method, score(labelled, judge(labelled))) for method, judge in compared.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _line(name: str, s: Score) -> tuple[str, ...]:
    delay = "-" if s.delay is None else f"{s.delay:+.0f}"
    return (
        name,
        f"{s.found}/{s.events}",
        f"{s.found_late}/{s.events}",
        delay,
        f"{s.placebo:.1f}",
        f"{s.p:.2g}",
        f"{s.healthy_any}/{s.healthy} runs, {s.per_thousand:.2f}/1000 rows",
        f"{s.healthy_critical}/{s.healthy} runs, {s.critical_per_thousand:.2f}/1000 rows",
        f"{s.transients_critical}",
    )


if __name__ == "__main__":
    main()
