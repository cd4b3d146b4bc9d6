"""The data endpoint: runs, series, states and changes as JSON, for the pages and for user scripts.

The endpoint is read-only, and is served by the dashboard's server behind the gate that also protects the pages.
``openapi.json`` in this directory describes every route and is served at ``/api/openapi.json``. NaN and infinities are
sent as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; a value that was not recorded is left out of its
series. Integers beyond 2^53, which a browser would round, are also sent as strings.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rlwatch.compare.alignment import names_of
from rlwatch.control.commands import ROLLBACK
from rlwatch.errors import RLWatchError, RunNotFoundError
from rlwatch.ports import Series
from rlwatch.records import AlertState, RunInfo, RunState
from rlwatch.state import explained, headline_of, next_action

from . import commands, first_page, news, queries, smoothing, table
from .charts import FARTHEST
from .fleet import RunEntry, fleet, kl, matching, risk, run_entries, why
from .fleet_rows import DELETED, ListView
from .fleet_rows import listed as list_of
from .health import judge, pause_of
from .principal import NAME_HEADER, ROLE_HEADER, SESSION_END, Principal
from .run_board import Address
from .thinning import bucket_means, reduced

Json = dict[str, Any]

OPENAPI = Path(__file__).with_name("openapi.json")

POINTS, MOST_POINTS = 500, 100_000
MOST_METRICS = 500
MOST_VALUES = 5_000_000
"""Most values (metrics times points) in a response."""
MOST_ROWS = 10_000
"""Most rows whose times are sent without thinning."""
MOST_LISTED = 500
"""Most rows of the list of runs in a response."""
MOST_STREAMS = 64
BEAT_S, POLL_S = 15.0, 5.0
"""Seconds between two heartbeats of an event stream, and between two polls of a store that sends no notifications."""
GAP_S = 1.0
"""Least seconds between two events of a stream."""

LONG = 2**63


class BadRequestError(RLWatchError):
    """Error for a request parameter that cannot be parsed."""


def answered(body: Mapping[str, Any], status: int = 200) -> Response:
    """Return an HTTP response with ``body`` as strict JSON and the ``status`` code, marked as not to be cached."""
    text = json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    headers = {"cache-control": "no-store"} | ({"retry-after": "5"} if status == 503 else {})
    return Response(text.encode("utf-8", "replace"), status, headers, "application/json")


async def _answer(work: Callable[..., Json], *args: Any) -> Response:
    """Run ``work`` in a thread; return its result, or an error as its HTTP status and message."""
    try:
        return answered(await run_in_threadpool(work, *args))
    except BadRequestError as error:
        return answered({"error": str(error)}, 400)
    except RunNotFoundError as error:
        return answered({"error": str(error)}, 404)
    except RLWatchError as error:
        return answered({"error": str(error)}, 503)


def principal_of(request: Request) -> Principal:
    """Return the user (name and role) whom the gate has put into the headers of the request."""
    return Principal(unquote(request.headers.get(NAME_HEADER, "")), request.headers.get(ROLE_HEADER, ""))


# Values as JSON.


def whole(value: int | None) -> int | str | None:
    """Return the integer ``value``, as a string if a browser would round it.

    >>> whole(2**53 - 1), whole(2**53)
    (9007199254740991, '9007199254740992')
    """
    return value if value is None or abs(value) <= FARTHEST else str(value)


def plain(value: float | None) -> float | str | None:
    """Return the number ``value`` for JSON: NaN and infinities as strings, others unchanged.

    >>> plain(0.5), plain(math.nan), plain(-math.inf)
    (0.5, 'NaN', '-Infinity')
    """
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def wholes(values: np.ndarray) -> list[int | str]:
    """Return the integers ``values`` (N,) for JSON, those that a browser would round as strings."""
    found: list[int | str] = values.tolist()
    far = bool(len(values)) and (int(values.max()) > FARTHEST or int(values.min()) < -FARTHEST)
    return [whole(int(value)) or 0 for value in found] if far else found


def numbers(values: np.ndarray) -> list[float | str | None]:
    """Return the numbers ``values`` (N,) for JSON, NaN and infinities as strings."""
    found: list[float | str | None] = values.tolist()
    for at in np.flatnonzero(~np.isfinite(values)).tolist():
        found[at] = plain(float(values[at]))
    return found


# Parameters of a request.


def _whole_of(request: Request, name: str, low: int, high: int) -> int | None:
    """Return an integer of the query, or None if the query has none. Raises ``BadRequestError``."""
    text = request.query_params.get(name)
    if text is None or text == "":
        return None
    bare = text.removeprefix("-")
    if not (bare.isascii() and bare.isdecimal() and len(bare) < 20 and low <= int(text) <= high):
        raise BadRequestError(f"{name}={text[:40]!r} is not a whole number from {low} to {high}")
    return int(text)


def _flag_of(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in {"true", "false"}:
        raise BadRequestError(f"{name}={text[:40]!r} is neither true nor false")
    return text == "true"


# /api/openapi.json and /api/runs


async def described(request: Request) -> Response:
    """Answer a request with the OpenAPI description of all routes, including this dashboard's address."""
    text = json.loads(OPENAPI.read_text(encoding="utf-8"))
    base = request.scope["path"].removesuffix("/api/openapi.json")
    return answered({**text, "servers": [{"url": base or "/"}]})


