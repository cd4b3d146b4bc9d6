"""Other people's packages: what their entry points add works, and what is broken is named and left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from preloaded import run_program

from rlwatch import plugins
from rlwatch.plugins import DOORS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
PAGE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")

BROKEN = """
import rlwatch_example

class Nothing: ...

class Impostor(rlwatch_example.LongAnswers):
    name = "entropy"

class Raises(rlwatch_example.LongAnswers):
    name = "raises"
    def update(self, step): raise KeyError("ours")

class Unmade(rlwatch_example.LongAnswers):
    name = "unmade"
    def __init__(self): raise OSError("no")

class Liar(rlwatch_example.LongAnswers):
    name = "liar"
    def update(self, step): return ["a text"]

class Choking(rlwatch_example.ToyConsole):
    name = "choking"
    def sniff(self, head, path): raise ValueError("head")

def panel(run): raise RuntimeError("boom")
"""
BROKEN_POINTS = {
    "rlwatch.detectors": {
        "absent": "no_such_module:X", "nothing": "broken_plugin:Nothing", "other_name": "broken_plugin:Raises",
        "raises": "broken_plugin:Raises", "unmade": "broken_plugin:Unmade", "liar": "broken_plugin:Liar",
    },
    "rlwatch.importers": {"choking": "broken_plugin:Choking", "json": "broken_plugin:Choking"},
    "rlwatch.notifiers": {"webhook": "rlwatch_example:FileNotifier"},
    "rlwatch.stores": {"sqlite": "rlwatch_example:scratch"},
    "rlwatch.panels": {"bad": "broken_plugin:panel"},
}  # fmt: skip


def installed(site: Path, name: str, version: str, points: dict[str, dict[str, str]]) -> None:
    """As pip leaves it: metadata and entry points beside the modules."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{door}]\n" + "".join(f"{n} = {value}\n" for n, value in own.items()) for door, own in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A place with the example package alone."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    installed(tmp_path / "site", project["name"], project["version"], project["entry-points"])
    (tmp_path / "site" / "rlwatch_example").symlink_to(EXAMPLE / "rlwatch_example")
    return tmp_path / "site"


@pytest.fixture
def broken(site: Path) -> Path:
    """And with one beside it of which everything is wrong."""
    (site / "broken_plugin.py").write_text(BROKEN)
    installed(site, "broken-plugin", "0.9", BROKEN_POINTS)
    return site


def environment(site: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), **more}


def python(site: Path, code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(site, **env),
    )


