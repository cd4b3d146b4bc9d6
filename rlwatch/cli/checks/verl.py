"""Is rlwatch's plugin where verl finds it, was it loaded, and did it find what it knows? verl itself would not say."""

from __future__ import annotations

import os
import time
from importlib import metadata

from rlwatch.cli.checks import Check, Level
from rlwatch.integrations.verl.compat import LAUNCH, loads_plugins, verl_version
from rlwatch.integrations.verl.heartbeat import IN_PLACE, WAITING, Heartbeat, directory, latest

GROUP, NAME = "verl.plugins", "rlwatch"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"


def examine() -> list[Check]:
    """Nothing where verl is neither installed nor ever loaded the plugin."""
    beats = latest()
    if not verl_version():
        return _heard(beats) if beats else []
    return [_entry_point(), *_policy(), *_heard(beats)]


def _entry_point() -> Check:
    if not loads_plugins():
        text = f"verl {verl_version()} loads no plugins, and refuses 'rlwatch' as a logger; start it with: {LAUNCH}"
        return Check("verl plugin", Level.WARN, text)
    if any(point.name == NAME for point in metadata.entry_points(group=GROUP)):
        return Check("verl plugin", Level.OK, f"registered under {GROUP!r}")
    return Check("verl plugin", Level.WARN, f"not registered under {GROUP!r}: reinstall rlwatch-monitor here")


def _policy() -> list[Check]:
    policy = os.environ.get(POLICY, "auto").strip().lower()
    if policy == "auto" or NAME in {name.strip() for name in policy.split(",")}:
        return []
    return [Check("verl plugin", Level.WARN, f"{POLICY}={policy} keeps verl from loading it; add {NAME!r} to the list")]


def _heard(beats: list[Heartbeat]) -> list[Check]:
    if not beats:
        how = "`python -c 'import verl'` loads it"
        return [Check("verl heartbeat", Level.WARN, f"no process has loaded the plugin yet ({directory()}); {how}")]
    checks = [_beat("verl heartbeat", beats[0])]
    for role in ("driver", "worker"):
        acted = next((beat for beat in beats if beat.role == role), None)
        if acted is not None and acted is not beats[0]:
            checks.append(_beat(f"verl {role}", acted))
    return checks


def _beat(name: str, beat: Heartbeat) -> Check:
    where = f"verl {beat.verl or '?'} loaded rlwatch {beat.rlwatch} {_ago(beat.loaded_at)} on {beat.host}"
    role = f", watched as {beat.role}" if beat.role else ""
    wrong = [f"{hook}: {how}" for hook, how in beat.hooks.items() if how not in (IN_PLACE, WAITING)]
    wrong += [beat.error] if beat.error else []
    if wrong:
        return Check(name, Level.WARN, f"{where}{role}, but {'; '.join(wrong)}")
    return Check(name, Level.OK, f"{where}{role}")


def _ago(then: float) -> str:
    minutes = max(0.0, time.time() - then) / 60.0
    for unit, length in (("days", 1440.0), ("hours", 60.0)):
        if minutes >= 2 * length:
            return f"{minutes / length:.0f} {unit} ago"
    return f"{minutes:.0f} minutes ago"
