"""The judge of alarms, on runs made by hand: every count can be checked with a pencil."""

from __future__ import annotations

import pytest
from detection.score import LEVELS, Alarm, Run, Score, Told, score, wilson

CRITICAL, ANY = LEVELS["critical"], LEVELS["any"]


def run(
    name: str, severity: str, onset: float | None = None, *, project: str = "p", every: int = 1, last: int = 300
) -> Run:
    return Run(name, project, severity, onset, tuple(range(every, last + 1, every)))


def alarms(*steps: int, critical: bool = True, kind: str = "reward_drop") -> Told:
    return Told(tuple(Alarm(step, critical, kind) for step in steps), critical)


def hit(event: Run, *steps: int) -> Score:
    return score([event], [alarms(*steps)], CRITICAL)


@pytest.mark.parametrize(
    ("every", "step", "found"),
    [
        (1, 99, 0),
        (1, 100, 1),
        (1, 200, 1),
        (1, 210, 1),
        (1, 211, 0),
        (5, 210, 1),
        (5, 215, 0),
        (20, 240, 1),
        (20, 241, 0),
    ],
)
def test_a_hit_is_from_100_steps_before_to_ten_steps_or_two_rows_after(every: int, step: int, found: int) -> None:
    assert hit(run("e", "crash", 200, every=every), step).hits.count == found


@pytest.mark.parametrize(("step", "found"), [(99, 0), (100, 1), (190, 1), (191, 0)])
def test_early_is_ten_steps_before_the_onset_or_more(step: int, found: int) -> None:
    assert hit(run("e", "instability", 200), step).early.count == found


def test_the_lead_is_of_the_first_alarm_in_the_window() -> None:
    told = hit(run("e", "instability", 200), 20, 170, 195)
    assert told.leads == (30,)
    assert told.lead == 30


def test_crashes_are_events_and_counted_apart() -> None:
    runs = [run("a", "crash", 100), run("b", "instability", 100), run("c", "dead", 1), run("d", "transient", 100)]
    told = score(runs, [alarms(100)] * 4, CRITICAL)
    assert (told.events, told.hits.count, told.crashes.total, told.crashes.count) == (2, 2, 1, 1)


def test_a_warning_is_no_critical_alarm() -> None:
    runs, told = [run("e", "crash", 100)], [alarms(100, critical=False)]
    assert score(runs, told, CRITICAL).hits.count == 0
    assert score(runs, told, ANY).hits.count == 1


def test_forecasts_are_counted_apart_and_together() -> None:
    runs, told = [run("e", "crash", 100)], [alarms(80, kind="crash_forecast")]
    counts = {name: score(runs, told, level).hits.count for name, level in LEVELS.items()}
    assert counts == {"critical": 1, "any": 1, "any but forecasts": 0, "forecasts": 1}


def twins(alarmed: int, of: int, **about: object) -> tuple[list[Run], list[Told]]:
    runs = [run(f"h{about}{i}", "healthy", **about) for i in range(of)]  # type: ignore[arg-type]
    return runs, [alarms(200) if i < alarmed else Told() for i in range(of)]


def placebo(*groups: tuple[list[Run], list[Told]], event: Run | None = None) -> Score:
    runs = [event or run("e", "crash", 200), *(each for group in groups for each in group[0])]
    return score(runs, [alarms(200), *(each for group in groups for each in group[1])], CRITICAL)


def test_the_placebo_is_of_twins_where_there_are_five() -> None:
    judged = placebo(twins(2, 5), twins(0, 20, project="other"))
    assert judged.placebo == pytest.approx(2 / 5)
    assert judged.p == pytest.approx(2.5 / 6)
    assert judged.twinned == 1


def test_the_placebo_is_of_all_healthy_runs_where_there_are_four() -> None:
    judged = placebo(twins(2, 4), twins(0, 16, project="other"))
    assert judged.placebo == pytest.approx(2 / 20)
    assert judged.p == pytest.approx(2.5 / 21)
    assert judged.twinned == 0


def test_runs_logged_at_other_steps_are_no_twins() -> None:
    assert placebo(twins(5, 5, every=5), twins(0, 5)).placebo == 0
    assert placebo(twins(5, 5, every=5), twins(0, 4)).placebo == pytest.approx(5 / 9)


def test_healthy_runs_that_end_before_the_onset_are_left_out_of_the_placebo() -> None:
    judged = placebo(twins(0, 5, last=199), twins(3, 5, project="other", last=200))
    assert judged.placebo == pytest.approx(3 / 5)


