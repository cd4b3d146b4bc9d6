"""The end of a run waits for alerts that its store cannot take yet."""

import sqlite3
import threading
import time

import rlwatch
from rlwatch.records import Command
from rlwatch.store.url import open_store

LOCKED_S = 2.0


def test_alerts_that_fired_while_another_process_held_the_control_tables_are_stored_at_the_end(tmp_path):
    """Within the deadline of ``finish``; they were lost to everybody who had not read the log."""
    run = rlwatch.init(store=str(tmp_path), run_id="run", system=False)
    store, released = open_store(str(tmp_path)), []
    store.submit(Command("c1", "run", "note", why="so that there are control tables", created_at=time.time()))

    def hold(ready):
        with sqlite3.connect(tmp_path / "run" / "control.db") as db:
            db.execute("BEGIN EXCLUSIVE")
            ready.set()
            time.sleep(LOCKED_S)
            db.rollback()
            released.append(time.monotonic())

    for step in range(1, 80):
        run.log({"reward": 0.6 if step <= 40 else 0.05, "entropy": 1.0 if step <= 40 else 0.02}, step=step)
        if step == 40:
            run.flush()
            ready = threading.Event()
            holder = threading.Thread(target=hold, args=(ready,))
            holder.start()
            ready.wait(60)
    ended = run.finish(deadline_s=60)
    holder.join()

    assert ended
    assert released
    assert "joint_collapse" in {alert.kind for alert in store.alerts("run")}
    assert store.judged("run")[0] == store.judged("run")[1]