async def listed(request: Request) -> Response:
    """Answer a request with all runs in the order of the list of runs, those that need attention first."""
    return await _answer(_listed, request)


def _listed(request: Request) -> Json:
    deleted, archived = _flag_of(request, "deleted"), _flag_of(request, "archived")
    limit = _whole_of(request, "limit", 0, 1_000_000)
    every, now = fleet(deleted=deleted), time.time()
    entries = [one for one in run_entries(every, now) if archived or deleted or not one.run.curation.archived]
    found = matching(entries, text=request.query_params.get("search", ""))
    return {
        "now": now,
        "total": len(entries),
        "matching": len(found),
        "runs": [run_json(entry) for entry in (found if limit is None else found[:limit])],
        "unreadable": dict(every.unreadable),
    }


# /api/list


async def rows_listed(request: Request) -> Response:
    """Answer a request with rows of the list of runs as the page draws them, for rows that scroll into view."""
    return await _answer(_rows_listed, request)


def _rows_listed(request: Request) -> Json:
    view = ListView.of_query(request.query_params.getlist)
    first, count = (_whole_of(request, name, 0, 1_000_000) for name in ("first", "count"))
    every, now = fleet(deleted=view.which == DELETED), time.time()
    lines = view.lines(list_of(every, view.which, now))
    begin = first or 0
    shown = lines[begin : begin + min(table.BLOCK if count is None else count, MOST_LISTED)]
    return {"total": len(lines), "rows": [table.row_json(row) for row in view.drawn(now).rows(shown)]}


# /first/PAGE/THEME


async def first(request: Request) -> Response:
    """Answer a request with what a page shows first, by its name, its query and the browser's theme."""
    return await _answer(_first, request)


def _first(request: Request) -> Json:
    shown = first_page.PAGES.get(request.path_params["page"])
    if shown is None:
        raise BadRequestError(f"there is no page {request.path_params['page'][:40]!r} with first data")
    address = Address(request.query_params.multi_items())
    return shown(address, principal_of(request), request.path_params["theme"])


def run_json(entry: RunEntry) -> Json:
    """Return one run of the list of runs, with its state, last values and failure risk, for JSON."""
    run, verdict, forecast = entry.run, entry.vitals.verdict, entry.vitals.forecast
    values = entry.vitals.values
    return {
        **identity(run),
        "state": verdict.name,
        "brief": verdict.brief,
        "status": entry.health.word.value,
        "since": whole(entry.health.since),
        "why": why(entry),
        "needs_attention": entry.health.needs_you,
        "ended": entry.health.ended,
        "last": {
            "reward": plain(values.get("reward/mean")),
            "entropy": plain(values.get("policy/entropy")),
            "kl": plain(kl(entry.vitals)),
            "grad_norm": plain(values.get("optim/grad_norm")),
        },
        "risk": plain(risk(entry)),
        "alarm": bool(forecast is not None and forecast.alarm),
    }


