"""Is this Python fit for rlwatch, and is it this rlwatch that is imported?"""

from __future__ import annotations

import platform
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import rlwatch
from rlwatch.cli import app_login
from rlwatch.cli.checks import Check, Level
from rlwatch.errors import ConfigError

DISTRIBUTION = "rlwatch-monitor"
NAMESAKE = "rlwatch"
"""A distribution of somebody else's that also installs ``rlwatch/__init__.py``."""

PYTHON_NEEDED = (3, 11)
SQLITE_NEEDED = (3, 24, 0)
"""UPSERT."""
WAL_RESET_FIXED = (3, 51, 3)

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "alerts": ("pydantic", "httpx", "tenacity"),
    "cli": ("typer", "rich"),
    "app": ("streamlit", "limits"),
    "trl": ("torch", "transformers", "trl"),
    "transformers": ("torch", "transformers", "accelerate"),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "notify": ("apprise",),
}
"""What each optional part needs."""

TRAINERS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "trl": ((1, 0), (2,)),
    "transformers": ((5, 0), (6,)),
    "verl": ((0, 9), (0, 10)),
    "openrlhf": ((0, 11), (0, 12)),
    "wandb": ((0, 19), (1,)),
}
"""Trainer (or tracker) -> the versions whose names and hooks are known: from the first up to, not with, the second."""


def python() -> Check:
    """The interpreter's version."""
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < PYTHON_NEEDED:
        return Check("python", Level.FAIL, f"{text}: rlwatch needs 3.11 or newer")
    return Check("python", Level.OK, text)


def sqlite(version: str = sqlite3.sqlite_version) -> Check:
    """The SQLite this Python was built with."""
    number = _numbers(version)
    if number < SQLITE_NEEDED:
        return Check("sqlite", Level.FAIL, f"{version}: rlwatch needs 3.24 or newer")
    if number < WAL_RESET_FIXED:
        note = "has the WAL-reset bug fixed in 3.51.3; rlwatch avoids it by keeping one writer per run file"
        return Check("sqlite", Level.OK, f"{version} ({note}: do not write to run files with other tools)")
    return Check("sqlite", Level.OK, version)


def package() -> Check:
    """Which rlwatch this is, and from where."""
    where = Path(rlwatch.__file__).parent
    installed = _version(DISTRIBUTION)
    text = f"{rlwatch.__version__} from {where}"
    if installed is None:
        return Check("rlwatch", Level.WARN, f"{text}, which is not installed (no {DISTRIBUTION} distribution)")
    if installed != rlwatch.__version__:
        return Check("rlwatch", Level.WARN, f"{text}, but {DISTRIBUTION} {installed} is installed: reinstall it")
    return Check("rlwatch", Level.OK, text)


def namesake() -> Check:
    """Whether the unrelated distribution called ``rlwatch`` is installed as well."""
    version = _version(NAMESAKE)
    if version is None:
        return Check("namesake", Level.OK, f"the unrelated PyPI distribution {NAMESAKE!r} is not installed")
    return Check(
        "namesake",
        Level.FAIL,
        f"the unrelated PyPI distribution {NAMESAKE!r} {version} is installed too and overwrites the same files; run: "
        f"pip uninstall -y {NAMESAKE} && pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def extras() -> list[Check]:
    """Each optional part: complete, or what it lacks."""
    return [_extra(name, packages) for name, packages in EXTRAS.items()]


def dashboard_login() -> Check:
    """Whether the dashboard's tokens and the secret its sessions are signed with are secret."""
    path = app_login.secret_path()
    try:
        set_ones = [token.source for token in app_login.tokens().values() if token.source]
        if path.exists():
            app_login.session_secret(path)
    except (ConfigError, OSError) as error:
        return Check("dashboard", Level.FAIL, f"rlwatch ui will not start: {error}")
    kept = f"{path}, yours alone" if path.exists() else f"{path}, which the first rlwatch ui makes"
    chosen = f"; token from {' and '.join(set_ones)}" if set_ones else "; each start makes new tokens"
    return Check("dashboard", Level.OK, f"sessions are signed with {kept}{chosen}")


def _extra(name: str, packages: Iterable[str]) -> Check:
    versions = {package: _version(package) for package in packages}
    absent = [package for package, version in versions.items() if version is None]
    if not absent:
        return Check(f"extra {name}", Level.OK, ", ".join(f"{p} {v}" for p, v in versions.items()))
    wanted = f"rlwatch-monitor[{name}]" if " " not in name else " ".join(absent)
    return Check(f"extra {name}", Level.WARN, f"without {', '.join(absent)}; if you need it: pip install '{wanted}'")


def trainers() -> list[Check]:
    """Each installed trainer: a version whose names and hooks are known, or not."""
    found = ((name, _version(name)) for name in TRAINERS)
    checks = [_trainer(name, version) for name, version in found if version is not None]
    return checks or [Check("trainers", Level.OK, f"none of {', '.join(TRAINERS)} here: use rlwatch.init and run.log")]


def _trainer(name: str, version: str) -> Check:
    first, beyond = TRAINERS[name]
    if first <= _numbers(version) < beyond:
        return Check(name, Level.OK, f"{version}, a version rlwatch knows")
    known = f"{'.'.join(map(str, first))} up to before {'.'.join(map(str, beyond))}"
    return Check(name, Level.WARN, f"{version} is not known (known: {known}): metrics may be missing or renamed")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``1.16.0.dev0`` -> (1, 16, 0)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
