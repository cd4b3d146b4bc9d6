"""``rlwatch demo``: train a small model on this machine, watch it live, steer it once, and let it fail."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from rlwatch.cli.background import sigterm_as_ctrl_c
from rlwatch.cli.options import StoreOption, examples
from rlwatch.demo import SMOLLM2, TINY

EPILOG = examples(
    "rlwatch demo", "rlwatch demo --exit", "rlwatch demo --model smollm2", "rlwatch demo --no-ui --store /tmp/demo-runs"
)


class DemoModel(StrEnum):
    """Model that ``rlwatch demo`` trains: a tiny random one, or SmolLM2."""

    TINY = TINY
    SMOLLM2 = SMOLLM2


def demo(
    store: StoreOption = None,
    ui: Annotated[
        bool, typer.Option("--ui/--no-ui", help="Start the dashboard too, if streamlit is installed.")
    ] = True,
    model: Annotated[
        DemoModel,
        typer.Option("--model", help="tiny: made in a moment. smollm2: SmolLM2-135M-Instruct, slow, extra smollm2."),
    ] = DemoModel.TINY,
    leave: Annotated[
        bool, typer.Option("--exit", help="Exit, and stop the dashboard, when the training ends.")
    ] = False,
) -> None:
    """Train a tiny model with TRL until its learning rate breaks it, and watch rlwatch detect it. About two minutes.

    Needs the trl extra, no GPU and no network. Exit code 0 if every check of the demo passed, else 1.
    """
    from rlwatch.demo.run import main

    with sigterm_as_ctrl_c():
        raise typer.Exit(main(store=store, ui=ui, exit=leave, model=model.value))
