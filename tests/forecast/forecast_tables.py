"""Tables of runs made by formula, some of which fail, with their labels."""

from forecast_runs import steady

from rlwatch.forecast.labels import Label, Labels, RunOutcome
from rlwatch.forecast.tables import joined_tables, table_of_rows

LENGTH = 160
ONSET = 140


def failing(seed):
    """Entropy falls from step 80 on, until a fifth is left at step 140."""
    return steady(LENGTH, every=2, seed=seed, **{"policy/entropy": lambda s: 0.2 ** (max(0, s - 80) / 60)})


def tables(failed=12, sound=28):
    """A table of runs and its labels."""
    runs = {f"bad-{i}": failing(i) for i in range(failed)} | {
        f"good-{i}": steady(LENGTH, every=2, seed=99 + i) for i in range(sound)
    }
    table = joined_tables([table_of_rows({run: rows}, recipe=run.split("-")[0]) for run, rows in runs.items()])
    labels = [
        Label(run, RunOutcome.EVENT, ONSET, "ent_low", LENGTH)
        if run.startswith("bad")
        else Label(run, RunOutcome.CLEAN, steps=LENGTH)
        for run in runs
    ]
    return table, Labels("by hand", tuple(labels))
