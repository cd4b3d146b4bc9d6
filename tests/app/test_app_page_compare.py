"""Runs beside each other, as Streamlit draws it."""

import math

from app_world import boards, cells, html, no_traceback, runs_page, tables, write_run
from streamlit.testing.v1 import AppTest
from twins import collapsed, sound

from rlwatch.records import RunInfo
from rlwatch.store.url import open_store


def compare_page(*run_ids, **params):
    """The page of these runs."""

    def script():
        from rlwatch_app.compare_page import page

        page(lambda run_id: None)

    page = AppTest.from_function(script, default_timeout=30)
    page.query_params["runs"] = list(run_ids)
    for name, value in params.items():
        page.query_params[name] = value
    return page.run()


def write(where, run_id, metrics, config=None, name="", **more):
    """A run with these columns of metrics, its first row at step 0."""
    rows = {
        step: {key: float(values[step]) for key, values in metrics.items()} for step in range(len(metrics["reward"]))
    }
    if config is not None:
        store = open_store(str(where))
        store.open_run(RunInfo(run_id, project="math", name=name, source="trl/grpo", config=config)).close()
        store.close()
    write_run(where, run_id, name=name, steps=len(rows) - 1, metrics=lambda step: rows[step], **more)


def twins(where):
    """A run that collapses and its twin."""
    write(where, "bad", collapsed(200, 1, at=120), {"lr": 3e-6, "model": {"r": 16}})
    write(where, "good", sound(200, 2), {"lr": 1e-6, "model": {"r": 16}})


def overlaid(page):
    """The charts of a page."""
    [board] = [data for data in boards(page).values() if data["sections"]]
    return board


def lines(page):
    """Chart -> names of the lines in it."""
    shown = overlaid(page)["sections"][0]["panels"]
    return {panel["title"]: [line["name"] for line in panel["lines"]] for panel in shown}


def test_less_than_two_runs_say_how_to_choose_them(store_dir):
    """An address without runs is a beginning, no error."""
    twins(store_dir)
    for page in (compare_page(), compare_page("bad"), compare_page("bad", "gone")):
        assert no_traceback(page)
        assert "Select two or more runs" in page.caption[0].value


def test_what_parted_first_is_said_with_its_step_and_evidence(store_dir):
    """The same sentence as in the shell, and a row a metric."""
    twins(store_dir)
    page = compare_page("bad", "good")
    assert no_traceback(page)
    assert "optim/grad_norm diverged first, at step 1" in html(page)
    assert "x noise" in html(page)
    first = cells(tables(page)["parted"]["rows"][0])
    assert first[0] == "optim/grad_norm"
    assert first[2] == "good"


def test_pairs_with_the_same_answer_share_a_sentence(store_dir):
    """Three seeds that do not differ are no news three times."""
    for seed in range(3):
        write_run(store_dir, f"s{seed}", name=f"seed{seed}")
    assert html(compare_page("s0", "s1", "s2")).count("<b>seed0 vs seed1, seed2</b>") == 1


def test_a_name_that_runs_share_has_their_ids(store_dir):
    """Another is clear by itself."""
    for run_id, name in (("a", "same"), ("b", "same"), ("c", "own")):
        write_run(store_dir, run_id, name=name)
    page = compare_page("a", "b", "c")
    assert [entry["name"] for entry in overlaid(page)["legend"]] == ["same · a", "same · b", "own"]


def test_every_run_is_a_line_in_every_panel(store_dir):
    """What parted is among the panels that are shown at first."""
    twins(store_dir)
    shown = lines(compare_page("bad", "good"))
    assert "optim/grad_norm" in shown
    assert all(names == ["bad", "good"] for names in shown.values())


def test_only_the_settings_that_differ_are_shown(store_dir):
    """A column a run."""
    twins(store_dir)
    rows = [cells(row) for row in tables(compare_page("bad", "good"))["settings"]["rows"]]
    assert rows[0] == ["lr", "3e-06", "1e-06"]
    assert [row[0] for row in rows] == ["lr", "page"]


