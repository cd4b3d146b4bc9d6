"""Extension points for other packages: entry points, loaded on first use, independently of each other.

A package names what it adds in its ``pyproject.toml``::

    [project.entry-points."rlwatch.detectors"] short_answers = "my_package.detectors:ShortAnswers"

A plugin that cannot be loaded, lacks required attributes, or has the name of one of rlwatch's own is reported (in the
log and by ``rlwatch plugins``) and skipped; the others still work. ``RLWATCH_PLUGINS=off`` skips all of them.
``docs/stability.md`` lists the requirements and promises of each extension point.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlwatch.error_boundary import call_or, described

if TYPE_CHECKING:
    from importlib import metadata

logger = logging.getLogger("rlwatch")

OFF = "RLWATCH_PLUGINS"
"""Environment variable; the value ``off`` means that no plugin is loaded."""


@dataclass(frozen=True, slots=True)
class ExtensionPoint:
    """One group of entry points by which other packages extend rlwatch, such as detectors or importers.

    Parameters
    ----------
    meaning
        Description of the objects that the entry points must refer to.
    needs
        Names of attributes that the objects must have.
    called
        Attribute that holds the name of the object, which must equal that of the entry point; empty: none.
    """

    meaning: str
    needs: tuple[str, ...] = ()
    called: str = ""


DOORS: Mapping[str, ExtensionPoint] = {
    "rlwatch.detectors": ExtensionPoint(
        "class of a detector (rlwatch.ports.Detector)",
        ("family", "kinds", "requires", "update", "arrival", "notice"),
        "name",
    ),
    "rlwatch.importers": ExtensionPoint(
        "importer of a log format (rlwatch.importers.Importer), or its class",
        ("expects", "source", "anywhere", "table", "sniff", "reading"),
        "name",
    ),
    "rlwatch.notifiers": ExtensionPoint("maker of a channel (rlwatch.ports.Notifier) from name= and its settings"),
    "rlwatch.stores": ExtensionPoint("maker of a store (rlwatch.ports.Store) from its URL; the name is the scheme"),
    "rlwatch.commands": ExtensionPoint(
        "class of a command's handler (rlwatch.ports.CommandHandler)", ("meaning", "args", "check", "__call__"), "kind"
    ),
    "rlwatch.panels": ExtensionPoint("panel of a run's page: from a rlwatch.analysis.runs.StoredRun to HTML, or None"),
    "rlwatch.forecasters": ExtensionPoint("maker of a forecaster, used where RLWATCH_FORECASTER names it"),
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of another package: the object it refers to, or the problem that kept it from being loaded.

    Parameters
    ----------
    door
        Extension point, such as ``rlwatch.detectors``.
    name, value
        Name of the entry point, and its path ``module:attribute``.
    package, version
        Distribution that has the entry point.
    target
        The loaded object; None if there is a problem.
    problem
        Reason why the plugin cannot be used; empty if it can.
    """

    door: str
    name: str
    value: str
    package: str = ""
    version: str = ""
    target: Any = None
    problem: str = ""

    @property
    def origin(self) -> str:
        """Package, version and path of the plugin, such as ``my-package 1.2 (my_package.detectors:ShortAnswers)``."""
        return f"{self.package} {self.version} ({self.value})"


@cache
def found(door: str) -> tuple[Plugin, ...]:
    """Return all plugins of the extension point ``door`` by name, with broken ones; each process loads them only once.

    Returns nothing if ``RLWATCH_PLUGINS`` is ``off``.
    """
    if os.environ.get(OFF, "").lower() in ("off", "0", "no", "false"):
        return ()
    if not _may_be_any():
        return ()
    from importlib import metadata  # it takes longer than the look above, and most processes have no plugin

    points = sorted(metadata.entry_points(group=door), key=lambda point: (point.name, point.value))
    return tuple(_loaded(door, point) for point in points)


