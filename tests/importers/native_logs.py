"""Logs as the trainers write them, made here; the shapes were read in the trainers' code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

Rows = Sequence[tuple[int, Mapping[str, float]]]
TOTAL = 500


def bar(n: int, total: int = TOTAL, title: str = "") -> str:
    """A tqdm bar as it stands after ``n`` of ``total``."""
    full = "█" * (10 * n // total)
    return f"{title}{100 * n // total:3d}%|{full:10}| {n}/{total} [00:{n % 60:02d}<1:02:03,  5.16s/it]"


def cleared(text: str) -> str:
    """What tqdm prints to wipe ``text`` off the terminal."""
    return "\r" + " " * len(text) + "\r"


def verl_console(rows: Rows, *, prefix: str = "\x1b[36m(TaskRunner pid=4242)\x1b[0m ") -> bytes:
    """verl's console logger under Ray and numpy 2, between progress bars."""
    out = [f"{prefix}Checkpoint tracker file does not exist: /ckpt/latest_checkpointed_iteration.txt\n"]
    for step, metrics in rows:
        pairs = " - ".join(f"{name}:np.float64({value!r})" for name, value in metrics.items())
        out.append(f"{prefix}{bar(step - 1, title='Training Progress: ')}\r")
        out.append(f"{prefix}step:{step} - {pairs}\n")
    return "".join(out).encode()


def verl_jsonl(rows: Rows) -> bytes:
    """verl's file logger: orjson, which writes null for NaN and for both infinities."""
    lines = []
    for step, metrics in rows:
        data = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        lines.append(json.dumps({"step": step, "data": data}, separators=(",", ":")) + "\n")
    return "".join(lines).encode()


def swift_jsonl(rows: Rows) -> bytes:
    """ms-swift's ``logging.jsonl``."""
    lines = []
    for step, metrics in rows:
        extra = {"epoch": step / 100, "global_step/max_steps": f"{step}/{TOTAL}", "elapsed_time": "4m 52s"}
        lines.append(json.dumps({**metrics, **extra}) + "\n")
    return "".join(lines).encode()


def trl_console(rows: Rows, *, total: int = TOTAL) -> bytes:
    """HF's progress callback on an unbuffered terminal: bar, wiped, row of strings, bar again."""
    out, last = [], total
    for step, metrics in rows:
        if step <= last:  # a new process
            out.append(f"Loading checkpoint shards: 100%|##########| 2/2 [00:01<00:00,  1.30s/it]\n\r{bar(0, total)}")
        last = step
        shown = {name: f"{value:.4g}" for name, value in {**metrics, "epoch": step / 100}.items()}
        out.append(f"\r{bar(step, total)}{cleared(bar(step, total))}{shown}\n\r{bar(step, total)}")
    return "".join(out).encode()


def openrlhf_console(rows: Rows) -> bytes:
    """OpenRLHF's log line, under Ray and Python's logging."""
    lines = []
    for step, metrics in rows:
        shown = str(dict(metrics))  # nan and inf as Python prints them
        lines.append(f"(PPOTrainer pid=77) INFO 06-01 10:00:00 ppo_trainer.py:551] ✨ Global step {step}: {shown}\n")
    return "".join(lines).encode()


def trainer_state(rows: Rows, *, summary: bool = True) -> bytes:
    """HF's ``trainer_state.json``: sorted keys, NaN as a literal."""
    history: list[dict[str, float]] = [{**metrics, "epoch": step / 100, "step": step} for step, metrics in rows]
    if summary:
        history.append({"train_runtime": 12.5, "train_loss": 0.1, "step": rows[-1][0], "epoch": 1.0})
    state = {"best_metric": None, "log_history": history, "logging_steps": 1, "max_steps": TOTAL}
    return json.dumps(state, indent=2, sort_keys=True).encode() + b"\n"


def long_csv(rows: Rows, *, run: str = "seed3") -> bytes:
    """``run_id,step,metric,value``."""
    lines = ["run_id,step,metric,value\n"]
    lines += [f"{run},{step},{name},{value!r}\n" for step, metrics in rows for name, value in metrics.items()]
    return "".join(lines).encode()


def wide_csv(rows: Rows, *, names: Sequence[str]) -> bytes:
    """``step,loss,reward``: an empty cell is what was not measured."""
    lines = [",".join(["step", *names]) + "\n"]
    for step, metrics in rows:
        cells = [repr(metrics[name]) if name in metrics else "" for name in names]
        lines.append(",".join([str(step), *cells]) + "\n")
    return "".join(lines).encode()


def json_document(rows: Rows) -> bytes:
    """What a callback dumps when training ends: Python's ``json``, a list of rows."""
    return json.dumps([{"step": step, **metrics} for step, metrics in rows], indent=2).encode() + b"\n"


def notebook(rows: Rows) -> bytes:
    """A notebook in which HF's Trainer drew its table: lines of HTML in the output of a cell."""
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    lines = ['<table border="1" class="dataframe">\n', "<thead><tr>\n", "<th>Step</th>\n"]
    lines += [*(f"<th>{name}</th>\n" for name in names), "</tr></thead>\n"]
    for step, metrics in rows:
        cells = [repr(metrics[name]) if name in metrics else "No log" for name in names]
        lines.append("".join(f"<td>{cell}</td>\n" for cell in [str(step), *cells]).join(("<tr>\n", "</tr>\n")))
    output = {
        "output_type": "display_data",
        "data": {"text/html": [*lines, "</table><p>"], "text/plain": ["<IPython>"]},
    }
    return json.dumps({"cells": [{"cell_type": "code", "outputs": [output]}], "nbformat": 4}, indent=1).encode()


