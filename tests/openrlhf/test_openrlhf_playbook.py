"""Every option the playbook names for OpenRLHF exists in the OpenRLHF that is installed."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from playbook_options import mentioned

if find_spec("openrlhf") is None:
    pytest.skip("OpenRLHF is not installed: its option names are NOT checked here", allow_module_level=True)

SOURCE = Path(find_spec("openrlhf").origin).parent / "cli" / "train_ppo_ray.py"


def arguments() -> dict[str, list[str] | None]:
    """Every option of the Ray trainer's parser and its choices; the actor's are made in a loop over prefixes."""
    found: dict[str, list[str] | None] = {}
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            name = node.args[0]
            text = (
                name.value if isinstance(name, ast.Constant) else ast.unparse(name)[2:-1].replace("{prefix}", "actor")
            )
            choices = [k.value for k in node.keywords if k.arg == "choices"]
            found[text] = ast.literal_eval(choices[0]) if choices else None
    return found


ARGUMENTS = arguments()


def test_options_exist():
    """A name in backticks is an option of the parser."""
    named = mentioned("openrlhf")

    assert len(named) > 30
    assert [row for row in named if row[1].split()[0] not in ARGUMENTS] == []


def test_values_exist():
    """A word given to an option with choices is one of them."""
    for action, quoted in mentioned("openrlhf"):
        name, *values = quoted.split()
        choices = ARGUMENTS[name]
        assert choices is None or all(value in choices for value in values), (action, quoted)
