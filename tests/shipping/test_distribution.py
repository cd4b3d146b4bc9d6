"""What is shipped beside the package says what the package says: recipe, hooks, action, workflow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CRASHED, HEALTHY = "entropy-collapse-trl-console.log", "healthy-trl-console.log"


def document(path: str):
    return yaml.safe_load((ROOT / path).read_text())


def required(extra: str) -> set[str]:
    """Requirements of an extra with those of the extras it names."""
    own = {one.replace(" ", "") for one in PROJECT["optional-dependencies"][extra]}
    inner = {
        name for one in own if (match := re.fullmatch(r"rlwatch-monitor\[(.+)\]", one)) for name in match[1].split(",")
    }
    return {one for one in own if "[" not in one} | {one for name in inner for one in required(name)}


def test_the_recipe_of_conda_asks_for_what_the_command_needs_in_this_version():
    """Nothing is written twice and different."""
    recipe = document("conda/recipe.yaml")
    run = {one.replace(" ", "") for one in recipe["requirements"]["run"]}

    assert recipe["context"]["version"] == PROJECT["version"]
    assert run == {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"], *required("cli")}
    assert recipe["build"]["python"]["entry_points"] == [f"rlwatch = {PROJECT['scripts']['rlwatch']}"]


def test_all_is_all_but_the_trainers_with_a_transformers_of_their_own_and_the_weights():
    """An extra that is added and forgotten there would be missed by whoever asks for all; ``smollm2`` is 93 MB."""
    extras = set(PROJECT["optional-dependencies"]) - {"all", "dev", "dev-verl", "verl", "openrlhf", "smollm2"}

    assert {extra for extra in extras if not required(extra) <= required("all")} == set()


def test_the_hook_installs_what_the_command_needs():
    """pre-commit installs the package without extras."""
    (hook,) = document(".pre-commit-hooks.yaml")

    assert set(hook["additional_dependencies"]) == required("cli")
    assert re.search(hook["files"], "outputs/checkpoint-5/trainer_state.json")


def test_a_release_is_tried_on_every_python_that_is_claimed():
    """The classifiers say what is tried."""
    matrix = document(".github/workflows/release.yml")["jobs"]["install"]["strategy"]["matrix"]
    claimed = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)]

    assert matrix["python"] == claimed
    assert {extra.strip("[]") for extra in matrix["extra"]} - {""} <= set(PROJECT["optional-dependencies"])


def test_a_pull_request_is_checked_by_what_a_developer_runs():
    """The workflow has no steps of its own that could differ."""
    workflow = document(".github/workflows/test.yml")

    assert "pull_request" in workflow[True]  # YAML reads ``on`` as true
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == ["bash .ci/run"]


@pytest.mark.parametrize(
    ("logs", "fail_on", "code", "output"),
    [
        ([HEALTHY], "critical", 0, "0"),
        ([CRASHED, HEALTHY], "critical", 1, "1"),
        ([CRASHED], "never", 0, "1"),
        (["README.md"], "critical", 2, "2"),
    ],
)
def test_the_action_annotates_summarises_and_fails_where_it_should(tmp_path, logs, fail_on, code, output):
    """Its own script, with the command of this checkout."""
    (scan,) = [step for step in document("action.yml")["runs"]["steps"] if step.get("id") == "scan"]
    command = tmp_path / "rlwatch" / "bin" / "rlwatch"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rlwatch.cli "$@"\n')
    command.chmod(0o755)
    told, summary = tmp_path / "output", tmp_path / "summary"
    given = {
        "RUNNER_TEMP": str(tmp_path),
        "LOGS": "\n".join(str(ROOT / "sample_logs" / log) for log in logs),
        "CONFIG": "",
        "FAIL_ON": fail_on,
        "GITHUB_OUTPUT": str(told),
        "GITHUB_STEP_SUMMARY": str(summary),
    }

    # as GitHub runs `shell: bash`
    ran = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", scan["run"]],
        env={**os.environ, **given}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (ran.returncode, told.read_text()) == (code, f"code={output}\n"), ran.stderr
    assert ("::error file=" in ran.stdout) is (output == "1")
    assert (summary.read_text().count("| ") > 2) is (output != "2")
