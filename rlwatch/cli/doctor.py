"""``rlwatch doctor``: check the installation, and recommend fixes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

import rlwatch
from rlwatch.cli import app_login, plugins
from rlwatch.cli.console import print_json, print_table
from rlwatch.cli.options import VARIABLES, FormatOption, OutputFormat, StoreOption, examples
from rlwatch.errors import ConfigError, StoreError
from rlwatch.integrations.verl.compat import LAUNCH, loads_plugins, verl_version
from rlwatch.integrations.verl.heartbeat import IN_PLACE, WAITING, Heartbeat, directory, latest
from rlwatch.ports import Store
from rlwatch.wording import age, meant

if TYPE_CHECKING:
    from rlwatch.alerts.config import ChannelConfig, Config


class CheckStatus(StrEnum):
    """Result of a check by ``rlwatch doctor``. ``fail``: rlwatch will not work; ``warn``: an optional part does not
    work.
    """

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One line printed by ``rlwatch doctor``: the checked part, its status, and a text with the fix."""

    name: str
    level: CheckStatus
    text: str


# Python, SQLite, the package and its extras.

DISTRIBUTION = "rlwatch-monitor"
NAMESAKE = "rlwatch"
"""Name of an unrelated PyPI distribution that also installs ``rlwatch/__init__.py``."""

PYTHON_NEEDED = (3, 11)
SQLITE_NEEDED = (3, 24, 0)
"""First version of SQLite that has UPSERT."""
WAL_RESET_FIXED = (3, 51, 3)

_OF_EXTRA = re.compile(r"([\w.-]+).*;.*\bextra\s*==\s*['\"]([\w-]+)['\"]")
"""Matches a requirement in the metadata of a distribution: its name, and its extra."""
NO_PARTS = ("all", "dev", "dev-verl")
"""Extras of the package that are not checked: those that only combine others, and those for development."""

TRAINERS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "trl": ((1, 0), (2,)),
    "transformers": ((5, 0), (6,)),
    "verl": ((0, 9), (0, 10)),
    "openrlhf": ((0, 11), (0, 12)),
    "wandb": ((0, 19), (1,)),
}
"""Supported versions of each trainer or tracker: from the first number up to, but without, the second."""


def python_check() -> DoctorCheck:
    """Check that the version of Python is supported."""
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < PYTHON_NEEDED:
        return DoctorCheck("python", CheckStatus.FAIL, f"{text}: rlwatch needs 3.11 or newer")
    return DoctorCheck("python", CheckStatus.OK, text)


def sqlite_check(version: str = sqlite3.sqlite_version) -> DoctorCheck:
    """Check that the SQLite library of this Python, of the given ``version``, is new enough."""
    number = _numbers(version)
    if number < SQLITE_NEEDED:
        return DoctorCheck("sqlite", CheckStatus.FAIL, f"{version}: rlwatch needs 3.24 or newer")
    if number < WAL_RESET_FIXED:
        note = "has the WAL-reset bug fixed in 3.51.3; rlwatch avoids it by keeping one writer per run file"
        return DoctorCheck("sqlite", CheckStatus.OK, f"{version} ({note}: do not write to run files with other tools)")
    return DoctorCheck("sqlite", CheckStatus.OK, version)


def package_check() -> DoctorCheck:
    """Report the version and location of rlwatch, with a warning if it is not installed or its versions disagree."""
    where = Path(rlwatch.__file__).parent
    installed = _version(DISTRIBUTION)
    text = f"{rlwatch.__version__} from {where}"
    if installed is None:
        return DoctorCheck(
            "rlwatch", CheckStatus.WARN, f"{text}, which is not installed (no {DISTRIBUTION} distribution)"
        )
    if installed != rlwatch.__version__:
        return DoctorCheck(
            "rlwatch", CheckStatus.WARN, f"{text}, but {DISTRIBUTION} {installed} is installed: reinstall it"
        )
    return DoctorCheck("rlwatch", CheckStatus.OK, text)