def test_an_alarm_of_a_twin_outside_the_window_is_no_placebo() -> None:
    runs, _ = twins(0, 5)
    judged = placebo((runs, [alarms(99), alarms(211), alarms(100), alarms(210), Told()]))
    assert judged.placebo == pytest.approx(2 / 5)


def test_early_hits_have_a_placebo_of_their_own() -> None:
    runs, _ = twins(0, 5)
    judged = placebo((runs, [alarms(190), alarms(191), Told(), Told(), Told()]))
    assert judged.placebo_early == pytest.approx(1 / 5)
    assert judged.p_early == 1


def test_p_is_the_chance_of_as_many_hits_or_more() -> None:
    healthy, told = twins(1, 5)
    events = [run(f"e{i}", "crash", 200) for i in range(2)]
    judged = score([*events, *healthy], [alarms(200), alarms(200), *told], CRITICAL)
    assert judged.p == pytest.approx((1.5 / 6) ** 2)


def test_no_healthy_run_beside_an_event_is_no_placebo_and_half_a_chance() -> None:
    judged = hit(run("e", "crash", 200), 200)
    assert judged.placebo is None
    assert judged.p == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("steps", "every", "episodes"),
    [((10, 30), 1, 1), ((10, 31), 1, 2), ((10, 25, 40), 1, 2), ((50, 150), 5, 1), ((50, 155), 5, 2), ((), 1, 0)],
)
def test_alarms_within_twenty_rows_of_an_episodes_first_belong_to_it(
    steps: tuple[int, ...], every: int, episodes: int
) -> None:
    judged = score([run("h", "healthy", every=every)], [alarms(*steps)], CRITICAL)
    assert judged.per_1000_rows.count == episodes


def test_false_alarms_are_those_of_healthy_runs_and_long_before_an_onset() -> None:
    runs = [run("h", "healthy"), run("e", "crash", 250), run("t", "transient", 50), run("d", "dead", 1)]
    judged = score(runs, [alarms(7), alarms(149, 150), alarms(50), alarms(50)], CRITICAL)
    assert judged.per_1000_rows.count == 2
    assert judged.per_1000_rows.total == 300 + 149
    assert judged.per_1000_rows.value == pytest.approx(1000 * 2 / 449)


def test_rows_and_steps_differ_where_rows_are_sparse() -> None:
    judged = score([run("h", "healthy", every=20)], [alarms(100)], CRITICAL)
    assert judged.per_1000_rows.total == 15
    assert judged.per_1000_steps.total == 300


def test_a_transient_is_judged_at_its_end() -> None:
    runs = [run("a", "transient", 50), run("b", "transient", 50)]
    judged = score(runs, [Told((Alarm(50),), True), Told((Alarm(50),), False)], CRITICAL)
    assert (judged.transients.count, judged.transients.total) == (1, 2)


def test_a_dead_run_is_to_be_told_once() -> None:
    runs = [run("a", "dead", 1), run("b", "dead", 1), run("c", "dead", 1)]
    judged = score(runs, [alarms(60), alarms(60, 90), Told()], CRITICAL)
    assert (judged.dead.count, judged.dead.total, judged.dead_repeated) == (2, 3, 1)


def test_findings_are_judged_apart_from_what_waited() -> None:
    told = Told((Alarm(215),), True, (Alarm(205),))
    runs = [run("e", "crash", 200)]
    assert score(runs, [told], CRITICAL).hits.count == 0
    assert score(runs, [told], CRITICAL, findings=True).hits.count == 1


def test_unlabelled_runs_are_in_no_count() -> None:
    judged = score([run("u", "unlabelled")], [alarms(10)], CRITICAL)
    assert (judged.events, judged.healthy.total, judged.per_1000_rows.total) == (0, 0, 0)


def test_wilson_is_the_published_interval() -> None:
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(8, 20) == pytest.approx((0.2188, 0.6134), abs=1e-4)


def test_projects_drawn_whole_are_wider_than_runs_where_projects_differ() -> None:
    runs = [run(f"{p}{i}", "healthy", project=p) for p in "abcd" for i in range(25)]
    judged = score(runs, [alarms(10) if each.project == "a" else Told() for each in runs], CRITICAL)
    assert judged.healthy.drawn is not None
    assert judged.healthy.exact is not None
    assert judged.healthy.drawn[1] > judged.healthy.exact[1]


def test_two_projects_are_too_few_to_draw() -> None:
    runs = [run(p, "healthy", project=p) for p in "ab"]
    assert score(runs, [Told(), Told()], CRITICAL).healthy.drawn is None
