"""Every block of README and docs/ is carried out, or stands below in ``LEFT`` with the reason why it cannot be.

Commands run in this process, in a directory with the logs and the runs of which the pages speak; Python blocks of a page
share their names. What is left out is still held to what there is: its imports, keywords, options, targets and files.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import rlwatch
from rlwatch.cli.app import app
from rlwatch.state import State
from rlwatch.view import stored_verdict

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KNOWN = {"bash", "python", "toml", "yaml", "nginx", "mermaid", "sql", "text"}
"""``text`` is output, and nothing to carry out; ``sql`` is for a server."""
TREE: Any = typer.main.get_command(app)

# (page, a part of the block or line): why it is not carried out here.
LEFT = {
    # Commands
    ("", "rlwatch ui"): "a server; tests/browser starts it",
    ("docs/dashboard.md", "[auth]"): "another program's settings; tests/browser/test_browser_oidc.py",
    ("docs/dashboard.md", "curl "): "a server; tests/browser/test_browser_api.py asks one",
    ("", "rlwatch sync"): "needs PostgreSQL; tests/store/test_store_postgres_shipping.py",
    ("", "postgresql://"): "needs PostgreSQL; tests/store starts one where it is installed",
    ("", "clickhouse-client "): "needs ClickHouse; tests/store has its engine",
    ("", "createdb "): "needs PostgreSQL; tests/store starts one where it is installed",
    ("", "--listen "): "a server; tests/cli/test_cli_serving_metrics.py",
    ("", "--otlp "): "a collector; tests/cli/test_cli_serving_metrics.py",
    ("", "--wait "): "waits for a live trainer; tests/cli and tests/browser have one",
    ("", "--cancel "): "takes back a command that a test would have to make first; tests/cli/test_cli_command.py",
    ("", "rlwatch export wandb "): "a server of wandb; tests/analysis/test_sending.py has one offline",
    ("", "rlwatch export mlflow "): "a server of MLflow; tests/analysis/test_sending.py has a file store",
    ("", "rlwatch alerts ack "): "an alert's id; tests/cli has alerts",
    ("", "rlwatch alerts snooze "): "an alert's id; tests/cli has alerts",
    ("", "rlwatch alerts note "): "an alert's id; tests/cli has alerts",
    ("", "rlwatch forecast judge "): "a past alarm; tests/cli/test_cli_forecast_record.py",
    ("", "rlwatch forecast calibrate "): "2,000 healthy steps; tests/forecast",
    ("", "rlwatch forecast train "): "a corpus of failures; tests/forecast",
    ("", "rlwatch forecast label "): "a corpus of failures; tests/forecast",
    ("", "rlwatch command math-7b-s3 "): "a live trainer; tests/cli and tests/browser have one",
    ("docs/watch.md", "odd.log"): "a log that nobody knows; tests/importers/test_import_pattern.py has some",
    ("", "RLWATCH_FORECAST"): "a training of the reader's",
    ("", "pip install"): "installs; make dist and tests/shipping try what is published",
    ("", "uvx "): "installs; tried by hand from a clone, with uv 0.13",
    ("", "pipx "): "installs; tried by hand from a clone, with pipx 1.18",
    ("", "make "): "is what runs this test, or takes minutes",
    (
        "",
        "--pattern ",
    ): "a log of the reader's; tests/importers/test_import_pattern.py and tests/cli/test_cli_pattern.py",
    ("", "ssh "): "needs another machine",
    ("", "rlwatch serve "): "serves until it is stopped; tests/cli/test_cli_serve.py",
    ("", "rlwatch db copy "): "needs PostgreSQL and ClickHouse; tests/store/test_store_transfer.py",
    ("docs/machine.md", "--engine "): "follows a log and engines elsewhere; tests/cli",
    ("", "python benchmarks/"): "takes minutes",
    ("", "python -m benchmarks."): "takes minutes to days",
    ("", "verl.trainer.main_ppo"): "a training; tests/verl",
    ("", "openrlhf.cli.train_ppo_ray"): "a training; tests/openrlhf",
    ("docs/clusters.md", "#SBATCH"): "needs a cluster",
    ("docs/clusters.md", "export RLWATCH_"): "needs a cluster",
    ("docs/clusters.md", "srun "): "needs a cluster",
    # Python
    ("docs/python.md", ""): "run by tests/analysis/test_open_runs.py",
    ("", "GRPOTrainer(...)"): "a training; examples/trl_grpo.py is one, and is run",
    ("docs/localisation.md", "watch(trainer"): "a training; examples/trl_grpo.py is one, and is run",
    ("docs/layer-clip.md", "clip_layers(trainer)"): "a training; tests/clipping",
    ("docs/layer-clip.md", "LayerClip(policy"): "a loop's middle; examples/layer_clip.py is whole, and is run",
    ("docs/control.md", "Controller("): "a loop's middle; tests/control",
    ("docs/layer-clip.md", "SkipOnSpike("): "a loop's middle; tests/clipping",
    ("", "watcher.observe("): "a loop's middle; examples/own_loop.py is whole, and is run",
    ("docs/machine.md", "dist.all_gather"): "a loop's middle, of several ranks; tests/detectors has the series",
    ("docs/own-loop.md", "nested_tensor"): "a line about the reader's tensors; tests/tensors/test_tensors_padded.py",
    ("docs/own-loop.md", "watcher.state_dict()"): "a loop's middle; tests/integrations",
    ("docs/team-store.md", "rlwatch.init("): "needs PostgreSQL; tests/store",
    ("docs/trackers.md", "tee_wandb("): "takes the place of wandb.log in this process; examples/tee_wandb.py is run",
    ("docs/trainers.md", "run_exp("): "a training of LLaMA-Factory, which asks for an environment of its own",
    ("docs/trainers.md", "swift rlhf "): "a training of ms-swift, which asks for an environment of its own",
    ("docs/trainers.md", "BasePPOExp"): "SkyRL has an environment of its own; tests/nightly",
    ("docs/trainers.md", "register("): "ms-swift has an environment of its own; tests/nightly",
    ("docs/localisation.md", ".spikes()"): "runs with spikes; tests/export",
    # Settings
    ("docs/diagnosis.md", "[my_kind]"): "an entry of the catalogue; tests/test_contributing.py adds one",
    ("docs/stability.md", "entry-points"): "of another package's pyproject; tests/plugins installs one",
    ("docs/dashboard.md", "map $http_upgrade"): "run in nginx by tests/browser/test_browser_proxy.py",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def why_left(self, part: str) -> str | None:
        """The reason, if ``part`` of the block is not carried out."""
        return next((why for (page, has), why in LEFT.items() if page in ("", self.page) and has in part), None)


def blocks(path: Path) -> list[Block]:
    """The blocks of a page in order."""
    page = path.relative_to(ROOT).as_posix()
    tokens = MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8"))
    return [
        Block(page, (token.map or [0])[0] + 1, token.info.strip(), token.content)
        for token in tokens
        if token.type == "fence"
    ]


EVERY = [block for path in PAGES for block in blocks(path)]


def commands(text: str) -> Iterator[str]:
    """Lines of a shell, those that go on joined; comments alone and here-documents left out."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip() and not line.startswith(("# ", "#!")):
            yield line


