"""The structure of ``rlwatch.toml``, for pydantic. Imported only when there is a file to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import time
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, field_validator

from rlwatch.alerts.rules import (
    DAYS,
    AlertGrouping,
    AlertingConfig,
    GroupBy,
    Inhibition,
    QuietHours,
    Rule,
    default_inhibitions,
)
from rlwatch.alerts.silencing import seconds_of
from rlwatch.errors import ConfigError
from rlwatch.notify.registry import notifier_kinds
from rlwatch.records import JSON, Severity
from rlwatch.wording import nearest

_T = TypeVar("_T")

ALWAYS_THERE = ("console", "webhook")
"""Channels that a rule may name although the file does not configure them: the environment may."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RuleTable(_Table):
    """One ``[[rules]]`` table: the fields of :class:`rlwatch.alerts.rules.Rule`, which checks their values."""

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
    repeat_minutes: float = Field(default=0.0, strict=False)
    escalate_after_minutes: float = Field(default=0.0, strict=False)
    escalate_after_steps: int = 0
    escalate_to: list[str] = []
    escalate_severity: str | None = None
    only_live: bool = True


def _seconds(text: object) -> object:
    try:
        return seconds_of(text) if isinstance(text, str) else text
    except ConfigError as error:
        raise ValueError(str(error)) from None


Age = Annotated[float, BeforeValidator(_seconds)]
Level = Annotated[Severity, Strict(strict=False)]


class GroupingTable(_Table):
    """The ``[grouping]`` table: the fields of :class:`rlwatch.alerts.rules.AlertGrouping`."""

    by: GroupBy = Field(default=GroupBy.RUN, strict=False)
    wait_s: float = Field(default=0.0, ge=0, le=3600, strict=False)


class QuietHoursTable(_Table):
    """One ``[[quiet_hours]]`` table: the fields of :class:`rlwatch.alerts.rules.QuietHours`."""

    start: time = Field(alias="from")
    end: time = Field(alias="to")
    time_zone: str = "UTC"
    let_through: Level = Severity.CRITICAL
    days: list[str] = list(DAYS)

    @field_validator("start", "end", mode="before")
    @classmethod
    def _clock_time(cls, value: object) -> object:
        """Return a time from ``"22:00"``, or from TOML's own 22:00:00."""
        try:
            return time.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError("must be a time of day, as in '22:00'") from None


class InhibitTable(_Table):
    """One ``[[inhibit]]`` table (some alerts hold back others): the fields of
    :class:`rlwatch.alerts.rules.Inhibition`.
    """

    when: list[str]
    mutes: list[str] = []
    min_severity: Level = Severity.CRITICAL
    up_to: Level = Severity.CRITICAL


class NotifyTable(_Table):
    """One ``[notify.NAME]`` table: a notification channel. ``kind`` defaults to the name; ``options``: for a plugin's
    kind.
    """

    kind: str | None = None
    url: str | None = None
    secret: str | None = Field(default=None, pattern=r"^env:\w+$")
    connect_s: float | None = Field(default=None, gt=0, strict=False)
    read_s: float | None = Field(default=None, gt=0, strict=False)
    total_s: float | None = Field(default=None, gt=0, strict=False)
    argv: list[str] | None = None
    pass_env: list[str] | None = None
    options: dict[str, Any] | None = None


class ActionTable(_Table):
    """One ``[[actions]]`` table (a command to send when an alert fires): fields of
    :class:`rlwatch.control.policy.PermittedAction`, which checks their values.
    """

    name: str
    kinds: list[str]
    do: str
    args: dict[str, Any] = {}
    min_severity: Level = Severity.WARNING
    cooldown_steps: int = 100
    most: int = 1
    dry_run: bool = True


class RescueTable(_Table):
    """The ``[[rescue]]`` table (permission to save a failing run): fields of
    :class:`rlwatch.control.rescue.RescuePolicy`, which checks their values.
    """

    name: str = "rescue"
    kinds: list[str] | None = None
    probe: int = 2
    scale: float = Field(default=0.1, strict=False)
    mild_scale: float = Field(default=0.3, strict=False)
    cooldown_steps: int = 30
    quiet_steps: int = 50
    most: int = 2
    skip_nonfinite: bool = False
    dry_run: bool = True


class RetentionTable(_Table):
    """The ``[retention]`` table: how long data are kept, as in ``tokens = "30d"``; other kinds are kept for ever."""

    tokens: Age | None = None
    completions: Age | None = None
    archived: Age | None = None


class PlaceTable(_Table):
    """The ``[store]`` or the ``[dashboard]`` table: the address of the store or of the dashboard."""

    url: str


class FileTable(_Table):
    """All tables and keys of ``rlwatch.toml``."""

    default_rules: bool = True
    rules: list[RuleTable] = []
    grouping: GroupingTable = GroupingTable()
    quiet_hours: list[QuietHoursTable] = []
    inhibit: list[InhibitTable] | None = None
    actions: list[ActionTable] = []
    rescue: list[RescueTable] = Field(default=[], max_length=1)
    notify: dict[str, NotifyTable] = {}
    store: PlaceTable | None = None
    retention: RetentionTable = RetentionTable()
    dashboard: PlaceTable | None = None
    forecast: bool = True
    map: dict[str, str | list[str]] = {}


