"""``rlwatch command RUN KIND``: queue a command for a live run, which the trainer picks up from the store."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from typing import Annotated, Any

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.console import STATUS_STYLES, print_json, print_text, warn
from rlwatch.cli.options import FormatOption, OutputFormat, StoreOption, examples, opened
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.commands import (
    COMMAND_KINDS,
    REQUIRED,
    Argument,
    Choice,
    CommandKind,
    Number,
    SnapshotChoice,
    Step,
    request,
)
from rlwatch.errors import ConfigError, StoreBusyError
from rlwatch.ports import CommandStore, Store
from rlwatch.records import JSON, Command, CommandStatus, RunInfo, RunState
from rlwatch.wording import cell, duration, step

EPILOG = examples(
    "rlwatch command math-7b-s3 reset-reference --why 'KL saturated since 4 000'",
    "rlwatch command math-7b-s3 reset-reference --optimizer keep --wait 120",
    "rlwatch command math-7b-s3 save-checkpoint --wait 120",
    "rlwatch command math-7b-s3 lower-lr --scale 0.3 --until 5200",
    "rlwatch command math-7b-s3 set-kl-coef --value 0.01",
    "rlwatch command math-7b-s3 rollback --wait 120",
    "rlwatch command math-7b-s3 rollback --to 480",
    "rlwatch command math-7b-s3 hold --batches 3 --wait 600",
    "rlwatch command math-7b-s3 skip-step --when nonfinite --steps 50",
    "rlwatch command math-7b-s3 undo",
    "rlwatch command math-7b-s3 pause --minutes 30",
    "rlwatch command math-7b-s3 resume",
    "rlwatch command math-7b-s3 stop --no-save",
    "rlwatch command math-7b-s3 --cancel 4f2a09c1",
)

ANSWERS = {
    CommandStatus.DONE: 0,
    CommandStatus.REJECTED: 1,
    CommandStatus.FAILED: 3,
    CommandStatus.EXPIRED: 4,
    CommandStatus.CANCELLED: 6,
}
"""Exit code for each final status of a command; code 2 means that the request itself was wrong."""
UNANSWERED = 5
"""Exit code if the trainer did not answer within ``--wait`` seconds; the command stays queued."""
CANCEL_S = 5.0
"""Seconds that a cancellation waits for the trainer that has already taken the command; it checks once a second."""


# Options for the arguments of all kinds: one for each name, generated from the definitions of the kinds.


def _options() -> list[Parameter]:
    """Return a parameter of :func:`command` for each argument of any kind, with its option."""
    takers: dict[str, list[CommandKind]] = {}
    for kind in COMMAND_KINDS.values():
        for name in kind.args:
            takers.setdefault(name, []).append(kind)
    return [_option(name, kinds) for name, kinds in takers.items()]


def _option(name: str, kinds: Sequence[CommandKind]) -> Parameter:
    arguments = [kind.args[name] for kind in kinds]
    first, defaults = arguments[0], {_shown(argument) for argument in arguments}
    meanings = dict.fromkeys(f"{argument.meaning} ({argument.allowed})" for argument in arguments)
    flag = isinstance(first, Choice) and set(first.values) == {"yes", "no"}
    made = typer.Option(
        f"--{name}/--no-{name}" if flag else f"--{name}",
        metavar=None if flag else METAVARS.get(type(first), "VALUE"),
        help=_sentence("; or ".join(meanings)),
        show_default=defaults.pop() if len(defaults) == 1 else False,
        rich_help_panel=f"For {', '.join(kind.name for kind in kinds)}",
    )
    taken = bool if flag else TYPES.get(type(first), str)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[taken | None, made])


METAVARS = {Choice: "NAME", Number: "NUMBER", Step: "STEP", SnapshotChoice: "STEP"}
TYPES: Mapping[type, type] = {Number: float, Step: int}


def _shown(argument: Argument) -> str | bool:
    """Return the default as the help shows it; False where there is none."""
    return False if argument.default in (REQUIRED, None) else str(cell(argument.default))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _read(args: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the given options as arguments of the kind, which checks them."""
    return {name: _plain(value) for name, value in args.items() if value is not None}


