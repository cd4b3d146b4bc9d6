"""``rlwatch command RUN KIND``: a wish for the live run, written down as a row the trainer picks up."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated

import typer

from rlwatch.cli.answers import wait_until_settled
from rlwatch.cli.console import print_json, say
from rlwatch.cli.lookup import find_run
from rlwatch.cli.options import Format, FormatOption, StoreOption, examples
from rlwatch.cli.stores import opened
from rlwatch.cli.wording import STATUS_STYLES, status, step
from rlwatch.clock import SystemClock
from rlwatch.records import Command, CommandStatus

EPILOG = examples(
    "rlwatch command math-7b-s3 reset-reference --why 'KL saturated since 4 000'",
    "rlwatch command math-7b-s3 reset-reference --optimizer keep --wait 120",
)


class Kind(StrEnum):
    """Commands a trainer may understand."""

    RESET_REFERENCE = "reset-reference"


class Optimizer(StrEnum):
    """What becomes of the optimizer's state when the reference is reset."""

    CLEAR = "clear"
    KEEP = "keep"


def command(
    run: Annotated[str, typer.Argument(help="The run: its id, name or unambiguous prefix.")],
    kind: Annotated[Kind, typer.Argument(help="What to do at the next safe boundary.")],
    *,
    optimizer: Annotated[
        Optimizer, typer.Option("--optimizer", help="Optimizer state on a reset: cleared (ProRL v1) or kept (v2).")
    ] = Optimizer.CLEAR,
    why: Annotated[str, typer.Option("--why", help="The reason, kept with the command for the audit.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Overrule a veto that may be overruled (a collapse is firing).")
    ] = False,
    expires: Annotated[
        float, typer.Option("--expires", min=1, metavar="SECONDS", help="Not claimed by then, it expires.")
    ] = 600,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="Wait so long for the answer; 0: do not wait.")
    ] = 0,
    store: StoreOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Ask the live run to do something. Exit code 0: queued or done, 1: rejected or expired."""
    from rlwatch.control.request import request

    clock = SystemClock()
    with opened(store) as target:
        info = find_run(target, run)
        args = {"optimizer": optimizer.value}
        sent = request(target, info.run_id, kind.value, args=args, why=why, force=force, expires_s=expires)
        alive = status(info, clock.now()) == "running"
        settled = wait_until_settled(target, sent, clock, time.sleep, wait)
    if output is Format.JSON:
        print_json(settled)
    else:
        _report(settled, alive=alive)
    if settled.status in {CommandStatus.REJECTED, CommandStatus.EXPIRED}:
        raise typer.Exit(1)


def _report(command: Command, *, alive: bool) -> None:
    at = f" at step {step(command.finished_step)}" if command.finished_step is not None else ""
    result = f": {command.result}" if command.result else ""
    style = STATUS_STYLES.get(command.status, "")
    say(f"{command.kind} {command.status}{at}{result}  ({command.command_id})", style=style)
    if command.status is CommandStatus.QUEUED and not alive:
        say("the run is not live: the command waits until a trainer resumes it, or expires", style="yellow")
