"""Steps beyond 2^53, which browsers round and sliders refuse: every page that has steps shows them."""

import time

import pytest
from app_world import alerts_page, board, boards, forecasts_page, healthy, no_traceback, run_page, runs_page
from rlwatch_app.board import LAST
from rollout_world import rollouts_page
from test_app_page_compare import compare_page
from token_world import Spiked, counted, far_out, tokens_page

from rlwatch.records import CompletionBatch, Event, Finding, RunInfo, Severity, StepRecord
from rlwatch.store.url import open_store

N = 20


def write(where, last, gap, run_id="run-1"):
    """A live run up to ``last``, with all that pages have to say of a step."""
    store, now = open_store(str(where)), time.time()
    writer = store.open_run(RunInfo(run_id, project="math", name=run_id, source="trl/grpo", created_at=now - 900))
    steps = [last - (N - 1 - k) * gap for k in range(N)]
    rows = [StepRecord(s, {**healthy(k), "grad_layer/a": 1.0 + k}, now - N + k) for k, s in enumerate(steps)]
    spiked = Spiked(steps[-3])
    texts = [
        CompletionBatch(step, {"prompt": ["a"], "completion": ["b"], "reward": [reward]}) for step, reward in
        ((steps[-9], -1.0), (steps[-1], 1.0))
    ]  # fmt: skip
    fell = Finding("d", "entropy_collapse", Severity.CRITICAL, steps[9], steps[8], "fell", metric="entropy", seq=10)
    said = [spiked.event(), *spiked.batches(), far_out(steps[-2]), counted(steps[-1]), *texts, Event("note", steps[5])]
    writer.write([*rows, *said, fell])
    writer.heartbeat(now)
    writer.close()
    return steps


@pytest.mark.parametrize(("last", "gap"), [(2**53 + 9, 1), pytest.param(LAST, 2**40, marks=pytest.mark.thorough)])
def test_pages_show_steps_that_browsers_round(store_dir, last, gap):
    """Counted from the first one; the address, marks and what is asked keep the step itself."""
    steps = write(store_dir, last, gap)
    write(store_dir, last - 3 * gap, gap, "run-2")
    page = run_page()
    shown = board(page)

    assert no_traceback(page)
    assert (shown["origin"], shown["window"]) == (str(steps[0]), [0, (N - 1) * gap])
    assert {str(steps[9]), str(steps[-3])} <= {str(mark["step"]) for mark in shown["marks"]}
    zoomed = run_page(**{"from": steps[3], "to": steps[-3]})
    assert no_traceback(zoomed)
    assert board(zoomed)["window"] == [3 * gap, (N - 3) * gap]
    tokens = tokens_page()
    assert no_traceback(tokens)
    assert boards(tokens)["spreads"]["sections"][0]["panels"][0]["shades"]["starts"]
    compared = compare_page("run-1", "run-2")
    assert no_traceback(compared)
    assert {one["origin"] for one in boards(compared).values()} == {str(steps[0] - 3 * gap)}


@pytest.mark.thorough
@pytest.mark.parametrize("page", [runs_page, alerts_page, forecasts_page, rollouts_page])
def test_lists_show_them_too(store_dir, page):
    """Runs, incidents, forecasts, rollouts."""
    write(store_dir, 2**53 + 9, 1)
    assert no_traceback(page())
