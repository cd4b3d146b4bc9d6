"""Starred metrics: in the address, and for the whole project in the store."""

import pytest
from app_world import board, no_traceback, run_page, write_run
from rlwatch_app.pinned import keep_pins
from rlwatch_app.principal import NotPermittedError, Principal
from streamlit.testing.v1 import AppTest

from rlwatch.store.url import open_store


def star(run_id, name, *before):
    """Click a star; the address from then on."""

    def script(run_id, name):
        from rlwatch_app.run_board import on_ask

        on_ask({"kind": "pin", "name": name}, run_id, "step")

    page = AppTest.from_function(script, kwargs={"run_id": run_id, "name": name})
    if before:
        page.query_params["pin"] = list(before)
    found = page.run().query_params["pin"]
    return [found] if isinstance(found, str) else found


def pinned(page):
    """Metrics under the heading of the starred ones."""
    assert no_traceback(page)
    first = board(page)["sections"][0]
    return [panel["name"] for panel in first["panels"]] if first["key"] == "pinned" else []


def test_what_an_operator_stars_comes_first_in_every_run_of_the_project(store_dir):
    """Also in the next one, for whoever looks; in another project nothing is starred."""
    write_run(store_dir)
    assert star("run-1", "kl") == ["kl"]
    write_run(store_dir, "run-2")
    write_run(store_dir, "run-3", project="other")
    assert [pinned(run_page(run)) for run in ("run-1", "run-2", "run-3")] == [["kl"], ["kl"], []]
    assert (pinned(run_page("run-2", pin="reward")), pinned(run_page("run-2", pin=""))) == (["reward"], [])
    assert star("run-2", "kl") == [""]
    assert pinned(run_page("run-1")) == []


def test_who_starred_what_is_in_the_audit(store_dir):
    """As all that people do in a store."""
    write_run(store_dir)
    star("run-1", "kl")
    star("run-1", "reward", "kl")
    store = open_store(str(store_dir))
    assert [(entry.by, entry.act) for entry in store.audit()] == [("ann", "pins")] * 2
    assert '["kl", "reward"]' in store.audit()[-1].text
    store.close()


def test_the_stars_of_a_viewer_are_in_the_address_alone(store_dir, looks):
    """Who may only look changes nothing for others."""
    write_run(store_dir)
    looks("bob", "viewer")
    assert star("run-1", "kl") == ["kl"]
    assert pinned(run_page("run-1")) == []
    with pytest.raises(NotPermittedError):
        keep_pins(open_store(str(store_dir)), "math", ["kl"], Principal("bob", "viewer"))
