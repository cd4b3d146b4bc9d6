"""Run tables from rows in memory, and several tables as one."""

import math

import numpy as np
import pytest

from rlwatch.errors import ConfigError
from rlwatch.forecast.tables import joined_tables, table_of_rows


def test_rows_come_out_as_they_went_in():
    """In order of steps; missing is missing, NaN is NaN."""
    rows = {3: {"a": 1.0}, 1: {"a": math.nan, "b": 2.0}}
    table = table_of_rows({"one": rows, "empty": {}})
    assert (table.runs, table.recipes) == (("one",), ("own",))
    (first, early), (second, late) = table.stream(0)
    assert (first, second, late) == (1, 3, {"a": 1.0})
    assert math.isnan(early["a"])
    assert early["b"] == 2.0


def test_tables_are_joined_run_after_run():
    """A metric of one table is missing in the other."""
    one, two = table_of_rows({"x": {1: {"a": 1.0}, 2: {"a": 2.0}}}), table_of_rows({"y": {5: {"b": 3.0}}}, recipe="r")
    both = joined_tables([one, two])
    assert both.runs == ("x", "y")
    assert both.recipes == ("own", "r")
    assert both.starts.tolist() == [0, 2, 3]
    assert [list(both.stream(i)) for i in range(2)] == [[(1, {"a": 1.0}), (2, {"a": 2.0})], [(5, {"b": 3.0})]]
    assert np.isnan(both.columns["b"].values[:2]).all()


def test_a_run_that_comes_twice_is_refused_by_name():
    """So is having no rows at all."""
    one = table_of_rows({"x": {1: {"a": 1.0}}})
    with pytest.raises(ConfigError, match="run 'x' is in two of these tables"):
        joined_tables([one, one])
    with pytest.raises(ConfigError, match="no rows in any"):
        table_of_rows({"x": {}})