def identity(run: RunInfo) -> Json:
    """Return the id, names, source and progress of a run for JSON."""
    return {
        "run_id": run.run_id,
        "project": run.project,
        "name": run.name,
        "source": run.source,
        "host": run.host,
        "tags": list(run.tags),
        "notes": run.curation.notes,
        "archived": run.curation.archived,
        "attempt": run.attempt,
        "live": run.state is RunState.RUNNING,
        "created_at": run.created_at or None,
        "last_step": whole(run.last_step),
        "last_ts": run.last_ts,
        "heartbeat_at": run.heartbeat_at,
    }


# /api/runs/ID/series


async def series(request: Request) -> Response:
    """Answer a request with metrics of a run: all rows, a range of steps, thinned, or only new rows."""
    return await _answer(_series, request)


def _series(request: Request) -> Json:
    wanted = list(dict.fromkeys(request.query_params.getlist("metrics")))
    if len(wanted) > MOST_METRICS:
        raise BadRequestError(f"{len(wanted)} metrics are asked for at once: at most {MOST_METRICS}")
    low, high = (_whole_of(request, name, -LONG, LONG - 1) for name in ("from", "to"))
    if low is not None and high is not None and low > high:
        raise BadRequestError(f"from={low} lies behind to={high}")
    points = _whole_of(request, "points", 1, MOST_POINTS) or POINTS
    after = _whole_of(request, "after", 0, LONG - 1) or 0
    if len(wanted) * points > MOST_VALUES:
        raise BadRequestError(f"{len(wanted)} metrics of {points} points are too many: at most {MOST_VALUES} values")
    smooth = request.query_params.get("smooth", smoothing.OFF)
    if smooth not in smoothing.SMOOTHS:
        raise BadRequestError(f"smooth={smooth[:40]!r} is none of {', '.join(smoothing.SMOOTHS)}")
    source = queries.store()
    run_id = request.path_params["run_id"]
    with source.at_once(run_id):
        run = source.run(run_id)
        if not wanted:
            return _named(run)
        if _flag_of(request, "mean"):
            return _means(run, wanted, low, high, points)
        if smooth != smoothing.OFF:
            return _smoothed(run, wanted, smooth, low, high, clip=_flag_of(request, "clip"))
        steps = (
            None
            if low is None and high is None
            else (-LONG if low is None else low, LONG - 1 if high is None else high)
        )
        recorded = _recorded(run, wanted)
        read = source.series(run_id, sorted(set(recorded.values())), after_seq=after, steps=steps, points=points)
        newest = max((int(one.seqs.max(initial=0)) for one in read.values()), default=0)
        starts = queries.outline(run).starts
        read = {name: reduced(one, starts, points) for name, one in read.items()}
        times = Times(run, after) if _flag_of(request, "times") else None
    return {
        **_progress(run, starts),
        **columns(recorded, read, times),
        "next": whole(newest or after),
    }


def _named(run: RunInfo) -> Json:
    """Return the name and canonical name of every metric, for a request that names none."""
    by_source = {source: name for name, source in names_of(queries.metric_names(run), run.source).items()}
    known = [{"name": name, "canonical": by_source.get(name, name)} for name in queries.metric_names(run)]
    return {"run_id": run.run_id, "metrics": known}


def _recorded(run: RunInfo, wanted: Sequence[str]) -> dict[str, str]:
    """Map each requested name, recorded or canonical, to the recorded one; an unknown name has no rows."""
    names = queries.metric_names(run)
    recorded, canonical = set(names), names_of(names, run.source)
    return {name: name if name in recorded else canonical.get(name, name) for name in wanted}


def _smoothed(run: RunInfo, wanted: Sequence[str], how: str, low: int | None, high: int | None, *, clip: bool) -> Json:
    """Smooth over every row of the current branch, then thin for a chart."""
    outline, recorded = queries.outline(run), _recorded(run, wanted)
    window = (outline.first if low is None else low, outline.last if high is None else high)
    whole_series = queries.store().series(run.run_id, sorted(set(recorded.values())))
    rows: list[Json] = []
    found: Json = {}
    for asked, name in recorded.items():
        curve = smoothing.smooth_curve(whole_series[name], outline.starts, window, how, clip=clip)
        found[asked] = {"recorded": name, "rows": len(rows), "values": numbers(curve.values)}
        rows.append({"steps": wholes(curve.steps)})
    return {**_progress(run, outline.starts), "rows": rows, "series": found, "next": 0}


