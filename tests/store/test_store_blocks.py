"""Rows that become blocks: when, how small, whatever interrupts it, and stores from before there were any."""

import gzip
import math
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from rlwatch.errors import StoreFullError
from rlwatch.records import Event, ForecastRecord, RunInfo, StepRecord
from rlwatch.store.sqlite import blocks
from rlwatch.store.sqlite.blocks import KEPT, LARGE, MOST_VALUES, SMALL, coarser, finest, pack_axis, unpack_axis
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import fill

_KILLED_AT = """
import rlwatch.store.sqlite.blocks as blocks
blocks.LARGE = 1024
writer = open_store(sys.argv[1]).open_run(RunInfo("run"))
def some(*steps):
    return [StepRecord(step, {"kl": step / 10, "lr": float(step)}) for step in steps]
writer.write(some(*range(1, 577)))
writer.write(some(*range(577, 1088)))
left = int(sys.argv[2])
def counted(statement):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
writer.db.set_trace_callback(counted)
writer.write(some(1088))
os.write(1, b"stored")
os._exit(0)
"""


def _held(path: Path) -> tuple[list[int], int]:
    """Rows of each block of records, and the records in none."""
    with sqlite3.connect(path / "run.db") as db:
        of_blocks = db.execute("SELECT n FROM block WHERE kept_in = 'record' ORDER BY last_seq").fetchall()
        return [rows for (rows,) in of_blocks], db.execute("SELECT count(*) FROM record").fetchone()[0]


def _some(*steps: int, attempt: int = 1) -> list[StepRecord]:
    return [StepRecord(step, {"kl": step / 10, "lr": float(step)}, attempt=attempt) for step in steps]