def test_every_block_says_what_it_is():
    """A block without a language is looked at by nobody."""
    assert [f"{b.page}:{b.line} {b.language!r}" for b in EVERY if b.language not in KNOWN] == []


def test_every_reason_is_still_needed():
    """An entry that fits nothing is taken out."""
    parts = [(b, part) for b in EVERY for part in ([*commands(b.text)] if b.language == "bash" else [b.text])]
    fits = {key for b, part in parts for key in LEFT if key[0] in ("", b.page) and key[1] in part}

    assert set(LEFT) - fits == set()


# Commands.


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs by the names that the pages use, and a store of one run that collapsed and one that is sound."""
    place = tmp_path_factory.mktemp("first-hour")
    logs = ROOT / "sample_logs"
    shutil.copytree(logs, place / "sample_logs", ignore=shutil.ignore_patterns("*.py"))
    shutil.copy(logs / "entropy-collapse-trl-console.log", place / "train.log")
    shutil.copy(logs / "healthy-trl-console.log", place / "sound.log")
    (place / "outputs").mkdir()
    shutil.copy(place / "train.log", place / "outputs" / "seed3.log")
    store = rlwatch_store(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("RLWATCH_STORE", store)
        for log, name in (("train.log", "math-7b-s3"), ("sound.log", "math-7b")):
            assert CliRunner().invoke(app, ["import", log, "--run-id", name]).exit_code == 0
    return place


def rlwatch_store(place: Path) -> str:
    return str(place / "rlwatch-runs")


def options(words: list[str]) -> tuple[list[str], set[str]]:
    """The path of a command in the tree, and the options it has; ``KeyError`` where there is none of the name."""
    command, path = TREE, []
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    return path, {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}


def exists(words: list[str]) -> None:
    """What can be said of a command that is not run: its name and options, its file, its target, its extras."""
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    if words[:1] == ["rlwatch"]:
        _, known = options(rest := words[1:])
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known
    elif words[:1] == ["make"]:
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = {extra for word in words for given in re.findall(r"\[(.+)\]", word) for extra in given.split(",")}
        assert asked <= set(extras)
    elif words[0].startswith("python") and words[1].endswith(".py") and "/" in words[1]:
        assert (ROOT / words[1]).is_file()
    elif words[0].startswith("python") and words[1] == "-m" and words[2].startswith("rlwatch"):
        assert importlib.util.find_spec(words[2]) is not None


BASH = sorted({block.page for block in EVERY if block.language == "bash"})


@pytest.mark.parametrize("page", BASH)
def test_its_commands_work(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch):
    """Exit code 2 is "the request is wrong"; 1 is what a crashed log gives."""
    for name in [name for name in os.environ if name.startswith("RLWATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLWATCH_STORE", rlwatch_store(workplace))
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(workplace / "state"))
    monkeypatch.chdir(workplace)
    (workplace / "rlwatch.toml").unlink(missing_ok=True)
    for block in [block for block in EVERY if block.page == page and block.language == "bash"]:
        for line in commands(block.text):
            words = shlex.split(line, comments=not line.startswith("#"))
            if block.why_left(line):
                exists(words)
                continue
            assert words[0] == "rlwatch", f"{page}: {line!r} is neither run nor in LEFT"
            asked = words[1 : words.index(">")] if ">" in words else words[1:]
            result = CliRunner().invoke(app, asked)
            assert result.exit_code in (0, 1), f"{page}: {line}\n{result.output}"
            assert result.exception is None or isinstance(result.exception, SystemExit), f"{page}: {line}"


# Python.


GIVEN: dict[str, dict[str, Any]] = {
    "docs/webhook.md": {"secret": "s" * 20, "timestamp": "1", "body": b"{}", "signature": "sha256=0", "time": time},
}
"""What the Python of a page takes for granted, besides ``rlwatch``."""

SOUND = (State.HEALTHY, State.NOT_JUDGED)
"""What is said of a run that a page makes; one of a few rows is not judged."""

PYTHON = sorted({block.page for block in EVERY if block.language == "python"})


@pytest.mark.parametrize("page", PYTHON)
def test_its_python_runs(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, each with the names of those before it; of what is left out, imports and keywords.

    A run that a page makes is sound, and said to be.
    """
    monkeypatch.setenv("RLWATCH_STORE", "memory://first-hour")
    monkeypatch.chdir(workplace)
    names: dict[str, Any] = {"rlwatch": rlwatch, **GIVEN.get(page, {})}
    before = {info.run_id for info in rlwatch.open_store("memory://first-hour").runs()}
    for block in [block for block in EVERY if block.page == page and block.language == "python"]:
        if block.why_left(block.text):
            keywords_are_known(block)
        else:
            exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
    store = rlwatch.open_store("memory://first-hour")
    said = {info.run_id: stored_verdict(store, info) for info in store.runs() if info.run_id not in before}
    assert {name: verdict.text for name, verdict in said.items() if verdict.state not in SOUND} == {}


