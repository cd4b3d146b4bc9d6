"""The integrations against the newest versions the registry serves, and against the verl releases the docs name.

    make nightly [ARGS="--only trl --minutes 20"]

Each room gets a fresh environment of its own, its tests run with a time limit, and a summary says which versions were
met, what failed, and what could not be installed: on the terminal and in ``build/nightly/summary.md``. Ends with 1 if
anything failed. Needs the network; nothing of it is part of ``make test``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import installs
from environment import BUILD, QUIET, ROOT, TESTING, Outcome, cpu_torch, last_line, read, run

NAMED = ("trl", "transformers", "torch", "ms-swift", "skyrl", "areal", "verl", "openrlhf", "ray", "streamlit", "wandb", "tensorboard", "mlflow-skinny", "accelerate",
         "deepspeed", "megatron-core", "aim", "vllm")  # fmt: skip


@dataclass(frozen=True)
class Room:
    """Tests, and the environment they run in.

    ``bare``: requirements whose own requirements are not installed. ``cpu``: with the newest torch built for CPUs alone,
    which may be older than the newest.
    """

    name: str
    requires: tuple[str, ...]
    tests: tuple[str, ...]
    bare: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    cpu: bool = True


TRL = (
    "tests/integrations/test_trl_taps.py", "tests/integrations/test_trl_harmless.py",
    "tests/integrations/test_trl_gradients.py", "tests/integrations/test_trl_reset.py",
    "tests/integrations/test_trl_kinds.py", "tests/integrations/test_transformers_watch.py",
)  # fmt: skip
VERL = ("TransferQueue>=0.1.10", "orjson", "cachetools", "fastapi", "uvicorn")
SWIFT = (
    "transformers<5.20", "trl<1.0", "peft<0.21", "addict", "aiohttp", "attrdict", "binpacking", "charset-normalizer", "dacite",
    "datasets<4.8.5", "einops", "fastapi", "importlib-metadata", "json-repair", "matplotlib", "modelscope>=1.23", "msgspec", "nltk",
    "openai", "oss2", "pandas", "pillow", "requests", "rouge", "scipy", "sentencepiece", "simplejson", "sortedcontainers",
    "tensorboard", "tiktoken", "transformers-stream-generator", "uvicorn", "zstandard",
)  # fmt: skip
"""What ms-swift 4.6 imports for GRPO; one of its other requirements (``cpm-kernels``) is for GPUs."""
SKYRL = (
    "transformers>=5.6.1,<=5.8.0", "ray==2.60.0", "loguru", "omegaconf", "jaxtyping", "tensordict", "datasets", "torchdata",
    "peft==0.18.1", "hydra-core", "cloudpathlib", "fsspec", "accelerate", "aiohttp", "tensorboardX", "uvloop", "typer", "pybase64",
    "fastapi", "uvicorn", "orjson", "msgspec", "pyzmq", "pandas",
)  # fmt: skip
AREAL = (
    "transformers<=5.3.0,>=5.0.0", "ray==2.60.0", "colorlog", "omegaconf", "hydra-core==1.3.8", "tensordict", "datasets",
    "torchdata", "peft<=0.18.1", "tenacity", "aiofiles", "aiohttp", "tensorboardX", "uvloop", "pybase64", "fastapi", "uvicorn",
    "orjson", "msgspec", "pyzmq", "tabulate", "swanlab", "trackio", "wandb", "einops", "pandas", "prettytable", "setproctitle",
    "math-verify", "python-dotenv", "openai-agents", "numba", "nvidia-ml-py", "flask", "anthropic", "openai", "zstandard",
    "pebble", "pillow", "lark",
)  # fmt: skip
"""What the trainers' modules import, without the engines."""
ROOMS = (
    Room("trl", ("trl", "transformers", "peft", "tokenizers"), TRL),
    Room("trl-newest-torch", ("torch", "trl", "transformers", "peft", "tokenizers"), TRL, cpu=False),
    Room("trl-oldest", ("trl==1.0.0", "transformers==5.0.0", "accelerate==1.4.0", "requests"), ("tests/nightly/test_oldest_trl.py",)),
    Room(
        "trl-deepspeed",
        ("trl", "transformers", "tokenizers", "einops", "hjson", "ninja", "py-cpuinfo", "msgpack", "pydantic", "psutil"),
        ("tests/nightly/test_deepspeed_trl.py",),
        bare=("deepspeed",),
        flags=("--timeout=6000",),
    ),
    Room("swift", SWIFT, ("tests/nightly/test_swift.py",), bare=("ms-swift==4.6.0",)),
    Room("skyrl", SKYRL, ("tests/nightly/test_skyrl_names.py",), bare=("skyrl==0.3.0",)),
    Room("areal", AREAL, ("tests/nightly/test_areal_names.py",), bare=("areal==1.0.4",)),
    Room("verl", ("verl", *VERL), ("tests/verl",)),
    Room(
        "openrlhf",
        ("torch", "transformers", "ray", "peft", "numpy"),
        ("tests/openrlhf", "--ignore=tests/openrlhf/test_openrlhf_end_to_end.py"),
        bare=("openrlhf", "deepspeed"),
    ),
    Room(
        "megatron",
        ("verl", *VERL),
        ("tests/nightly/test_megatron_verl.py", "tests/nightly/test_megatron_loop.py"),
        bare=("megatron-core",),
    ),
    Room("streamlit", ("streamlit",), ("tests/app",)),
    Room(
        "trackers",
        ("wandb", "tensorboard", "tensorboardX", "torch", "mlflow-skinny", "pandas", "pyarrow"),
        (
            "tests/integrations/test_tee_wandb.py",
            "tests/integrations/test_tee_tensorboard.py",
            "tests/integrations/test_tee_mlflow.py",
            "tests/analysis/test_sending.py",
        ),
    ),
    Room("aim", ("aim",), ("tests/nightly/test_aim.py",)),
    Room("vllm", ("numpy",), ("tests/nightly/test_vllm_names.py",), bare=("vllm",)),
)  # fmt: skip
NAMES_OF = ("trl", "verl", "openrlhf")
"""Rooms whose trainer's own sources are searched for names of metrics."""
OLD_VERL = ("0.5.0", "0.6.1", "0.7.1", "0.8.0")
"""Releases before plugins: installed without their requirements over the room of the newest verl."""