def test_old_rows_become_blocks_and_blocks_grow(tmp_path: Path):
    """A small block each 512 rows, a large one of so many; the newest stay rows."""
    writer = open_store(tmp_path).open_run(RunInfo("run"))
    seen = set()
    for begin in range(0, LARGE + SMALL + KEPT, KEPT):
        writer.write(_some(*range(begin, begin + KEPT)))
        of_blocks, rows = _held(tmp_path / "run")
        seen.add(tuple(of_blocks))
        assert rows < SMALL + KEPT
    writer.close()

    assert _held(tmp_path / "run") == ([LARGE, SMALL], KEPT)
    assert seen == {(SMALL,) * count for count in range(LARGE // SMALL)} | {(LARGE,), (LARGE, SMALL)}


def test_a_kill_while_rows_become_a_block_loses_none_and_doubles_none(tmp_path: Path, child):
    """At any statement: of the write, of the new block, and of the large one that is made of two."""
    stored = 0
    for statement in range(1, 60, 5):
        place = tmp_path / str(statement)
        process = child(_KILLED_AT, place, statement)
        stored += process.communicate(timeout=600)[0] == "stored"
        store = open_store(place)
        count = len(store.records("run"))
        assert [record.seq for record in store.records("run")] == list(range(1, count + 1))
        assert count in (1087, 1088)
        series = store.series("run", ["lr"])["lr"]
        assert series.values.tolist() == [float(step) for step in range(1, count + 1)]
        fill(store, _some(2000, attempt=2))
        assert store.last_values("run")["lr"] == (2000, 2000.0)
        assert store.steps("run")[1] == list(range(1, count + 1))
    assert 0 < stored < 12  # the last of them came after all of it


def test_readers_see_every_row_once_while_blocks_are_made(tmp_path: Path):
    """Each answer is one moment, whatever the writer does meanwhile."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    writer.write(_some(1))
    wrong: list[object] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seqs = store.series("run", ["lr"])["lr"].seqs
            if not np.array_equal(seqs, np.arange(1, len(seqs) + 1)):
                wrong.append(seqs)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 2 * SMALL + 3 * KEPT):
        writer.write(_some(step))
    over.set()
    reader.join()
    writer.close()
    assert not wrong
    assert _held(tmp_path / "run")[0] == [SMALL, SMALL]


def test_a_disk_without_room_for_a_block_keeps_its_rows(tmp_path: Path):
    """What was written is written; blocks are made once there is room."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    writer.write(_some(*range(SMALL + KEPT - 1)))
    pages = writer.db.execute("PRAGMA page_count").fetchone()[0]
    writer.db.execute(f"PRAGMA max_page_count = {pages}")
    last = SMALL + KEPT - 1
    try:
        while True:
            writer.write(_some(last))
            last += 1
    except StoreFullError:
        pass
    assert _held(tmp_path / "run") == ([], last)
    writer.db.execute("PRAGMA max_page_count = 1073741823")
    writer.write(_some(*range(last, last + SMALL)))
    writer.close()

    assert sum(_held(tmp_path / "run")[0]) >= SMALL
    assert [record.step for record in store.records("run")] == list(range(last + SMALL))


def test_a_run_of_format_4_is_read_as_it_is_and_goes_on(tmp_path: Path):
    """Recorded by the program of then: two attempts, a NaN, an infinity, forecasts, events."""
    (tmp_path / "old").mkdir()
    packed = Path(__file__).parent / "data" / "format4.db.gz"
    (tmp_path / "old" / "run.db").write_bytes(gzip.decompress(packed.read_bytes()))
    store, names = open_store(tmp_path), ["policy/kl", "optim/lr", "forecast/p50"]

    def told(until: int) -> str:
        series = store.series("old", names).values()
        rows = [(one.seqs[:until].tolist(), one.steps[:until].tolist(), one.values[:until].tolist()) for one in series]
        return repr((store.records("old")[:800], rows, store.events("old"), list(store.branch("old", 3, 600))))

    before = told(800)
    thin = store.series("old", names, points=10)["policy/kl"]
    assert (len(store.records("old")), store.spans("old")) == (800, {1: (0, 499), 2: (400, 699)})
    assert [math.isnan(v) for v in thin.values[[450, 451]]] == [True, False]
    for step in range(700, 704):
        fill(store, [StepRecord(step, {"policy/kl": 1.0, "optim/lr": 1e-6}, attempt=3)], "old")

    assert _held(tmp_path / "old") == ([704], 100)
    assert told(800) == before
    assert store.series("old", names, points=10)["policy/kl"].steps[-4:].tolist() == [700, 701, 702, 703]


def test_a_forecast_that_comes_late_finds_its_place(tmp_path: Path):
    """A judge may come back to steps it passed over; forecasts are kept once each, in order."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    seqs = range(1, SMALL + 2 * KEPT)
    writer.write(_some(*seqs))
    writer.write([ForecastRecord(seq, {"forecast/p50": float(seq)}, seq=seq) for seq in seqs if seq != 7])
    late = [ForecastRecord(seq, {"forecast/p50": float(seq)}, seq=seq) for seq in (6, 7, 8)]
    writer.write(late)
    writer.write(late)
    writer.close()

    series = store.series("run", ["forecast/p50"])["forecast/p50"]
    assert series.seqs.tolist() == [forecast.seq for forecast in store.forecasts("run")] == list(seqs)
    assert store.series("run", ["forecast/p50"], after_seq=600)["forecast/p50"].seqs.tolist() == list(seqs[600:])


def test_sets_too_wide_stay_rows(tmp_path: Path):
    """A block of them would be as large as all that may be held at once."""
    store = open_store(tmp_path)
    wide = {f"m{k}": float(k) for k in range(MOST_VALUES // SMALL + 1)}
    fill(store, [*(StepRecord(step, wide) for step in range(SMALL + KEPT)), *_some(*range(SMALL + KEPT))])

    assert _held(tmp_path / "run") == ([SMALL], SMALL + 2 * KEPT)
    assert store.series("run", ["m7"])["m7"].values.tolist() == [7.0] * (SMALL + KEPT)


def test_records_without_metrics_become_blocks_too(tmp_path: Path):
    """Their steps and moments count."""
    store = open_store(tmp_path)
    fill(store, [StepRecord(step, {}, ts=float(step)) for step in range(SMALL + KEPT)] + [Event("note")])

    assert _held(tmp_path / "run") == ([SMALL], KEPT)
    assert [(record.step, record.metrics) for record in store.records("run", limit=2)] == [(0, {}), (1, {})]
    assert store.moments("run").values.tolist() == [float(step) for step in range(SMALL + KEPT)]


def test_blocks_take_hardly_more_room_than_rows(tmp_path: Path):
    """Some 10 bytes a value, of which 8 are the value; room that is free again is used by what comes next."""
    writer = open_store(tmp_path).open_run(RunInfo("run"))
    rng = np.random.default_rng(0)
    names = [f"m{k}" for k in range(40)]
    rows = rng.normal(size=(LARGE + SMALL, len(names))).tolist()
    for begin in range(0, len(rows), 64):
        some = enumerate(rows[begin : begin + 64], begin)
        writer.write([StepRecord(k, dict(zip(names, row, strict=True)), ts=float(k)) for k, row in some])
    writer.close()
    with sqlite3.connect(tmp_path / "run" / "run.db") as db:
        pages, free, size = (
            db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("page_count", "freelist_count", "page_size")
        )

    values = len(rows) * len(names)
    assert (pages - free) * size / values < 10
    assert pages * size / values < 15


@pytest.mark.parametrize("steps", [[0, 10, 20, 30], [5, 5, 5], [3, 1, 2], [0, 2**63 - 1, 0], [-5, -4, -3]])
def test_an_axis_comes_back(steps: list[int]):
    """Evenly spaced ones take 16 bytes."""
    axis = np.array(steps, dtype=np.int64)
    blob = pack_axis(axis)
    assert unpack_axis(blob, len(axis)).tolist() == steps
    assert (len(blob) == 16) == (len(set(np.diff(axis).tolist())) == 1)


def test_cells_sum_up_their_rows_at_every_width():
    """Extremes and places of what is finite, first NaN and infinities, counts and sum; of nothing finite, none."""
    rng = np.random.default_rng(1)
    values = rng.integers(-9, 9, size=(3, 64 * 10)).astype(float)
    values[0, [70, 80, 90, 100]] = [math.nan, math.inf, -math.inf, math.nan]
    values[1, 128:192] = math.nan
    cells, width = finest(values), 64
    for _ in range(3):
        for metric, row in enumerate(values):
            for place in range(cells["low"].shape[1]):
                _check_cell(
                    {name: column[metric, place] for name, column in cells.items()}, row[place * width :][:width]
                )
        cells, width = coarser(cells, width, 4), width * 4


def _check_cell(cell: dict, rows: np.ndarray) -> None:
    finite = np.flatnonzero(np.isfinite(rows))
    assert (cell["numbers"], cell["total"]) == (len(finite), rows[finite].sum())
    if len(finite):
        assert (cell["low"], cell["high"]) == (rows[finite].min(), rows[finite].max())
        assert cell["low_at"] == np.flatnonzero(rows == cell["low"])[0]
        assert cell["high_at"] == np.flatnonzero(rows == cell["high"])[-1]
    else:
        assert (cell["low_at"], cell["high_at"]) == (blocks.ABSENT, blocks.ABSENT)
    for name, hit in (("nan", np.isnan(rows)), ("up", rows == np.inf), ("down", rows == -np.inf)):
        assert cell[f"{name}s"] == hit.sum()
        assert cell[f"{name}_at"] == (np.flatnonzero(hit)[0] if hit.any() else blocks.ABSENT)