def said(site: Path, code: str, cwd: Path, **env: str) -> str:
    done = python(site, code, cwd, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def listed(site: Path, cwd: Path, **env: str) -> tuple[int, list[dict[str, str]]]:
    done = python(site, "import sys; from rlwatch.cli.entry import main; sys.argv = ['rlwatch', 'plugins', '--format', "
                        "'json']; main()", cwd, **env)  # fmt: skip
    return done.returncode, json.loads(done.stdout)["plugins"]


def test_all_doors_are_tried_by_the_example_and_told_on_the_page(site: Path, tmp_path: Path) -> None:
    """With version and origin; a new door without an example fails here."""
    code, plugins = listed(site, tmp_path)

    assert code == 0
    assert {one["door"] for one in plugins} == set(DOORS)
    assert {(one["package"], one["version"], one["problem"]) for one in plugins} == {
        ("rlwatch-example-plugin", "0.1.0", "")
    }
    assert [door for door in DOORS if f"`{door}`" not in PAGE] == []


def test_what_is_broken_is_named_and_left_out(broken: Path, tmp_path: Path) -> None:
    """And the exit code says so, while the example goes on working."""
    code, plugins = listed(broken, tmp_path)
    problems = {(one["door"].removeprefix("rlwatch."), one["name"]): one["problem"] for one in plugins}

    assert code == 1
    assert "no_such_module" in problems["detectors", "absent"]
    assert problems["detectors", "nothing"].startswith("lacks family, kinds, requires, update, arrival, notice, name")
    assert "calls itself 'raises'" in problems["detectors", "other_name"]
    assert "one of its own" in problems["notifiers", "webhook"]
    assert "one of its own" in problems["stores", "sqlite"]
    assert "calls itself 'choking'" in problems["importers", "json"]
    assert not [name for name, problem in problems.items() if problem and "rlwatch-example" in problem]
    assert problems["detectors", "long_answers"] == problems["stores", "scratch"] == ""


def test_doctor_names_what_was_left_out(broken: Path, tmp_path: Path) -> None:
    """Each with its package and the reason."""
    code = "from rlwatch.cli.doctor import plugin_checks; print(*(f'{c.level} {c.name}: {c.text}' for c in plugin_checks()), sep='\\n')"
    told = said(broken, code, tmp_path)

    assert "warn plugin absent: broken-plugin 0.9 (no_such_module:X) is left out: cannot be loaded" in told


def test_none_is_loaded_where_nobody_wants_any(broken: Path, tmp_path: Path) -> None:
    """RLWATCH_PLUGINS=off."""
    assert listed(broken, tmp_path, RLWATCH_PLUGINS="off") == (0, [])


SCAN = """
import logging, rlwatch
report = rlwatch.scan({"step": range(60), "len/mean": [500.0] * 40 + [3000.0] * 20, "entropy": [0.5] * 59 + [float("nan")]})
print(sorted({f.kind for f in report.findings}), [a.kind for a in report.alarms])
"""


def test_a_detector_judges_and_its_findings_become_alerts(site: Path, tmp_path: Path) -> None:
    """By the rule for whatever else is found."""
    out = said(site, SCAN, tmp_path)

    assert "'long_answers'" in out.split("]")[0]
    assert "long_answers" in out.split("]")[1]


def test_a_detector_that_raises_takes_nothing_with_it(broken: Path, tmp_path: Path) -> None:
    """One that cannot be made, one that raises, one that returns no findings: each is said once."""
    done = python(broken, SCAN, tmp_path)

    assert "'long_answers'" in done.stdout
    assert "'nonfinite'" in done.stdout
    for name in ("raises", "unmade", "liar"):
        assert done.stderr.count(f"detector {name!r} of a plugin failed") == 1


def test_a_log_is_read_by_a_plugin_also_beside_one_that_chokes(broken: Path, tmp_path: Path) -> None:
    """The surest importer wins, as among ours."""
    (tmp_path / "train.log").write_text("".join(f"noise\n[toy] {s} reward={s / 99} entropy=nan\n" for s in range(9)))

    out = said(broken, "import rlwatch; r = rlwatch.scan('train.log'); print(r.format, r.steps, r.metrics)", tmp_path)

    assert out == "toy-console 9 ('policy/entropy', 'reward/mean')"


def test_alerts_go_to_a_channel_of_a_plugin(site: Path, tmp_path: Path) -> None:
    """With its settings from rlwatch.toml; settings that it refuses are named, their values are not."""
    (tmp_path / "rlwatch.toml").write_text('[notify.file]\noptions = {path = "out.jsonl"}\n')
    (tmp_path / "wrong.toml").write_text('[notify.file]\noptions = {token = "sesame"}\n')
    build = "from rlwatch.alerts.config import load_config; from rlwatch.notify.registry import build_notifier; " \
            "c = next(c for c in load_config({!r}).channels if c.name == 'file'); n = build_notifier(c.kind, c.name, c.options); "  # fmt: skip
    send = (
        "from rlwatch.records import OutboxMessage as M; print(n.deliver(M('m1', 'r', 'a', 'file', {'text': 'x'})).ok)"
    )

    assert said(site, build.format("rlwatch.toml") + send, tmp_path) == "True"
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"id": "m1", "text": "x"}
    wrong = python(site, build.format("wrong.toml"), tmp_path).stderr
    assert "refuses its settings" in wrong
    assert "sesame" not in wrong


