"""The wheel as people install it: under each Python that is claimed, with each extra, in an environment that has nothing else.

What is built is what a release would be. In each environment the package is imported and scans a list and a log; where the
command is installed, it scans the log too, and ``rlwatch doctor`` must call the extra complete; where the dashboard is, it
must start (``rlwatch ui --check``). Then the tests of rooms that need no torch run under each Python, with all extras that
bring none; of these rooms what needs a trainer all the same is skipped and counted.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from environment import BUILD, QUIET, ROOT, TESTING, Outcome, cpu_torch, last_line, read, run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOG = ROOT / "sample_logs" / "entropy-collapse-trl-console.log"
TOOLS, HOME, WHEEL = BUILD / "tools", BUILD / "install", BUILD / "wheel"
TRAINERS = {
    "verl": "its requirements have rooms of their own",
    "openrlhf": "it pins versions that need a GPU, and has a room of its own",
}
"""Extras that are never tried here, and why."""
LIGHT = """
import json, sys
from pathlib import Path
import rlwatch
heavy = {"torch", "pandas", "sklearn", "streamlit"} & set(sys.modules)
assert not heavy, f"import rlwatch imports {heavy}"
assert Path(rlwatch.__file__).is_relative_to(sys.prefix), rlwatch.__file__
assert rlwatch.scan([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]).steps == 2
found = {one.kind for one in rlwatch.scan(sys.argv[1]).findings}
assert "entropy_collapse" in found, found
"""
TORCHLESS = (
    "tests/alerts", "tests/analysis", "tests/app", "tests/catalogue", "tests/cli", "tests/compare", "tests/control",
    "tests/detectors", "tests/diagnosis", "tests/forecast", "tests/importers", "tests/layers", "tests/link",
    "tests/monitor", "tests/notify", "tests/recorder", "tests/report", "tests/rollouts", "tests/run", "tests/sample_logs",
    "tests/security", "tests/stats", "tests/store", "tests/text", "tests/vocabulary",
)  # fmt: skip
HELPERS = (
    "jsonschema",
    "markdown-it-py",
    "pyyaml",
    "check-jsonschema",
    "kubernetes-validate",
    "chdb-core",
    "pytest-xdist",
)


def everywhere(pythons: list[str] | None, limit_s: float) -> list[Outcome]:
    """A row for each Python; those that are claimed and not found have one that says so."""
    tools = Outcome("install")
    shutil.rmtree(TOOLS, ignore_errors=True)
    for folder in (TOOLS, HOME, WHEEL):
        folder.mkdir(parents=True, exist_ok=True)
    log = BUILD / "install.log"
    build = [str(TOOLS / "bin" / "python"), "-m", "build", "--outdir", str(WHEEL), str(ROOT)]
    for step in (
        [sys.executable, "-m", "venv", str(TOOLS)],
        [str(TOOLS / "bin" / "python"), *QUIET, "build", "uv"],
        build,
    ):
        ended = run(step, limit_s, log)
        if ended:
            tools.failed.append(f"no wheel ({ended}): {last_line(log)}")
            return [tools]
    wheel = max(WHEEL.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    found = {python: python for python in pythons or ()} or {name: shutil.which(name) for name in claimed()}
    return [under(name, python, wheel, limit_s) for name, python in found.items()]


def claimed() -> list[str]:
    """Names of the interpreters of the classifiers."""
    return [f"python{one.rpartition(' ')[2]}" for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)]


def under(name: str, python: str | None, wheel: Path, limit_s: float) -> Outcome:
    """Every extra under one Python, then the tests."""
    outcome, began = Outcome(f"install {name}"), time.monotonic()
    version = [python, "-c", "import platform; print(platform.python_version())"] if python else ["false"]
    asked = subprocess.run(version, capture_output=True, text=True, check=False)
    if not python or asked.returncode:
        outcome.failed.append(f"{name} is claimed and not on PATH; --python names one")
        return outcome
    outcome.name = f"install {asked.stdout.strip()}"
    torch = cpu_torch(python)
    left_out = dict(TRAINERS)
    if not torch.read_text():
        left_out |= dict.fromkeys(with_torch(), "no index here has a torch for CPUs")
    for extra in ["", *extras()]:
        if extra in left_out:
            outcome.skipped += 1
            continue
        reason = tried(python, wheel, extra, torch, limit_s)
        outcome.passed += not reason
        outcome.failed += [f"[{extra}]: {reason}"] if reason else []
    reasons: dict[str, list[str]] = {}
    for extra, why in left_out.items():
        reasons.setdefault(why, []).append(extra)
    outcome.versions = "left out: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
    tested(python, outcome, limit_s)
    outcome.seconds = time.monotonic() - began
    return outcome


def extras() -> list[str]:
    """Those for people who use rlwatch."""
    return [one for one in PROJECT["optional-dependencies"] if not one.startswith("dev")]


def required(extra: str) -> set[str]:
    """Names of what an extra asks for, by the extras that it names too."""
    own = PROJECT["optional-dependencies"][extra]
    inner = [match[1].split(",") for one in own if (match := re.match(r"rlwatch-monitor\[(.+)\]", one))]
    return {re.split(r"[\[<>=]", one)[0] for one in own}.union(*(required(name) for names in inner for name in names))


def with_torch() -> list[str]:
    """Extras that bring torch."""
    return [extra for extra in extras() if "torch" in required(extra)]


def environment(python: str, home: Path, wanted: list[str], limit_s: float, log: Path) -> str:
    """Make an environment that has what is wanted; why it could not be, or an empty string."""
    uv = str(TOOLS / "bin" / "uv")
    shutil.rmtree(home, ignore_errors=True)
    for step in (
        [uv, "venv", "--quiet", "--python", python, str(home)],
        [uv, "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), *wanted],
    ):
        ended = run(step, limit_s, log)
        if ended:
            return f"not installed ({ended}): {last_line(log)}"
    return ""


def tried(python: str, wheel: Path, extra: str, torch: Path, limit_s: float) -> str:
    """Install one extra and use what it brings; what was wrong, or an empty string."""
    home, log = HOME / (extra or "none"), BUILD / f"install-{extra or 'none'}.log"
    wanted = f"rlwatch-monitor[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    reason = environment(python, home, [wanted, "-c", str(torch)], limit_s, log)
    reason = reason or next(filter(None, (check(home, extra, log, limit_s) for check in CHECKS)), "")
    shutil.rmtree(home, ignore_errors=True)
    return reason


def imports(home: Path, extra: str, log: Path, limit_s: float) -> str:
    """Is the package light, and does it judge?"""
    ended = run([str(home / "bin" / "python"), "-c", LIGHT, str(LOG)], limit_s, log, where=home, PYTHONPATH="")
    return f"from Python: {last_line(log)}" if ended else ""


def command(home: Path, extra: str, log: Path, limit_s: float) -> str:
    """Does the command find the crash; where it is not installed, does it say how it would be?"""
    ended = run([str(home / "bin" / "rlwatch"), "scan", str(LOG)], limit_s, log, where=home, PYTHONPATH="")
    wanted, words = ("exit code 1", "entropy") if has(home, "typer") else ("exit code 2", "rlwatch-monitor[cli]")
    said = log.read_text()
    return "" if ended == wanted and words in said else f"rlwatch scan: {ended or 'exit code 0'}: {last_line(log)}"


def doctor(home: Path, extra: str, log: Path, limit_s: float) -> str:
    """Is the extra complete, and is nothing wrong?"""
    if not has(home, "typer"):
        return ""
    asks = [str(home / "bin" / "rlwatch"), "doctor", "--format", "json", "--store", str(home / "runs")]
    ended = run(asks, limit_s, log, where=home, PYTHONPATH="")
    if ended:
        return f"rlwatch doctor: {ended}: {last_line(log)}"
    levels = {one["name"]: one["level"] for one in json.loads(log.read_text())}
    level = levels.get(f"extra {extra}", "ok")
    return "" if level == "ok" else f"rlwatch doctor calls the extra {level}"


def dashboard(home: Path, extra: str, log: Path, limit_s: float) -> str:
    """Does it start?"""
    if not has(home, "streamlit"):
        return ""
    ended = run([str(home / "bin" / "rlwatch"), "ui", "--check"], limit_s, log, where=home, PYTHONPATH="")
    return f"rlwatch ui --check: {ended}: {last_line(log)}" if ended else ""


CHECKS: tuple[Callable[[Path, str, Path, float], str], ...] = (imports, command, doctor, dashboard)


def has(home: Path, package: str) -> bool:
    """Is a package installed there?"""
    return any(home.glob(f"lib/python*/site-packages/{package}"))


def tested(python: str, outcome: Outcome, limit_s: float) -> None:
    """The tests that need no torch, of this checkout."""
    home, log, report = HOME / "tests", BUILD / f"{outcome.name}.log", BUILD / f"{outcome.name}.xml"
    report.unlink(missing_ok=True)
    light = [one for one in extras() if one not in with_torch() and one not in TRAINERS]
    wanted = ["-e", f"{ROOT}[{','.join(light)}]", *TESTING, *HELPERS]
    reason = environment(python, home, wanted, limit_s, log)
    if reason:
        outcome.failed.append(f"tests: {reason}")
        return
    command = [
        str(home / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile",
        "--timeout=600", "-m", "not torch and not thorough and not browser", f"--junitxml={report}", "-p", "torchless",
        *TORCHLESS,
    ]  # fmt: skip
    read(report, outcome, run(command, limit_s, log, PYTHONPATH=str(Path(__file__).parent)))
