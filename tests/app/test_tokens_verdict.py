"""The roll-up of a localised step, its cures, shares that cancel, and distributions over the steps of a run."""

import math

import numpy as np
import pytest
from app_world import boards, cells, html, no_traceback, tables, write_run
from rlwatch_app.token_spread import BUCKETS, SPREADS, panel_of
from token_world import Spiked, counted, tokens_page, write_spikes

from rlwatch.ports import Series

BLAME = {
    "verdict": "response",
    "statement": "sequence 3 makes 98.8% of the gradient norm",
    "because": "its advantage is 33.7",
    "remedy": "with advantages clipped at 1.43 the norm goes from 12.6 to 1.43",
    "units": [
        {"level": "response", "name": "sequence 3", "share": 0.988, "up": 1.19, "down": -0.202, "tokens": 220},
        {"level": "response", "name": "all others", "share": 0.012, "up": 0.2, "down": -0.188, "tokens": 16164},
    ],
    "cures": [
        {"kind": "clip advantages", "value": 1.43, "action": "with advantages clipped at 1.43", "before": 12.6, "after": 1.43},
        {"kind": "mask responses", "value": None, "action": "with its responses masked", "before": 12.6, "after": 0.9},
    ],
    "count": 40,
    "explained": 0.93,
}  # fmt: skip


def rows(page, key):
    return [cells(row) for row in tables(page)[key]["rows"]]


def test_verdict_roll_up_and_cures_stand_together(store_dir):
    """The sentences, what the shares add up to, what cancels, and the norm that a cure would have given."""
    write_spikes(store_dir, [Spiked(20, body=BLAME)])
    page = tokens_page()

    assert no_traceback(page)
    assert "Sequence 3 makes 98.8% of the gradient norm." in html(page)
    assert rows(page, "units")[0] == ["sequence 3", "98.8%", "119%", "-20.2%", "220"]
    assert rows(page, "cures")[0] == ["with advantages clipped at 1.43", "12.6", "1.43", "0.113"]
    assert "40 tokens stand out; those listed hold 93% of their excess" in html(page)


@pytest.mark.parametrize(
    "broken", [{"units": "x", "cures": 3}, {"units": [1, {}], "cures": [{"before": 0, "after": math.nan}]}]
)
def test_a_broken_event_is_no_broken_page(store_dir, broken):
    """Whoever wrote it."""
    write_spikes(store_dir, [Spiked(20, body=broken)])

    assert no_traceback(tokens_page())


def test_a_token_that_cancels_says_so_and_comes_last(store_dir):
    """One denominator, the gradient norm; a negative share is no blame."""
    spiked = Spiked(20, blamed=3)
    share = spiked.response["share"]
    share[spiked.at] = [0.9, -0.015, 0.2]
    write_spikes(store_dir, [spiked])
    page = tokens_page()

    table = tables(page)["culprits"]
    place = [column["label"] for column in table["columns"]].index("share of norm")
    assert [row[place] for row in rows(page, "culprits")] == ["90%", "20%", "cancels 1.5%"]


def spreading(step):
    """Quantiles of ratio and entropy; of the mismatch only the mean."""
    return {
        "ratio/mean": 1.0, "ratio/min": 0.5, "ratio/p99": 1.5 if step != 20 else 40.0,
        "policy/entropy": 1.0, "policy/entropy_p10": 0.1, "policy/entropy_p90": math.nan if step == 7 else 2.5,
        "mismatch/logp_absdiff": 0.01,
    }  # fmt: skip


def test_distributions_are_bands_over_the_steps(store_dir):
    """Only of what has quantiles; NaN is marked; without any the page says what records them."""
    write_run(store_dir, metrics=spreading)
    write_run(store_dir, "run-2")
    page = tokens_page()
    ratio, entropy = boards(page)["spreads"]["sections"][0]["panels"]

    assert no_traceback(page)
    assert [panel["title"] for panel in (ratio, entropy)] == ["importance ratio", "entropy"]
    assert [line["name"] for line in ratio["lines"]] == ["mean", "smallest", "99th percentile"]
    assert (set(ratio["lines"][0]["low"]), max(ratio["lines"][0]["high"])) == ({0.5}, 40)
    assert entropy["bad"] == [[7, "NaN", "mean"]]
    assert "Distributions were not recorded" in html(page)
    assert "level=&#x27;tokens&#x27;" in html(tokens_page("run-2"))


def test_recorded_distributions_are_maps_with_quantiles(store_dir):
    """Of every quantity instead of its band; the branch that counts alone; NaN marked, shares and levels as counted."""
    kept = [counted(step, width=0.02 * step, broken=2 * (step == 20)) for step in range(1, 31)]
    write_run(store_dir, metrics=spreading, events=[*kept[:-1], counted(9, attempt=0), kept[-1]])
    page = tokens_page()
    ratio, difference, entropy = boards(page)["spreads"]["sections"][0]["panels"]

    assert no_traceback(page)
    assert [panel["title"] for panel in (ratio, entropy)] == ["importance ratio", "entropy"]
    assert (entropy["bad"], difference["bad"]) == ([[20, "2 × NaN", "median"]], [])
    assert [len(panel["shades"]["starts"]) for panel in (ratio, difference, entropy)] == [31] * 3
    assert [words for _, words in ratio["shades"]["ticks"]][:2] == ["0.5", "0.9"]
    assert ratio["lines"][-1]["shown"][-1] == pytest.approx(math.exp(1.645 * 0.6), rel=0.15)


def series(name, values, steps=None):
    at = np.arange(len(values)) if steps is None else np.asarray(steps)
    return Series(name, at, np.asarray(values, dtype=float), np.ones(len(at), dtype=np.int64), at)


def test_a_long_run_is_thinned_without_losing_a_spike():
    """The ends of the band are the extremes of a bucket, the line its mean."""
    n = 50_000
    high = np.full(n, 1.5)
    high[31_234] = 99.0
    found = panel_of(SPREADS[0], {"ratio/mean": series("a", np.ones(n)), "ratio/min": series("b", np.full(n, 0.5)),
                                    "ratio/p99": series("c", high)}, {1: 0})  # fmt: skip
    mean = found.lines[0]

    assert len(mean.curve) == BUCKETS
    assert mean.area[1].max() == 99.0
    assert set(mean.curve.values) == {1.0}
    assert set(mean.area[0]) == {0.5}


def test_without_a_step_that_has_all_quantiles_there_is_no_band():
    """And nothing raises: NaN everywhere, or other steps."""
    nothing = {
        "ratio/mean": series("a", [1.0, 1.0]),
        "ratio/min": series("b", [math.nan] * 2),
        "ratio/p99": series("c", [2.0, 2.0]),
    }

    assert panel_of(SPREADS[0], nothing, {1: 0}) is None
    assert panel_of(SPREADS[0], {name: series(name, []) for name in nothing}, {}) is None
