"""Which runs in trouble are found, when, and at what price in false alarms: rlwatch, simple rules, and its peers.

    make bench-detect                                        # our recorded logs, and public runs if ../shared has them
    make bench-detect ARGS="--only ShibukiZero --each"       # the runs of one repository, and what was told of each
    python benchmarks/detection --json before.json --fast    # rlwatch alone; keep what it told
    python benchmarks/detection --compare before.json after.json
    python benchmarks/detection --runs runs.csv.gz --index index.csv   # runs of your own

Peers run by their own code, in environments of their own, on the same rows. The definitions are in score.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from detection import methods, record, runs  # noqa: E402
from detection.record import Recorded  # noqa: E402
from detection.score import LEVELS, Rate, Score, Told, score  # noqa: E402

SHARED = HERE.parent.parent.parent / "shared"
OURS = "rlwatch"
JUDGES: dict[str, methods.Judge] = {
    OURS: methods.ours,
    "static rules": methods.by_row(methods.static),
    "6 sd over 128 rows": methods.by_row(methods.ewma),
    "clock: 40th row": methods.by_row(methods.clock),
    "never": methods.by_row(methods.never),
}
PEERS = {
    "PyPI rlwatch 0.5.1": ("rlwatch==0.5.1", "peer_rlwatch.py"),
    "rldoctor 0.2.0": ("rldoctor==0.2.0", "peer_rldoctor.py"),
}
HEAD = (
    "method", "level", "hit", "crashes", "early", "lead", "placebo", "p", "ever", "false/1000 rows", "/1000 steps",
    "healthy alarmed", "transients critical at end", "dead told",
)  # fmt: skip


def main() -> None:
    """Print a table for each set of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder for the peers' environments; made if it is not there")
    parser.add_argument("--runs", type=Path, help="long CSV of runs")
    parser.add_argument("--index", type=Path, help="their labels")
    parser.add_argument("--sets", help="comma separated: " + ", ".join(SETS))
    parser.add_argument("--only", help="runs whose project or name holds this")
    parser.add_argument("--fast", action="store_true", help="rlwatch alone, without simple rules")
    parser.add_argument("--without-forecasts", action="store_true", help="a third of the time")
    parser.add_argument(
        "--strict", action="store_true", help="leave out labels that are in doubt (else both are shown)"
    )
    parser.add_argument("--each", action="store_true", help="also what rlwatch told of each run")
    parser.add_argument("--json", type=Path, help="keep every run's alarms and findings here")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two of these, run by run")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if args.compare:
        compare(*args.compare, strict=args.strict)
        return
    judges = {OURS: JUDGES[OURS]} if args.fast else dict(JUDGES)
    if args.without_forecasts:
        judges[OURS] = methods.without_forecasts
    beside = peers(args.peers) if args.peers else {}
    recorded = {
        name: record.record(labelled, judges, beside, jobs=args.jobs, title=name) for name, labelled in sets(args)
    }
    for name, told in recorded.items():
        tables(name, told, strict=args.strict)
        if args.each:
            print(*record.each(told, OURS), sep="\n")
    if args.json:
        record.write(args.json, recorded)


def compare(before: Path, after: Path, *, strict: bool) -> None:
    """Print what changed run by run, then both tables."""
    (was, old), (now, new) = record.read(before), record.read(after)
    for name, told in new.items():
        if name not in old:
            print(f"\n{name}: only in {after}")
            continue
        lines = list(record.changes(old[name], told, OURS))
        print(f"\n{name}: {len(lines)} of {len(told.runs)} runs changed from {was} to {now}", *lines, sep="\n")
    for name, told in new.items():
        for state, recorded in ((was, old.get(name)), (now, told)):
            if recorded is not None:
                tables(f"{name} at {state}", Recorded(recorded.runs, {OURS: recorded.told[OURS]}), strict=strict)


# The runs.


def samples() -> list[runs.Labelled]:
    """Our own recorded logs."""
    return runs.sample_logs(HERE.parent.parent / "sample_logs")


