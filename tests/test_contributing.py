"""CONTRIBUTING is true: its recipes are carried out, as they stand there, in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(heading: str) -> list[tuple[str, str]]:
    """(language, text) of the code blocks below a heading."""
    (section,) = re.findall(rf"^## {heading}.*?$(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def copied(to: Path, *parts: str) -> Path:
    """A copy of parts of the repository, without the traces of earlier runs."""
    for part in ("pyproject.toml", "conftest.py", "rlwatch", *parts):
        source, target = ROOT / part, to / part
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return to


def shell(commands: str, at: Path) -> str:
    """What the commands print, in the copy and with this Python; they must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "PYTHONPATH": str(at), "PYTEST_ADDOPTS": "-q -n 0 -p no:cacheprovider"}
    made = subprocess.run(  # noqa: PLW1510  (the assertion shows what it printed)
        ["bash", "-e", "-c", commands], cwd=at, env={**os.environ, **settings}, capture_output=True, text=True
    )

    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_a_detector_is_a_file_an_entry_and_a_test(tmp_path: Path):
    """No other file is edited, and the contract suite finds it."""
    copy = copied(tmp_path, "README.md", "app", "docs", "tests/catalogue", "tests/detectors")
    recipe = blocks("Add a detector")
    for language, text in recipe:
        if language == "python":
            file = copy / text.split("\n", 1)[0].removeprefix("# ")
            assert not file.exists()
            file.write_text(text.split("\n", 1)[1])
        elif language == "toml":
            with (copy / "rlwatch" / "catalogue" / "kinds.toml").open("a") as catalogue:
                catalogue.write("\n" + text)
    (commands,) = [text for language, text in recipe if language == "sh"]
    said = shell(commands, copy)

    assert [language for language, _ in recipe] == ["python", "toml", "python", "sh"]
    assert "written: README.md, docs/findings.md, docs/alerts.md" in said
    assert "`ratio_outliers`" in (copy / "docs" / "findings.md").read_text()
    assert int(re.search(r"(\d+) passed", said)[1]) > 100


def inserted(file: Path, text: str, before: str) -> None:
    """Put ``text`` before the one place of a file that begins with ``before``."""
    old = file.read_text()
    assert old.count(before) == 1, (file, before)
    file.write_text(old.replace(before, text + before))


def test_an_importer_is_a_file_an_entry_and_a_sample(tmp_path: Path):
    """Its suite passes, and so does the test that every registered importer has one."""
    copy = copied(tmp_path, "tests/importers")
    recipe = blocks("Add an importer")
    (module, registered, contract) = [text.split("\n", 1) for language, text in recipe if language == "python"]
    (commands,) = [text for language, text in recipe if language == "sh"]
    new = copy / module[0].removeprefix("# ")
    assert not new.exists()
    new.write_text(module[1])
    registry = copy / registered[0].removeprefix("# ")
    line, entry = registered[1].splitlines(keepends=True)
    inserted(registry, line, before="from rlwatch.importers.trl_console import")
    inserted(registry, entry, before="    TrlConsole(),\n")
    with (copy / contract[0].removeprefix("# ")).open("a") as contracts:
        contracts.write("\n\n" + contract[1])

    said = shell(commands, copy)

    assert int(re.search(r"(\d+) passed", said)[1]) > 10


LOOK_AT_ITS_CHART = """
import sys

sys.path.insert(0, "tests/app")
from app_world import panels, run_page, write_run

from rlwatch.metrics import canonicalise

write_run("runs", source="toy", metrics=lambda step: {"reward": step * 0.01, "toy_points": step % 5})
panel = panels(run_page())["reward/toy"]
assert panel["sub"] == "points · toy_points", panel
assert canonicalise({"ToyReward": 3.0})[0] == {"reward/toy": 3.0}
print("drawn")
"""


def test_a_metric_with_a_panel_is_one_row(tmp_path: Path):
    """The run's page draws it with its unit and what the trainer calls it; a loop of one's own may name it in words."""
    copy = copied(tmp_path, "app", "tests/app")
    [(_, text)] = blocks("Add a metric with a panel")
    file, row = text.split("\n", 1)
    inserted(copy / file.removeprefix("# "), row, before='    Metric("reward/std", ')
    (copy / "look.py").write_text(LOOK_AT_ITS_CHART)

    assert shell("RLWATCH_STORE=runs python look.py", copy).endswith("drawn\n")
