"""Seeds of property tests are fixed, and garbage collections skip what was there before the first test.

The same commit passes or fails everywhere; ``pytest --hypothesis-profile explore`` draws new examples at every run,
and more of them.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestItem, DoctestModule
from hypothesis import HealthCheck, settings

# No deadline: a machine that is busy with something else is no fault of the code, nor of what draws the examples.
SLOW = [HealthCheck.too_slow]
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile("explore", derandomize=False, print_blob=True, deadline=None, suppress_health_check=SLOW)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _runs_of_examples(request: pytest.FixtureRequest) -> None:
    """Examples of ``rlwatch.open`` speak of ``runs``: ``run``, one of five steps, and two that part at step 30."""
    if isinstance(request.node, DoctestItem) and request.node.name.startswith("rlwatch.analysis.runs."):
        request.getfixturevalue("doctest_namespace").update(request.getfixturevalue("example_runs"))


@pytest.fixture(scope="session")
def example_runs() -> dict[str, object]:
    """These runs by the names that the examples give them."""
    import math

    import numpy as np

    import rlwatch
    from rlwatch.records import CULPRITS, CompletionBatch, SpikeBatch

    def record(name: str, lr: float, rows: list[dict[str, float]], *more: SpikeBatch | CompletionBatch) -> None:
        with rlwatch.init(project="docs", name=name, run_id=name, config={"lr": lr}, store="memory://examples") as run:
            for step, row in enumerate(rows, start=1):
                run.log(row, step=step)
            for one in more:
                run.log_spikes(one) if isinstance(one, SpikeBatch) else run.log_completions(one)

    token = {"position": np.array([7]), "text": [" is"], "cause": ["token ratio"], "own_norm": np.array([32.5])}
    answer = {"prompt": ["1+1="], "completion": ["2"], "reward": np.ones(1)}
    more = SpikeBatch(5, token, reason=CULPRITS), CompletionBatch(5, answer)
    rewards = [0.5 + 0.01 * math.sin(step) for step in range(1, 51)]
    record("seed-3", 1e-6, [{"reward": reward if step < 29 else 0.1} for step, reward in enumerate(rewards)])
    record("seed-2", 2e-6, [{"reward": reward} for reward in rewards])
    record(
        "seed-1",
        1e-6,
        [{"reward": s / 4, "entropy": 0.9} for s in range(1, 5)] + [{"reward": 1.0, "entropy": math.nan}],
        *more,
    )
    runs = rlwatch.open("memory://examples")
    return {"rlwatch": rlwatch, "runs": runs, "run": runs["seed-1"]}


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """No test has examples in its docstrings: looking for them also runs what tests start as programs."""
    collectors = yield
    in_tests = file_path.is_relative_to(Path(__file__).parent / "tests")
    return [one for one in collectors if not (in_tests and isinstance(one, DoctestModule))]


os.environ.setdefault("RLWATCH_SYSTEM", "0")  # a look at the machine would go with some row of a run, if it takes long

PROCESSES = "RLWATCH_TEST_PROCESSES"


def pytest_configure(config: pytest.Config) -> None:
    """Where all workers find the server of ``tests/processes``, which lives as long as this process."""
    if not hasattr(config, "workerinput") and PROCESSES not in os.environ:
        os.environ[PROCESSES] = f"{tempfile.mkdtemp(prefix='rlwatch-processes-')}:{os.getpid()}"


def pytest_unconfigure() -> None:
    """Whoever made the folder removes it."""
    folder, _, tests = os.environ.get(PROCESSES, "").rpartition(":")
    if tests == str(os.getpid()):
        shutil.rmtree(folder, ignore_errors=True)


LONGEST = (
    "tests/browser/",
    "tests/test_examples.py",
    "tests/ranks/",
    "tests/integrations/",
    "tests/localising/",
    "tests/demo/",
)
"""Where tests wait for other processes or train: begun first, so that no worker is left alone with them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of their names otherwise."""
    items.sort(
        key=lambda item: next((n for n, room in enumerate(LONGEST) if item.nodeid.startswith(room)), len(LONGEST))
    )


def pytest_sessionstart() -> None:
    """What is imported and collected stays: the search for garbage in it took a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """It is left out from now on: every training of TRL looked through all of it for garbage."""
    gc.freeze()
    gc.enable()
