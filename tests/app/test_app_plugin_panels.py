"""Panels of other people's packages on a run's page: shown behind a fold, and one that fails says so alone."""

import pytest
from app_world import html, no_traceback, run_page

import rlwatch
from rlwatch import plugins

PANELS = """
def shows(run):
    return f"<b>{run.info.name}: {len(run.history())} steps</b><script>alert(1)</script>"
def fails(run):
    raise KeyError("boom")
def nothing(run):
    return None
"""


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """A package with three panels."""
    info = tmp_path / "site" / "panels-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: panels\nVersion: 1.0\n")
    names = {"Mine": "shows", "Broken": "fails", "Silent": "nothing"}
    points = "".join(f"{title} = some_panels:{name}\n" for title, name in names.items())
    (info / "entry_points.txt").write_text(f"[rlwatch.panels]\n{points}")
    (tmp_path / "site" / "some_panels.py").write_text(PANELS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    plugins.reload()
    yield
    plugins.reload()


def test_panels_are_shown_and_one_that_fails_hurts_no_other(panels, store_dir):
    """None shows nothing."""
    with rlwatch.init(run_id="run-1", name="math", store=store_dir) as run:
        for step in range(5):
            run.log({"reward": 0.5}, step=step)

    page = run_page()

    assert no_traceback(page)
    assert "math: 5 steps" in html(page)
    assert "The panel failed: KeyError: &#x27;boom&#x27;" in html(page)
    assert [one.label for one in page.expander if one.label in ("Mine", "Broken", "Silent")] == ["Broken", "Mine"]