@dataclass(frozen=True, slots=True)
class Parsed:
    """Checked content of ``rlwatch.toml``.

    Parameters
    ----------
    policy
        Alert rules and their settings.
    default_rules
        Whether the default rules apply, too.
    channels
        Name, kind and options of each notification channel.
    store_url, dashboard_url
        Addresses, if set.
    actions, rescue
        Tables, of which only the structure is checked: commands that alerts may send without a user, and the permission
        to save failing runs.
    retention
        Kind of data -> seconds for which it is kept.
    map
        Role of a metric, such as ``reward`` -> names that the user's logs have for it.
    """

    policy: AlertingConfig
    default_rules: bool
    channels: tuple[tuple[str, str, Mapping[str, JSON]], ...]
    store_url: str | None
    dashboard_url: str
    actions: tuple[Mapping[str, JSON], ...] = ()
    rescue: tuple[Mapping[str, JSON], ...] = ()
    retention: Mapping[str, float] = field(default_factory=dict)
    map: Mapping[str, Sequence[str]] = field(default_factory=dict)


def parse(file: str, raw: Mapping[str, Any]) -> Parsed:
    """Check the tables ``raw`` of the configuration file and return the content.

    Raises
    ------
    ConfigError
        With the file and the key of each problem; values of ``[notify]`` are not shown.
    """
    try:
        table = FileTable.model_validate(raw)
    except ValidationError as error:
        problems = [_problem(e["loc"], e["type"], e["msg"], e["input"]) for e in error.errors()]
        raise _refusal(file, problems) from None
    problems = [*_channel_problems(table)]
    rules = [*_built(problems, "rules", Rule, [rule.model_dump(exclude_unset=True) for rule in table.rules])]
    names = [rule.name for rule in rules]
    problems += [f"rules: more than one is named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    quiet = [*_built(problems, "quiet_hours", QuietHours, [_tuples(each) for each in table.quiet_hours])]
    causes = [*_built(problems, "inhibit", Inhibition, [_tuples(each) for each in table.inhibit or ()])]
    if problems:
        raise _refusal(file, problems)
    return Parsed(
        AlertingConfig(
            tuple(rules),
            AlertGrouping(table.grouping.by, table.grouping.wait_s),
            tuple(quiet),
            default_inhibitions() if table.inhibit is None else tuple(causes),
            table.forecast,
        ),
        table.default_rules,
        tuple((n, t.kind or n, t.model_dump(exclude_unset=True, exclude={"kind"})) for n, t in table.notify.items()),
        table.store.url if table.store else None,
        table.dashboard.url if table.dashboard else "",
        tuple(_tuples(action) for action in table.actions),
        tuple({key: value for key, value in _tuples(one).items() if value is not None} for one in table.rescue),
        table.retention.model_dump(exclude_none=True),
        {role: [names] if isinstance(names, str) else names for role, names in table.map.items()},
    )


def _built(problems: list[str], where: str, kind: Callable[..., _T], tables: Iterable[dict[str, Any]]) -> Iterator[_T]:
    """Yield the objects that can be built; for others, add the problem to ``problems``."""
    for number, table in enumerate(tables):
        try:
            yield kind(**table)
        except ConfigError as error:
            problems.append(f"{where}[{number}]: {error}")


def _tuples(table: BaseModel) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.model_dump().items()}


def _channel_problems(table: FileTable) -> Iterator[str]:
    for name, notifier in table.notify.items():
        kind = notifier.kind or name
        kinds = notifier_kinds()
        if kind not in kinds:
            yield f"notify.{name}: there is no kind {kind!r}; set kind to one of {', '.join(sorted(kinds))}"
    known = {*table.notify, *ALWAYS_THERE}
    for number, rule in enumerate(table.rules):
        for key, channels in (("channels", rule.channels), ("escalate_to", rule.escalate_to)):
            for channel in channels:
                if channel not in known:
                    yield f"rules[{number}].{key}: there is no channel {channel!r}; add [notify.{channel}]"


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
    return f"{key}: {message.removeprefix('Value error, ')}, got {value!r}"


def _hint(place: tuple[int | str, ...]) -> str:
    tables: Mapping[object, type[BaseModel]] = {
        "rules": RuleTable,
        "notify": NotifyTable,
        "actions": ActionTable,
        "rescue": RescueTable,
        "grouping": GroupingTable,
        "quiet_hours": QuietHoursTable,
        "inhibit": InhibitTable,
        "retention": RetentionTable,
    }
    table = FileTable if len(place) == 1 else tables.get(place[0], PlaceTable)
    keys = [field.alias or name for name, field in table.model_fields.items()]
    near = nearest(str(place[-1]), keys)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(keys)}"
