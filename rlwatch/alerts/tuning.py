"""Tune rules by the ``rlwatch.toml`` in a store's root: read it, try rules on stored findings, and write a rule.

That file is data: of a default rule it changes only the keys in :data:`rlwatch.alerts.config.TAKEN`, adds kinds and
channels, and adds rules (:mod:`rlwatch.alerts.config`). The rest of the file, comments included, is left as it is.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlwatch.alerts.config import Config, rule_toml, tuned_config
from rlwatch.alerts.engine import AlertEngine, DecisionReason
from rlwatch.alerts.rules import HEARTBEAT_KINDS, Rule, unknown_kinds
from rlwatch.errors import ConfigError
from rlwatch.ports import RunReader
from rlwatch.records import Finding, RunInfo, Severity, Stage
from rlwatch.trust import FILE_NAME

_BLOCK = re.compile(r"^\[\[rules\]\][ \t]*(#.*)?$", re.MULTILINE)
_TABLE = re.compile(r"^\[", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The rules file ``rlwatch.toml`` of a store as it was read: path, ``text`` (empty without a file), and
    configuration.
    """

    path: Path
    text: str
    config: Config

    @property
    def tables(self) -> dict[str, Mapping[str, Any]]:
        """Name -> table of each rule in the file, as it is written there."""
        return {str(table.get("name")): table for table in _rule_tables(self.text)}


def read_tuning(root: str | os.PathLike[str]) -> Tuning:
    """Read the ``rlwatch.toml`` in a store's root. Raises ``ConfigError`` where it is a link, or cannot be read."""
    path = Path(root) / FILE_NAME
    if path.is_symlink():
        raise ConfigError(f"{path} is a link: it is not edited from here")
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return Tuning(path, text, tuned_config(path, text))


def with_rule(tuning: Tuning, rule: Rule) -> Tuning:
    """Return the rules file ``tuning`` with ``rule`` in place of the rule with its name, or at the end; nothing is
    written.

    Raises
    ------
    ConfigError
        If the rule names a kind that no detector reports, or has keys that such a file may not set: each is named.
    """
    problems = unknown_kinds([rule])
    if problems:
        raise ConfigError("; ".join(problems))
    block = rule_toml(rule, whole=True)
    place = _place(tuning.text, rule.name)
    if place is None:
        head = tuning.text.rstrip("\n")
        text = f"{head}\n\n{block}" if head else block
    else:
        text = tuning.text[: place[0]] + block + tuning.text[place[1] :]
    made = Tuning(tuning.path, text, tuned_config(tuning.path, text))
    before = set(filter(None, [tuning.config.refused]))
    if made.config.refused and made.config.refused not in before:
        raise ConfigError(made.config.refused)
    return made


def without_rule(tuning: Tuning, name: str) -> Tuning:
    """Return the rules file ``tuning`` without the rule called ``name``; nothing is written.

    Raises ``ConfigError`` if it has no such rule.
    """
    place = _place(tuning.text, name)
    if place is None:
        raise ConfigError(f"{tuning.path} has no rule {name!r}; it has {', '.join(tuning.tables) or 'none'}")
    text = tuning.text[: place[0]] + tuning.text[place[1] :]
    return Tuning(tuning.path, text, tuned_config(tuning.path, text))


def write_tuning(before: Tuning, after: Tuning) -> None:
    """Replace the rules file of a store as it was read (``before``) by ``after``, completely or not at all.

    Raises
    ------
    ConfigError
        If the file is no longer ``before``, because another process changed it, or if it cannot be written.
    """
    if read_tuning(before.path.parent).text != before.text:
        raise ConfigError(f"{before.path} was changed meanwhile: look at it again, nothing was written")
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=before.path.parent, prefix=".rlwatch-toml-", delete=False
        ) as made:
            made.write(after.text)
            made.flush()
            os.fsync(made.fileno())
        Path(made.name).replace(before.path)
    except OSError as error:
        raise ConfigError(f"{before.path} cannot be written: {error.strerror or error}") from None


def _rule_tables(text: str) -> list[Mapping[str, Any]]:
    try:
        tables = tomllib.loads(text).get("rules", [])
    except tomllib.TOMLDecodeError:
        return []
    return [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []


def _place(text: str, name: str) -> tuple[int, int] | None:
    """Return begin and end of a rule's ``[[rules]]`` in the text; comments before the next table
    belong to that table.
    """
    for begin in _BLOCK.finditer(text):
        following = _TABLE.search(text, begin.end())
        end = following.start() if following else len(text)
        tables = _rule_tables(text[begin.start() : end])
        if tables and tables[0].get("name") == name:
            block = text[begin.start() : end]
            kept = len(block) - len(_comments_after(block))
            return begin.start(), begin.start() + kept
    return None


def _comments_after(block: str) -> str:
    """Return the comments and blank lines at the end of a block."""
    lines = block.splitlines(keepends=True)
    while lines and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        lines.pop()
    return block[sum(len(line) for line in lines) :]


# Trying a rule on stored findings: no detector is run again.


@dataclass(frozen=True, slots=True)
class Firing:
    """One time that a rule would have fired on a past run: run, step, kind, severity, and step at which it would have
    ended.

    ``until`` None: it would have fired to the end.
    """

    run_id: str
    step: int
    kind: str
    severity: Severity
    until: int | None = None


def tried(store: RunReader, run: RunInfo, rule: Rule) -> list[Firing]:
    """Return the alerts that ``rule`` would have raised on a stored run, from its stored findings.

    A finding counts from the step at which it was reported until its recovery was reported. May raise ``StoreError``.
    """
    stored = sorted((*store.findings(run.run_id), *store.recoveries(run.run_id)), key=lambda each: each.seq)
    engine, found = AlertEngine(run.run_id, [rule]), dict[str, Firing]()
    steps = store.steps(run.run_id)
    for attempt, seen in sorted(steps.items()):
        later = min((own[0] for number, own in steps.items() if number > attempt and own), default=None)
        own = [each for each in stored if each.attempt == attempt]
        for seq, step, holding in _held([s for s in seen if later is None or s < later], own):
            for change in engine.step(seq, step, holding):
                alert = change.alert
                if change.reason in (DecisionReason.FIRED_AT_ONCE, DecisionReason.HELD_FOR):
                    found[alert.alert_id] = Firing(run.run_id, step, alert.kind, alert.severity)
                elif change.reason is DecisionReason.RESOLVED and alert.alert_id in found:
                    fired = found[alert.alert_id]
                    found[alert.alert_id] = Firing(run.run_id, fired.step, fired.kind, fired.severity, step)
    return list(found.values())


def _held(steps: Sequence[int], stored: Sequence[Finding]) -> list[tuple[int, int, list[Finding]]]:
    """Return for each row its number, its step, and the findings that hold at it."""
    waiting, holding, rows = list(stored), dict[tuple[str, str], Finding](), []
    for number, step in enumerate(steps, start=1):
        while waiting and waiting[0].step <= step:
            each = waiting.pop(0)
            key = (each.detector, each.kind)
            if each.stage is Stage.RESOLVED:
                holding.pop(key, None)
            else:
                holding[key] = each
        rows.append((number, step, list(holding.values())))
    return rows


def not_tried(rule: Rule) -> tuple[str, ...]:
    """Return the kinds in ``rule`` that cannot be tried on past runs, since no findings of them are
    stored: heartbeats.
    """
    return tuple(kind for kind in HEARTBEAT_KINDS if kind in rule.kinds)
