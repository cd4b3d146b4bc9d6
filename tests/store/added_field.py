"""Run by test_store_fields.py, with a field ``added`` in every record class: writes, reads, prints what did not survive."""

import dataclasses
import json
import sys
from pathlib import Path

import rlwatch.records as r
from rlwatch import codec
from rlwatch.analysis.runs import Runs
from rlwatch.cli.console import plain
from rlwatch.run.ranks import _packed, _unpacked
from rlwatch.store.fields import dumps
from rlwatch.store.sqlite.journal import SQLiteJournal, journals_in
from rlwatch.store.sqlite.nodefiles import records_of, words_of
from rlwatch.store.url import open_store

STREAM = (r.StepRecord, r.Event, r.Finding, r.ForecastRecord, r.SpikeBatch, r.CompletionBatch)
SAID = (r.Command, r.Alert, r.OutboxMessage, r.Acknowledgement, r.Silence, r.AuditEntry, r.ForecastAnswer, r.RunEdit)
NEEDED = {
    "run_id": "run", "step": 3, "onset_step": 2, "severity": r.Severity.CRITICAL, "state": r.AlertState.FIRING,
    "metrics": {"kl": 0.5}, "columns": {"text": ["a"]}, "payload": {}, "right": True, "at": 5.0, "created_at": 1.0,
    "until": 2.0, "deleted_at": 1.0,
}  # fmt: skip


def made(kind, **more):
    """A record of the kind with ``added``, and a word for each other field that it needs."""
    needed = codec.plan_of(kind).needed
    return kind(**{name: NEEDED.get(name, name) for name in needed}, **more, added=(kind.__name__, 1.5))


def write(store):
    """One of everything."""
    writer = store.open_run(made(r.RunInfo))
    writer.write([made(kind, **({"seq": 1} if kind is r.ForecastRecord else {})) for kind in STREAM])
    writer.finish(r.RunState.FINISHED, "", 9.0)
    writer.close()
    store.open_run(r.RunInfo("run")).close()  # a resume that says nothing of it
    command, alert, message, acknowledgement, silence, entry, answer, edit = map(made, SAID)
    store.submit(command)
    store.put_alerts([alert], [message])
    store.acknowledge(acknowledgement)
    store.put_silence(silence)
    store.put_entry(entry)
    store.answer_forecast(answer)
    store.edit(edit)


def read(store, run_id="run"):
    """Everything."""
    found = [store.run(run_id), *store.records(run_id), *store.events(run_id), *store.findings(run_id)]
    found += [*store.recoveries(run_id), *store.forecasts(run_id), *store.spikes(run_id), *store.completions(run_id)]
    found += [*store.commands(run_id), *store.alerts(run_id), *store.outbox(run_id), *store.acknowledgements(run_id)]
    return [*found, *store.silences(), *store.audit(), *store.forecast_answers(run_id), *store.edits(run_id)]


def lost(records, *kinds):
    """Kinds of which no record came back, or one without its field."""
    whole = {type(each) for each in records if each.added == (type(each).__name__, 1.5)}
    return [
        kind.__name__ for kind in kinds if kind not in whole or any(type(e) is kind and e.added == () for e in records)
    ]


def main(where, earlier):
    """Prints, by place, what did not survive there."""
    found = {}
    for url in (str(where / "store"), "memory://added"):
        store = open_store(url)
        write(store)
        found[url.partition(":")[0][:6]] = lost(read(store), r.RunInfo, *STREAM, *SAID)
    run, other = Runs(open_store(where / "store")), open_store("memory://copy")
    from rlwatch.store.transfer import copy_run, copy_shared

    copied = copy_run(run.store, other, "run")
    copy_shared(run.store, other)
    found["copy"] = [*copied.differs, *lost(read(other), r.RunInfo, *STREAM, *SAID)]
    tables = {
        "runs": run.rows(),
        **{kind: list(run["run"].table(kind).rows()) for kind in ("findings", "alerts", "events")},
    }
    found["tables"] = [name for name, rows in tables.items() if not all(row.get("added") for row in rows)]
    columns = {kind: run["run"].table(kind).columns for kind in ("findings", "alerts", "events")}
    found["columns"] = [name for name, of in columns.items() if "added" not in of]
    found["frame"] = [] if "added" in run.table() and "added" in run["run"].findings() else ["frame"]
    found["json"] = [k.__name__ for k in (*STREAM, *SAID) if plain(made(k)).get("added") != [k.__name__, 1.5]]
    found["wire"] = lost(_unpacked(_packed([made(r.Command)])), r.Command)
    words = [("key", json.loads(dumps(words_of(made(kind))))) for kind in SAID]
    found["nodes"] = [k.__name__ for k, each in zip(SAID, words, strict=True) if lost(records_of([each], k), k)]
    (where / "journal").mkdir()
    journal = SQLiteJournal(where / "journal")
    kept = (r.Event, r.SpikeBatch, r.CompletionBatch)
    for kind in kept:
        journal.append(made(kind))
    found["journal"] = lost([item for of in journals_in(where / "journal").values() for _, item in of], *kept)
    for each in sorted(earlier.iterdir()):
        store = open_store(each / "store")
        store.open_run(r.RunInfo("run")).close()  # format 1 wants its writer first
        found[each.name] = [type(e).__name__ for e in read(store) if dataclasses.is_dataclass(e) and e.added != ()]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