def main() -> int:
    """Run the rooms; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(room.name for room in ROOMS), "verl-old", "install"]
    parser.add_argument("--only", action="append", choices=names, help="a room; may be given again")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="most for the installation and for the tests of a room"
    )
    parser.add_argument("--keep", action="store_true", help="use environments that an earlier run left")
    parser.add_argument(
        "--python", action="append", metavar="PATH", help="of `install`: an interpreter instead of those claimed; again"
    )
    args = parser.parse_args()
    wanted = args.only or names
    limit_s = args.minutes * 60
    rooms = [room for room in ROOMS if room.name in wanted or (room.name == "verl" and "verl-old" in wanted)]
    outcomes = [enter(room, limit_s, keep=args.keep, test=room.name in wanted) for room in rooms]
    if "verl-old" in wanted:
        outcomes += [old_verl(version, limit_s) for version in OLD_VERL]
    if "install" in wanted:
        outcomes += installs.everywhere(args.python, limit_s)
    lines = ["| room | versions | passed | skipped | failed | seconds |", "|---|---|---|---|---|---|"]
    text = "\n".join([*lines, *(outcome.row for outcome in outcomes)])
    (BUILD / "summary.md").write_text(text + "\n")
    print(text)
    return int(any(outcome.failed for outcome in outcomes))


def enter(room: Room, limit_s: float, *, keep: bool, test: bool = True) -> Outcome:
    """Make the room's environment and run its tests in it."""
    outcome, began, home = Outcome(room.name), time.monotonic(), BUILD / room.name
    python = home / "bin" / "python"
    if not (keep and python.exists()):
        reason = installed(room, home, python, limit_s)
        if reason:
            outcome.failed.append(reason)
            return outcome
    outcome.versions = versions(python)
    if test:
        report = BUILD / f"{room.name}.xml"
        report.unlink(missing_ok=True)
        command = [
            str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", f"--junitxml={report}",
            *room.flags, *room.tests,
        ]  # fmt: skip
        ended = run(command, limit_s, BUILD / f"{room.name}.log")
        read(report, outcome, ended)
    if test and room.name in NAMES_OF:
        log = BUILD / f"{room.name}.names.log"
        ended = run([str(python), "tests/nightly/names.py", room.name], limit_s, log, PYTHONPATH=str(ROOT))
        if ended:
            outcome.failed.append(f"names of metrics that nothing knows ({ended}), see {log}")
    outcome.seconds = time.monotonic() - began
    return outcome


