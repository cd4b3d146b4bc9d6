"""Make ``earlier-*.tar.gz``: a small store, as the rlwatch that runs this writes it.

``python tests/store/data/make_earlier.py OUT.tar.gz``, with an older checkout on ``PYTHONPATH`` for an older schema. A
sample is made once, before the schema changes, and never again: ``test_store_earlier.py`` reads all of them.
"""

import math
import sys
import tarfile
import tempfile
from pathlib import Path

from rlwatch import records
from rlwatch.store.url import open_store

TS = 1_700_000_000.0


def items():
    """Rows, events, findings and batches of the run, as far as this rlwatch knows their kinds."""
    values = (0.5, math.nan, math.inf, -math.inf, -0.0)
    yield from (records.StepRecord(step, {"kl": kl, "reward": 1.0}, ts=TS + step) for step, kl in enumerate(values))
    yield records.StepRecord(9, {"kl": 0.25}, ts=TS + 9)
    yield records.Event("note", 3, {"text": "häh", "by": math.nan}, ts=TS + 3.5)
    yield records.Finding(
        "entropy",
        "entropy_collapse",
        records.Severity.CRITICAL,
        step=4,
        onset_step=2,
        message="entropy is collapsing",
        evidence={"now": math.nan, "was": 0.5},
        metric="policy/entropy",
        family="exploration",
        score=math.inf,
        baseline=0.5,
        seq=4,
    )
    yield records.SpikeBatch(4, {"ratio": [8.0, math.nan], "token_id": [1, 2]}, reason="culprits", ts=TS + 4)
    if hasattr(records, "CompletionBatch"):
        yield records.CompletionBatch(4, {"prompt": ["1+1="], "completion": ["2"], "reward": [1.0]}, ts=TS + 4)
    if hasattr(records, "ForecastRecord"):
        yield records.ForecastRecord(4, {"forecast/p50": 0.75}, {"absent": ""}, ts=TS + 4, seq=5)


def alert():
    """The one alert."""
    return records.Alert(
        "a1",
        "run",
        "collapse",
        "entropy_collapse",
        records.Severity.CRITICAL,
        records.AlertState.FIRING,
        2,
        4,
        "entropy is collapsing",
        "at once",
        "entropy",
        {"now": math.nan},
        fired_at=TS + 4,
    )


def people(store):
    """Whatever people say about a run, as far as this rlwatch knows it."""
    if hasattr(records, "Acknowledgement"):
        store.acknowledge(records.Acknowledgement("a1", "run", "ann", "on it", TS + 5, records.Severity.CRITICAL))
    if hasattr(records, "Silence"):
        store.put_silence(records.Silence("s1", "bob", "new data", TS, TS + 60, kind="kl_drift", labels={"team": "rl"}))
    if hasattr(records, "RunEdit"):
        store.edit(records.RunEdit("run", "ann", TS + 6, name="best", tagged=("paper",)))
    if hasattr(records, "AuditEntry"):
        store.put_entry(records.AuditEntry("e1", TS + 6, "ann", "note", "looked at it", "run", "a1"))
    if hasattr(records, "ForecastAnswer"):
        store.answer_forecast(records.ForecastAnswer("run", 4, True, "ann", "it fell", TS + 6))


def fill(root):
    """Write the store into ``root``."""
    store = open_store(root)
    config = {"lr": 1e-6, "clip": math.inf}
    run = records.RunInfo("run", "math", "seed-1", "trl/grpo", TS, config, ("a",), host="node7", pid=42)
    writer = store.open_run(run)
    writer.write(list(items()))
    writer.finish(records.RunState.FINISHED, "done", TS + 20)
    writer.close()
    store.submit(records.Command("c1", "run", "save", {"keep": 2}, True, requested_by="ann", why="safe", created_at=TS))
    store.claim("run", TS + 1)
    store.settle("run", "c1", records.CommandStatus.DONE, TS + 2, step=3, result="saved")
    told = {"text": "entropy", "value": math.nan}
    store.put_alerts([alert()], [records.OutboxMessage("m1", "run", "a1", "hook", told, created_at=TS + 4)])
    people(store)


def bare(member):
    """Without the lock, which names the machine, and without an owner."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return None if member.name.endswith(".lock") else member


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where, tarfile.open(sys.argv[1], "w:gz") as packed:
        fill(Path(where) / "store")
        packed.add(Path(where) / "store", "store", filter=bare)
