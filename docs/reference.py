"""Write the reference pages: ``python docs/reference.py [--check]``, or ``make docs-reference``, in a clone's root.

Commands come from the tree that the command line is made of, keys of ``rlwatch.toml`` from the tables that read it,
settings of a run from signatures and docstrings, variables from the sources: one that has no words here, or is gone,
is an error.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Words for what has none in a docstring.

KEYS = {
    "default_rules": "whether the default rules apply in addition to those of the file",
    "forecast": "whether runs are forecast; `rlwatch.init(forecast=)` takes precedence",
    "grouping.by": "what alerts that begin together must share to be sent in one message: `none`, `run` or `project`",
    "grouping.wait_s": "seconds a firing alert waits for others of its group, 0 to 3600",
    "quiet_hours.from": "when the hours begin, as `22:00`",
    "quiet_hours.to": "when they end; over midnight if that is not later",
    "quiet_hours.time_zone": "time zone of the hours: a name of the IANA database",
    "quiet_hours.let_through": "alerts of this severity and worse are still sent",
    "quiet_hours.days": "days on which the hours begin",
    "inhibit.when": "kinds that suppress others while they fire",
    "inhibit.mutes": "suppressed kinds; empty: all others",
    "inhibit.min_severity": "least severity of the suppressing alert",
    "inhibit.up_to": "worst severity that is suppressed",
    "notify.kind": "kind of channel; may be left out where it is the name ([kinds](notifiers.md))",
    "notify.url": "address, or `env:NAME` for a variable that has it",
    "notify.secret": "`env:NAME` of the secret that signs deliveries",
    "notify.connect_s": "seconds to connect",
    "notify.read_s": "seconds to wait for an answer",
    "notify.total_s": "seconds for one try",
    "notify.argv": "the command of a channel of kind `command`, as a list",
    "notify.pass_env": "variables that the command receives in addition to the default ones",
    "notify.options": "settings of a plugin's kind",
    "retention.tokens": "age from which `rlwatch db prune` removes token records, as `30d`; by default never",
    "retention.completions": "the same for texts of completions",
    "retention.archived": "the same for whole archived runs",
    "map": "names of your own, as `reward = 'my_score'`. The key is a role (`reward`, `entropy`, `kl`, `length`, "
    "`gradient`, `loss`) or a canonical name, the value the name in logs, or a list of names. `--map` does the same "
    "for one log",
    "store.url": "the default store (`RLWATCH_STORE` takes precedence)",
    "dashboard.url": "address of the dashboard, for links in messages",
}
NEEDED = {"name": "example"}
"""What a rule cannot do without."""
INSIDE = {"RLWATCH_UI_SETTINGS"}
"""Between our own processes."""
CALLS = (
    ("rlwatch.init", "rlwatch/run/setup.py", "init"),
    ("rlwatch.Watcher", "rlwatch/integrations/torch/attach.py", "Watcher"),
    ("Settings of rlwatch.Watcher", "rlwatch/integrations/torch/compat.py", "WatcherSettings"),
    ("rlwatch.integrations.trl.watch", "rlwatch/integrations/trl/attach.py", "watch"),
)
HEAD = "Written by `make docs-reference`; do not edit.\n"


def cell(text: str) -> str:
    """Text within a row of a table; what is marked up as a reference becomes its last name."""
    plain = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return " ".join(plain.replace("``", "`").split()).replace("|", "\\|")


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Rows as a table of Markdown; a meaning that several share is told once."""
    lines: list[str] = []
    told: dict[str, str] = {}
    for row in rows:
        *others, meaning = row
        first = told.setdefault(meaning, row[0])
        lines.append(f"| {' | '.join([*others, meaning if first == row[0] else f'with {first}'])} |")
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines]) + "\n"


# Commands.