def test_a_store_of_a_plugin_is_opened_by_its_scheme(site: Path, tmp_path: Path) -> None:
    """Wherever a URL of a store may stand."""
    url = "scratch://mine"
    code = f"import rlwatch\nwith rlwatch.init(name='x', store={url!r}) as run: run.log({{'reward': 1.0}}, step=1)\n" \
           f"print(rlwatch.open({url!r}))"  # fmt: skip

    assert "1 run of" in said(site, code, tmp_path, TMPDIR=str(tmp_path))


COMMAND = """
import rlwatch, rlwatch_example
from rlwatch.control.commands import request
from rlwatch.integrations.commands import Controller
from rlwatch.integrations.ranks import OneRank
from rlwatch.error_boundary import ErrorBoundary
rlwatch_example.SetTemperature.generation["temperature"] = 1.0
run = rlwatch.init(run_id="r", store="runs")
sent = request(rlwatch.open_store("runs"), "r", "set-temperature", args={"value": 0.5})
controller = Controller(ErrorBoundary(run), [])
import time
for step in range(200):
    controller.obey(step)
    if rlwatch.open_store("runs").commands("r")[0].finished_step is not None: break
    time.sleep(0.05)
run.finish()
print(rlwatch.open_store("runs").commands("r")[0].status, rlwatch_example.SetTemperature.generation)
"""


def test_a_command_of_a_plugin_is_carried_out_with_its_arguments_checked(site: Path, tmp_path: Path) -> None:
    """At a boundary, by the handler, answered as any other."""
    done = run_program(COMMAND, env=environment(site), cwd=tmp_path, check=True)
    assert done.stdout.strip() == "done {'temperature': 0.5}"
    asks = "import sys; from rlwatch.cli.entry import main; sys.argv = 'rlwatch command r set-temperature --set value=1.5 " \
           "--store runs --format json'.split(); main()"  # fmt: skip
    assert json.loads(python(site, asks, tmp_path).stdout)["args"] == {"value": 1.5}
    wrong = run_program(COMMAND.replace("0.5}", "9}"), env=environment(site), cwd=tmp_path).stderr
    assert "set-temperature value=9 is not a number of at least 0 and at most 2" in wrong


def test_a_forecaster_is_used_where_it_is_asked_for_by_name(site: Path, tmp_path: Path) -> None:
    """One that nobody has is said, and nothing else is put in its place."""
    code = "import rlwatch; r = rlwatch.scan({'step': range(60), 'entropy': [0.5] * 60, 'reward': [0.1] * 60}); " \
           "print({f['p50'] for f in r.forecast}, [n.reason for n in r.not_run if n.name == 'forecast'])"  # fmt: skip

    assert said(site, code, tmp_path, RLWATCH_FORECASTER="never") == "{0.0} []"
    assert "no plugin has a forecaster 'mine'" in said(site, code, tmp_path, RLWATCH_FORECASTER="mine")


def test_packages_are_read_from_the_names_of_their_folders_as_their_metadata_tell(monkeypatch, tmp_path):
    """Name and version; where a zip file or a finder of another package may hold some, nothing is concluded."""
    plain = [one for one in sys.meta_path if one is PathFinder or not hasattr(one, "find_distributions")]
    monkeypatch.setattr(sys, "meta_path", plain)  # other tests import packages that bring finders of their own
    known = plugins.installed()
    told = {one.metadata["Name"].lower().replace("_", "-").replace(".", "-"): one for one in metadata.distributions()}
    assert known is not None
    assert set(known) >= set(told)
    assert {name: known[name][0] or one.version for name, one in told.items()} == {
        name: one.version for name, one in told.items()
    }

    with zipfile.ZipFile(tmp_path / "packed.zip", "w"):
        pass
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "nothing"), str(tmp_path)])
    assert plugins.installed() == known
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "packed.zip")])
    assert plugins.installed() is None
