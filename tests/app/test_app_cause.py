"""On a run's page: the likely cause and what to do, while it is in trouble, and the post-mortem to take away."""

import pytest
from app_world import danger_run, finding, html, no_traceback, run_page, write_run

from rlwatch.records import RunState, Severity


def test_a_run_in_danger_says_what_to_do(store_dir):
    """The first actions in a line; options, evidence and sources in the fold."""
    danger_run(store_dir)
    page = run_page()

    assert no_traceback(page)
    text = html(page)
    assert "Entropy fell; trigger unknown" in text
    assert "1 Roll back to the last good snapshot" in text
    assert "<code>epsilon_high=0.28</code>" in text
    assert "arXiv 2503.14476" in text
    assert "actor_rollout_ref" not in text


def test_a_healthy_run_is_left_alone(store_dir):
    """No cause, no orders."""
    write_run(store_dir)
    page = run_page()

    assert no_traceback(page)
    assert "Likely" not in html(page)
    assert [fold.label for fold in page.expander] == ["Settings (0)", "Environment"]


def test_a_crash_that_nothing_explains_gives_no_orders(store_dir):
    """The reward fell and nothing came before it."""
    lone = finding(kind="reward_drop", detector="reward_drop", severity=Severity.CRITICAL)
    write_run(store_dir, state=RunState.CRASHED, findings=[lone])
    page = run_page()

    assert no_traceback(page)
    assert "cause unknown" in html(page)
    assert ">Do<" not in html(page)


@pytest.mark.parametrize("run", ["<script>", "a b/c"])
def test_the_report_of_a_run_is_one_html_file(store_dir, run):
    """As the command writes it."""
    from rlwatch_app import queries

    write_run(store_dir, name=run)

    assert queries.report("run-1").startswith("<!doctype html>")
    assert "<script" not in queries.report("run-1")
