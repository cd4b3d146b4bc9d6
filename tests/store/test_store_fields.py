"""What stores hold of records: fields that are added later, and stores that were written by every earlier schema."""

import json
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import rlwatch
from rlwatch import codec
from rlwatch.columns import ALERTS, FINDINGS, RUNS
from rlwatch.errors import StoreCorruptError
from rlwatch.records import Alert, Event, Finding, RunInfo, Severity, Stage
from rlwatch.store.fields import FINDING, FieldTable
from rlwatch.store.url import open_store

DATA = Path(__file__).parent / "data"
EARLIER = sorted(DATA.glob("earlier-*.tar.gz"))
KINDS = (
    "RunEdit", "Curation", "Purge", "RunInfo", "StepRecord", "SpikeBatch", "CompletionBatch", "Event", "Finding",
    "ForecastRecord", "Alert", "Acknowledgement", "Silence", "AuditEntry", "ForecastAnswer", "OutboxMessage", "Command",
)  # fmt: skip
PACKAGE = Path(rlwatch.__file__).parent


def unpacked(sample: Path, where: Path) -> Path:
    with tarfile.open(sample) as packed:
        packed.extractall(where, filter="data")
    return where / "store"


def a_package_with_a_field_more(where: Path) -> None:
    """The package, but that each class of a record has a field more: one line each."""
    (where / "rlwatch").mkdir()
    for entry in PACKAGE.iterdir():
        (where / "rlwatch" / entry.name).symlink_to(entry)
    records = where / "rlwatch" / "records.py"
    text, count = re.subn(
        rf'^(class (?:{"|".join(KINDS)}):\n    """(?:.|\n)*?"""\n\n(?:    \w+: .*\n)+)',
        r"\1    added: tuple[str | float, ...] = ()\n",
        records.read_text(),
        flags=re.MULTILINE,
    )
    assert count == len(KINDS)
    records.unlink()
    records.write_text(text)


def test_a_field_added_in_one_place_survives_everywhere_and_runs_of_before_are_read(tmp_path: Path):
    """In stores, copies, journals, JSON, tables, between ranks and nodes; of a store of before it is the default."""
    a_package_with_a_field_more(tmp_path)
    for sample in EARLIER:
        unpacked(sample, tmp_path / "earlier" / sample.name)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    script = Path(__file__).with_name("added_field.py")
    out = subprocess.run(
        [sys.executable, script, tmp_path, tmp_path / "earlier"],
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )

    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert found == {key: [] for key in found}
    assert len(found) == 10 + len(EARLIER)


@pytest.mark.parametrize("sample", EARLIER, ids=lambda sample: sample.name[8])
def test_a_store_of_every_earlier_schema_is_read(tmp_path: Path, sample: Path):
    """Row by row as it was written, by a reader where the schema is near enough and else once its run is resumed."""
    store, number = open_store(unpacked(sample, tmp_path)), int(sample.name[8])
    if number == 1:
        store.open_run(RunInfo("run")).close()

    kl = [record.metrics["kl"] for record in store.records("run")]
    assert repr(kl) == repr([0.5, math.nan, math.inf, -math.inf, -0.0, 0.25])
    (finding,) = store.findings("run")
    assert (finding.severity, finding.stage, finding.score) == (Severity.CRITICAL, Stage.BEGAN, math.inf)
    assert repr(finding.evidence) == "{'now': nan, 'was': 0.5}"
    (event,) = store.events("run")
    assert repr(event.body) == "{'text': 'häh', 'by': nan}"
    run = store.run("run")
    assert (run.project, run.config, run.curation.logged_name or run.name) == (
        "math", {"lr": 1e-6, "clip": math.inf}, "seed-1",
    )  # fmt: skip
    (alert,), (command,), (message,) = store.alerts("run"), store.commands("run"), store.outbox("run")
    assert (alert.reason, alert.fired_at, alert.resolved_at) == ("at once", 1_700_000_004.0, None)
    assert (command.args, command.force, command.result) == ({"keep": 2}, True, "saved")
    assert (message.channel, repr(message.payload["value"])) == ("hook", "nan")
    held = [store.completions("run"), store.acknowledgements("run"), store.silences(), store.forecasts("run")]
    held += [store.edits("run"), store.audit(), store.forecast_answers("run")]
    assert [len(each) for each in held] == {
        1: [0, 0, 0, 0, 0, 0, 0], 2: [1, 1, 1, 0, 0, 0, 0], 3: [1, 1, 1, 1, 0, 0, 0], 4: [1, 1, 1, 1, 1, 0, 0],
        5: [1, 1, 1, 1, 1, 1, 1],
    }[number]  # fmt: skip


def test_a_record_that_lacks_what_it_needs_says_what(tmp_path: Path):
    """One clear error instead of a name that was not there."""
    with pytest.raises(ValueError, match=r"Finding lacks detector, severity.*; got kind"):
        codec.decoded(Finding, {"kind": "x"})
    with pytest.raises(ValueError, match="'fatal' is not a valid Severity"):
        codec.decoded(Finding, {"severity": "fatal"})
    store = open_store(unpacked(EARLIER[-1], tmp_path))
    with store.open_run(RunInfo("run")).db as db:  # a body that another program wrote
        db.execute("UPDATE finding SET body = '{}'")
    with pytest.raises(StoreCorruptError, match=r"Finding is damaged: .* message"):
        store.findings("run")


def test_a_table_names_the_fields_of_its_record_only():
    """A column without a field would be found by no type checker."""
    for table in [each for each in vars(sys.modules[FieldTable.__module__]).values() if isinstance(each, FieldTable)]:
        assert set(table.fields) <= set(codec.plan_of(table.kind).names), table.name


def test_every_field_is_a_column_of_the_one_list():
    """So that no table of an interface has to be told of it."""
    for kind, columns in ((Finding, FINDINGS), (Alert, ALERTS)):
        assert set(codec.plan_of(kind).names) <= columns.keys()
    assert {"run_id", "attempt", "created_at"} <= RUNS.keys()
    assert all(column.meaning for column in (*FINDINGS.values(), *ALERTS.values(), *RUNS.values()))


def test_the_body_of_a_finding_has_every_field_without_a_column():
    """Also those that are as they are by default."""
    finding = Finding("d", "k", Severity.INFO, 1, 1, "m")
    assert FINDING.body(finding).keys() == set(codec.plan_of(Finding).names) - set(FINDING.fields)
    assert codec.beyond(Event("note")) == {"kind": "note"}
