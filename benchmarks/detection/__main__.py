"""Which runs in trouble are found, when, and at what price in false alarms: rlwatch, simple rules, and its peers.

    make bench-detect                                        # our recorded logs, and public runs if ../shared has them
    make bench-detect ARGS="--only ShibukiZero --each"       # the runs of one repository, and what was told of each
    make bench-detect ARGS="--cadence 2,5,10,20"             # and with rows as far apart as trainers log them
    python benchmarks/detection --fast --json before.json    # rlwatch alone; keep what it told
    python benchmarks/detection --fast --apart 5             # small batches in rows that are far apart
    python benchmarks/detection --sentences --sets samples,real_runs     # what is said at every row, judged
    python benchmarks/detection --compare before.json after.json
    python benchmarks/detection --read told.json --page docs/detection.md
    python benchmarks/detection --runs runs.csv.gz --index index.csv   # runs of your own

Peers run by their own code, in environments of their own, on the same rows. The definitions are in score.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from detection import cadence, methods, page, record, runs, sentences, tables  # noqa: E402
from detection.record import Recorded  # noqa: E402
from detection.tables import OURS  # noqa: E402
from forecast import tools  # noqa: E402

from rlwatch.errors import RLWatchError  # noqa: E402

ROOT = HERE.parent.parent
JUDGES: dict[str, methods.Judge] = {
    OURS: methods.ours,
    "two witnesses (chosen with these runs in view)": methods.by_row(methods.two_witnesses),
    "static rules": methods.by_row(methods.static),
    "6 sd over 128 rows": methods.by_row(methods.ewma),
    "clock: 40th row": methods.by_row(methods.clock),
}
HELD_OUT = "joint evidence, limit from other projects"
PEERS = {"rlprobe 0.1.0": ("rlprobe==0.1.0", "peer_rlprobe.py")} | tools.PEERS
SETS = ("samples", "real_runs", "real_runs_2", "wild", "synth")
CLOSE = 2
"""Steps between rows up to which a run is drawn apart."""


def main() -> None:
    """Print the tables of each set of runs; keep, compare or publish what was told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder for the peers' environments; made if it is not there")
    parser.add_argument("--runs", type=Path, help="long CSV of runs")
    parser.add_argument("--index", type=Path, help="their labels")
    parser.add_argument("--sets", help=f"comma separated: {', '.join((*SETS, runs.CORPUS))}; else all but the last")
    parser.add_argument("--only", help="runs whose project or name holds this")
    parser.add_argument("--fast", action="store_true", help="rlwatch alone, without simple rules")
    parser.add_argument("--without-forecasts", action="store_true", help="a third of the time")
    parser.add_argument(
        "--apart", type=int, default=1, help="judge runs of close rows as if these were so many times as far apart"
    )
    parser.add_argument("--cadence", help="also with a row every so many steps, comma separated; rlwatch alone")
    parser.add_argument(
        "--strict", action="store_true", help="leave out labels that are in doubt (else both are shown)"
    )
    parser.add_argument("--each", action="store_true", help="also what rlwatch told of each run")
    parser.add_argument("--json", type=Path, help="keep every run's alarms and findings here, set by set")
    parser.add_argument("--read", type=Path, nargs="+", help="judge no run, but take what was told from these")
    parser.add_argument(
        "--ledger", type=Path, help="write here what is not told the same at every cadence, kind by kind"
    )
    parser.add_argument("--page", type=Path, help="write the figures here, and those of README.md into it")
    parser.add_argument("--command", default="`make bench-detect`", help="what the page says it was made by")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two of these, run by run")
    parser.add_argument("--sentences", action="store_true", help="judge states, headlines and causes at every row")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if args.sentences:
        said(args)
        return
    if args.compare:
        compare(*args.compare, strict=args.strict)
        return
    state, recorded = record.state(), dict[str, Recorded]()
    for path in args.read or ():
        state, held = record.read(path)
        recorded |= held
    for name, told in () if args.read else judged(args):
        recorded[name] = told
        if args.json:
            record.write(args.json, recorded)
    show(recorded, strict=args.strict, each=args.each)
    if args.ledger:
        args.ledger.write_text(cadence.owed(cadence.ledger(recorded, OURS)))
    if args.page:
        args.page.write_text(page.page(recorded, state=state, command=args.command))
        page.into_readme(ROOT / "README.md", recorded)


