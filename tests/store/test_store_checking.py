"""``rlwatch db check`` and ``rlwatch db stats``: what is wrong is found where it is, and nothing where all is well."""

import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from postgres_server import sql
from typer.testing import CliRunner

from rlwatch.cli.app import app
from rlwatch.records import Event, RunInfo, SpikeBatch, StepRecord
from rlwatch.store.checking import check_run
from rlwatch.store.postgres.address import read_address
from rlwatch.store.url import open_store

ROWS = 1500


def recorded(url: str, *run_ids: str) -> str:
    """Runs long enough for blocks and chunks, with values that are none, a metric now and then, events and tokens."""
    store = open_store(url)
    for run_id in run_ids:
        writer = store.open_run(RunInfo(run_id))
        odd = {7: math.nan, 8: math.inf, 9: -math.inf}
        rows = [
            StepRecord(step, {"reward": odd.get(step, step / 7)} | ({"kl": 0.1} if step % 10 == 0 else {}))
            for step in range(1, ROWS + 1)
        ]
        for at in range(0, ROWS, 100):
            writer.write(rows[at : at + 100])
        writer.write(
            [Event("note", 3, {"text": "x"}), SpikeBatch(5, {"token_id": np.array([4]), "score": np.array([2.0])})]
        )
        writer.close()
    store.close()
    return url


def ran(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["db", *map(str, arguments)])
    return result.exit_code, result.output


def damaged(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(statement).rowcount > 0


@pytest.fixture(params=["directory", "postgres"])
def store(request, tmp_path: Path) -> str:
    url = str(tmp_path / "runs") if request.param == "directory" else request.getfixturevalue("emptied_postgres_url")
    return recorded(url, "one", "two")


def test_nothing_is_wrong_with_what_was_stored(store):
    """All rows and values are counted, NaN and infinities too; a run can be asked for by itself."""
    assert ran("check", "--store", store) == (0, "2 runs read back, 3,002 rows, 3,300 values: no damage\n")
    assert "1 runs read back, 1,501 rows" in ran("check", "one", "--store", store)[1]


def test_a_store_says_what_it_takes(store):
    """Something for everything in it, and the sum."""
    code, said = ran("stats", "--store", store)

    assert code == 0
    assert "one" in said or "record" in said
    assert "together" in said.splitlines()[-1]


def test_a_place_on_the_disk_that_went_bad_is_found_by_sqlite(tmp_path: Path):
    """In one run; the other is read to its end."""
    url = recorded(str(tmp_path), "bad", "good")
    path = tmp_path / "bad" / "run.db"
    content = bytearray(path.read_bytes())
    content[2 * 4096 : 4 * 4096] = b"\xa5" * 8192
    path.write_bytes(content)

    code, said = ran("check", "--store", url)
    assert (code, said.splitlines()[0].partition(":")[0]) == (1, "bad")
    assert "1 damaged" in said


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE chunk SET v = substr(v, 1, 12)", "rows cannot be read"),
        ("UPDATE block SET seqs = x'00'", "rows cannot be read"),
        ("UPDATE spike_batch SET v = x'0102'", "localised tokens cannot be read"),
        ("UPDATE event SET body = '{oops'", "cannot be read"),
    ],
)
def test_what_no_longer_parses_is_named(tmp_path: Path, statement, what):
    """Each kind of what a run holds."""
    url = recorded(str(tmp_path), "run")
    damaged(tmp_path / "run" / "run.db", statement)

    checked = check_run(open_store(url), "run")
    assert any(what in problem for problem in checked.problems), checked.problems


def test_a_chunk_that_differs_from_its_rows_is_found(emptied_postgres_url):
    """One bit of one value, which nobody would see."""
    url = recorded(emptied_postgres_url, "run")
    with sql(url) as db:
        schema = read_address(url).schema
        assert db.execute(f"UPDATE {schema}.chunk SET v = set_bit(v, 77, 1 - get_bit(v, 77))").rowcount > 0

    assert "the series of reward has other values than its rows" in check_run(open_store(url), "run").problems


def test_a_store_that_takes_nothing_on_a_disk_says_so():
    """Only of this process."""
    assert ran("stats", "--store", "memory://none")[0] == 2