def public(folder: str) -> list[runs.Labelled]:
    """A folder of ``../shared`` with an index."""
    return runs.long_csv(SHARED / folder / "runs.csv.gz", SHARED / folder / "index.csv")


def wild() -> list[runs.Labelled]:
    """Logs as their owners left them."""
    found, refused = runs.wild(SHARED / "wild")
    print(f"wild: {len(refused)} units hold no run of ten rows that is read")
    return found


SETS = {
    "samples": samples,
    "real_runs": lambda: public("real_runs"),
    "real_runs_2": lambda: public("real_runs_2"),
    "wild": wild,
}


def sets(args: argparse.Namespace) -> Iterator[tuple[str, list[runs.Labelled]]]:
    """The runs to judge on, set by set."""
    if args.runs:
        yield args.runs.name, runs.long_csv(args.runs, args.index)
        return
    for name in args.sets.split(",") if args.sets else SETS:
        if name != "samples" and not (SHARED / name).is_dir():
            print(f"{name} is not here ({SHARED / name}): not judged")
            continue
        found = [
            run for run in SETS[name]() if not args.only or args.only in run.run.project or args.only in run.run.name
        ]
        if found:
            yield name, found


def peers(folder: Path) -> dict[str, methods.Peer]:
    """Each in its own environment: one of them has our package's name."""
    made = {}
    for name, (package, worker) in PEERS.items():
        place = folder / package.replace("==", "-")
        if not (place / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            subprocess.run([place / "bin" / "pip", "install", "--quiet", package], check=True)
        made[name] = methods.peer(place / "bin" / "python", HERE / worker)
    return made


# Tables.


def tables(name: str, recorded: Recorded, *, strict: bool) -> None:
    """One with all labels and, where some are in doubt, one without these."""
    if not strict or not any(run.doubt for run in recorded.runs):
        table(name, recorded, strict=False)
    if any(run.doubt for run in recorded.runs):
        table(f"{name}, labels without doubt", recorded, strict=True)


def table(name: str, recorded: Recorded, *, strict: bool) -> None:
    """One line for each method and level."""
    kept, told = recorded.kept(strict)
    kinds = [run.severity for run in kept]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(f"\n{name}: {len(kept)} runs ({counts}), {sum(len(run.steps) for run in kept)} rows")
    lines = [HEAD]
    for method, answers in told.items():
        lines += [_line(method, level, score(kept, answers, LEVELS[level])) for level in _levels(answers)]
        if any(answer.findings for answer in answers):
            for level in ("critical", "any"):
                found = score(kept, answers, LEVELS[level], findings=True)
                lines.append(_line(f"{method}, findings", level, found))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _levels(answers: Sequence[Told]) -> list[str]:
    """Levels at which a method tells anything of its own: rules know one, and only ours has forecasts."""
    kinds = {alarm.kind for answer in answers for alarm in answer.alarms}
    if kinds != {""} and kinds:
        return list(LEVELS)
    warns = any(not alarm.critical for answer in answers for alarm in answer.alarms)
    return ["critical", "any"] if warns else ["critical"]


def _line(name: str, level: str, s: Score) -> tuple[str, ...]:
    return (
        name,
        level,
        _rate(s.hits),
        _count(s.crashes),
        _rate(s.early),
        "-" if s.lead is None else f"{s.lead:.0f}",
        "-" if s.placebo is None else f"{s.placebo:.2f}",
        f"{s.p:.2g}",
        _count(s.ever),
        _rate(s.per_1000_rows),
        _rate(s.per_1000_steps),
        _rate(s.healthy),
        _count(s.transients),
        _count(s.dead) + (f", {s.dead_repeated} again" if s.dead_repeated else ""),
    )


def _count(rate: Rate) -> str:
    return f"{rate.count:g}/{rate.total:g}"


def _rate(rate: Rate) -> str:
    """Counts of a share, the value of another rate, with the interval that takes runs for independent."""
    if rate.value is None:
        return "-"
    edges = rate.exact
    said = f"{rate.value:.2f}" if rate.scale != 1 else _count(rate)
    return said if edges is None else f"{said} [{edges[0]:.2f}-{edges[1]:.2f}]"


if __name__ == "__main__":
    main()
