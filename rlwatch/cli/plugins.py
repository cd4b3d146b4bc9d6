"""``rlwatch plugins``: list the plugins of other packages, and those that failed to load."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Annotated

import typer

from rlwatch.cli.console import print_json, print_table, print_text
from rlwatch.cli.options import FormatOption, OutputFormat, examples
from rlwatch.plugins import DOORS, Plugin, judged
from rlwatch.wording import one_line

EPILOG = examples("rlwatch plugins", "rlwatch plugins --format json", "RLWATCH_PLUGINS=off rlwatch scan train.log")


def plugins(
    output: FormatOption = OutputFormat.TEXT,
    doors: Annotated[bool, typer.Option("--doors", help="List the extension points.")] = False,
) -> None:
    """List installed plugins with version and origin; exit code 1 if one could not be loaded."""
    found = everything()
    if output is OutputFormat.JSON:
        rows = [asdict(replace(plugin, target=None)) for plugin in found]
        for row in rows:
            del row["target"]
        print_json({"plugins": rows, "doors": {name: door.meaning for name, door in DOORS.items()}})
    else:
        _print(found, doors=doors)
    if any(plugin.problem for plugin in found):
        raise typer.Exit(1)


def everything() -> list[Plugin]:
    """Return the plugins of all extension points, those that failed to load with their problem."""
    return [plugin for door in DOORS for plugin in judged(door, _ours().get(door, ()))]


def _print(found: Collection[Plugin], *, doors: bool) -> None:
    if doors:
        print_table(("door", "interface"), [(name, door.meaning) for name, door in DOORS.items()], title="Doors")
    if not found:
        print_text("no plugins (docs/stability.md describes how to write one)")
        return
    rows = [
        (
            plugin.door.removeprefix("rlwatch."),
            one_line(plugin.name),
            one_line(f"{plugin.package} {plugin.version}"),
            one_line(plugin.value),
            ("works", "green") if not plugin.problem else (one_line(plugin.problem, 300), "red"),
        )
        for plugin in found
    ]
    print_table(("door", "name", "package", "origin", "state"), rows)


def _ours() -> Mapping[str, Collection[str]]:
    """Return the built-in names, by extension point."""
    from rlwatch.control.commands import COMMAND_KINDS
    from rlwatch.detectors.index import entries
    from rlwatch.importers.registry import IMPORTERS
    from rlwatch.notify.registry import HOMES
    from rlwatch.store.url import OWN

    return {
        "rlwatch.detectors": {entry.name for entry in entries()},
        "rlwatch.importers": {importer.name for importer in IMPORTERS},
        "rlwatch.notifiers": HOMES,
        "rlwatch.stores": OWN,
        "rlwatch.commands": COMMAND_KINDS,
    }
