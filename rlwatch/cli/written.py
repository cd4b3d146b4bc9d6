"""Text for a file or for stdout; a file is there whole or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_text(path: Path | None, text: str) -> None:
    """Write ``text`` beside ``path`` and then put it in its place; without a path, on stdout."""
    if path is None:
        sys.stdout.write(text)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)  # noqa: PTH105  (atomic on one file system)
    finally:
        beside.unlink(missing_ok=True)
