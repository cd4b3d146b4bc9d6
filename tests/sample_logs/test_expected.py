"""``rlwatch.scan`` finds in every sample log what its curves show, in time, and nothing critical besides."""

import ast
import tomllib
from pathlib import Path

import pytest

import rlwatch
from rlwatch.records import Severity

FOLDER = Path(__file__).parent.parent.parent / "sample_logs"
EXPECTED = {log["file"]: log for log in tomllib.loads((FOLDER / "expected.toml").read_text())["log"]}
CRASHED = {name: log for name, log in EXPECTED.items() if "find" in log}
HEALTHY = [name for name in EXPECTED if name not in CRASHED]
MUST_FIND = [
    pytest.param(name, find, id=f"{name}-{find['kind']}-{find['severity']}")
    for name, log in CRASHED.items()
    for find in log["find"]
]
LARGEST = 150_000
"""Bytes of a sample log: they travel with the repository."""


@pytest.fixture(scope="module")
def report():
    """Scans a log once."""
    reports = {}

    def scan(name):
        if name not in reports:
            reports[name] = rlwatch.scan(FOLDER / name)
        return reports[name]

    return scan


@pytest.mark.parametrize("name", EXPECTED)
def test_the_format_is_recognised_and_every_row_is_read(name, report):
    """Sniffed from the content; as many steps as were logged."""
    assert report(name).format == EXPECTED[name]["format"]
    assert report(name).steps == EXPECTED[name]["rows"]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_silent(name, report):
    """No alarm, and not even a warning that came to nothing."""
    found = [(f.kind, f.severity, f.step) for f in report(name).findings if f.severity is not Severity.INFO]

    assert found == []
    assert report(name).alarms == ()
    assert report(name).ok


@pytest.mark.parametrize(("name", "find"), MUST_FIND)
def test_the_failure_is_found_where_it_began_and_in_time(name, find, report):
    """At least this severe, dated within the window, by the step at which a person would be sure."""
    low, high = find["onset"]
    least = Severity(find["severity"]).rank
    found = [f for f in report(name).findings if f.kind == find["kind"] and f.severity.rank >= least]

    assert found, f"no {find['severity']} {find['kind']}"
    assert min(f.step for f in found) <= find["found_by"]
    assert all(low <= f.onset_step <= high for f in found[:1]), f"dated {found[0].onset_step}"


@pytest.mark.parametrize("name", CRASHED)
def test_a_failure_is_alarmed_and_nothing_else_is_critical(name, report):
    """The critical kinds a person would be told of are those the curves bear out."""
    critical = {alarm.kind for alarm in report(name).alarms if alarm.severity is Severity.CRITICAL}

    assert not report(name).ok
    assert critical <= set(CRASHED[name]["critical_only"])
    assert {find["kind"] for find in CRASHED[name]["find"] if find["severity"] == "critical"} <= critical


@pytest.mark.parametrize("name", CRASHED)
def test_nothing_is_found_before_it_began(name, report):
    """No warning and no alarm before the earliest onset the curves allow."""
    earliest = min(find["onset"][0] for find in CRASHED[name]["find"])
    early = [(f.kind, f.step) for f in report(name).findings if f.severity is not Severity.INFO and f.step < earliest]

    assert early == []


def test_the_folder_the_list_the_recorder_and_the_readme_agree():
    """Every log is expected, recorded and described; none is left over."""
    code = {".py", ".md", ".toml", ".pyc"}
    logs = {path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix not in code}
    readme = (FOLDER / "README.md").read_text()

    assert logs == set(EXPECTED) == recorded()
    assert all(f"`{name}`" in readme for name in logs)


def recorded():
    """Names that record.py can make, read without running it: it needs a trainer."""
    calls = [node for node in ast.walk(ast.parse((FOLDER / "record.py").read_text())) if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", "") == "recorder"}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_files_are_small_and_tell_nothing_of_the_machine_they_came_from(name):
    """No home directories, no host paths."""
    text = (FOLDER / name).read_text()

    assert len(text.encode()) <= LARGEST
    assert not any(place in text for place in ("/home/", "/root/", "/tmp/", "/usr/", "/work/"))