def loop_console(rows: Rows, *, total: int = TOTAL) -> bytes:
    """A loop of one's own, in the words of its author."""
    lines = ["Model Params: 30.03M\nEpoch 1 begins\n"]
    for step, metrics in rows:
        pairs = ", ".join(f"{name}: {value!r}" for name, value in metrics.items())
        lines.append(f"Epoch:[1/1]({step}/{total}), {pairs}, epoch_time: 9.0min\n")
    return "".join(lines).encode()


def console_table(rows: Rows, *, names: Sequence[str]) -> bytes:
    """A CSV behind the greeting of a program; an empty cell was not measured."""
    lines = ["Loading model...\n", ",".join(("step", *names)) + "\n"]
    for step, metrics in rows:
        lines.append(",".join((str(step), *(repr(metrics[name]) if name in metrics else "" for name in names))) + "\n")
    return "".join(lines).encode()


def slime_console(rows: Rows) -> bytes:
    """slime's line of an update, under Ray and Python's logging; ``train/step`` is wandb's axis."""
    lines = []
    for step, metrics in rows:
        shown = str({**metrics, "train/step": step})
        lines.append(f"(MegatronTrainRayActor pid=78) [2026-01-01 10:00:00] model.py:607 - step {step}: {shown}\n")
    return "".join(lines).encode()


def roll_console(rows: Rows) -> bytes:
    """ROLL's pipeline: metrics as Python's JSON, then the step that is through; both under its logger."""
    log = "[2026-01-01 10:00:00] [rlvr_pipeline.py (777)] [INFO] [PIPELINE 0 / 1][PID 1] "
    lines = []
    for step, metrics in rows:
        lines.append(f'{log}[{{"prompt": "1+1=", "response": "2"}}]\n{log}{json.dumps(dict(metrics))}\n')
        lines.append(f"{log}pipeline step {step} finished\n")
    return "".join(lines).encode()


def megatron_console(rows: Rows, *, total: int = TOTAL) -> bytes:
    """Megatron's ``training_log``: 8 places for the iteration, pairs between bars."""
    lines = []
    for step, metrics in rows:
        pairs = "".join(f" {name}: {value!r} |" for name, value in metrics.items())
        beside = "elapsed time per iteration (ms): 215613.0 | remaining time: 3d 18h |"
        lines.append(f" [2026-01-01 10:00:00] iteration {step:8d}/{total:8d} | {beside}{pairs}\n")
    return "".join(lines).encode()


def torchforge_console(rows: Rows) -> bytes:
    """torchforge's console backend: a block a step, between two rules of ``=``."""
    blocks = []
    for step, metrics in rows:
        pairs = "".join(f"  {name}: {value!r}\n" for name, value in metrics.items())
        blocks.append(f"[0] INFO === [global_logger_fF8h_r0] - METRICS STEP {step} ===\n{pairs}{'=' * 30}\n\n")
    return "".join(blocks).encode()


def nemo_rl_console(rows: Rows, *, total: int = TOTAL) -> bytes:
    """NeMo-RL's print-outs of a step: validation first, then results, then timing with units."""
    blocks = []
    for step, metrics in rows:
        pairs = "".join(f"  • {name}: {value:.4f}\n" for name, value in metrics.items())
        held_out = "📊 Validation Results:\n    • Accuracy: 0.2500\n    • Samples processed: 256\n"
        timing = "⏱️  Timing:\n  • Total step time: 12.31s\n  • generation: 8.00s (66.0%)\n"
        rule = "=" * 25
        blocks.append(f"\n{rule} Step {step}/{total} {rule}\n{held_out}\n📊 Training Results:\n{pairs}\n{timing}")
    return "".join(blocks).encode()


def areal_console(rows: Rows, *, total: int = TOTAL, columns: int = 2) -> bytes:
    """AReaL's step and the table below it, as ``tabulate`` draws ``fancy_grid``."""
    blocks = []
    for step, metrics in rows:
        cells = [f" {name} │ {value:.4e} " for name, value in metrics.items()]
        lines = ["│".join(cells[at : at + columns]) for at in range(0, len(cells), columns)]
        body = "\n├───┼───┤\n".join(f"│{line}│" for line in lines)
        log = "20260101-10:00:00.000 StatsLogger INFO: "
        blocks.append(f"{log}Epoch 1/2 Step {step}/{total} Train step {step}/{2 * total} done.\n{log}\n")
        blocks.append(f"╒═══╤═══╕\n{body}\n╘═══╧═══╛\n")
    return "".join(blocks).encode()


def markdown_table(rows: Rows, *, names: Sequence[str]) -> bytes:
    """A table that somebody pasted into an issue."""
    lines = [f"Look at this:\n\n| Step | {' | '.join(names)} |\n|{':---:|' * (len(names) + 1)}\n"]
    for step, metrics in rows:
        cells = [repr(metrics[name]) if name in metrics else "No log" for name in names]
        lines.append(f"| {step} | {' | '.join(cells)} |\n")
    return "".join(lines).encode()


def clearml_metrics(rows: Rows) -> bytes:
    """ClearML's offline session: a list of events a flush; NaN as 0, unless it was told to keep it."""
    lines = []
    for step, metrics in rows:
        events = []
        for name, value in metrics.items():
            title, _, series = name.rpartition("/")
            event = {"timestamp": 1795455265540 + step, "type": "training_stats_scalar", "task": "offline-b772"}
            events.append({**event, "iter": step, "metric": title, "variant": series, "value": value, "method": "get"})
        lines.append(json.dumps(events) + "\n")
    return "".join(lines).encode()
