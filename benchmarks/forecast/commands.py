"""The commands of ``python -m benchmarks.forecast``: make runs, keep them as shards, judge any tool on them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from forecast import artefacts, cadence, classes, evaluate, judge, sparse, tools, unseen
from forecast.knobs import Pace, Start
from forecast.tables import pack as packed

from rlwatch.cli.console import FailingInOneLine
from rlwatch.cli.options import examples

app = typer.Typer(
    cls=FailingInOneLine,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Runs that fail and runs that do not, to fit and judge forecasts of crashes on.",
)
RUN = "python -m benchmarks.forecast"
CORPUS = Path("build/corpus")

FolderOption = Annotated[Path, typer.Option("--out", help="Folder, one file a run.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Runs of a seed are the same, however many are made.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Times as many responses a step as the recipes draw.")]


class TrlPace(StrEnum):
    """Names of the paces that runs of TRL come at: as the recipe draws it, or twice as long."""

    DRAWN = "drawn"
    LONG = "long"


class TrlDeck(StrEnum):
    """Names of the recipes that runs of TRL are drawn from."""

    LARGE = "large"
    SMALL = "small"


class Backend(StrEnum):
    """Names of joblib's backends; ray and dask are on a cluster that is up."""

    LOKY = "loky"
    RAY = "ray"
    DASK = "dask"


@app.command(
    epilog=examples(
        f"{RUN} generate --out build/runs --runs 600 --jobs 8 --seed 1",
        f"{RUN} generate --out build/runs --runs 600 --jobs 8 --seed 2 --pace gradual",
        f"{RUN} generate --out build/runs --runs 200 --jobs 8 --seed 4 --pace long --batch 4",
        f"{RUN} generate --out build/runs --runs 200 --jobs 8 --seed 6 --pace long --start cold",
        f"{RUN} generate --out build/runs --runs 40 --recipes lr_step,control --backend ray",
    )
)
def generate(
    *,
    out: FolderOption,
    runs: Annotated[int, typer.Option("--runs", min=1)] = 600,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes; -1: one a core.")] = -1,
    seed: SeedOption = 1,
    recipes: Annotated[str, typer.Option("--recipes", help="Only these, separated by commas.")] = "",
    pace: Annotated[Pace, typer.Option("--pace", help="How fast faults come that can be slow.")] = Pace.DRAWN,
    batch: BatchOption = 1,
    start: Annotated[Start, typer.Option("--start", help="cold: the reward is still to take off.")] = Start.WARM,
    backend: Annotated[Backend, typer.Option("--backend", help="ray, dask: on a cluster that is up.")] = Backend.LOKY,
) -> None:
    """Make runs of the testbed that are not there yet."""
    from forecast.generate import generate as made

    only = tuple(name for name in recipes.split(",") if name)
    fresh = made(out, runs, jobs, seed, only, backend.value, pace, batch, start)
    print(f"{fresh} runs made, {runs - fresh} were there: {out}")


@app.command(
    "generate-trl",
    epilog=examples(
        f"{RUN} generate-trl --out build/trl --runs 84 --jobs 2 --seed 1",
        f"{RUN} generate-trl --out build/trl --runs 104 --jobs 2 --seed 5 --pace long --batch 3",
        f"{RUN} generate-trl --out build/small --runs 160 --jobs 1 --seed 9 --deck small",
    ),
)
def generate_trl(
    *,
    out: FolderOption,
    runs: Annotated[int, typer.Option("--runs", min=1)] = 84,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 1,
    seed: SeedOption = 1,
    pace: Annotated[TrlPace, typer.Option("--pace", help="long: twice as long.")] = TrlPace.DRAWN,
    batch: BatchOption = 1,
    deck: Annotated[TrlDeck, typer.Option("--deck", help="small: batches of 4 to 128, seven tasks, sparse logs.")] = (
        TrlDeck.LARGE
    ),
) -> None:
    """Make runs of TRL that are not there yet, which takes longer."""
    from forecast.trl_jobs import Deck
    from forecast.trl_runs import generate as made

    made(out, runs, jobs, seed, Pace(pace.value), batch, Deck(deck.value))


@app.command(epilog=examples(f"{RUN} pack --from build/runs --from build/trl --out build/corpus/autumn.parquet"))
def pack(
    folders: Annotated[list[Path], typer.Option("--from", help="Folder of runs; once for each.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="A .parquet; the records go beside it, as NAME-runs.")],
) -> None:
    """Join all runs of some folders in a new shard, and print its entry for corpus.toml."""
    from forecast.recipes import AT_ONCE, UNSEEN
    from forecast.trl_recipes import AT_ONCE as TRL_AT_ONCE
    from forecast.trl_small import AT_ONCE as SMALL_AT_ONCE

    for path in packed(out, *folders, at_once={*AT_ONCE, *UNSEEN, *TRL_AT_ONCE, *SMALL_AT_ONCE}):
        print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    print(f"\nfor corpus.toml:\n{artefacts.entry(out)}")


@app.command(epilog=examples(f"{RUN} fetch --from /mnt/corpora"))
def fetch(
    *,
    source: Annotated[str, typer.Option("--from", help="Folder or URL that has the files.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of shards.")] = CORPUS,
) -> None:
    """Put all shards of the corpus into a folder, and check their hashes."""
    for path in artefacts.fetch(out, source):
        print(path)


@app.command(epilog=examples(f"{RUN} sample --from build/corpus --out benchmarks/forecast/sample"))
def sample(
    *,
    corpus: Annotated[Path, typer.Option("--from", help="Where fetch put the shards.")] = CORPUS,
    out: Annotated[Path, typer.Option("--out", help="Folder.")] = artefacts.SAMPLE,
    runs: Annotated[int, typer.Option("--runs", help="About so many.")] = artefacts.RUNS,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice.")] = artefacts.SEED,
) -> None:
    """Choose the runs that the repository keeps, and write their rows."""
    for path in artefacts.sample(corpus, out, runs, seed):
        print(path)


@app.command()
def recipes() -> None:
    """List what goes wrong in runs of the testbed."""
    from forecast.recipes import RECIPES

    for recipe in RECIPES.values():
        print(f"{recipe.family:15} {recipe.name:20} {recipe.about}")


app.command("tools", epilog=tools.EXAMPLES)(tools.tools)
app.command("cadence", epilog=cadence.EXAMPLES)(cadence.cadence)
app.command("classes", epilog=classes.EXAMPLES)(classes.classes)
app.command("sparse", epilog=sparse.EXAMPLES)(sparse.sparse)
app.command("unseen", epilog=unseen.EXAMPLES)(unseen.unseen)
app.command("small-batches", epilog=unseen.SMALL_EXAMPLES)(unseen.small_batches)
app.command("judge", epilog=judge.EXAMPLES)(judge.judge)
app.command("evaluate", epilog=evaluate.EVALUATE_EXAMPLES)(evaluate.evaluate)
app.command("leaderboard", epilog=evaluate.LEADERBOARD_EXAMPLES)(evaluate.leaderboard)
