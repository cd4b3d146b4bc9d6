"""Options that several commands share, and functions that open the store or configuration they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.errors import ConfigError, RunNotFoundError
from rlwatch.ports import Store

if TYPE_CHECKING:
    from rlwatch.alerts.config import Config
    from rlwatch.alerts.rules import Rule
    from rlwatch.importers.naming import Naming
    from rlwatch.run.alerting import Alerting


class OutputFormat(StrEnum):
    """Form of a command's output: text for people or JSON for scripts."""

    TEXT = "text"
    JSON = "json"


def _trainer(source: str) -> str:
    """Return the trainer as given; warn if it is close to a known one."""
    from rlwatch.cli.console import errors
    from rlwatch.metrics import TABLE
    from rlwatch.wording import meant, one_line

    known = {alias.source for metric in TABLE for alias in metric.aliases if alias.source}
    if source and source.partition("/")[0] not in {name.partition("/")[0] for name in known}:
        hint = meant(source, sorted(known), 1)
        if hint:
            errors().print(f"unknown trainer {one_line(source)!r}{hint}", style="yellow", markup=False)
    return source


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="RLWATCH_STORE",
        metavar="URL",
        help="Store of the runs: a directory or sqlite:///path.",
        show_default="./rlwatch-runs",
    ),
]
FormatOption = Annotated[
    OutputFormat,
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
RunOfLogOption = Annotated[str | None, typer.Option("--run", metavar="ID", help="Run to read from a log with several.")]
ReadAsOption = Annotated[
    str | None,
    typer.Option("--as", metavar="FORMAT", help="Format of the log.", show_default="detected"),
]
PatternOption = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        metavar="REGEX",
        help="Regular expression for the lines of an unknown log, with groups (?P<step>...), (?P<name>...) and "
        "(?P<value>...), or one group for each metric, (?P<reward>...).",
    ),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="ROLE=NAME",
        help="Map the metric NAME of the log to a role: reward, entropy, kl, length, gradient, loss, or any canonical "
        "name. Repeatable; [map] in rlwatch.toml applies to every log.",
    ),
]
TrainerOption = Annotated[
    str,
    typer.Option(
        "--source",
        metavar="TRAINER",
        help="Trainer of the log (trl/grpo, verl, ...), if the log does not name it.",
        callback=_trainer,
    ),
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
ByOption = Annotated[
    str, typer.Option("--by", metavar="NAME", help="Your name, stored with the action.", show_default="you@host")
]


def me() -> str:
    """Return the name (``user@host``) that is recorded with an action if ``--by`` is not given."""
    from rlwatch.control.commands import whoami

    return whoami()


def examples(*lines: str) -> str:
    """Return the last part of a command's help: each example command on its own line."""
    return "\n\n".join(("Examples:", *(f"  {line}" for line in lines)))


# Opening and closing the store of a command.


@contextmanager
def opened(url: str | None) -> Iterator[Store]:
    """Open the store at ``url`` for the block (None: ``RLWATCH_STORE``, else ``./rlwatch-runs``), and close it
    afterwards.
    """
    from rlwatch.store.url import open_store

    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def no_log_either(reference: str | None) -> Iterator[None]:
    """Extend a run-not-found error raised in the block with the remark that no file ``reference`` exists either.

    For commands that take either a run or a log.
    """
    try:
        yield
    except RunNotFoundError as error:
        message = f"{error} (and there is no file or directory {reference!r})" if reference else str(error)
        raise RunNotFoundError(message) from None


def require_directory(file: Path) -> None:
    """Raise ``ConfigError`` if the directory of the output ``file`` does not exist."""
    if not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: there is no directory {file.parent}")


# The configuration: the file of ``--config``, or ``rlwatch.toml`` of this directory.


def rules_of(config: Path | None) -> Sequence[Rule]:
    """Return the alert rules of the file ``config``, or the default rules if it is None. Raises ``ConfigError``."""
    return configured(config).rules


def configured(config: Path | None) -> Config:
    """Return the configuration in the file ``config`` (None: the default file), and print its warnings on stderr.

    Raises ``ConfigError`` if the file is not valid.
    """
    from rlwatch.alerts.config import load_config
    from rlwatch.cli.console import warn

    found = load_config(config)
    for warning in filter(None, (found.refused, *found.warnings)):
        warn(warning)
    return found


def alerting_of(config: Path | None, store: Store) -> Alerting:
    """Return the alert rules and channels that a trainer on this machine would use with ``store``. Raises
    ``ConfigError``.
    """
    from rlwatch.run.alerting import alerting_for

    return alerting_for(config_file=config, webhook_url=None, rules=None, store=store)


def naming_of(mapped: Sequence[str] | None, config: Path | None = None) -> Naming:
    """Return the mapping of metric names from ``--map`` (``mapped``) and the configuration file. Raises
    ``ConfigError``.
    """
    from rlwatch.alerts.config import load_config
    from rlwatch.importers.naming import naming_of as naming

    return naming(mapped or (), load_config(config).map)


def format_of(read_as: str | None, pattern: str | None) -> str | None:
    """Return the log format given by ``--as`` or ``--pattern``; None if neither is given. Raises ``ConfigError`` for
    both.
    """
    from rlwatch.importers.pattern_console import PREFIX

    if pattern is None:
        return read_as
    if read_as is not None:
        raise ConfigError(f"--as {read_as} and --pattern are alternatives; give one of them")
    return PREFIX + pattern


# Environment variables that rlwatch reads or sets, with their meaning.

VARIABLES: Mapping[str, str] = {
    "RLWATCH_STORE": "the store: a directory, `sqlite:///directory`, `postgresql://...`",
    "RLWATCH_RUN_ID": "id of the run that a trainer begins or continues",
    "RLWATCH_CONFIG": "path of the `rlwatch.toml` that applies",
    "RLWATCH_WEBHOOK_URL": "makes the channel `webhook`",
    "RLWATCH_WEBHOOK_SECRET": "signs what the webhook is sent",
    "RLWATCH_LOCAL_DIR": "local disk of a trainer whose store is on a network; default `/tmp/rlwatch-UID`",
    "RLWATCH_JOURNAL_MB": "most megabytes of a run that wait while its store takes nothing, 1 or more; default 256",
    "RLWATCH_SHARED_STORE": "`1`: nodes share the store's directory without locks to rely on (NFS), if unseen",
    "RLWATCH_SYSTEM": "`off` or `0`: do not measure the machine beside a run",
    "RLWATCH_STALL_S": "seconds without a step or a change of stage after which a process stores its stacks; 108",
    "RLWATCH_ENGINES": "addresses of rollout engines' metrics that rank 0 reads beside a run, with commas between them",
    "RLWATCH_STATE_DIR": "where logins and marks of processes are kept; default `~/.local/state/rlwatch`",
    "RLWATCH_PLUGINS": "`off` leaves all plug-ins out",
    "RLWATCH_DEBUG": "`1` prints tracebacks of known errors, too",
    "RLWATCH_FORECASTER": "name of a plug-in's forecaster",
    "RLWATCH_FORECAST_MODEL": "path of a forecaster of your own",
    "RLWATCH_FORECAST_EVIDENCE": "whose runs prove a chance that is shown: `others` (default); `own`: those of rlwatch",
    "RLWATCH_FORECAST_BUDGET": "false alarms in 1,000 healthy steps: `0.25`, `0.5` (default), `1`, `2` or `5`",
    "RLWATCH_FORECAST_THRESHOLD": "chance from which on a forecast is an alarm",
    "RLWATCH_LINK_HOST": "address on which rank 0 listens for the other ranks",
    "RLWATCH_LINK_PORT": "its port; a free one by default",
    "RLWATCH_LINK_SECRET": "what ranks prove to know, 16 characters or more; random by default",
    "RLWATCH_UI_TOKEN": "the operator's token of the dashboard; `RLWATCH_UI_TOKEN_FILE`: a file that holds it",
    "RLWATCH_UI_VIEWER_TOKEN": "the viewer's token; `RLWATCH_UI_VIEWER_TOKEN_FILE` likewise",
    "RLWATCH_DELIVERY": "given to a channel's command: id of the message, the same at every try",
    "RLWATCH_EVENT": "given to a channel's command: what happened to the alert",
}