def keywords_are_known(block: Block) -> None:
    """Names that are imported exist, and what is called by a known name has the parameters given to it.

    Read from the sources: importing a trainer to look at a signature takes longer than all that is run here.
    """
    tree, known = ast.parse(block.text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlwatch"):
            known |= {one.asname or one.name: declared(node.module or "", one.name) for one in node.names}
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        where = ast.unparse(call.func)
        owner, _, name = where.rpartition(".")
        if owner == "rlwatch":
            definition = declared(HOMES[name], name)
        elif owner == "watcher":
            definition = WATCHER[name]
        else:
            definition = known.get(where)
        if definition is not None:
            asked = {keyword.arg for keyword in call.keywords if keyword.arg}
            assert asked <= parameters(definition) or parameters(definition) >= {"**"}, (
                f"{block.page}:{block.line} {where}"
            )


HOMES = ast.literal_eval(
    next(
        node.value
        for node in ast.parse((ROOT / "rlwatch" / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
)
"""Module of each public name."""


def declared(module: str, name: str) -> ast.stmt:
    """The definition of a name, through what re-exports it."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return declared(node.module or "", name)
    raise AssertionError(f"{module} has no {name}")


WATCHER = {
    node.name: node
    for node in ast.walk(ast.parse((ROOT / "rlwatch" / "integrations" / "torch" / "attach.py").read_text()))
    if isinstance(node, ast.FunctionDef)
}
"""What a ``Watcher`` is told by."""


def parameters(definition: ast.stmt) -> set[str]:
    """What may be given by keyword; ``**`` if anything may. Of a class, what its ``__init__`` takes, or its fields."""
    if isinstance(definition, ast.ClassDef):
        made = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not made:
            return {ast.unparse(node.target) for node in definition.body if isinstance(node, ast.AnnAssign)}
        (definition,) = made
    assert isinstance(definition, ast.FunctionDef)
    taken = definition.args
    return {one.arg for one in (*taken.args, *taken.kwonlyargs)} | ({"**"} if taken.kwarg else set())


# Settings.


@pytest.mark.parametrize(
    "block", [b for b in EVERY if b.language in ("toml", "yaml")], ids=lambda b: f"{b.page}:{b.line}"
)
def test_its_settings_are_read(block: Block, workplace: Path):
    """TOML of ``rlwatch.toml`` is taken by the rules that apply, with channels that are there."""
    from rlwatch.alerts.config import load_config

    if block.language == "yaml":
        assert yaml.safe_load(block.text)
        return
    assert tomllib.loads(block.text)
    if not block.why_left(block.text):
        (file := workplace / "block.toml").write_text(block.text)
        load_config(
            file, env={"SLACK_URL": "https://hooks.slack.com/x", "PAGERDUTY_URL": "https://events.pagerduty.com/x"}
        )