def test_seeds_are_a_mean_and_a_band(store_dir):
    """Grouped by a setting; the band is one standard deviation of the runs at that step."""
    for seed, level in enumerate((1.0, 3.0, 5.0)):
        write_run(
            store_dir, f"s{seed}", name=f"seed{seed}", steps=40, metrics=lambda step, level=level: {"entropy": level}
        )
    page = compare_page("s0", "s1", "s2", group="name without its last number", metrics="policy/entropy")
    assert no_traceback(page)
    [mean] = overlaid(page)["sections"][0]["panels"][0]["lines"]
    assert mean["name"] == "seed (3 runs)"
    assert (set(mean["low"]), set(mean["y"]), set(mean["high"])) == ({1}, {3}, {5})
    assert [(entry["name"], entry["note"]) for entry in overlaid(page)["legend"]] == [("seed (3 runs)", "mean ± std")]


def test_each_run_has_its_settings_and_the_end_of_its_metrics_for_the_pictures(store_dir):
    """Numbers as numbers, what is missing as nothing, NaN left out of the result; equal settings are no columns."""
    for place, lr in enumerate((1e-6, 3e-6, None)):
        config = {"beta": 0.04, "name": f"n{place}"} | ({} if lr is None else {"lr": lr})
        metrics = sound(40, place)
        metrics["reward"][:] = place
        metrics["reward"][39] = math.nan
        write(store_dir, f"s{place}", metrics, config)
    page = compare_page("s0", "s1", "s2", metrics="reward/mean", group="name")
    assert no_traceback(page)
    study = overlaid(page)["study"]
    assert {one["name"]: one["values"] for one in study["settings"]} == {
        "lr": [1e-6, 3e-6, None], "name": ["n0", "n1", "n2"]
    }  # fmt: skip
    assert study["results"] == [{"name": "reward/mean", "values": [0.0, 1.0, 2.0]}]
    assert study["places"] == [0, 1, 2]


def test_the_distance_to_the_crash_and_time_are_axes(store_dir):
    """Steps before the end, and hours."""
    twins(store_dir)
    by_crash, by_time = compare_page("bad", "good", by="crash"), compare_page("bad", "good", by="time")
    assert no_traceback(by_crash)
    assert no_traceback(by_time)
    crash, time = overlaid(by_crash), overlaid(by_time)
    assert (crash["axis"], crash["whole"][0] < 0) == ("crash", True)
    assert (time["axis"], math.isclose(time["whole"][1], 198 * 5 / 3600, rel_tol=1e-3)) == ("time", True)
    assert "diverged first, at" in html(by_crash)


def test_an_axis_that_was_not_recorded_is_said(store_dir):
    """And the page goes on."""
    twins(store_dir)
    page = compare_page("bad", "good", by="tokens")
    assert no_traceback(page)
    assert "did not record tokens" in html(page)


def test_a_nan_is_marked_in_its_run(store_dir):
    """Not a gap that looks like nothing."""
    bad = collapsed(200, 1, at=120)
    bad["grad_norm"][150:] = math.nan
    write(store_dir, "bad", bad)
    write(store_dir, "good", sound(200, 2))
    [panel] = overlaid(compare_page("bad", "good", metrics="optim/grad_norm"))["sections"][0]["panels"]
    assert panel["bad"][0] == [150, "NaN", "bad"]
    assert {name for _, _, name in panel["bad"]} == {"bad"}


def test_a_range_in_the_address_is_what_is_read_and_shown(store_dir):
    """A part of a long run has its own rows, not those of the whole thinned."""
    twins(store_dir)
    shown = overlaid(compare_page("bad", "good", metrics="optim/grad_norm", **{"from": "20", "to": "30", "at": "25"}))
    assert (shown["window"], shown["whole"], shown["at"]) == ([20, 30], [1, 199], 25)
    assert {tuple(line["x"]) for line in shown["sections"][0]["panels"][0]["lines"]} == {tuple(range(20, 31))}


def test_runs_are_picked_in_the_list_and_compared_by_a_button(store_dir):
    """Boxes where there is more than one run; one alone cannot be compared."""
    twins(store_dir)
    page = runs_page()
    assert [row["picked"] for row in tables(page)["runs"]["rows"]] == [False, False]
    page.session_state["kept-picked"] = ["bad"]
    page.run()
    assert page.button(key="compare").disabled
    page.session_state["kept-picked"] = ["bad", "good"]
    page.run()
    assert [row["picked"] for row in tables(page)["runs"]["rows"]] == [True, True]
    page.button(key="compare").click().run()
    assert no_traceback(page)
    assert "First divergence" in html(page)
    assert page.query_params["runs"] == ["bad", "good"]


