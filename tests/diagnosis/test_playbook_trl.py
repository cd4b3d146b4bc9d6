"""Every option the playbook names for TRL exists in the TRL that is installed. Read, not imported: that takes seconds."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from playbook_options import mentioned

if find_spec("trl") is None or find_spec("transformers") is None:
    pytest.skip("TRL is not installed: its option names are NOT checked here", allow_module_level=True)

TRAINERS = Path(find_spec("trl").origin).parent / "trainer"
ARGUMENTS = Path(find_spec("transformers").origin).parent / "training_args.py"


def fields(*paths: Path) -> dict[str, str]:
    """Fields of the configuration classes in these files, and their annotations."""
    return {
        line.target.id: ast.unparse(line.annotation)
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
    }


BASE = (TRAINERS / "base_config.py", ARGUMENTS)
FIELDS = {name: fields(TRAINERS / f"{name}_config.py", *BASE) for name in ("grpo", "rloo")}
SOURCE = "".join(path.read_text() for path in (TRAINERS / "grpo_config.py", ARGUMENTS))
ELSEWHERE = {"lr_scheduler_type": ("constant", "cosine"), "eval_strategy": ("steps",)}
"""Values that are the names of enums in other modules of transformers."""


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_options_exist(trainer):
    """A name in backticks is a field of the trainer's configuration."""
    named = mentioned("trl", f"trl/{trainer}")

    assert len(named) > 30
    assert [row for row in named if row[1].partition("=")[0] not in FIELDS[trainer]] == []


def test_values_make_sense():
    """A value written down has the field's type, and a word is one TRL's source knows."""
    for action, quoted in mentioned("trl", "trl/grpo"):
        name, equals, text = quoted.partition("=")
        if not equals:
            continue
        value, annotation = ast.literal_eval(text), FIELDS["grpo"][name]
        assert any(word in annotation for word in (type(value).__name__, "float", "Any")), (action, quoted, annotation)
        if isinstance(value, str):
            assert value in ELSEWHERE.get(name, ()) or f'"{value}"' in SOURCE, (action, quoted)
