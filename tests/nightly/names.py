"""Names of metrics in the sources of installed trainers that rlwatch does not know.

    python tests/nightly/names.py [trl verl openrlhf]

Reads what is installed beside the interpreter it runs with: texts that index something called metrics, log, stats or the
like, and keys with a slash of dictionaries in modules that log. What is filled in at run time (``f"rewards/{name}"``) is
read with a word in its place. Ends with 1 if a name is neither a metric of ours nor seen and not judged for a reason.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rlwatch.metrics import resolve, unjudged

SOURCES = {"trl": "trl/grpo", "verl": "verl", "openrlhf": "openrlhf"}
LEFT_OUT = re.compile(
    r"/(?:tests?|examples?|scripts?|templates?|chat_template_utils|data_utils|datasets|skills|cli)(?:/|\.py$)"
)
_HOLDER = re.compile(r"metric|_log$|^logs?$|stats|status|log_dict|logging", re.IGNORECASE)
_NAME = re.compile(r"[a-z][a-z0-9_@-]*(?:/[a-z0-9_@-]+)+")
_FILLED = "x"


def literal(node: ast.expr | None) -> str:
    """The text of a constant or of an f-string, with a word for each part that is filled in; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (literal(part) if isinstance(part, ast.Constant) else _FILLED for part in node.values)
        return "".join(parts)
    return ""


def holder(node: ast.expr) -> str:
    """The last name of what is indexed: ``self._metrics["train"]`` is ``_metrics``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_of(tree: ast.AST) -> Iterator[str]:
    """Names of metrics that a module seems to log."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _HOLDER.search(holder(node.value)):
            yield literal(node.slice)
        elif isinstance(node, ast.Dict):
            yield from filter(_NAME.fullmatch, map(literal, node.keys))


def scanned(package: str) -> dict[str, str]:
    """Name -> file, of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    root, found = Path(spec.origin).parent, dict[str, str]()
    for file in sorted(root.rglob("*.py")):
        place = file.relative_to(root.parent).as_posix()
        if not LEFT_OUT.search(place):
            for name in names_of(ast.parse(file.read_text(encoding="utf-8"))):
                told = [part for part in name.split("/") if part not in (_FILLED, "mean", "max", "min", "std")]
                if _NAME.fullmatch(name) and len(told) > 1:
                    found.setdefault(name, place)
    return found


def main(packages: list[str]) -> int:
    """Print what is not known; 1 if there is anything."""
    unknown = 0
    for package in packages or list(SOURCES):
        names = scanned(package)
        news = {n: file for n, file in names.items() if resolve(n, SOURCES[package]) is None and not unjudged(n)}
        unknown += len(news)
        print(f"{package}: {len(names)} names, {len(news)} not known" if names else f"{package}: not installed")
        for name, file in news.items():
            print(f"  {name}  ({file})")
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
