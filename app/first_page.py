"""First picture of a page: its list or charts, as data that the browser draws before Streamlit's session exists.

A page's HTML names the address of these data and of ``first.js``, which draws them. Streamlit's own elements then take
over the same charts. The functions read the store and the address, and no session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlwatch.state import explained, headline_of

from . import fleet_rows, queries, run_board, runs_page, table
from .charts import DARK, LIGHT
from .fleet import fleet
from .fleet_rows import ListView
from .principal import Principal
from .run_board import Address

Json = dict[str, Any]

CHOICES = frozenset(
    {"state", "project", "tag", "columns", "curves", "group", "open", "picked", "search", "sort", "show"}
)
"""Names in the address of the list whose choices only its session reads: with them it is drawn by the session alone."""


def of_runs(address: Address, who: Principal, theme: str) -> Json:  # noqa: ARG001  (one signature for all pages)
    """Return headline and first rows of the list of runs; nothing if there are none, or the address has choices."""
    if CHOICES & set(address):
        return {}
    every, now = fleet(), time.time()
    entries = fleet_rows.listed(every, fleet_rows.NORMAL, now)
    if not entries:
        return {}
    metrics = {name for entry in entries for name in entry.vitals.sources}
    curves = [name for name in fleet_rows.DEFAULT_CURVES if name in metrics]
    boxed = len(entries) > 1 or who.may_command
    columns = fleet_rows.used_columns(fleet_rows.DEFAULT_COLUMNS, entries)
    view = ListView(columns=columns, curves=curves, picked=frozenset() if boxed else None)
    first = table.table_json("runs", **runs_page.first_rows(view, view.lines(entries), now))
    return {"title": runs_page.headline(entries), "table": first}


def of_run(address: Address, who: Principal, theme: str) -> Json:  # noqa: ARG001
    """Return name, headline and charts of the run in the address, or nothing if it has no metrics or does not exist."""
    run_id = address.get("run", "")
    with queries.store().at_once(run_id):
        run = queries.run(run_id)
        if not queries.metric_names(run):
            return {}
        ink = DARK if theme == "dark" else LIGHT
        drawing = run_board.drawing_of(run, address, ink, live=address.get("live") != "false")
        drawing = replace(drawing, look=replace(drawing.look, wanted=address.get("q", "")))
        bare = run_board.bare_board(drawing)
        verdict, diagnosis = queries.verdict(run), queries.diagnosis(run)
        return {
            "title": run.name or run.run_id,
            "project": run.project,
            "headline": headline_of(verdict, explained(diagnosis, verdict)),
            "boards": {
                run_board.STRIP_KEY: run_board.strip_board(drawing, bare).data(),
                run_board.ALL_KEY: run_board.all_board(drawing, bare).data(),
            },
        }


PAGES: Mapping[str, Callable[[Address, Principal, str], Json]] = {"runs": of_runs, "run": of_run}
"""Function of each page that has first data, by its name in the address."""