def said(args: argparse.Namespace) -> None:
    """Print how the sentences of each set fare, with ``--each`` the headline at the end of each run."""
    for name, labelled in sets(args, {}):
        score = sentences.scored(labelled, forecasts=not args.without_forecasts)
        print(f"\n{name}: what is said, by label", *sentences.lines_of(score), sep="\n")
        for run, at, wrong in score.contradicted[:20]:
            print(f"  {run} at step {at}: {wrong}")
        if args.each:
            print(*(f"  {label}: {run}: {headline}" for run, label, headline in score.ends), sep="\n")


def judged(args: argparse.Namespace) -> Iterator[tuple[str, Recorded]]:
    """What the methods told of each set, and of each way of logging it."""
    judges = {OURS: JUDGES[OURS]} if args.fast else dict(JUDGES)
    if args.without_forecasts:
        judges[OURS] = methods.without_forecasts
    named = PEERS if args.peers else {}
    pythons = {name: tools.environment(args.peers, package) for name, (package, _) in named.items()}
    beside: dict[str, methods.Peer] = {HELD_OUT: methods.held_out}
    beside |= {name: methods.peer(pythons[name], HERE / PEERS[name][1]) for name in pythons}
    every = [int(number) for number in args.cadence.split(",")] if args.cadence else []
    for name, labelled in apart(sets(args, pythons), args.apart):
        yield name, record.record(labelled, judges, {} if args.fast else beside, jobs=args.jobs, title=name)
        yield from cadence.judged_every_way(name, labelled, {OURS: judges[OURS]}, every, jobs=args.jobs)


def apart(whole: Iterable[tuple[str, list[runs.Labelled]]], times: int) -> Iterator[tuple[str, list[runs.Labelled]]]:
    """The sets, or of each the runs with close rows, drawn so many times as far apart."""
    for name, labelled in whole:
        if times == 1:
            yield name, labelled
            continue
        close = [cadence.drawn_apart(run, times) for run in labelled if run.run.spacing <= CLOSE]
        yield f"{name}, {times} times as far apart", close


def show(recorded: Mapping[str, Recorded], *, strict: bool, each: bool) -> None:
    """Print the tables of each set and, with ``each``, what was told run by run."""
    for name, told in recorded.items():
        if told.every:
            continue
        for doubtless in doubts(told, strict):
            title = f"{name}, labels without doubt" if doubtless else name
            print(f"\n{title}: {tables.counted(told, strict=doubtless)}")
            print(tables.aligned(tables.methods(told, strict=doubtless)))
            if became := tables.verdicts(told, strict=doubtless):
                print(f"\n{title}, by verdict of {OURS} at the end")
                print(tables.aligned(became))
            if others := cadence.sparser(recorded, name):
                print(f"\n{title}, by the steps between rows")
                print(tables.aligned(tables.cadences(told, others, strict=doubtless)))
        if each:
            print(*record.each(told, OURS), sep="\n")


def doubts(recorded: Recorded, strict: bool) -> list[bool]:
    """Whether to leave out labels in doubt: both ways where there are some."""
    return ([] if strict else [False]) + [True] if any(run.doubt for run in recorded.runs) else [False]


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
            if recorded is not None and not recorded.every:
                ours = replace(recorded, told={OURS: recorded.told[OURS]})
                show({f"{name} at {state}": ours}, strict=strict, each=False)


def sets(args: argparse.Namespace, pythons: Mapping[str, Path]) -> Iterator[tuple[str, list[runs.Labelled]]]:
    """The runs to judge on, set by set; what is not here is named."""
    if args.runs:
        yield args.runs.name, runs.long_csv(args.runs, args.index)
        return
    for name in args.sets.split(",") if args.sets else SETS:
        try:
            whole = _set(name, pythons)
        except FileNotFoundError as error:
            print(f"{name}: not judged, {error}")
            continue
        found = [run for run in whole if not args.only or args.only in run.run.project or args.only in run.run.name]
        if found:
            yield name, found


def _set(name: str, pythons: Mapping[str, Path]) -> list[runs.Labelled]:
    if name != "synth":
        return runs.named(name)
    if "rlprobe 0.1.0" not in pythons:
        raise FileNotFoundError("rlprobe makes these runs: give --peers")
    worker = [pythons["rlprobe 0.1.0"], "-E", HERE / "peer_rlprobe.py", "synth"]
    made = subprocess.run(worker, capture_output=True, text=True, check=True)
    return runs.synthetic(made.stdout.splitlines())


if __name__ == "__main__":
    try:
        main()
    except RLWatchError as error:
        sys.exit(str(error))
