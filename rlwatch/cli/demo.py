"""``rlwatch demo``: a small real training run, watched live, steered once, and lost."""

from __future__ import annotations

from typing import Annotated

import typer

from rlwatch.cli.background import sigterm_as_ctrl_c
from rlwatch.cli.options import StoreOption, examples

EPILOG = examples("rlwatch demo", "rlwatch demo --exit", "rlwatch demo --no-ui --store /tmp/demo-runs")


def demo(
    store: StoreOption = None,
    ui: Annotated[
        bool, typer.Option("--ui/--no-ui", help="Start the dashboard too, if streamlit is installed.")
    ] = True,
    leave: Annotated[
        bool, typer.Option("--exit", help="Exit, and stop the dashboard, when the training ends.")
    ] = False,
) -> None:
    """Train a tiny model with TRL until its learning rate breaks it, and watch rlwatch detect it. About two minutes.

    Needs the trl extra, no GPU and no network. Exit code 0 if every check of the demo passed, else 1.
    """
    from rlwatch.demo.run import main

    with sigterm_as_ctrl_c():
        raise typer.Exit(main(store=store, ui=ui, exit=leave))