def test_curves_are_smoothed_scaled_and_cut_as_on_the_page_of_a_run(store_dir):
    """The smoothed line has the run's name and what was measured is pale below it; zero is no place on a log axis."""
    spiky = sound(200, 2)
    spiky["grad_norm"][100] = 1e6
    write(store_dir, "bad", collapsed(200, 1, at=120))
    write(store_dir, "spiky", spiky)
    look = {"metrics": ["optim/grad_norm", "reward/mean"]}
    plain, smoothed = (compare_page("bad", "spiky", **look, **more) for more in ({}, {"smooth": "EMA 0.9"}))
    log, whole = (compare_page("bad", "spiky", **look, **more) for more in ({"log": "true"}, {"clip": "false"}))
    by_title = [
        {panel["title"]: panel for panel in overlaid(page)["sections"][0]["panels"]}
        for page in (plain, smoothed, log, whole)
    ]
    norms = [panels["optim/grad_norm"] for panels in by_title]
    assert [line["alpha"] for line in norms[0]["lines"]] == [1, 1]
    assert [line["alpha"] for line in norms[1]["lines"]] == [1, 0.3, 1, 0.3]
    assert norms[1]["lines"][0]["name"] == norms[1]["lines"][1]["name"]
    measured, mean = (norms[1]["lines"][place]["y"] for place in (3, 2))
    assert max(measured) == 1e6
    assert max(mean) < 100  # an outlier that is cut has no part in the mean
    assert norms[0]["range"][1] < 100
    assert norms[2]["log"] == norms[3]["log"] == 1
    assert norms[2]["range"][1] > 1e6
    assert norms[3]["range"][1] > 1e6
    assert [panels["reward/mean"]["log"] for panels in by_title][:2] == [0, 0]


def test_the_mean_of_a_group_is_that_of_its_smoothed_runs(store_dir):
    """Smoothed first, so that the band is that of what is drawn."""
    for place in range(3):
        write(store_dir, f"s{place}", sound(200, place), name=f"seed-{place}")
    look = {"group": "name without its last number", "metrics": ["policy/entropy"]}
    [raw], [smooth] = (
        overlaid(compare_page("s0", "s1", "s2", **look, **more))["sections"][0]["panels"][0]["lines"]
        for more in ({}, {"smooth": "mean of 50"})
    )
    rough = [sum(abs(b - a) for a, b in zip(line["y"], line["y"][1:], strict=False)) for line in (raw, smooth)]
    assert rough[1] < rough[0] / 3
    assert len(smooth["low"]) == len(smooth["y"])


def test_a_long_run_has_its_mean_above_its_extremes_and_a_short_range_only_its_rows(store_dir):
    """The tooltip has measured values alone: there is no mean in it."""
    for run_id in ("a", "b"):
        write(store_dir, run_id, {"reward": [step % 2 for step in range(1000)]}, {"lr": run_id})

    of_all = [
        line for line in overlaid(compare_page("a", "b"))["sections"][0]["panels"][0]["lines"] if line["name"] == "a"
    ]
    of_few = overlaid(compare_page("a", "b", **{"from": "0", "to": "100"}))["sections"][0]["panels"][0]["lines"]

    mean, rows = of_all
    assert {round(value, 1) for value in mean["y"][:-1]} <= {0.4, 0.5, 0.6}  # the last range is cut off
    assert (mean["smooth"], mean["mute"], rows["mute"]) == (True, True, False)
    assert set(rows["y"]) == {0, 1}
    assert rows["alpha"] < mean["alpha"] == 1
    assert [line.get("smooth", False) for line in of_few] == [False, False]


def test_two_groups_of_seeds_differ_or_are_too_few(store_dir):
    """The same sentence as in the shell; for other groups there is none."""
    runs = [f"{arm}-s{seed}" for arm in ("cold", "hot") for seed in range(4)]
    for place, run_id in enumerate(runs):
        metrics = sound(60, place)
        metrics["reward"] = metrics["reward"] + (0.5 if "hot" in run_id else 0.0)
        write(store_dir, run_id, metrics, name=run_id)
    grouped = {"group": "seeds of one configuration", "metrics": "reward/mean"}
    page, few, single = (compare_page(*some, **grouped) for some in (runs, runs[2:6], runs[:2]))

    assert all(no_traceback(one) for one in (page, few, single))
    assert "Is the difference noise?" in html(page)
    assert "first reward/mean from step 1 (p = 0.029)" in html(page)
    assert "Too few seeds: with 2 against 2" in html(few)
    assert "Is the difference noise?" not in html(single)
