"""The formats: what a trainer writes by itself is taken as it comes; what our own loop writes has verl's form."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Row = Mapping[str, float]


def trainer_state(trainer, path: Path) -> None:
    """Train, and keep the ``trainer_state.json`` a checkpoint would hold."""
    trainer.train()
    trainer.state.save_to_json(str(path))


def console(build: Callable[[Path], object], path: Path) -> None:
    """Train in a child process and keep what its terminal would have shown, the traceback of a crash too.

    Paths in it are shortened to begin at the repository or at the installed package.
    """
    with path.open("wb") as log:
        child = os.fork()
        if child == 0:
            _train_into(log.fileno(), build)
        os.waitpid(child, 0)
    text = path.read_text()
    for prefix in (sysconfig.get_path("purelib"), Path(__file__).resolve().parent.parent):
        text = text.replace(f"{prefix}/", "")
    path.write_text(text)


def _train_into(descriptor: int, build: Callable[[Path], object]) -> None:
    """In the child: stdout and stderr go to ``descriptor``; never returns."""
    import traceback

    from transformers import PrinterCallback

    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 0
    try:
        with tempfile.TemporaryDirectory(prefix="rlwatch-sample-") as directory:
            trainer = build(Path(directory))
            if trainer.args.disable_tqdm:
                trainer.add_callback(PrinterCallback)
            trainer.train()
    except RuntimeError:
        code = 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def verl_console(rows: Iterable[Row], path: Path) -> None:
    """``step:N - name:value - ...``, as verl's console logger prints."""
    with path.open("w") as log:
        for row in rows:
            values = " - ".join(f"{name}:{value}" for name, value in row.items())
            log.write(f"step:{int(row['training/global_step'])} - {values}\n")


def verl_file(rows: Iterable[Row], path: Path) -> None:
    """``{"step": N, "data": {...}}``, as verl's file logger writes: what is not finite becomes null."""
    with path.open("w") as log:
        for row in rows:
            data = {name: value if math.isfinite(value) else None for name, value in row.items()}
            log.write(json.dumps({"step": int(row["training/global_step"]), "data": data}) + "\n")


def long_csv(rows: Iterable[Row], run_id: str, path: Path) -> None:
    """``run_id,step,metric,value``."""
    with path.open("w", newline="") as table:
        cells = csv.writer(table, lineterminator="\n")
        cells.writerow(("run_id", "step", "metric", "value"))
        for row in rows:
            step = int(row["training/global_step"])
            cells.writerows((run_id, step, name, value) for name, value in row.items())