def _plain(value: JSON) -> JSON:
    """Return a flag as its word and a whole number as an integer."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _kinds_in_words() -> str:
    return "\n\n    ".join(f"{kind.name}: {kind.meaning}." for kind in COMMAND_KINDS.values())


def command(
    run: Annotated[str, typer.Argument(help="Run: id, name or unique prefix.")],
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="Command to run at the next safe boundary; see above.",
            autocompletion=lambda: list(COMMAND_KINDS),
        ),
    ] = None,
    *,
    cancel: Annotated[
        str | None,
        typer.Option(
            "--cancel",
            metavar="ID",
            help="Instead of KIND: cancel the command with this id (or unique prefix), unless it has started.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An argument of a plugin's command; VALUE is JSON or text."),
    ] = None,
    why: Annotated[str, typer.Option("--why", help="Reason, stored with the command for the audit.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Override the veto while a collapse is firing.")] = False,
    expires: Annotated[
        float, typer.Option("--expires", min=1, metavar="SECONDS", help="Time until an unstarted command expires.")
    ] = 600,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="Seconds to wait for the answer; 0: do not wait.")
    ] = 0,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
    **args: Any,
) -> None:
    """Send a command to a live run, or cancel one.

    Exit code 0: done (without --wait: queued), 1: rejected, 2: the request is wrong, 3: it failed inside the trainer,
    4: it expired, 5: no answer within --wait (the command stays queued), 6: cancelled by a user. With --cancel 0:
    cancelled, 1: too late, already answered, 5: the trainer has not answered yet.

    """
    clock = SystemClock()
    if (kind is None) == (cancel is None):
        raise ConfigError("give either KIND or --cancel ID")
    wanted = _read(args) | _set(settings or ())
    with opened(store) as target:
        info = find_run(target, run)
        if kind is None:
            sent = _cancelled(target, info.run_id, str(cancel), why)
        else:
            sent = request(target, info.run_id, kind, args=wanted, why=why, force=force, expires_s=expires)
        warn_if_not_live(info, clock.now())
        settled = wait_until_settled(target, sent, clock, time.sleep, max(wait, CANCEL_S) if kind is None else wait)
    if output is OutputFormat.JSON:
        print_json(settled)
    else:
        _report(settled)
    raise typer.Exit(_code(settled, waited=kind is None or wait > 0, wanted=kind is not None))


_takes = inspect.signature(command, eval_str=True)
command.__signature__ = _takes.replace(  # type: ignore[attr-defined]
    parameters=[*[p for p in _takes.parameters.values() if p.kind is not Parameter.VAR_KEYWORD], *_options()]
)
command.__doc__ = f"{command.__doc__}\n    {_kinds_in_words()}\n    "


def _cancelled(store: Store, run_id: str, beginning: str, why: str) -> Command:
    from rlwatch.control.commands import cancel

    rows = store.commands(run_id)
    found = [row for row in rows if beginning and row.command_id.startswith(beginning)]
    if len(found) != 1:
        there = ", ".join(f"{row.command_id} ({row.kind})" for row in (found or rows) if row.status.open) or "none"
        which = "several commands" if found else "no command"
        raise ConfigError(f"{which} of run {run_id!r} begin with {beginning!r}; still open: {there}")
    return cancel(store, run_id, found[0].command_id, why=why)


def _code(command: Command, *, waited: bool, wanted: bool) -> int:
    """Return the exit code; ``wanted``: the user sent the command, rather than cancelled it."""
    if command.status.open:
        return UNANSWERED if waited else 0
    if not wanted:
        return int(command.status is not CommandStatus.CANCELLED)
    return ANSWERS[command.status]


def warn_if_not_live(run: RunInfo, now: float) -> None:
    """Warn on stderr if ``run`` has no live trainer to carry out a command, with the time of its last sign of life.

    ``now`` is the current time in Unix seconds.
    """
    from rlwatch.control.liveness import dead_since

    if run.state is not RunState.RUNNING:
        what = f"the run has {run.state.value}"
    elif (since := dead_since(run, now)) is not None:
        what = f"the trainer is dead since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}"
        what += f" ({duration(now - since)} without a heartbeat)"
    else:
        return
    warn(f"{what}: a command waits until a trainer resumes the run, or expires")


def _set(settings: Sequence[str]) -> dict[str, JSON]:
    """Split ``NAME=VALUE`` into name and value. Raises ``ConfigError``."""
    read: dict[str, JSON] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes NAME=VALUE, got {text!r}")
        try:
            read[name] = json.loads(value)
        except ValueError:
            read[name] = value
    return read


def _report(command: Command) -> None:
    at = f" at step {step(command.finished_step)}" if command.finished_step is not None else ""
    result = f": {command.result}" if command.result else ""
    style = STATUS_STYLES.get(command.status, "")
    print_text(f"{command.kind} {command.status}{at}{result}  ({command.command_id})", style=style)


# Waiting for the result of a command.

POLL_S = 0.5


def wait_until_settled(
    store: CommandStore, command: Command, clock: Clock, sleep: Callable[[float], None], wait_s: float
) -> Command:
    """Return ``command`` as stored once it has a final status, or its latest state after ``wait_s`` seconds.

    A command that no trainer took before its expiry is returned as expired, although the store marks it only later.
    """
    deadline = clock.monotonic() + wait_s
    while command.status.open and clock.monotonic() < deadline:
        sleep(min(POLL_S, max(0.0, deadline - clock.monotonic())))
        command = _again(store, command)
        if command.status is CommandStatus.QUEUED and 0 < command.expires_at <= clock.now():
            return replace(command, status=CommandStatus.EXPIRED, result="no trainer took the command in time")
    return command


def _again(store: CommandStore, command: Command) -> Command:
    try:
        rows = store.commands(command.run_id)
    except StoreBusyError:
        return command
    return next((row for row in rows if row.command_id == command.command_id), command)
