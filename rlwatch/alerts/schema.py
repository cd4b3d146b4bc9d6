"""The shape of ``rlwatch.toml``, for pydantic. Imported only when there is a file to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlwatch.alerts.rules import Rule
from rlwatch.errors import ConfigError
from rlwatch.notify.registry import HOMES
from rlwatch.records import JSON

ALWAYS_THERE = ("console", "webhook")
"""Channels a rule may name without the file configuring them: the environment may."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RuleTable(_Table):
    """``[[rules]]``: the fields of :class:`rlwatch.alerts.rules.Rule`, which checks their values."""

    name: str
    kinds: list[str] = []
    detectors: list[str] = []
    min_severity: str = "warning"
    for_steps: int = 0
    keep_firing_for: int = 0
    severity: str | None = None
    labels: dict[str, str] = {}
    channels: list[str] = []
    for_critical: int | None = None
    except_kinds: list[str] = []


class NotifyTable(_Table):
    """``[notify.NAME]``. ``kind`` may be left out where it is the name."""

    kind: str | None = None
    url: str | None = None
    secret: str | None = Field(default=None, pattern=r"^env:\w+$")
    connect_s: float | None = Field(default=None, gt=0, strict=False)
    read_s: float | None = Field(default=None, gt=0, strict=False)
    total_s: float | None = Field(default=None, gt=0, strict=False)


class PlaceTable(_Table):
    """``[store]`` and ``[dashboard]``."""

    url: str


class FileTable(_Table):
    """The whole file."""

    default_rules: bool = True
    rules: list[RuleTable] = []
    notify: dict[str, NotifyTable] = {}
    store: PlaceTable | None = None
    dashboard: PlaceTable | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the file says, checked. ``channels``: (name, kind, options)."""

    rules: tuple[Rule, ...]
    default_rules: bool
    channels: tuple[tuple[str, str, Mapping[str, JSON]], ...]
    store_url: str | None
    dashboard_url: str


def parse(file: str, raw: Mapping[str, Any]) -> Parsed:
    """The file's content.

    Raises
    ------
    ConfigError
        Naming the file and, for each thing that is wrong, its key; values of ``[notify]`` are not shown.
    """
    try:
        table = FileTable.model_validate(raw)
    except ValidationError as error:
        problems = [_problem(e["loc"], e["type"], e["msg"], e["input"]) for e in error.errors()]
        raise _refusal(file, problems) from None
    problems = [*_channel_problems(table)]
    rules = []
    for number, rule in enumerate(table.rules):
        try:
            rules.append(Rule(**rule.model_dump(exclude_unset=True)))
        except ConfigError as error:
            problems.append(f"rules[{number}]: {error}")
    names = [rule.name for rule in rules]
    problems += [f"rules: more than one is named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        raise _refusal(file, problems)
    return Parsed(
        tuple(rules),
        table.default_rules,
        tuple((n, t.kind or n, t.model_dump(exclude_unset=True, exclude={"kind"})) for n, t in table.notify.items()),
        table.store.url if table.store else None,
        table.dashboard.url if table.dashboard else "",
    )


def _channel_problems(table: FileTable) -> Iterator[str]:
    for name, notifier in table.notify.items():
        kind = notifier.kind or name
        if kind not in HOMES:
            yield f"notify.{name}: there is no kind {kind!r}; set kind to one of {', '.join(sorted(HOMES))}"
    known = {*table.notify, *ALWAYS_THERE}
    for number, rule in enumerate(table.rules):
        for channel in rule.channels:
            if channel not in known:
                yield f"rules[{number}].channels: there is no channel {channel!r}; add [notify.{channel}]"


def _refusal(file: str, problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"{file}: {problems[0]}")
    return ConfigError("\n  ".join([f"{file}: {len(problems)} problems", *problems]))


def _problem(place: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_hint(place)}"
    if kind == "missing":
        return f"{key}: missing"
    if place[0] == "notify":
        secret = place[-1] == "secret"
        return f"{key}: " + ("must name an environment variable, as in 'env:MY_SECRET'" if secret else message)
    return f"{key}: {message}, got {value!r}"


def _hint(place: tuple[int | str, ...]) -> str:
    tables: Mapping[object, type[BaseModel]] = {"rules": RuleTable, "notify": NotifyTable}
    table = FileTable if len(place) == 1 else tables.get(place[0], PlaceTable)
    near = get_close_matches(str(place[-1]), table.model_fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(table.model_fields)}"