def installed(room: Room, home: Path, python: Path, limit_s: float) -> str:
    """Why the environment could not be made, or an empty string."""
    shutil.rmtree(home, ignore_errors=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    log = BUILD / f"{room.name}.install.log"
    pip = [str(python), *QUIET]
    torch = ["-c", str(cpu_torch())] if room.cpu else []
    steps = [
        [sys.executable, "-m", "venv", str(home)],
        [*pip, *torch, *room.requires, *TESTING, "-e", f"{ROOT}[cli,notify]"],
    ]
    steps += [[*pip, "--no-deps", *room.bare]] if room.bare else []
    for step in steps:
        ended = run(step, limit_s, log)
        if ended:
            return f"not installed ({ended}): {last_line(log)}"
    return ""


def old_verl(version: str, limit_s: float) -> Outcome:
    """verl's own ``run_ppo`` and loop of a release before 0.9, started by the launcher: are its scalars there?"""
    outcome, began = Outcome(f"verl {version}"), time.monotonic()
    python, target, store = BUILD / "verl" / "bin" / "python", BUILD / f"verl-{version}", BUILD / f"store-{version}"
    log = BUILD / f"verl-{version}.log"
    shutil.rmtree(store, ignore_errors=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(target)]
    ended = run([*pip, f"verl=={version}"], limit_s, log)
    if not ended:
        fit = [str(python), "-m", "rlwatch.integrations.verl", "tests/verl/legacy_fit.py", str(store)]
        ended = run(fit, limit_s, log, PYTHONPATH=f"{target}{os.pathsep}{ROOT}")
    if ended:
        outcome.failed.append(f"launcher: {ended}, see {log}")
    code = (
        "import sys, rlwatch; store = rlwatch.open_store(sys.argv[1]); (run,) = store.runs(); "
        "steps = {r.step: r.metrics for r in store.records(run.run_id)}; "
        "assert str(run.state) == 'finished' and set(steps) == {1, 2, 3}, (run.state, set(steps)); "
        "assert 'critic/score/mean' in steps[1]; print(len(steps[1]), 'scalars a step')"
    )
    out = subprocess.run([str(python), "-c", code, str(store)], capture_output=True, text=True, check=False)
    outcome.passed = int(out.returncode == 0)
    outcome.versions = f"verl {version}: {out.stdout.strip()}" if outcome.passed else f"verl {version}"
    if out.returncode:
        outcome.failed.append(f"no scalars: {out.stderr.strip().splitlines()[-1][:200]}")
    outcome.seconds = time.monotonic() - began
    return outcome


def versions(python: Path) -> str:
    """Of what matters, as it was installed."""
    code = (
        "from importlib.metadata import distributions as d\nfor x in d(): print(x.metadata['Name'].lower(), x.version)"
    )
    out = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    found = dict(line.split(" ", 1) for line in out.stdout.splitlines() if " " in line)
    return ", ".join(f"{name} {found[name]}" for name in NAMED if name in found)


if __name__ == "__main__":
    sys.exit(main())