def namesake_check() -> DoctorCheck:
    """Check that the unrelated PyPI distribution called ``rlwatch``, which overwrites files of this one, is not
    installed.
    """
    version = _version(NAMESAKE)
    if version is None:
        return DoctorCheck("namesake", CheckStatus.OK, f"the unrelated PyPI distribution {NAMESAKE!r} is not installed")
    return DoctorCheck(
        "namesake",
        CheckStatus.FAIL,
        f"the unrelated PyPI distribution {NAMESAKE!r} {version} is installed too and overwrites the same files; run: "
        f"pip uninstall -y {NAMESAKE} && pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def extras_checks() -> list[DoctorCheck]:
    """Report for each extra of rlwatch if it is complete, or the packages it lacks; [] if rlwatch is not installed."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    parts: dict[str, list[str]] = {}
    for match in filter(None, map(_OF_EXTRA.match, required)):
        name, extra = match.groups()
        if name != DISTRIBUTION and extra not in NO_PARTS:
            parts.setdefault(extra, []).append(name)
    return [_extra(name, packages) for name, packages in parts.items()]


def login_check() -> DoctorCheck:
    """Check that no other user can read the dashboard's login tokens and session secret."""
    path = app_login.secret_path()
    try:
        set_ones = [token.source for token in app_login.tokens().values() if token.source]
        if path.exists():
            app_login.session_secret(path)
    except (ConfigError, OSError) as error:
        return DoctorCheck("dashboard", CheckStatus.FAIL, f"rlwatch ui will not start: {error}")
    kept = f"{path}, readable by you alone" if path.exists() else f"{path}, which the first rlwatch ui makes"
    chosen = f"; token from {' and '.join(set_ones)}" if set_ones else "; each start makes new tokens"
    return DoctorCheck("dashboard", CheckStatus.OK, f"sessions are signed with {kept}{chosen}")


def _extra(name: str, packages: Iterable[str]) -> DoctorCheck:
    versions = {package: _version(package) for package in packages}
    absent = [package for package, version in versions.items() if version is None]
    if not absent:
        return DoctorCheck(f"extra {name}", CheckStatus.OK, ", ".join(f"{p} {v}" for p, v in versions.items()))
    wanted = f"rlwatch-monitor[{name}]" if " " not in name else " ".join(absent)
    return DoctorCheck(
        f"extra {name}", CheckStatus.WARN, f"without {', '.join(absent)}; to install it: pip install '{wanted}'"
    )


def trainer_checks() -> list[DoctorCheck]:
    """Check that the versions of the installed trainers and trackers are supported."""
    found = ((name, _version(name)) for name in TRAINERS)
    checks = [_trainer(name, version) for name, version in found if version is not None]
    return checks or [
        DoctorCheck("trainers", CheckStatus.OK, f"none of {', '.join(TRAINERS)} here: use rlwatch.init and run.log")
    ]


def kernel_checks() -> list[DoctorCheck]:
    """Report how entropy is computed from logits on a GPU, where PyTorch is installed."""
    torch, triton = _version("torch"), _version("triton")
    if torch is None:
        return []
    how = "by PyTorch, in tiles, because Triton is not installed"
    if triton is not None:
        how = f"by a kernel of Triton {triton}, in one pass over the logits; by PyTorch, in tiles, if it fails at first"
    return [DoctorCheck("entropy", CheckStatus.OK, f"from logits on a GPU {how}")]


def _trainer(name: str, version: str) -> DoctorCheck:
    first, beyond = TRAINERS[name]
    if first <= _numbers(version) < beyond:
        return DoctorCheck(name, CheckStatus.OK, f"{version}, a supported version")
    known = f"{'.'.join(map(str, first))} up to before {'.'.join(map(str, beyond))}"
    return DoctorCheck(
        name, CheckStatus.WARN, f"{version} is untested (supported: {known}): metrics may be missing or renamed"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``1.16.0.dev0`` -> (1, 16, 0)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


# The store: reachable, writable, and its runs readable.

MOST_LISTED = 10
LEAST_FREE = 1 << 30
"""Least free disk space in bytes before a warning; it suffices for some runs of 100,000 steps of 150 metrics."""


def storage_checks(url: str | None, mounts: str | None = None) -> list[DoctorCheck]:
    """Check the location, file system and runs of the store at ``url``.

    ``mounts`` is text in the format of ``/proc/self/mountinfo``, which is read if it is None.
    """
    from rlwatch.store.url import open_store

    try:
        store = open_store(url)
    except StoreError as error:
        return [DoctorCheck("store", CheckStatus.FAIL, f"cannot be opened: {error}")]
    try:
        return [*_place(store, mounts), *_runs(store)]
    finally:
        store.close()


def root_of(url: str | None) -> Path | None:
    """Return the directory of the store at ``url``; None if it is not in a directory or cannot be opened."""
    from rlwatch.store.url import open_store

    try:
        return getattr(open_store(url), "root", None)
    except StoreError:
        return None


def _place(store: Store, mounts: str | None) -> list[DoctorCheck]:
    root: Path | None = getattr(store, "root", None)
    if root is None:
        return [DoctorCheck("store", CheckStatus.OK, store.url)]
    return [_writable(root), *_space(root), *_network(root, mounts)]


def _space(root: Path) -> list[DoctorCheck]:
    """Report a disk that is nearly full; empty if there is enough space."""
    existing = next(place for place in (root, *root.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free >= LEAST_FREE:
        return []
    text = f"{free >> 20} MiB are free at {existing}: recording stops when it is full; free space there"
    return [DoctorCheck("disk", CheckStatus.WARN, text)]


def _network(root: Path, mounts: str | None) -> list[DoctorCheck]:
    from rlwatch.store.sqlite.layout import network_file_system

    kind = network_file_system(root, mounts)
    if kind is None:
        return []
    return [
        DoctorCheck(
            "file system",
            CheckStatus.WARN,
            f"{root} lies on a network file system ({kind}): runs are written node-locally and copied there every "
            "minute, and commands take seconds to a minute; use a local directory if possible",
        )
    ]


def _writable(root: Path) -> DoctorCheck:
    """Check by permissions whether the store can be written, without creating a file."""
    existing = next(place for place in (root, *root.parents) if place.exists())
    if not os.access(existing, os.R_OK | os.X_OK):
        return DoctorCheck("store", CheckStatus.FAIL, f"{root} cannot be read: check the permissions of {existing}")
    if not os.access(existing, os.W_OK):
        return DoctorCheck(
            "store", CheckStatus.WARN, f"{root} is read-only here: runs can be shown, not recorded or commanded"
        )
    return DoctorCheck(
        "store", CheckStatus.OK, f"{root} {'is writable' if existing == root else 'will be made by the first run'}"
    )


def _runs(store: Store) -> list[DoctorCheck]:
    try:
        readable, unreadable = store.runs(), store.unreadable()
    except StoreError as error:
        return [DoctorCheck("runs", CheckStatus.FAIL, str(error))]
    checks = [DoctorCheck("runs", CheckStatus.OK, f"{len(readable)} readable")]
    checks += [
        DoctorCheck("runs", CheckStatus.WARN, f"{name}: {why}") for name, why in list(unreadable.items())[:MOST_LISTED]
    ]
    if len(unreadable) > MOST_LISTED:
        checks.append(
            DoctorCheck("runs", CheckStatus.WARN, f"and {len(unreadable) - MOST_LISTED} more that cannot be read")
        )
    return checks


# The plugin for verl: installed where verl finds it, loaded, and compatible. verl itself reports none of it.

GROUP, NAME = "verl.plugins", "rlwatch"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"


def verl_checks() -> list[DoctorCheck]:
    """Check that verl loads the plugin of rlwatch; [] if verl is not installed and has never loaded it."""
    beats = latest()
    if not verl_version():
        return _heard(beats) if beats else []
    return [_entry_point(), *_policy(), *_heard(beats)]


def _entry_point() -> DoctorCheck:
    if not loads_plugins():
        text = f"verl {verl_version()} loads no plugins, and refuses 'rlwatch' as a logger; start it with: {LAUNCH}"
        return DoctorCheck("verl plugin", CheckStatus.WARN, text)
    if any(point.name == NAME for point in metadata.entry_points(group=GROUP)):
        return DoctorCheck("verl plugin", CheckStatus.OK, f"registered under {GROUP!r}")
    return DoctorCheck(
        "verl plugin", CheckStatus.WARN, f"not registered under {GROUP!r}: reinstall rlwatch-monitor here"
    )


def _policy() -> list[DoctorCheck]:
    policy = os.environ.get(POLICY, "auto").strip().lower()
    if policy == "auto" or NAME in {name.strip() for name in policy.split(",")}:
        return []
    return [
        DoctorCheck(
            "verl plugin", CheckStatus.WARN, f"{POLICY}={policy} keeps verl from loading it; add {NAME!r} to the list"
        )
    ]


def _heard(beats: list[Heartbeat]) -> list[DoctorCheck]:
    if not beats:
        how = "`python -c 'import verl'` loads it"
        return [
            DoctorCheck(
                "verl heartbeat", CheckStatus.WARN, f"the plugin has not been loaded yet ({directory()}); {how}"
            )
        ]
    checks = [_beat("verl heartbeat", beats[0])]
    for role in ("driver", "worker"):
        acted = next((beat for beat in beats if beat.role == role), None)
        if acted is not None and acted is not beats[0]:
            checks.append(_beat(f"verl {role}", acted))
    return checks


def _beat(name: str, beat: Heartbeat) -> DoctorCheck:
    where = f"verl {beat.verl or '?'} loaded rlwatch {beat.rlwatch} {age(beat.loaded_at, time.time())} on {beat.host}"
    role = f", watched as {beat.role}" if beat.role else ""
    wrong = [f"{hook}: {how}" for hook, how in beat.hooks.items() if how not in (IN_PLACE, WAITING)]
    wrong += [beat.error] if beat.error else []
    if wrong:
        return DoctorCheck(name, CheckStatus.WARN, f"{where}{role}, but {'; '.join(wrong)}")
    return DoctorCheck(name, CheckStatus.OK, f"{where}{role}")


# Environment variables with a name close to one that rlwatch reads.

ALIKE = 0.85
_PREFIX = "RLWATCH_"


def variable_checks(environment: Mapping[str, str] | None = None) -> list[DoctorCheck]:
    """Warn of environment variables that rlwatch does not read but whose names resemble one it does: probable typing
    errors.

    ``environment`` replaces the variables of this process.
    """
    known = {*VARIABLES, *(f"{name}_FILE" for name in VARIABLES if name.endswith("_TOKEN"))}
    strange = sorted(name for name in environment or os.environ if name.startswith(_PREFIX) and name not in known)
    plain = [name.removeprefix(_PREFIX) for name in known]
    return [
        DoctorCheck("variable", CheckStatus.WARN, f"{name} is not a variable of rlwatch{hint}")
        for name in strange
        if (hint := meant(name.removeprefix(_PREFIX), plain, 1, ALIKE).replace("mean ", f"mean {_PREFIX}"))
    ]


# Alerting: the configuration, and whether webhooks answer. No address is shown.

PING_S = 5.0


def webhook_checks(*, ping: bool = False, store_root: Path | None = None) -> list[DoctorCheck]:
    """Check the configuration and each webhook in it; with ``ping``, also that the server of each webhook answers.

    ``store_root``: directory of the store, in which a configuration is also looked for.
    """
    from rlwatch.alerts.config import load_config

    try:
        config = load_config(store_root=store_root)
    except ConfigError as error:
        return [DoctorCheck("configuration", CheckStatus.FAIL, str(error))]
    where = str(config.path) if config.path else "the defaults (no rlwatch.toml here)"
    checks = [DoctorCheck("configuration", CheckStatus.OK, f"{where}, {len(config.rules)} alert rules")]
    warnings = [*config.warnings, *([config.refused] if config.refused else [])]
    checks += [DoctorCheck("configuration", CheckStatus.WARN, warning) for warning in warnings]
    return checks + _channels(config, ping=ping)


def _channels(config: Config, *, ping: bool) -> list[DoctorCheck]:
    from rlwatch.alerts.config import URL_VARIABLE, build_notifiers

    channels = [channel for channel in config.channels if channel.kind != "console"]
    if not channels:
        return [DoctorCheck("webhook", CheckStatus.OK, f"none ({URL_VARIABLE} is not set): alerts stay in the store")]
    try:
        build_notifiers(config, console=False)
    except ConfigError as error:
        return [DoctorCheck("channels", CheckStatus.FAIL, f"cannot be used: {error}")]
    checks = [_described(channel) for channel in channels]
    return checks + [_ping(channel) for channel in channels if ping and channel.kind == "webhook"]


def _described(channel: ChannelConfig) -> DoctorCheck:
    from rlwatch.alerts.config import SECRET_VARIABLE
    from rlwatch.redaction import redact_url

    if channel.kind != "webhook":
        return DoctorCheck(
            channel.name, CheckStatus.OK, f"{channel.kind}; rlwatch alerts test --channel {channel.name} tries it"
        )
    shown = redact_url(_value(channel, "url"))
    if not _value(channel, "secret"):
        unsigned = f"unsigned: set {SECRET_VARIABLE} so that receivers can verify messages"
        return DoctorCheck(channel.name, CheckStatus.WARN, f"{shown}, {unsigned}")
    return DoctorCheck(channel.name, CheckStatus.OK, f"{shown}, signed")


def _value(channel: ChannelConfig, key: str) -> str:
    from rlwatch.alerts.config import REFERENCE

    value = str(channel.options.get(key) or "")
    return os.environ.get(value.removeprefix(REFERENCE), "") if value.startswith(REFERENCE) else value


def _ping(channel: ChannelConfig) -> DoctorCheck:
    """Send a HEAD request, which carries no message; any HTTP response, even 405, shows that a server answers."""
    import httpx

    from rlwatch.notify.http import quiet_http_logs
    from rlwatch.notify.webhook import LOOPBACK
    from rlwatch.redaction import Redactor

    url, name = _value(channel, "url"), f"{channel.name} ping"
    local = urlsplit(url).hostname in LOOPBACK
    try:
        with quiet_http_logs():
            answer = httpx.head(url, timeout=PING_S, follow_redirects=False, trust_env=not local)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return DoctorCheck(name, CheckStatus.FAIL, f"no answer: {Redactor(urls=[url]).error(error)}")
    return DoctorCheck(name, CheckStatus.OK, f"reachable (HTTP {answer.status_code} to HEAD)")


EPILOG = examples("rlwatch doctor", "rlwatch doctor --ping", "rlwatch doctor --format json")

STYLES = {CheckStatus.OK: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "bold red"}


def doctor(
    store: StoreOption = None,
    ping: Annotated[bool, typer.Option("--ping", help="Check that the webhook's receiver is reachable.")] = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Check the installation, the store and the webhook. Exit code 0, or 1 if anything fails."""
    checks = examine(store, ping=ping)
    if output is OutputFormat.JSON:
        print_json(checks)
    else:
        rows = [((check.level.value, STYLES[check.level]), check.name, check.text) for check in checks]
        print_table(("", "what", "status"), rows)
    if any(check.level is CheckStatus.FAIL for check in checks):
        raise typer.Exit(1)


def plugin_checks() -> list[DoctorCheck]:
    """Report each plugin that failed to load, with the reason; one line if all loaded, [] without plugins."""
    found = plugins.everything()
    broken = [plugin for plugin in found if plugin.problem]
    checks = [
        DoctorCheck(f"plugin {one.name}", CheckStatus.WARN, f"{one.origin} is left out: {one.problem}")
        for one in broken
    ]
    if found and not broken:
        checks = [
            DoctorCheck("plugins", CheckStatus.OK, f"{len(found)} from other packages; list them with rlwatch plugins")
        ]
    return checks


def examine(store: str | None, *, ping: bool = False) -> list[DoctorCheck]:
    """Run every check of ``rlwatch doctor`` on this installation and the ``store``, and return them in the printed
    order.

    ``ping``: also request an answer from the server of each webhook.
    """
    return [
        python_check(),
        sqlite_check(),
        package_check(),
        namesake_check(),
        *extras_checks(),
        login_check(),
        *variable_checks(),
        *trainer_checks(),
        *kernel_checks(),
        *verl_checks(),
        *plugin_checks(),
        *storage_checks(store),
        *webhook_checks(ping=ping, store_root=root_of(store)),
    ]
