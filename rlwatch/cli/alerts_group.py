"""``rlwatch alerts``: what can be done about alerts; a run, an option or nothing after it lists them."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from rlwatch.cli import alert_commands, alert_delivery, alerts
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
    help="List alerts, acknowledge and silence them, see to their delivery, try a channel.",
    epilog=examples("rlwatch alerts", "rlwatch alerts math-7b-s3", "rlwatch alerts list --format json"),
)
group.command(LIST, epilog=alerts.EPILOG)(alerts.alerts)
group.command("ack", epilog=alert_commands.ACK)(alert_commands.ack)
group.command("silence", epilog=alert_commands.SILENCE)(alert_commands.silence)
group.command("silences", epilog=alert_commands.SILENCES)(alert_commands.silences)
group.command("unsilence", epilog=alert_commands.UNSILENCE)(alert_commands.unsilence)
group.command("test", epilog=alert_delivery.TEST)(alert_delivery.trial)
group.command("dead", epilog=alert_delivery.DEAD)(alert_delivery.dead)
group.command("retry", epilog=alert_delivery.RETRY)(alert_delivery.retry)
