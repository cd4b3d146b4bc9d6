"""How the app is built: one door, no HTML from data, nothing that leaks, startable from anywhere."""

import ast
import gc
import re
import runpy
import shutil
import subprocess
import sys
import tomllib

import pytest
from app_world import APP, no_traceback, runs_page

SOURCES = sorted(APP.rglob("*.py"))
ROOT = APP.parent


def calls(path):
    """Every call in a file with the dotted name that is called."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imports(path):
    """Every module a file imports absolutely."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module)


def test_only_the_queries_open_the_store():
    """Every read goes through ``queries``."""
    assert [p.name for p in SOURCES if "rlwatch.store.url" in imports(p)] == ["queries.py"]


def test_the_app_uses_what_rlwatch_publishes_and_little_else():
    """Streamlit and numpy, the door what it is made of; nothing of the trainer, the CLI or the engine."""
    door = {"google", "itsdangerous", "limits", "rlwatch", "starlette", "uvicorn"}
    doors = [APP / f"{name}.py" for name in ("api", "assets", "endpoint", "gate", "news", "oidc")]
    pages = {name.split(".")[0] for path in SOURCES if path not in doors for name in imports(path)}
    assert pages - set(sys.stdlib_module_names) == {"numpy", "rlwatch", "streamlit"}
    assert {name.split(".")[0] for path in doors for name in imports(path)} - set(sys.stdlib_module_names) == {
        "numpy",
        "streamlit",
        *door,
    }
    rooms = {name.split(".")[1] for path in SOURCES for name in imports(path) if name.startswith("rlwatch.")}
    assert rooms <= {
        "alerts",
        "state",
        "step_notes",
        "analysis",
        "catalogue",
        "clock",
        "compare",
        "control",
        "curation",
        "columns",
        "diagnosis",
        "distributions",
        "errors",
        "export",
        "forecast",
        "importers",
        "link",
        "metrics",
        "plugins",
        "ports",
        "records",
        "redaction",
        "report",
        "error_boundary",
        "store",
        "rollouts",
        "view",
        "wording",
    }


def test_html_is_only_made_by_the_function_that_escapes():
    """What reaches ``st.html`` comes from ``el``, ``joined``, or is a constant; but for the panel of a plugin."""
    of_a_plugin = "str(given)"  # shown as st.html shows what it is given by default: without scripts
    made = []
    for path in SOURCES:
        for name, call in calls(path):
            if name.endswith(".html"):
                made.append(ast.unparse(call.args[0]))
    assert made.count(of_a_plugin) == 1
    assert [text for text in made if not re.match(r"(el|joined)\(|(DARK_)?STYLE$", text)] == [of_a_plugin]


def test_nothing_turns_streamlits_guards_off():
    """No unsafe HTML, no script in HTML."""
    for path in SOURCES:
        for name, call in calls(path):
            assert not {k.arg for k in call.keywords} & {"unsafe_allow_html", "unsafe_allow_javascript"}, (path, name)


