"""A corpus of runs that fail and runs that do not, to fit and judge forecasts of crashes on.

python -m benchmarks.forecast generate --out build/runs --runs 600 --jobs 8 --seed 1
python -m benchmarks.forecast generate --out build/runs --runs 600 --jobs 8 --seed 2 --pace gradual
python -m benchmarks.forecast generate --out build/runs --runs 200 --jobs 8 --seed 4 --pace long --batch 4
python -m benchmarks.forecast generate --out build/runs --runs 200 --jobs 8 --seed 6 --pace long --start cold
python -m benchmarks.forecast generate --out build/runs --runs 40 --recipes lr_step,control --backend ray
python -m benchmarks.forecast generate-trl --out build/runs --runs 84 --jobs 2 --seed 1
python -m benchmarks.forecast generate-trl --out build/runs --runs 104 --jobs 2 --seed 5 --pace long --batch 3
python -m benchmarks.forecast pack --from build/runs --out build/corpus/cold-2.parquet
python -m benchmarks.forecast fetch --out build/corpus
python -m benchmarks.forecast sample --from build/corpus --out benchmarks/forecast/sample
python -m benchmarks.forecast recipes
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its module `statistics` would hide the standard one

from forecast.artefacts import RUNS, SAMPLE, SEED, entry, fetch, sample  # noqa: E402
from forecast.generate import BACKENDS, generate  # noqa: E402
from forecast.recipes import AT_ONCE, RECIPES, UNSEEN, Pace, Start  # noqa: E402
from forecast.tables import pack  # noqa: E402
from forecast.trl_recipes import AT_ONCE as TRL_AT_ONCE  # noqa: E402

from rlwatch.errors import RLWatchError  # noqa: E402


def main() -> None:
    """Make runs, or pack those that were made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("generate", help="make runs that are not there yet")
    making.add_argument("--out", type=Path, required=True, help="folder, one file a run")
    making.add_argument("--runs", type=int, default=600)
    making.add_argument("--jobs", type=int, default=-1, help="processes (default: one a core)")
    making.add_argument("--seed", type=int, default=1)
    making.add_argument("--recipes", default="", help="only these, separated by commas")
    making.add_argument(
        "--pace", choices=list(Pace), default=Pace.DRAWN, type=Pace, help="how fast faults come that can be slow"
    )
    making.add_argument("--batch", type=int, default=1, help="times as many responses a step as the recipes draw")
    making.add_argument(
        "--start", choices=list(Start), default=Start.WARM, type=Start, help="cold: the reward is still to take off"
    )
    making.add_argument("--backend", choices=BACKENDS, default="loky", help="ray and dask: on a cluster that is up")
    real = commands.add_parser("generate-trl", help="the same of runs of TRL, which take longer")
    real.add_argument("--out", type=Path, required=True, help="folder, one file a run")
    real.add_argument("--runs", type=int, default=84)
    real.add_argument("--jobs", type=int, default=1, help="processes")
    real.add_argument("--seed", type=int, default=1)
    real.add_argument(
        "--pace", choices=[Pace.DRAWN, Pace.LONG], default=Pace.DRAWN, type=Pace, help="long: twice as long"
    )
    real.add_argument("--batch", type=int, default=1, help="times as many responses a step as the recipes draw")
    packing = commands.add_parser("pack", help="join all runs of some folders in two files")
    packing.add_argument("--from", type=Path, required=True, nargs="+", dest="folders")
    packing.add_argument("--out", type=Path, required=True, help="a .parquet; the records go beside it, as -runs")
    fetching = commands.add_parser("fetch", help="put all shards of the corpus into a folder, and check their hashes")
    fetching.add_argument("--out", type=Path, default=Path("build/corpus"))
    fetching.add_argument(
        "--from", default="", dest="source", help="folder or URL (default: the history of this clone)"
    )
    sampling = commands.add_parser("sample", help="choose the runs that the repository keeps")
    sampling.add_argument("--from", type=Path, default=Path("build/corpus"), dest="corpus", help="where fetch put it")
    sampling.add_argument("--out", type=Path, default=SAMPLE)
    sampling.add_argument("--runs", type=int, default=RUNS, help="about so many")
    sampling.add_argument("--seed", type=int, default=SEED)
    commands.add_parser("recipes", help="list the recipes")
    args = parser.parse_args()
    if args.command.startswith("generate") and args.batch < 1:
        parser.error(f"--batch is how many times as many responses, 1 or more, not {args.batch}")
    try:
        _do(args)
    except RLWatchError as wrong:
        sys.exit(f"error: {wrong}")


def _do(args: argparse.Namespace) -> None:
    if args.command == "generate":
        only = tuple(name for name in args.recipes.split(",") if name)
        made = generate(
            args.out, args.runs, args.jobs, args.seed, only, args.backend, args.pace, args.batch, args.start
        )
        print(f"{made} runs made, {args.runs - made} were there: {args.out}")
    elif args.command == "generate-trl":
        from forecast.trl_runs import generate as generate_trl

        generate_trl(args.out, args.runs, args.jobs, args.seed, args.pace, args.batch)
    elif args.command == "pack":
        for path in pack(args.out, *args.folders, at_once={*AT_ONCE, *UNSEEN, *TRL_AT_ONCE}):
            print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
        print(f"\nfor corpus.toml:\n{entry(args.out)}")
    elif args.command == "fetch":
        print(*fetch(args.out, args.source), sep="\n")
    elif args.command == "sample":
        print(*sample(args.corpus, args.out, args.runs, args.seed), sep="\n")
    else:
        for recipe in RECIPES.values():
            print(f"{recipe.family:15} {recipe.name:20} {recipe.about}")


if __name__ == "__main__":
    main()
