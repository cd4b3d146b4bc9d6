"""Runs for the app's tests, written as a trainer would, and ways to read what a page shows."""

from __future__ import annotations

import json
import math
import time
from importlib.util import module_from_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path

from streamlit.testing.v1 import AppTest

from rlwatch.ports import Progress
from rlwatch.records import (
    Alert,
    AlertState,
    Finding,
    OutboxMessage,
    OutboxStatus,
    RunInfo,
    Severity,
    StepRecord,
)
from rlwatch.store.url import open_store

APP = Path(__file__).resolve().parents[2] / "app"
NAN = math.nan
WEIRD = '<script>alert("x")</script> **bold** [link](http://x) `code` $x$ ' + "very long name " * 20
WEIRD = WEIRD[:200]


def _load_app() -> None:
    spec = spec_from_file_location("rlwatch_app_main", APP / "main.py")
    assert spec is not None
    assert spec.loader is not None
    main = module_from_spec(spec)
    spec.loader.exec_module(main)
    main.load_package(APP)


_load_app()  # before test modules import rlwatch_app


def write_run(
    where,
    run_id="run-1",
    *,
    steps=30,
    metrics=None,
    name="seed3",
    project="math",
    age_s=1.0,
    step_s=5.0,
    state=None,
    reason="",
    source="trl/grpo",
    events=(),
    findings=(),
    config=None,
):
    """One run whose newest step is ``age_s`` seconds old; ``metrics(step)`` gives its numbers."""
    metrics = metrics or healthy
    store = open_store(str(where))
    last = time.time() - age_s
    info = RunInfo(
        run_id, project=project, name=name, source=source, created_at=last - steps * step_s, config=config or {}
    )
    writer = store.open_run(info)
    attempt = writer.run.attempt
    rows = [StepRecord(s, metrics(s), ts=last - (steps - s) * step_s, attempt=attempt) for s in range(1, steps + 1)]
    writer.write([*rows, *events, *findings])
    writer.write([], Progress(judged=writer.last_seq))
    if state is not None:
        writer.finish(state, reason, last)
    writer.close()
    store.close()
    return info


def healthy(step):
    """A healthy step."""
    return {"reward": 0.2 + step * 0.01, "entropy": 1.0 - step * 0.001, "kl": 0.01 * step, "grad_norm": 1.0 + step % 3}


def alert(run_id="run-1", *, kind="entropy_collapse", severity=Severity.CRITICAL, state=AlertState.FIRING, **more):
    """An alert that fired at step 20, begun at 12."""
    fields = {
        "alert_id": f"{run_id}-{kind}",
        "rule": "collapse",
        "onset_step": 12,
        "step": 20,
        "message": "entropy fell from 1 to 0.1 nats/token",
        "reason": "has held from step 12 to step 20",
        "fired_at": time.time() - 60,
        "evidence": {"entropy": 0.1, "entropy_baseline": 1.0},
        **more,
    }
    return Alert(run_id=run_id, kind=kind, severity=severity, state=state, **fields)


def finding(**more):
    """The finding behind :func:`alert`."""
    fields = {
        "detector": "entropy_collapse",
        "kind": "entropy_collapse",
        "severity": Severity.CRITICAL,
        "step": 20,
        "onset_step": 12,
        "message": "entropy fell from 1 to 0.1 nats/token",
        "evidence": {"entropy": 0.1, "ratio": NAN},
        "metric": "policy/entropy",
        "family": "Exploration",
        "score": 4.0,
        "baseline": 1.0,
        "seq": 20,
        **more,
    }
    return Finding(**fields)


def message(alert_id, status=OutboxStatus.SENT, **more):
    """A message of an alert."""
    fields = {"message_id": f"m-{alert_id}-{status}", "run_id": "run-1", "channel": "slack", "payload": {}, **more}
    return OutboxMessage(alert_id=alert_id, status=status, **fields)


def put_alerts(where, alerts, messages=()):
    """Store alerts and messages."""
    store = open_store(str(where))
    store.put_alerts(list(alerts), list(messages))
    store.close()


def danger_run(where, run_id="run-1", **more):
    """A live run whose entropy collapsed."""
    write_run(where, run_id, findings=[finding()], **more)
    put_alerts(where, [alert(run_id)])


def runs_page(**params):
    """The whole app, on its first page."""
    page = AppTest.from_file(str(APP / "main.py"), default_timeout=30)
    page.query_params.update(params)
    return page.run()


def run_page(run_id="run-1", **params):
    """The page of one run."""

    def script():
        from rlwatch_app.run_page import page

        page(lambda run_id, step: None)

    page = AppTest.from_function(script, default_timeout=30)
    page.query_params["run"] = run_id
    for name, value in params.items():
        page.query_params[name.rstrip("_")] = value if isinstance(value, list) else str(value)
    return page.run()


def alerts_page(**params):
    """The page of alerts."""

    def script():
        from rlwatch_app.alerts_page import page

        page(lambda run_id: None)

    page = AppTest.from_function(script, default_timeout=30)
    page.query_params.update(params)
    return page.run()


def rules_page():
    """The page of rules and channels."""

    def script():
        from rlwatch_app.rules_page import page

        page()

    return AppTest.from_function(script, default_timeout=30).run()


def forecasts_page():
    """The page of past forecasts."""

    def script():
        from rlwatch_app.forecasts_page import page

        page(lambda run_id: None)

    return AppTest.from_function(script, default_timeout=30).run()


def tables(page):
    """The tables a page shows, as the data their script gets, by key."""
    return {key: data for key, data in _components(page).items() if "sections" not in data}


def boards(page):
    """All charts a page shows, by key, as the data their script gets."""
    return {key: data for key, data in _components(page).items() if "sections" in data}


def _components(page):
    sent = {element.key: element.proto.json for element in page.get("bidi_component")}
    return {key: json.loads(data, object_hook=_with_steps) for key, data in sent.items() if data}


def _with_steps(data):
    """A line's steps are sent as distances."""
    return {**data, "x": list(accumulate(data["dx"]))} if "dx" in data else data


def board(page, key="board-all"):
    """The charts below the search, or of the ``board-strip`` above it, as the data their script gets."""
    return _components(page)[key]


def panels(page):
    """Title -> chart, of all charts below the strip."""
    if "board-all" not in _components(page):
        return {}
    return {panel["title"]: panel for section in board(page)["sections"] for panel in section["panels"]}


def cells(row):
    """What a row says, one text a cell."""
    return [str(cell.get("text", cell["kind"])) for cell in row["cells"]]


def html(page):
    """All HTML a page made, joined."""
    return "\n".join(element.value for element in page.get("html"))


def no_traceback(page):
    """Whether the page ended well."""
    return not page.exception