def leaves(command: Any, path: str = "rlwatch") -> Iterator[tuple[str, Any]]:
    """Every command with its words."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, f"{path} {name}")
    else:
        yield path, command


def option(parameter: Any) -> tuple[str, str, str, str]:
    """Name, value, default and meaning of an option or argument."""
    flag, kind = getattr(parameter, "is_flag", False), parameter.type_descriptor.annotation
    is_option = parameter.opts[0].startswith("-")
    names = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
    choices = "|".join(one.value for one in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ""
    value = "" if flag else choices or parameter.metavar or getattr(kind, "__name__", str(kind))
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    told = "" if flag or default in (None, "", (), []) or callable(default) else getattr(default, "value", default)
    variable = f" (`{parameter.envvar}`)" if parameter.envvar else ""
    name = names if is_option else f"`{parameter.metavar or parameter.name.upper()}`"
    return (
        name,
        cell(value) if is_option else "",
        "required" if parameter.required else cell(str(told)),
        cell(parameter.help or "") + variable,
    )


def commands() -> str:
    """The page of commands."""
    import typer

    from rlwatch.cli.app import app

    parts = [
        "# Commands\n",
        HEAD,
        "Exit codes: 0, 1 where a command says so, 2 if the request or its input is wrong.\n",
    ]
    for words, command in leaves(typer.main.get_command(app)):
        text = inspect.cleandoc(command.help or "").replace("\f", "")
        parts += [f"## {words}\n", "\n\n".join(cell(part) for part in text.split("\n\n")) + "\n"]
        rows = [option(one) for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
        if rows:
            parts.append(table(("", "value", "default", "meaning"), rows))
        shown = [line.strip() for line in (command.epilog or "").splitlines()[1:] if line.strip()]
        if shown:
            parts.append("```text\n" + "\n".join(shown) + "\n```\n")
    return "\n".join(parts)


# Settings.


def described(docstring: str) -> dict[str, str]:
    """Meaning of each parameter, from the section of a docstring; several in one line share theirs."""
    section = re.search(r"Parameters\n-+\n(.*?)(?=\n\S[^\n]*\n-{3,}|\n>>>|\Z)", docstring, re.DOTALL)
    found: dict[str, str] = {}
    for names, text in re.findall(
        r"^(\S[^\n]*)\n((?:    [^\n]*\n?|\n)+)", section[1] + "\n" if section else "", re.MULTILINE
    ):
        found |= dict.fromkeys((name.strip() for name in names.split(",")), cell(text))
    return found


def arguments(node: Any) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Name, type and default of each argument."""
    made = (
        [one for one in node.body if getattr(one, "name", "") == "__init__"]
        if isinstance(node, ast.ClassDef)
        else [node]
    )
    if not made:
        yield from ((one.target.id, one.annotation, one.value) for one in node.body if isinstance(one, ast.AnnAssign))
        return
    given = made[0].args
    plain = [one for one in given.args if one.arg != "self"]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for one, default in (
        *zip(plain, defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ):
        yield one.arg, one.annotation, default


def call(path: str, name: str) -> str:
    """Arguments of a function, or of what makes a class (of a dataclass its fields), with type, default and meaning."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    (node,) = [one for one in tree.body if getattr(one, "name", "") == name]
    meaning = described(ast.get_docstring(node) or "")  # type: ignore[arg-type]
    rows = [
        (f"`{argument}`", f"`{cell(ast.unparse(annotation))}`" if annotation else "",
         "required" if default is None else f"`{ast.unparse(default)}`", meaning[argument])
        for argument, annotation, default in arguments(node)
    ]  # fmt: skip
    return table(("argument", "type", "default", "meaning"), rows)


def keys(heading: str, model: Any, meaning: dict[str, str], made: type | None = None) -> str:
    """Keys of one table of ``rlwatch.toml``; defaults are those of the class it makes, where it makes one."""
    from pydantic_core import PydanticUndefined

    rows = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        value = getattr(field.default, "value", field.default)
        if made is not None and not isinstance(own := getattr(made(**NEEDED), name), Mapping):
            value = list(own) if isinstance(own, tuple) else getattr(own, "value", own)
        default = "required" if field.default is PydanticUndefined else f"`{value}`"
        shown = model.__annotations__[name].replace("Age", "str")
        rows.append((f"`{key}`", f"`{cell(shown)}`", default.replace("`None`", "-"), meaning[key]))
    return f"### {heading}\n\n" + table(("key", "type", "default", "meaning"), rows)


def settings() -> str:
    """The page of settings."""
    from rlwatch.alerts import rules, schema
    from rlwatch.control.policy import PermittedAction

    def worded(prefix: str) -> dict[str, str]:
        return {key.removeprefix(f"{prefix}."): words for key, words in KEYS.items() if key.startswith(f"{prefix}.")}

    from rlwatch.control.rescue import RescuePolicy

    wanted = (
        "rules", "grouping", "quiet_hours", "inhibit", "actions", "rescue", "notify", "store", "retention", "dashboard"
    )  # fmt: skip
    switches = ("default_rules", "forecast")
    if set(schema.FileTable.model_fields) != {*wanted, *switches, "map"}:
        raise SystemExit(f"rlwatch.toml has other tables than {wanted}: describe them in docs/reference.py")
    tables = [
        keys("[[rules]]", schema.RuleTable, described(inspect.getdoc(rules.Rule) or ""), rules.Rule),
        keys("[grouping]", schema.GroupingTable, worded("grouping")),
        keys("[[quiet_hours]]", schema.QuietHoursTable, worded("quiet_hours")),
        keys("[[inhibit]]", schema.InhibitTable, worded("inhibit")),
        keys("[notify.NAME]", schema.NotifyTable, worded("notify")),
        keys("[[actions]]", schema.ActionTable, described(inspect.getdoc(PermittedAction) or "")),
        keys("[[rescue]]", schema.RescueTable, described(inspect.getdoc(RescuePolicy) or "")),
        keys("[store]", schema.PlaceTable, worded("store")),
        keys("[retention]", schema.RetentionTable, worded("retention")),
        keys("[dashboard]", schema.PlaceTable, worded("dashboard")),
        f"### [map]\n\nThis table applies to live runs, and to logs wherever they are read. It maps {KEYS['map']}.\n",
    ]
    own = "\n\n".join(f"`{name}` (`bool`, default `true`): {KEYS[name]}." for name in switches) + "\n"
    parts = [
        "# Settings\n",
        HEAD,
        "## rlwatch.toml\n",
        "How rules, grouping and silences work together: [alerts](alerts.md).\n",
        own,
    ]
    parts += [
        *tables,
        "## Variables of the environment\n",
        table(("variable", "meaning"), variables()),
        "## Of a run\n",
    ]
    return "\n".join([*parts, *(f"### {title}\n\n{call(path, name)}" for title, path, name in CALLS)])


def variables() -> list[tuple[str, str]]:
    """Every variable that the sources name, with its meaning. Exits where the two differ."""
    from rlwatch.cli import options as described
    from rlwatch.cli.options import VARIABLES

    files = [path for room in ("rlwatch", "app") for path in (ROOT / room).rglob("*.py")]
    files.remove(Path(described.__file__))
    named = {
        name for path in files for name in re.findall(r"\bRLWATCH_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    if missing := (named - set(VARIABLES) - INSIDE) | (set(VARIABLES) - named):
        raise SystemExit(
            f"rlwatch/cli/options.py describes other variables than the sources name: {', '.join(sorted(missing))}"
        )
    return [(f"`{name}`", words) for name, words in VARIABLES.items()]


PAGES = {"docs/reference-cli.md": commands, "docs/reference-settings.md": settings}


def main(arguments: list[str]) -> int:
    """Rewrite the pages; with ``--check`` only say which are out of date."""
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if stale:
        sys.stdout.write(
            f"{'out of date, run make docs-reference' if '--check' in arguments else 'written'}: {', '.join(stale)}\n"
        )
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
