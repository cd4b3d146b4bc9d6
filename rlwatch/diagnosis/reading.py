"""Reads the playbook: what each kind of finding means, what follows from it, what people do about it.

The playbook is data (``playbook/actions/*.toml``, ``playbook/kinds/*.toml``, a file per family): an action
is written once, and a kind that uses it may say how strong the evidence is for that use.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from rlwatch.errors import ConfigError
from rlwatch.records import JSON

REACH = 300
"""Steps within which an effect follows its cause, unless a kind says otherwise: published collapses by mismatch,
entropy or likelihood took 40 to 300 steps from their first sign."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the playbook says of one kind of finding.

    ``collapse``: while it holds, a reference reset would make a bad policy the anchor. ``symptom``: it
    is hardly ever where a failure begins. ``leads_to``: kinds known to follow, within ``reach`` steps.
    ``do``: actions in order, merged with what the kind says of them.
    """

    kind: str
    title: str
    cause: str
    happened: str
    meaning: str
    do: tuple[Mapping[str, JSON], ...]
    collapse: bool = False
    symptom: bool = False
    leads_to: tuple[str, ...] = ()
    reach: int = REACH


@cache
def playbook() -> Mapping[str, Entry]:
    """Every kind of finding with advice. Raises ``ConfigError`` if a kind uses an action nobody wrote."""
    actions = _tables("actions")
    return {kind: _entry(kind, table, actions) for kind, table in _tables("kinds").items()}


def _entry(kind: str, table: Mapping[str, JSON], actions: Mapping[str, Mapping[str, JSON]]) -> Entry:
    do = []
    for used in table["do"]:
        if used["action"] not in actions:
            raise ConfigError(f"playbook: {kind} uses the action {used['action']!r}, which no file describes")
        do.append({**actions[used["action"]], **used})
    plain = {key: value for key, value in table.items() if key not in ("do", "leads_to")}
    return Entry(kind=kind, do=tuple(do), leads_to=tuple(table.get("leads_to", ())), **plain)


def _tables(folder: str) -> dict[str, Mapping[str, JSON]]:
    tables: dict[str, Mapping[str, JSON]] = {}
    files = resources.files("rlwatch.diagnosis") / "playbook" / folder
    for file in sorted(files.iterdir(), key=lambda path: path.name):
        if file.name.endswith(".toml"):
            tables |= tomllib.loads(file.read_text(encoding="utf-8"))
    return tables
