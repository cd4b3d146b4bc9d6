"""The table of trainers and doors in ``rlwatch.integrations`` says what the files are."""

from pathlib import Path

import pytest

import rlwatch.integrations

HERE = Path(rlwatch.integrations.__file__).parent
DOORS = ("attach", "taps", "batch", "commands", "checkpoints", "ranks", "compat", "localise")
ENTRIES = {"__init__", "__main__"}


def table():
    """Trainer -> door -> cell; the extra rooms are the door ``rooms``."""
    lines = rlwatch.integrations.__doc__.splitlines()
    rules = [at for at, line in enumerate(lines) if line.startswith("====")]
    edges = [at for at, sign in enumerate(lines[rules[0]]) if sign == "=" and lines[rules[0]][at - 1 : at] in ("", " ")]
    rows = [[line[a:b].strip() for a, b in zip(edges, [*edges[1:], None], strict=True)] for line in lines]
    trainers = rows[rules[0] + 1][1:]
    cells = {trainer: {} for trainer in trainers}
    door = ""
    for name, *row in rows[rules[1] + 1 : rules[2]]:
        door = name or door
        for trainer, cell in zip(trainers, row, strict=True):
            cells[trainer][door] = f"{cells[trainer].get(door, '')} {cell}".strip()
    return cells


TABLE = table()


def files(folder):
    """Names of the modules in a folder."""
    return {path.stem for path in folder.glob("*.py")}


def test_every_trainer_has_a_column():
    """A package with an attach door is a trainer's."""
    assert set(TABLE) == {path.parent.name for path in HERE.glob("*/attach.py")}
    assert {path.name for path in HERE.iterdir() if path.is_dir() and files(path)} == set(TABLE)


@pytest.mark.parametrize("trainer", TABLE)
def test_the_doors_of_a_trainer_are_its_files(trainer):
    """What the table calls a file is one; where it names shared code or a reason, there is none."""
    cells = TABLE[trainer]
    rooms = {room.strip() for room in cells["rooms"].split(",") if room.strip()}
    doors = {door for door in DOORS if cells[door] == door}

    assert set(cells) == {*DOORS, "rooms"}
    assert files(HERE / trainer) - ENTRIES == doors | rooms


@pytest.mark.parametrize("trainer", TABLE)
def test_a_door_without_a_file_says_where_to_go(trainer):
    """Shared code that exists, or a reason."""
    for door in DOORS:
        kind, _, where = TABLE[trainer][door].partition(": ")
        if kind == "shared":
            assert where in files(HERE)
        else:
            assert kind == door or (kind == "none" and where)
