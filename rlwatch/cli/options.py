"""Options that several commands share, so that they read alike everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """What a command prints."""

    TEXT = "text"
    JSON = "json"


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="RLWATCH_STORE",
        metavar="URL",
        help="Where the runs are: a directory or sqlite:///path.",
        show_default="./rlwatch-runs",
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="text for people; json for scripts: strict JSON alone on stdout, with NaN and the infinities as "
        'the strings "NaN", "Infinity", "-Infinity".',
    ),
]
LogArgument = Annotated[
    Path,
    typer.Argument(
        metavar="LOG",
        help="A log of any trainer rlwatch reads: console text, JSON lines, trainer_state.json, CSV, a wandb file, "
        "TensorBoard's event files or their directory...",
    ),
]
RunOfLogOption = Annotated[str | None, typer.Option("--run", metavar="ID", help="Which run of a log with several.")]
ReadAsOption = Annotated[
    str | None,
    typer.Option("--as", metavar="FORMAT", help="Read the log as this format.", show_default="found out by looking"),
]
TrainerOption = Annotated[
    str,
    typer.Option("--source", metavar="TRAINER", help="The trainer (trl/grpo, verl...), where the log does not tell."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Alert rules and channels from this rlwatch.toml.",
        show_default="RLWATCH_CONFIG, else ./rlwatch.toml",
    ),
]


def examples(*lines: str) -> str:
    """The epilog of a command: each example on its own line."""
    return "\n\n".join(("Examples:", *(f"  {line}" for line in lines)))
