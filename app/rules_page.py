"""Page with the alert rules and channels: edit rules, try them on past runs, and test channels.

The page edits the ``rlwatch.toml`` in the store's root, which can only tune rules (docs/security.md): no page can set a
channel, an address or an action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from rlwatch.alerts.config import Config, load_config
from rlwatch.alerts.outbox import Trial
from rlwatch.alerts.rules import Rule, builtin_kinds, default_rules
from rlwatch.alerts.tuning import Firing, Tuning, not_tried, read_tuning, tried, with_rule, without_rule
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.records import RunInfo, Severity

from . import format as fmt
from . import incident_acts as acts
from . import layout, queries, table
from .markup import Markup, el, joined

COLUMNS = (
    table.TableColumn("rule", "tight"),
    table.TableColumn("kinds", "long"),
    table.TableColumn("severity", "tight"),
    table.TableColumn("fire after, steps", "right tight"),
    table.TableColumn("if critical", "right tight"),
    table.TableColumn("resolve after, steps", "right tight"),
    table.TableColumn("repeat every", "right tight"),
    table.TableColumn("sends to", "tight wide"),
    table.TableColumn("source", "tight"),
)
NEW = "New rule"
MOST_TRIED = 20
"""Most runs on which a rule is tried at once."""
MESSAGE = "rules-message"
"""Session key of the message about the last action, for the page drawn after it."""


@dataclass(frozen=True, slots=True)
class RulesSource:
    """Alert rules in force, and the store's file of rules (``tuning``), or the reason (``why_not``) that it cannot be
    edited.
    """

    config: Config
    tuning: Tuning | None
    why_not: str = ""


def place() -> RulesSource:
    """Return the alert rules in force and the file to edit. Raises ``ConfigError`` if the
    configuration cannot be read.
    """
    root = getattr(queries.store(), "root", None)
    config = load_config(store_root=root)
    if root is None:
        return RulesSource(config, None, "this store is not a directory and has no rlwatch.toml of its own")
    try:
        tuning = read_tuning(root)
    except ConfigError as error:
        return RulesSource(config, None, str(error))
    if config.path is not None and config.path.resolve() != tuning.path.resolve():
        return RulesSource(config, None, f"{config.path} overrides the store's rules: edit that file")
    return RulesSource(config, tuning)


def rule_row(rule: Rule, source: str) -> table.TableRow:
    """Return an alert rule as a row of the table with :data:`COLUMNS`; ``source``: result of :func:`source_of`."""
    kinds = ", ".join(fmt.words(kind) for kind in rule.kinds) or ("all others" if rule.except_kinds else "everything")
    critical = rule.for_steps if rule.for_critical is None else rule.for_critical
    return table.TableRow(
        cells=[
            table.text(fmt.shorten(rule.name, 40)),
            table.text(fmt.shorten(kinds, 2000), quiet=True),
            table.severity(rule.min_severity),
            table.text(fmt.step(rule.for_steps)),
            table.text(fmt.step(critical)),
            table.text(fmt.step(rule.keep_firing_for)),
            table.text(fmt.duration(60.0 * rule.repeat_minutes) if rule.repeat_minutes else "never"),
            table.text(fmt.shorten(", ".join(rule.channels) or "none", 60)),
            table.text(source, quiet=source == "default"),
        ],
        opens="",
    )


def source_of(rule: Rule, usual: Sequence[Rule]) -> str:
    """Return ``default``, ``changed`` or ``added``, by comparing an alert rule with the default rules ``usual``."""
    known = {each.name: each for each in usual}
    return "added" if rule.name not in known else "default" if known[rule.name] == rule else "changed"


def tried_words(found: Sequence[Firing], runs: int) -> str:
    """Return the result of trying a rule on ``runs`` past runs, on which it fired as in ``found``: ``would have fired 3
    times on 1 of 4 runs``.
    """
    hit = len({each.run_id for each in found})
    times = f"would have fired {fmt.plural(len(found), 'time')} on {hit} of {fmt.plural(runs, 'run')}"
    return times if found else f"would not have fired on {fmt.plural(runs, 'run')}"


# The page.


def page() -> None:
    """Draw the alert rules, their editor and the channels."""
    with layout.readable("The rules"):
        found = place()
        head, store = st.columns([3, 2], vertical_alignment="bottom")
        head.html(el("div", "Alert rules and channels", cls="rl-head"))
        with store:
            layout.store_line(f"rules from {found.config.path or 'the defaults (no rlwatch.toml)'}")
        for warning in (*found.config.warnings, *([found.config.refused] if found.config.refused else [])):
            st.warning(fmt.shorten(warning, 600))
        message = st.session_state.pop(MESSAGE, "")
        if message:
            st.success(fmt.shorten(message, 300))
        usual = default_rules()
        table.show("rules", COLUMNS, [rule_row(rule, source_of(rule, usual)) for rule in found.config.rules])
        _editor(found)
        _channels(found.config)


def _editor(found: RulesSource) -> None:
    st.html(el("div", "Change or add a rule", cls="rl-family"))
    if found.tuning is None:
        st.caption(fmt.shorten(found.why_not[:1].upper() + found.why_not[1:], 400))
        st.caption("You can still test a rule below; it is not saved.")
    else:
        st.caption(
            f"Saved in {fmt.shorten(str(found.tuning.path), 200)}. Trainers and `rlwatch watch` without their own "
            "rlwatch.toml read it when they start. A rule with the name of a default rule overrides it; critical "
            "findings never fire later than by default. Other names add rules."
        )
    names = [NEW, *(rule.name for rule in found.config.rules)]
    chosen = st.selectbox("Rule", names, key="rule")
    rule = next((each for each in found.config.rules if each.name == chosen), Rule("mine", for_steps=10))
    made = _form(rule, new=chosen == NEW)
    if made is None:
        return
    _trial(made)
    if found.tuning is not None:
        _buttons(found.tuning, made)


def _form(rule: Rule, *, new: bool) -> Rule | None:
    """Draw the fields of a rule and return the rule; show the reason and return None if it is invalid."""
    key = "new" if new else rule.name
    name = st.text_input("Name", value="" if new else rule.name, key=f"rule-name-{key}", disabled=not new)
    kinds = st.multiselect(
        "Kinds (empty: all)",
        sorted({*builtin_kinds(), *rule.kinds}),
        default=list(rule.kinds),
        format_func=fmt.words,
        key=f"rule-kinds-{key}",
    )
    one, two, three, four = st.columns(4)
    levels = [severity.value for severity in Severity]
    level = one.selectbox("Minimum severity", levels, index=levels.index(rule.min_severity), key=f"rule-from-{key}")
    steps = two.number_input("Fire after, steps", 0, 100_000, rule.for_steps, key=f"rule-for-{key}")
    keep = three.number_input("Resolve after, steps", 0, 100_000, rule.keep_firing_for, key=f"rule-keep-{key}")
    again = four.number_input("Repeat every, minutes", 0.0, 1e6, rule.repeat_minutes, key=f"rule-again-{key}")
    critical = min(int(steps), rule.for_steps if rule.for_critical is None else rule.for_critical)
    try:
        return Rule(
            str(name or "").strip() if new else rule.name,
            kinds=tuple(kinds),
            except_kinds=rule.except_kinds,
            min_severity=Severity(level),
            for_steps=int(steps),
            for_critical=0 if new else critical,
            keep_firing_for=int(keep),
            labels=rule.labels,
            channels=rule.channels,
            repeat_minutes=float(again),
        )
    except ConfigError as error:
        if name:
            st.error(fmt.shorten(str(error), 400))
        else:  # no error before typing
            st.caption("Give the rule a name to test and save it.")
        return None


def _trial(rule: Rule) -> None:
    runs = sorted(queries.runs_by_id().values(), key=lambda run: -run.created_at)
    chosen = st.multiselect(
        f"Test on runs (at most {MOST_TRIED})",
        runs,
        default=runs[:5],
        format_func=lambda run: fmt.shorten(f"{run.project} / {run.name or run.run_id}", 80),
        max_selections=MOST_TRIED,
        key="rule-runs",
    )
    if not st.button("Test", key="rule-try") or not chosen:
        return
    found = [fired for run in chosen for fired in tried(queries.store(), run, rule)]
    st.html(el("div", tried_words(found, len(chosen)), cls="rl-verdict"))
    st.html(joined(_fired(found, chosen)))
    left = ", ".join(fmt.words(kind) for kind in not_tried(rule))
    note = f" Not tested: {left} (detected only while a run is watched)." if left else ""
    st.caption(f"Uses the stored findings of these runs; ignores silences and inhibition.{note}")


def _fired(found: Sequence[Firing], runs: Sequence[RunInfo]) -> Markup:
    names = {run.run_id: run.name or run.run_id for run in runs}
    lines = [
        el(
            "li",
            el("b", fmt.shorten(names[each.run_id], 80)),
            f" at step {fmt.step(each.step)}: {fmt.words(each.kind)} ({each.severity.value})",
            f", until step {fmt.step(each.until)}" if each.until is not None else ", to the end",
        )
        for each in found[:100]
    ]
    return el("ul", *lines, cls="rl-plain")


def _buttons(tuning: Tuning, rule: Rule) -> None:
    save, drop = st.columns([1, 1])
    if save.button("Save rule", type="primary", key="rule-save", width="stretch"):
        _act(lambda: acts.keep_rules(queries.store(), tuning, with_rule(tuning, rule), by=layout.principal()),
             f"Rule {rule.name} saved")  # fmt: skip
    if rule.name in tuning.tables and drop.button("Reset to default", key="rule-drop", width="stretch"):
        _act(lambda: acts.keep_rules(queries.store(), tuning, without_rule(tuning, rule.name), by=layout.principal()),
             f"Rule {rule.name} reset to its default")  # fmt: skip
    if not layout.principal().may_command:
        st.caption(layout.LOOK_ONLY)


def _act(act: Callable[[], None], done: str) -> None:
    try:
        act()
    except RLWatchError as error:
        st.error("The rule was not saved.")
        st.code(fmt.shorten(str(error), 1000), language=None, wrap_lines=True)
        return
    st.session_state[MESSAGE] = done
    st.rerun()


def _channels(config: Config) -> None:
    st.html(el("div", "Channels", cls="rl-family"))
    st.caption(
        "Names and kinds only; addresses and keys are never shown. Add channels in your own rlwatch.toml "
        "(RLWATCH_CONFIG), not here: write access to a store must not decide where messages go."
    )
    named = {name for rule in config.rules for name in (*rule.channels, *rule.escalate_to)}
    missing = sorted(named - set(config.channel_names))
    for channel in config.channels:
        words, test = st.columns([4, 1], vertical_alignment="center")
        words.html(el("div", el("b", fmt.shorten(channel.name, 60)), f" · {fmt.shorten(channel.kind, 40)}"))
        tellable = channel.kind != "console" and layout.principal().may_command
        if tellable and test.button("Send test", key=f"try-{channel.name}", width="stretch"):
            _try(config, channel.name)
    if missing:
        st.caption(f"Named by rules but not configured here (nothing is sent): {', '.join(missing)}")


def _try(config: Config, name: str) -> None:
    try:
        trial: Trial = acts.try_channel(config, name, by=layout.principal())
    except RLWatchError as error:
        st.error(fmt.shorten(str(error), 400))
        return
    answer = fmt.shorten(trial.delivery.reason, 300)
    if trial.delivery.ok:
        st.success(f"{name}: delivered" + (f": {answer}" if answer else ""))
    else:
        st.error(f"{name}: failed: {answer}")