READ_AT_ONCE = 16
"""Metrics whose rows are held at once for their means: 100 000 rows of one take 0.8 MB."""


def _means(run: RunInfo, wanted: Sequence[str], low: int | None, high: int | None, points: int) -> Json:
    """Return the mean of each range of steps, over every row of the current branch."""
    outline, recorded = queries.outline(run), _recorded(run, wanted)
    window = (
        outline.first if low is None else max(low, outline.first),
        outline.last if high is None else min(high, outline.last),
    )
    rows: list[Json] = []
    found: Json = {}
    every = list(recorded.items())
    for first in range(0, len(every), READ_AT_ONCE):
        some = every[first : first + READ_AT_ONCE]
        read = queries.store().series(run.run_id, sorted({name for _, name in some}), steps=window)
        for asked, name in some:
            of = bucket_means(read[name], outline.starts, window, points)
            values = [None if math.isnan(value) else value for value in of.values.tolist()]
            found[asked] = {"recorded": name, "rows": len(rows), "values": values, "counts": of.counts.tolist()}
            rows.append({"steps": wholes(of.starts), "width": whole(of.width), "through": whole(of.through)})
    return {**_progress(run, outline.starts), "rows": rows, "series": found, "next": 0}


def _progress(run: RunInfo, starts: Mapping[int, int]) -> Json:
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "live": run.state is RunState.RUNNING,
        "last_step": whole(run.last_step),
        "starts": {str(attempt): whole(first) for attempt, first in starts.items()},
    }


class Times:
    """Times (Unix seconds) of a run's rows by sequence number; if a few new rows are asked for, only
    theirs are read.
    """

    def __init__(self, run: RunInfo, after: int) -> None:
        if after:
            rows = queries.store().records(run.run_id, after_seq=after, limit=MOST_ROWS)
            self._seqs = np.array([row.seq for row in rows], dtype=np.int64)
            self._times = np.array([row.ts or math.nan for row in rows], dtype=np.float64)
        else:
            moments = queries.store().moments(run.run_id)
            self._seqs, self._times = moments.seqs, moments.values

    def of(self, seqs: np.ndarray) -> list[float | None]:
        """Return the times of the rows with the sequence numbers ``seqs`` (N,); None for a row without a time."""
        if not len(self._seqs):
            return [None] * len(seqs)
        at = np.minimum(np.searchsorted(self._seqs, seqs), len(self._seqs) - 1)
        found = np.where(self._seqs[at] == seqs, self._times[at], math.nan)
        return [None if math.isnan(value) else round(value, 3) for value in found.tolist()]


def columns(recorded: Mapping[str, str], read: Mapping[str, Series], times: Times | None) -> Json:
    """Return series and their rows for JSON; series with equal rows share an entry of ``rows``.

    Parameters
    ----------
    recorded
        Name under which each requested metric is recorded.
    read
        Series by recorded name.
    times
        Times of the rows; None leaves them out.
    """
    rows: list[Json] = []
    known: dict[bytes, int] = {}
    found: Json = {}
    for asked, name in recorded.items():
        one = read[name]
        key = one.seqs.tobytes() + one.steps.tobytes()
        if key not in known:
            known[key] = len(rows)
            own: Json = {"steps": wholes(one.steps), "attempts": one.attempts.tolist()}
            rows.append(own if times is None else {**own, "times": times.of(one.seqs)})
        found[asked] = {"recorded": name, "rows": known[key], "values": numbers(one.values)}
    return {"rows": rows, "series": found}


# /api/runs/ID/axes


async def axes(request: Request) -> Response:
    """Answer a request with the positions of a run's steps on the time axis and the token axis of its charts."""
    return await _answer(_axes, request.path_params["run_id"])


def _axes(run_id: str) -> Json:
    source = queries.store()
    with source.at_once(run_id):
        run = source.run(run_id)
        found = {kind: smoothing.place_of(run, kind) for kind in ("time", "tokens")}
    knotted = {kind: None if axis is None else smoothing.knots(axis) for kind, axis in found.items()}
    return {
        "run_id": run_id,
        **{
            kind: None if of is None else {"steps": [whole(step) for step in of[0]], "places": of[1]}
            for kind, of in knotted.items()
        },
    }


# /api/runs/ID/state


