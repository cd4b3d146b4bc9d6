"""What asks a recorded run, over a log that TRL wrote: its names are of open families too (``rewards/sorting/mean``)."""

from __future__ import annotations

import ast
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

import rlwatch
from rlwatch.analysis.runs import StoredRun
from rlwatch.errors import ConfigError
from rlwatch.metrics import OPEN, read_as, unit_of

ROOT = Path(__file__).parents[2]
PART = "rewards/sorting/mean"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlwatch.cli.app import app

    where = tmp_path_factory.mktemp("trl") / "runs"
    log = ROOT / "sample_logs" / "entropy-collapse-trl-console.log"
    assert CliRunner().invoke(app, ["import", str(log), "--store", str(where)]).exit_code == 0
    return where


@pytest.fixture
def run(store: Path) -> StoredRun:
    return next(iter(rlwatch.open(store)))


def test_every_logged_metric_has_a_row(run: StoredRun) -> None:
    """Also those whose canonical name is of an open family."""
    rows = run.metrics().set_index("metric")

    assert rows.loc[PART, "canonical"] == "reward/part/sorting"
    assert rows.loc["completions/mean_length", "unit"] == "tokens"
    assert set(rows.index) == set(run.store.metric_names(run.run_id))


@pytest.mark.parametrize("flags", [(), ("--metrics",), ("--findings", "--metrics"), ("--format", "json", "--metrics")])
def test_show_tells_of_it(store: Path, flags: tuple[str, ...]) -> None:
    """In every form."""
    from rlwatch.cli.app import app

    said = CliRunner().invoke(app, ["show", "entropy", *flags, "--store", str(store)])

    assert said.exit_code == 0, said.output
    assert ("sorting" in said.output) == ("--metrics" in flags)


def test_whatever_a_run_is_asked_it_answers(run: StoredRun) -> None:
    """Each table, each chart, the view; nothing raises over a name."""
    tables = [run.metrics(), run.history(), run.history([PART, "reward/part/sorting"]), run.findings(), run.alerts(),
              run.forecasts(), run.events(), run.spikes(), run.distributions(), run.completions(), run.config(),
              run.diff(run)]  # fmt: skip

    assert len(tables[1]) == 80
    assert run.plot(PART).html.count("<svg") == 1
    assert "collapse" in run.view().verdict.text


@pytest.mark.parametrize("family", OPEN, ids=lambda family: family.name)
def test_a_member_of_an_open_family_has_its_unit(family: rlwatch.metrics.Metric) -> None:
    """Whatever the member is called."""
    assert unit_of(f"{family.name}any") == family.unit
    assert read_as(f"{family.name}any")


def test_nothing_looks_a_name_of_a_run_up_in_the_closed_table() -> None:
    """``BY_NAME[...]`` fails for a member of an open family: unit_of, meaning_of and metric_of do not."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ("rlwatch", "app")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.parent.name != "metrics" and "import BY_NAME" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "BY_NAME"
    ]

    assert found == []


def test_a_plot_is_what_its_name_says(run: StoredRun, tmp_path: Path) -> None:
    """A page or a picture; another ending is an error, and no file."""
    plot = run.plot("reward", PART)
    plot.save(tmp_path / "r.svg")
    plot.save(str(tmp_path / "R.HTML"))
    picture = ET.parse(tmp_path / "r.svg").getroot()

    assert picture.tag == f"{SVG}svg"
    assert len(picture.findall(f".//{SVG}polyline")) >= 2
    assert "var(" not in (tmp_path / "r.svg").read_text()
    assert (tmp_path / "R.HTML").read_text().startswith("<!doctype html>")
    for name in ("r.png", "r.pdf", "r"):
        with pytest.raises(ConfigError, match=r"\.html or \.svg"):
            plot.save(tmp_path / name)
        assert not (tmp_path / name).exists()