def installed() -> dict[str, tuple[str, str]] | None:
    """Return name (lower case, ``-`` for ``_``) -> version and folder of the metadata of each installed package.

    They are read from the names of the folders, in a tenth of the time of ``importlib.metadata``. None where only that
    knows all packages: with zip files or eggs in the path, and with finders of other packages. A package that names no
    version there has an empty one.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return None
    found: dict[str, tuple[str, str]] = {}
    for place in map(Path, sys.path):
        if place.suffix == ".egg" or place.is_file():
            return None
        for name, version, folder in _in_folder(place):
            found.setdefault(name, (version, folder))
    return found


def _in_folder(place: Path) -> Iterator[tuple[str, str, str]]:
    with suppress(OSError):  # a folder of the path need not exist
        for folder in os.scandir(place):
            stem, _, kind = folder.name.rpartition(".")
            if kind in ("dist-info", "egg-info"):
                name, version, *_ = *stem.split("-"), ""
                yield name.lower().replace("_", "-").replace(".", "-"), version, folder.path


def _may_be_any() -> bool:
    """Return whether an installed package may extend rlwatch: False only if none has such an entry point."""
    packages = installed()
    return packages is None or any(_extends(Path(folder, "entry_points.txt")) for _, folder in packages.values())


def _extends(entry_points: Path) -> bool:
    try:
        return b"[rlwatch." in entry_points.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def reload() -> None:
    """Clear the cache of loaded plugins, so that packages installed since then are found."""
    found.cache_clear()
    _usable.cache_clear()


def usable(door: str, taken: Collection[str] = ()) -> Mapping[str, Any]:
    """Return name -> loaded object of the working plugins of the extension point ``door``; log a warning for each other
    one.

    ``taken``: names that rlwatch uses itself, which no plugin may have.
    """
    return _usable(door, frozenset(taken))


@cache
def _usable(door: str, taken: frozenset[str]) -> Mapping[str, Any]:
    plugins = judged(door, taken)
    for plugin in plugins:
        if plugin.problem:
            message = "rlwatch: plugin %r of %s left out: %s: %s"
            logger.warning(message, plugin.name, door, plugin.origin, plugin.problem)
    return {plugin.name: plugin.target for plugin in plugins if not plugin.problem}


def judged(door: str, taken: Collection[str] = ()) -> list[Plugin]:
    """Return all plugins of the extension point ``door``, each with its ``problem`` or none.

    ``taken``: names that rlwatch uses itself. A plugin with one of them, or with the name of an earlier plugin, gets a
    problem.
    """
    plugins: list[Plugin] = []
    for plugin in found(door):
        problem = plugin.problem
        if not problem and plugin.name in taken:
            problem = f"rlwatch has one of its own that is called {plugin.name!r}"
        elif not problem and any(plugin.name == other.name and not other.problem for other in plugins):
            problem = f"another plugin is called {plugin.name!r}"
        plugins.append(replace(plugin, problem=problem))
    return plugins


def _loaded(door: str, point: metadata.EntryPoint) -> Plugin:
    package, version = call_or(lambda: _whose(point), lambda _: ("?", "?"))
    bare = Plugin(door, point.name, point.value, package, version)
    return call_or(
        lambda: _made(bare, DOORS[door], point.load()),
        lambda error: _broken(bare, f"cannot be loaded: {described(error)}"),
    )


def _whose(point: metadata.EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("?", "?")


def _made(bare: Plugin, door: ExtensionPoint, target: Any) -> Plugin:
    lacks = [name for name in (*door.needs, *filter(None, [door.called])) if not hasattr(target, name)]
    if lacks:
        return _broken(bare, f"lacks {', '.join(lacks)}: it must be a {door.meaning}")
    if not door.needs and not callable(target):
        return _broken(bare, f"cannot be called: it must be a {door.meaning}")
    own = getattr(target, door.called) if door.called else bare.name
    if own != bare.name:
        return _broken(bare, f"calls itself {own!r}: the entry point must be called so, too")
    return replace(bare, target=target)


def _broken(bare: Plugin, problem: str) -> Plugin:
    return replace(bare, problem=problem)