async def state(request: Request) -> Response:
    """Answer a request with the state, headline, cause and permitted actions of one run."""
    return await _answer(_state, request.path_params["run_id"], principal_of(request))


def _state(run_id: str, who: Principal) -> Json:
    source = queries.store()
    with source.at_once(run_id):
        return state_json(source.run(run_id), who)


def state_json(run: RunInfo, who: Principal) -> Json:
    """Return the state, headline, cause and alerts of a run, and the commands that ``who`` may send, for JSON."""
    now, vitals = time.time(), queries.vitals(run)
    asked, alerts = queries.commands(run.run_id), queries.alerts(run.run_id)
    pause = pause_of(run, asked, now)
    verdict = queries.verdict(run)
    diagnosis = explained(queries.diagnosis(run), verdict)
    health = judge(run, verdict, now, vitals.pace, pause)
    cause = diagnosis.causes[0] if diagnosis.enough and diagnosis.causes else None
    action, reason = next_action(diagnosis), commands.impossible(run, who)
    forecast = vitals.forecast
    return {
        **identity(run),
        "now": now,
        "verdict": verdict.to_dict(),
        "headline": headline_of(verdict, diagnosis),
        "status": health.word.value,
        "why": health.why,
        "since": whole(health.since),
        "needs_attention": health.needs_you,
        "ended": health.ended,
        "step_s": vitals.step_s,
        "cause": None
        if cause is None
        else {
            "kind": cause.kind,
            "title": cause.title,
            "confidence": cause.sure.words,
            "onset_step": whole(cause.onset_step),
        },
        "next_action": None if action is None else {"id": action.id, "name": action.name},
        "forecast": None
        if forecast is None
        else {"p20": plain(forecast.p20), "p50": plain(forecast.p50), "p100": plain(forecast.p100),
              "alarm": forecast.alarm, "absent": forecast.absent},
        "step_notes": [
            {"step": whole(note.step), "text": note.text, "by": note.by, "at": note.at}
            for note in queries.notes(run.run_id)
        ],
        "firing": [
            {
                "alert_id": alert.alert_id,
                "kind": alert.kind,
                "severity": alert.severity.value,
                "onset_step": whole(alert.onset_step),
            }
            for alert in alerts
            if alert.state is AlertState.FIRING
        ],
        "commands": [
            {"kind": kind, "possible": not reason, "why_not": reason}
            for kind in (*(("resume",) if pause is not None else ()), commands.RESET, ROLLBACK)
        ],
    }  # fmt: skip


# /api/events


async def events(request: Request) -> Response:
    """Answer a request with a stream of server-sent events: one each time the run, or any run of the store, has
    changed.
    """
    if _Streams.open >= MOST_STREAMS:
        return answered({"error": f"{MOST_STREAMS} streams are open already: try again later"}, 503)
    runs = frozenset(filter(None, request.query_params.getlist("run")))
    until = float(request.scope.get(SESSION_END, math.inf))
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(event_stream(runs, until), headers=headers, media_type="text/event-stream")


class _Streams:
    """The open streams."""

    open = 0


async def event_stream(runs: frozenset[str], until: float) -> AsyncIterator[str]:
    """Yield server-sent events as text, one for each change of ``runs`` (empty: of any run), until the session ends at
    ``until`` (Unix seconds).
    """
    _Streams.open += 1
    try:
        with news.HUB.listening() as listener:
            listener.runs = runs
            yield f"retry: {int(1000 * POLL_S)}\n\n" + _event(runs)
            beat_at = time.monotonic() + BEAT_S
            while time.time() < until:
                wait_s = POLL_S if news.HUB.deaf else BEAT_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(listener.woken.wait(), min(wait_s, max(0.0, until - time.time())))
                changed = listener.woken.is_set() or news.HUB.deaf
                listener.woken.clear()
                if changed:
                    yield _event(runs)
                    await asyncio.sleep(GAP_S)
                elif time.monotonic() >= beat_at:
                    yield ": still here\n\n"
                beat_at = time.monotonic() + BEAT_S
            yield "event: over\ndata: {}\n\n"
    finally:
        _Streams.open -= 1


def _event(runs: frozenset[str]) -> str:
    return f"event: changed\ndata: {json.dumps({'runs': sorted(runs), 'at': round(time.time(), 3)})}\n\n"
