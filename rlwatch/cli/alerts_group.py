"""``rlwatch alerts``: what can be done about alerts; a run, an option or nothing after it lists them."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from rlwatch.cli import alerts
from rlwatch.cli.options import examples

LIST = "list"


class ListsUnlessTold(TyperGroup):
    """``rlwatch alerts RUN`` is ``rlwatch alerts list RUN``, unless RUN is the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command where none is named."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [LIST, *args])


group = typer.Typer(
    cls=ListsUnlessTold,
    help="List alerts, see to their delivery, try a channel.",
    epilog=examples("rlwatch alerts", "rlwatch alerts math-7b-s3", "rlwatch alerts list --format json"),
)
group.command(LIST, epilog=alerts.EPILOG)(alerts.alerts)
