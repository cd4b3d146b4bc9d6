"""``rlwatch rules``: the alert rules and channels of ``rlwatch.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlwatch.cli.console import say
from rlwatch.cli.options import examples
from rlwatch.errors import ConfigError

INIT_EPILOG = examples("rlwatch rules init", "rlwatch rules init configs/rlwatch.toml")
TEST_EPILOG = examples("rlwatch rules test", "rlwatch rules test configs/rlwatch.toml")

rules = typer.Typer(
    help="Alert rules: write a commented rlwatch.toml, check one.",
    no_args_is_help=True,
    epilog=examples("rlwatch rules init", "rlwatch rules test"),
)

FileArgument = Annotated[Path, typer.Argument(help="The configuration file.")]


@rules.command("init", epilog=INIT_EPILOG)
def init(file: FileArgument = Path("rlwatch.toml")) -> None:
    """Write a commented rlwatch.toml with the default rules; never overwrites."""
    from rlwatch.alerts.config import default_toml

    text = default_toml()
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already; it is left as it is") from None
    say(f"wrote {file}")
