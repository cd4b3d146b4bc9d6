"""The tree of ``rlwatch`` commands, one line for each: name, function and examples."""

from __future__ import annotations

from typing import Annotated

import typer

from rlwatch import __version__
from rlwatch.cli import (
    alerts,
    app_login,
    command,
    database,
    demo,
    diff,
    doctor,
    export,
    forecast,
    import_log,
    names,
    plugins,
    replay,
    report,
    rescue,
    rules,
    runs,
    scan,
    serve,
    show,
    ui,
    watch,
)
from rlwatch.cli.console import FailingInOneLine
from rlwatch.cli.options import examples

app = typer.Typer(
    name="rlwatch",
    cls=FailingInOneLine,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("rlwatch demo", "rlwatch scan train.log", "rlwatch ui"),
)

app.command("demo", epilog=demo.EPILOG)(demo.demo)
app.command("ui", epilog=ui.EPILOG)(ui.ui)
app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("scan", epilog=scan.EPILOG)(scan.scan)
app.command("watch", epilog=watch.EPILOG)(watch.watch)
app.command("import", epilog=import_log.EPILOG)(import_log.import_log)
app.command("runs", epilog=runs.EPILOG)(runs.runs)
app.command("edit", epilog=runs.EDIT_EPILOG)(runs.edit)
app.command("audit", epilog=runs.AUDIT_EPILOG)(runs.audit)
app.command("purge", epilog=runs.PURGE_EPILOG)(runs.purge)
app.command("show", epilog=show.EPILOG)(show.show)
app.command("diff", epilog=diff.EPILOG)(diff.diff)
app.command("report", epilog=report.EPILOG)(report.report)
app.add_typer(export.group, name="export")
app.add_typer(alerts.group, name="alerts")
app.command("command", epilog=command.EPILOG)(command.command)
app.add_typer(rescue.group, name="rescue")
app.command("replay", epilog=replay.EPILOG)(replay.replay)
app.command("names", epilog=names.EPILOG)(names.names)
app.command("plugins", epilog=plugins.EPILOG)(plugins.plugins)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(rules.rules, name="rules")
app.add_typer(forecast.group, name="forecast")
app.add_typer(database.group, name="db")
app.add_typer(app_login.group, name="token")
app.command("sync", epilog=database.SYNC_EPILOG)(database.sync)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rlwatch {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Watch reinforcement-learning post-training of language models: find the crash, name the cause, steer the run."""