SCRIPTS = [
    "arrange.js", "board.js", "chart.js", "controls.js", "curves.js", "first.js", "keys.js", "lane.js", "live.js", "look.js", "means.js",
    "menu.js", "nodes.js", "numbers.js", "overlay.js", "page.js", "response.js", "rulers.js", "save.js", "shapes.js", "study.js",
    "table.js", "tip.js", "views.js",
]  # fmt: skip
DRAWS_NOTHING = {
    "arrange.js", "chart.js", "curves.js", "first.js", "lane.js", "live.js", "look.js", "means.js", "menu.js", "numbers.js", "overlay.js",
    "page.js", "rulers.js", "shapes.js", "tip.js", "views.js",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_parses_html(name):
    """Text nodes only."""
    assert sorted(path.name for path in APP.glob("*.js")) == SCRIPTS
    script = (APP / name).read_text(encoding="utf-8")
    assert "textContent" in script or name in DRAWS_NOTHING
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert sink not in script


def test_writes_happen_in_one_place():
    """A page that is drawn changes nothing: only ``commands.send`` submits, only ``incident_acts`` acknowledges and silences."""
    writers = {
        "submit",
        "settle",
        "claim",
        "put_alerts",
        "open_run",
        "settle_message",
        "retry_message",
        "lease_messages",
        "tell",
        "put_silence",
        "silence",
        "end_silence",
    }
    others = [p for p in SOURCES if p.name != "incident_acts.py"]
    assert [(p.name, name) for p in others for name, _ in calls(p) if _writes(name) in writers] == []
    assert [p.name for p in SOURCES for name, _ in calls(p) if name == "request"] == ["commands.py"]
    assert {p.name for p in SOURCES for name, _ in calls(p) if name.endswith("acknowledge")} == {"incident_acts.py"}


def _writes(name):
    """Last part of what is called; nothing for a call of the module that checks who may."""
    return "" if name.startswith("acts.") else name.split(".")[-1]


def test_whoever_writes_about_incidents_may():
    """Every act asks first."""
    tree = ast.parse((APP / "incident_acts.py").read_text(encoding="utf-8"))
    acts = [f for f in tree.body if isinstance(f, ast.FunctionDef) and any(a.arg == "by" for a in f.args.kwonlyargs)]
    assert len(acts) >= 6
    for act in acts:
        assert "by.require_command()" in {ast.unparse(line) for line in act.body}, act.name


def test_no_page_swallows_what_it_should_not():
    """Errors meant for people are shown; bugs are not hidden."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None
                assert ast.unparse(node.type) not in {"Exception", "BaseException"}, path


def test_the_shipped_configuration_keeps_to_itself():
    """This machine only, no telemetry, no traceback in the browser, no file watching."""
    config = tomllib.loads((APP / ".streamlit" / "config.toml").read_text(encoding="utf-8"))
    assert config["server"] == {"address": "127.0.0.1", "headless": True, "fileWatcherType": "none"}
    assert config["browser"]["gatherUsageStats"] is False
    assert config["client"] == {"showErrorDetails": "none", "toolbarMode": "minimal"}


def test_the_configuration_is_in_the_repository():
    """``.streamlit`` is usually ignored; this one ships."""
    tracked = subprocess.run(
        ["git", "ls-files", "app/.streamlit/config.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert tracked.stdout.strip() == "app/.streamlit/config.toml"


@pytest.mark.parametrize("place", ["app", "site/rlwatch/_app"])
def test_the_package_loads_from_a_checkout_and_from_a_wheel(tmp_path, place):
    """Under one name, with nothing put on the path."""
    directory = tmp_path / place
    shutil.copytree(APP, directory, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import runpy, sys; from pathlib import Path; before = list(sys.path);"
        f"main = runpy.run_path({str(directory / 'main.py')!r}, run_name='loaded');"
        f"main['load_package'](Path({str(directory)!r}));"
        "import rlwatch_app.charts, rlwatch_app.run_page;"
        "print(rlwatch_app.__path__[0], sys.path == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(directory), "True"]


def test_loading_twice_is_loading_once():
    """Streamlit runs the script at every look."""
    before = sys.modules["rlwatch_app"]
    main = runpy.run_path(str(APP / "main.py"), run_name="loaded")
    main["load_package"](APP)
    assert sys.modules["rlwatch_app"] is before


def test_a_directory_without_the_app_leaves_nothing_half_loaded(tmp_path, monkeypatch):
    """The next try begins anew."""
    main = runpy.run_path(str(APP / "main.py"), run_name="loaded")
    monkeypatch.delitem(sys.modules, "rlwatch_app")
    with pytest.raises((ImportError, FileNotFoundError)):
        main["load_package"](tmp_path)
    assert "rlwatch_app" not in sys.modules


def test_what_the_first_look_loaded_is_not_searched_for_garbage_after_every_part_of_a_page(store_dir):
    """Streamlit searches everything then: 30 ms and more, eight times a look at a run."""
    assert no_traceback(runs_page())
    assert gc.get_freeze_count() > len(sys.modules)
