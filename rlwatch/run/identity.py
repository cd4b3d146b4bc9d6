"""Identity of a run: its id, and its origin (the code, command, packages and machine it is started with).

The id is given, read from a file in the checkpoint directory, or generated. The origin is stored among the settings
under :data:`~rlwatch.records.ORIGIN`, for each attempt, so that it is compared and searched like other settings. Values
that are named or look like secrets are redacted. Of the environment only :data:`VARIABLES` are read.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from rlwatch.errors import ConfigError
from rlwatch.plugins import installed
from rlwatch.records import JSON
from rlwatch.redaction import MAX_TEXT, redacted

PATIENCE_S = 2.0
"""Seconds to wait for a program; without its output the entry is left out."""
PACKAGES = (
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "flash-attn", "huggingface-hub", "jax", "liger-kernel",
    "megatron-core", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "openrlhf", "peft", "ray", "rlwatch-monitor",
    "sglang", "tensordict", "tokenizers", "torch", "torchtitan", "transformer-engine", "transformers", "triton", "trl",
    "unsloth", "verl", "vllm", "xformers",
)  # fmt: skip
"""Distributions whose versions influence how a training behaves."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "WORLD_SIZE")
GPU = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def origin() -> dict[str, JSON]:
    """Return where this process comes from: command, directory, code version, packages, machine, environment.

    Parts that cannot be determined are left out. Secrets are redacted.
    """
    directory = _directory()
    found: dict[str, JSON] = {
        "command": redacted(shlex.join(sys.orig_argv), most=MAX_TEXT),
        "directory": redacted(directory),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "cpus": str(os.cpu_count() or ""),
        "gpus": gpus(),
        "git": {**git(directory)} if directory else {},
        "packages": {**packages()},
        "environment": {name: redacted(os.environ[name]) for name in VARIABLES if os.environ.get(name)},
    }
    return {name: value for name, value in found.items() if value}


@cache
def git(directory: str) -> dict[str, str]:
    """Return ``commit`` and ``branch`` of the code in a directory, and the number of ``changed_files``; empty without
    git.
    """
    names = (_answer("git", "-C", directory, "rev-parse", "HEAD", "--abbrev-ref", "HEAD") or "").splitlines()
    if not names:
        return {}
    changed = _answer("git", "-C", directory, "status", "--porcelain", "--untracked-files=no")
    dirty = {} if changed is None else {"changed_files": str(len(changed.splitlines()))}
    return {**dict(zip(("commit", "branch"), names, strict=False)), **dirty}


@cache
def gpus() -> str:
    """Return the GPUs of the machine as text, grouped by kind: ``8 x NVIDIA H100 ...``; empty without nvidia-smi."""
    names = (_answer(*GPU) or "").splitlines()
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


@cache
def packages() -> dict[str, str]:
    """Return package -> version for those of :data:`PACKAGES` that are installed."""
    known = installed()
    if known is None:
        return {name: version for name in PACKAGES if (version := _version(name))}
    there = {name: known[name][0] or _version(name) for name in PACKAGES if name in known}
    return {name: version for name, version in there.items() if version}


def _version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed. Parsing all of its metadata, with its
    README, takes ten times as long.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # takes 7 ms, and is rarely needed

    try:
        known = distribution(package)
    except PackageNotFoundError:
        return ""
    line = re.search(r"^Version: *(\S+)\s*$", known.read_text("METADATA") or "", re.MULTILINE)
    return line[1] if line else known.version


def _directory() -> str:
    """Return the working directory; empty if it has been removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _answer(*arguments: str) -> str | None:
    """Return the output of a program; None if it is not installed, fails or is too slow."""
    program = shutil.which(arguments[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


# The run's id: given, read from the checkpoint directory, or generated.

REMEMBERED = "rlwatch.json"
RUN_ID_VARIABLE = "RLWATCH_RUN_ID"


def choose_run_id(run_id: str | None, output_dir: str | os.PathLike[str] | None, project: str, resume: str) -> str:
    """Return the id of the run that begins: ``run_id``, ``RLWATCH_RUN_ID``, the id in ``output_dir/rlwatch.json``, or
    a new one.

    ``resume="never"`` ignores the id in ``output_dir``; ``"must"`` fails if a new one would be needed. ``project``
    begins a new id.

    Raises
    ------
    ConfigError
        If ``resume`` is unknown, the file cannot be read, or ``"must"`` finds no id.
    """
    if resume not in ("auto", "never", "must"):
        raise ConfigError(f"resume must be 'auto', 'never' or 'must', got {resume!r}")
    chosen = run_id or os.environ.get(RUN_ID_VARIABLE)
    if not chosen and output_dir is not None and resume != "never":
        chosen = remembered_run_id(output_dir)
    if not chosen and resume == "must":
        raise ConfigError(
            "resume='must', but no run_id was given, RLWATCH_RUN_ID is unset and no rlwatch.json was found"
        )
    return chosen or new_run_id(project)


def remember_run_id(run_id: str, output_dir: str | os.PathLike[str]) -> None:
    """Write the run's id to ``output_dir/rlwatch.json``, atomically. Raises ``ConfigError`` if it cannot be written."""
    directory = Path(output_dir)
    temporary = directory / f"{REMEMBERED}.{os.getpid()}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            undo.callback(temporary.unlink, missing_ok=True)
            temporary.write_text(json.dumps({"run_id": run_id}) + "\n")
            temporary.replace(directory / REMEMBERED)
            undo.pop_all()
    except OSError as error:
        problem = f"the run's id cannot be kept in output_dir {str(directory)!r} ({error.strerror})"
        raise ConfigError(f"{problem}; choose a directory that can be written") from None


def new_run_id(project: str) -> str:
    """Return a new id ``<project>-<utc time>-<random>``, which sorts by time and is safe as a directory name."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in project).strip("._-")[:60]
    return f"{plain or 'run'}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def remembered_run_id(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the run's id in ``output_dir/rlwatch.json``; None without a file. Raises ``ConfigError`` if it cannot be
    read.
    """
    path = Path(output_dir) / REMEMBERED
    if not path.exists():
        return None
    try:
        run_id = json.loads(path.read_text())["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not hold a run id ({error}); delete it or pass run_id=") from None
    if not isinstance(run_id, str) or not run_id:
        raise ConfigError(f"{path} does not hold a run id (got {run_id!r}); delete it or pass run_id=")
    return run_id
