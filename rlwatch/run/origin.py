"""Origin of a run: the code, the command, the packages and the machine that it is started with.

Kept among its settings under :data:`~rlwatch.records.ORIGIN`, attempt by attempt, so that it is compared and found like
every other setting. Secrets are no part of it: what is named or looks like one is blacked out, and of the environment
only :data:`VARIABLES` are read.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlwatch.records import JSON
from rlwatch.redaction import MAX_TEXT, redacted

PATIENCE_S = 2.0
"""Seconds that a program is waited for; without its answer the entry is left out."""
PACKAGES = (
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "flash-attn", "huggingface-hub", "jax", "liger-kernel",
    "megatron-core", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "openrlhf", "peft", "ray", "rlwatch-monitor",
    "sglang", "tensordict", "tokenizers", "torch", "torchtitan", "transformer-engine", "transformers", "triton", "trl",
    "unsloth", "verl", "vllm", "xformers",
)  # fmt: skip
"""Distributions whose versions decide how a training behaves."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "WORLD_SIZE")
GPU = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def origin() -> dict[str, JSON]:
    """Origin of this process, as far as it can be told."""
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
    """Commit and branch of the code in a directory, and whether files differ from it; empty where there is no git."""
    commit = _answer("git", "-C", directory, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _answer("git", "-C", directory, "status", "--porcelain", "--untracked-files=no")
    branch = _answer("git", "-C", directory, "rev-parse", "--abbrev-ref", "HEAD")
    dirty = {} if changed is None else {"changed_files": str(len(changed.splitlines()))}
    return {"commit": commit, **({"branch": branch} if branch else {}), **dirty}


@cache
def gpus() -> str:
    """Accelerators of the machine, those of one kind together."""
    names = (_answer(*GPU) or "").splitlines()
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


@cache
def packages() -> dict[str, str]:
    """Versions of :data:`PACKAGES`, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _directory() -> str:
    """Directory in which the process works; empty where somebody removed that."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _answer(*arguments: str) -> str | None:
    """Output of a program, None where it is not there, fails or is too slow."""
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
