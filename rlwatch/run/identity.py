"""Which run this is: an id given, an id remembered beside the checkpoints, or a new one."""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import ExitStack
from pathlib import Path

from rlwatch.errors import ConfigError

REMEMBERED = "rlwatch.json"
RUN_ID_VARIABLE = "RLWATCH_RUN_ID"


def choose_run_id(run_id: str | None, output_dir: str | os.PathLike[str] | None, project: str, resume: str) -> str:
    """The run's id, by the first of: argument, ``RLWATCH_RUN_ID``, ``output_dir/rlwatch.json``, a new one.

    ``resume="never"`` ignores the remembered id; ``"must"`` fails without a given or remembered one.

    Raises
    ------
    ConfigError
        If ``resume`` is unknown, a remembered id cannot be read, or there is none though it must be.
    """
    if resume not in ("auto", "never", "must"):
        raise ConfigError(f"resume must be 'auto', 'never' or 'must', got {resume!r}")
    chosen = run_id or os.environ.get(RUN_ID_VARIABLE)
    if not chosen and output_dir is not None and resume != "never":
        chosen = _remembered(Path(output_dir) / REMEMBERED)
    if not chosen and resume == "must":
        raise ConfigError(
            "resume='must', but no run_id was given, RLWATCH_RUN_ID is unset and no rlwatch.json was found"
        )
    return chosen or new_run_id(project)


def remember_run_id(run_id: str, output_dir: str | os.PathLike[str]) -> None:
    """Write the id beside the checkpoints, whole or not at all. Raises ``ConfigError`` if it cannot be written."""
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
    """``<project>-<utc time>-<random>``: sorts by time, safe as a directory name."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in project).strip("._-")[:60]
    return f"{plain or 'run'}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def _remembered(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        run_id = json.loads(path.read_text())["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not hold a run id ({error}); delete it or pass run_id=") from None
    if not isinstance(run_id, str) or not run_id:
        raise ConfigError(f"{path} does not hold a run id (got {run_id!r}); delete it or pass run_id=")
    return run_id
