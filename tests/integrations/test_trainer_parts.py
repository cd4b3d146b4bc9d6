"""The table of trainers and their parts in ``rlwatch.integrations`` says what the files are."""

from pathlib import Path

import pytest

import rlwatch.integrations

HERE = Path(rlwatch.integrations.__file__).parent
PARTS = ("attach", "taps", "batch", "commands", "checkpoints", "ranks", "compat", "localise")
ENTRIES = {"__init__", "__main__"}


def table():
    """Trainer -> part -> cell; the other modules are the part ``others``."""
    lines = rlwatch.integrations.__doc__.splitlines()
    rules = [at for at, line in enumerate(lines) if line.startswith("====")]
    edges = [at for at, sign in enumerate(lines[rules[0]]) if sign == "=" and lines[rules[0]][at - 1 : at] in ("", " ")]
    rows = [[line[a:b].strip() for a, b in zip(edges, [*edges[1:], None], strict=True)] for line in lines]
    trainers = rows[rules[0] + 1][1:]
    cells = {trainer: {} for trainer in trainers}
    part = ""
    for name, *row in rows[rules[1] + 1 : rules[2]]:
        part = name or part
        for trainer, cell in zip(trainers, row, strict=True):
            cells[trainer][part] = f"{cells[trainer].get(part, '')} {cell}".strip()
    return cells


TABLE = table()


def files(folder):
    """Names of the modules in a folder."""
    return {path.stem for path in folder.glob("*.py")}


def test_every_trainer_has_a_column():
    """A package with a module attach is a trainer's."""
    assert set(TABLE) == {path.parent.name for path in HERE.glob("*/attach.py")}
    assert {path.name for path in HERE.iterdir() if path.is_dir() and files(path)} == set(TABLE)


@pytest.mark.parametrize("trainer", TABLE)
def test_the_parts_of_a_trainer_are_its_files(trainer):
    """What the table calls a file is one; where it names shared code or a reason, there is none."""
    cells = TABLE[trainer]
    others = {name.strip() for name in cells["others"].split(",") if name.strip()}
    parts = {part for part in PARTS if cells[part] == part}

    assert set(cells) == {*PARTS, "others"}
    assert files(HERE / trainer) - ENTRIES == parts | others


@pytest.mark.parametrize("trainer", TABLE)
def test_a_part_without_a_file_names_where_it_is(trainer):
    """Shared code that exists, or a reason."""
    for part in PARTS:
        kind, _, where = TABLE[trainer][part].partition(": ")
        if kind == "shared":
            assert where in files(HERE)
        elif kind == "in":
            assert where in files(HERE / trainer)
        else:
            assert kind == part or (kind == "none" and where)
