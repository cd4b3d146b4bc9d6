"""All outputs of a training in a notebook: the table that was drawn, and what its cell printed beside it."""

import json

import pytest

from rlwatch.importers import read_log
from rlwatch.metrics import known


def table(steps, **columns):
    columns = columns or {"Training Loss": [step / 1000 for step in steps]}
    head = "".join(f"<th>{name}</th>" for name in ("Step", *columns))
    rows = [
        "".join(f"<td>{cell}</td>" for cell in (step, *(column[number] for column in columns.values())))
        for number, step in enumerate(steps)
    ]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def cell(*, drawn=(), printed=""):
    shown = [{"output_type": "display_data", "data": {"text/html": [html]}} for html in drawn]
    return {
        "cell_type": "code",
        "outputs": [*shown, *([{"output_type": "stream", "text": [printed]}] if printed else [])],
    }


def dicts(steps):
    return "".join(f"{{'loss': {step / 1000}, 'reward': {step / 100}, 'epoch': {step / 500}}}\n" for step in steps)


def read(tmp_path, *cells):
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    return read_log(tmp_path / "train.ipynb")


TENS = range(10, 110, 10)


@pytest.mark.parametrize(
    "printed",
    [
        dicts(TENS),  # numbered, as many as rows
        dicts([30, 40, 50, 60, 70]),  # numbered; their losses tell of which rows they are
        "".join(f"step: {step}, reward: {step / 100}, kl: 0.01\n" for step in TENS),
        "".join(
            f"step: {step}, reward: {step / 100}, kl: 0.01\n" for step in range(1, 101)
        ),  # more often than the table
    ],
)
def test_what_a_cell_printed_beside_its_table_is_joined_by_step(tmp_path, printed):
    """Whichever of the two has more rows; a table of losses alone hid the reward."""
    [run] = read(tmp_path, cell(printed="Loading the model\n"), cell(drawn=[table(TENS)], printed=printed))

    rewards = {record.step: record.metrics["reward"] for record in run.records if "reward" in record.metrics}
    assert len(rewards) >= 5
    assert all(reward == step / 100 for step, reward in rewards.items())
    assert sum("Training Loss" in record.metrics for record in run.records) == 10
    assert "joined by step" in run.notes[0]


def test_what_the_table_shows_itself_is_not_taken_from_what_was_printed(tmp_path):
    """The reward functions of a notebook print rewards of single responses."""
    drawn = table(TENS, **{"Training Loss": [0.1] * 10, "reward": [0.7] * 10})
    [run] = read(tmp_path, cell(drawn=[drawn], printed=dicts(TENS)))

    assert {record.metrics["reward"] for record in run.records} == {0.7}
    assert known(run.records[0].metrics, run.source) == {"reward/mean", "loss/policy"}


def test_what_goes_with_no_row_of_the_table_is_left_out_with_a_count(tmp_path):
    """Nothing tells of which steps it is."""
    printed = "".join(f"{{'reward': 0.5, 'loss': 7.5, 'epoch': {number}}}\n" for number in range(4))
    [run] = read(tmp_path, cell(drawn=[table(TENS)], printed=printed))

    assert set(run.records[0].metrics) == {"Training Loss"}
    assert [skipped.reason for skipped in run.skipped] == [
        "a row printed with a table, whose step in that table is unknown"
    ]


def test_two_tables_of_the_same_steps_in_one_cell_are_one_training(tmp_path):
    """Of other steps, or in other cells, they are trainings of their own."""
    losses, rewards = table(TENS), table(TENS, reward=[0.5] * 10)
    [run] = read(tmp_path, cell(drawn=[losses, rewards]))

    assert set(run.records[0].metrics) == {"Training Loss", "reward"}
    assert [run.name for run in read(tmp_path, cell(drawn=[losses]), cell(drawn=[rewards]))] == ["table 1", "table 2"]


def test_a_training_printed_in_another_cell_is_not_hidden_by_a_table(tmp_path):
    """It is a run beside that of the table."""
    printed = "".join(f"step: {step}, reward: {step / 100}, kl: 0.01\n" for step in range(1, 30))
    first, second = read(tmp_path, cell(drawn=[table(TENS)]), cell(printed=printed))

    assert (len(first.records), len(second.records)) == (10, 29)
    assert "reward" in second.records[0].metrics


def test_what_another_cell_printed_is_joined_to_the_only_table_of_the_same_steps(tmp_path):
    """Unless both say a loss, and another one: then it is another training."""
    rewards = "".join(f"step: {step}, reward: {step / 100}, kl: 0.01\n" for step in TENS)
    [run] = read(tmp_path, cell(drawn=[table(TENS)]), cell(printed=rewards))
    assert {"Training Loss", "reward", "kl"} == set(run.records[0].metrics)

    other = "".join(f"step: {step}, reward: 0.1, loss: 7.5\n" for step in TENS)
    assert len(read(tmp_path, cell(drawn=[table(TENS)]), cell(printed=other))) == 2
