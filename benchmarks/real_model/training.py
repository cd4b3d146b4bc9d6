"""One run: a TRL trainer on the real model, watched at ``full``; or the same twice to see what watching costs."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from datasets import Dataset
from real_model.faults import HARMLESS_BONUS, Engine, Knobs, Reward, Truth, plant_overflow
from real_model.plan import Fault, Run, Size
from real_model.tasks import problems
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rlwatch
from rlwatch.integrations.trl import watch
from rlwatch.records import CULPRITS

PROBLEMS = 512
COSTED, WARM = 24, 8
"""Steps of a training whose cost is measured, and those of them that do not count."""


class Clock(TrainerCallback):
    """Wall and CPU seconds from step to step, the device's work done."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before the rollouts."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.at.append((time.perf_counter(), time.process_time()))

    def seconds(self) -> list[float]:
        """Of each step but the last, wall."""
        return [after[0] - before[0] for before, after in zip(self.at, self.at[1:], strict=False)]

    def cpu_seconds(self) -> list[float]:
        """The same, of the CPU: all threads."""
        return [after[1] - before[1] for before, after in zip(self.at, self.at[1:], strict=False)]


def make_trainer(run: Run, size: Size, device: str, weights: Path, out: Path, truth: Truth) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(weights, padding_side="left")
    transformers.set_seed(run.seed)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32),
        reward_funcs=Reward(run, size, truth),
        args=arguments(run, size, device, out),
        train_dataset=Dataset.from_list(list(problems(run.task, PROBLEMS, run.seed))),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Knobs(trainer, run, size))
    if run.fault is Fault.PADDING:
        plant_overflow(trainer, size, truth)
    if run.engine:
        copy = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).to(trainer.accelerator.device)
        trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = (
            Engine(trainer, run, size, copy),
            True,
            -1,
        )
    return trainer


def arguments(run: Run, size: Size, device: str, out: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(out / "output"),
        per_device_train_batch_size=size.answers,
        num_generations=size.group,
        max_completion_length=size.longest,
        max_steps=size.steps,
        learning_rate=size.rate,
        lr_scheduler_type="constant",
        entropy_coef=HARMLESS_BONUS if run.fault is Fault.ENTROPY else 0.0,
        vllm_importance_sampling_correction=run.corrected,
        beta=0.0,
        temperature=1.0,
        seed=run.seed,
        use_cpu=device == "cpu",
        bf16=False,
        activation_checkpointing=False,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(run: Run, size: Size, device: str, weights: Path, out: Path) -> None:
    """Train, and write ``out/NAME.json`` and its series beside it."""
    quiet(device)
    truth, clock = Truth(), Clock()
    trainer = make_trainer(run, size, device, weights, out / run.name, truth)
    trainer.add_callback(clock)
    store = out / "stores" / run.name
    watch(trainer, project="real-model", name=run.name, store=str(store))
    name, crash = device_name(device), ""
    try:
        trainer.train()
    except Exception as error:  # a policy of NaN cannot be sampled: that is how some faults end
        crash = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    said = told(store, run.name)
    kept = {
        "run": asdict(run) | {"fault": run.fault.value},
        "size": asdict(size),
        "device": name,
        "versions": versions(),
        "crash": crash,
        "right": truth.right,
        "planted": truth.planted,
        "seconds_a_step": statistics.median(clock.seconds() or [0.0]),
    }
    write_series(store, run.name, truth, out / f"{run.name}.parquet")
    written(out / f"{run.name}.json", kept | said)


def written(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: a run that has this file is done."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(content, indent=1))
    beside.rename(path)


def told(store: Path, name: str) -> dict[str, Any]:
    """What rlwatch said of a run: all findings with the step they came at, cause, forecasts, tokens."""
    with rlwatch.open(str(store)) as runs:
        view = runs[name].view()
    cause = view.cause
    return {
        "verdict": view.verdict.name,
        "headline": view.verdict.text,
        "cause": None if cause is None else cause.to_dict(),
        "findings": [
            {
                "kind": one.kind, "severity": one.severity.value, "step": one.step, "onset": one.onset_step,
                "stage": one.stage.value, "message": one.message,
            }
            for one in view.all_findings
        ],
        "forecasts": [
            {"step": one.step, "alarm": bool(one.body.get("alarm")), **{k: finite(v) for k, v in one.metrics.items()}}
            for one in view.forecasts
        ],
        "culprits": [
            {"step": batch.step, "columns": {k: plain(v) for k, v in batch.columns.items() if k in NAMED}}
            for batch in view.culprits
            if batch.reason == CULPRITS
        ],
        "events": [{"kind": one.kind, "step": one.step} for one in view.events],
    }  # fmt: skip


NAMED = ("sequence", "position", "cause", "share")


def plain(values: Any) -> list[Any]:
    return [x if isinstance(x, str) else finite(float(x)) for x in list(values)[:3]]


def finite(x: float) -> float | None:
    """JSON knows no NaN."""
    return float(x) if math.isfinite(x) else None


def write_series(store: Path, name: str, truth: Truth, path: Path) -> None:
    """Everything that was logged or measured, a row a step, in single precision."""
    with rlwatch.open(str(store)) as runs:
        frame = runs[name].history()
    columns: dict[str, Any] = {"step": pa.array([int(x) for x in frame["step"]], pa.int32())}
    for column in frame.columns:
        if column not in ("step", "attempt"):
            values = [None if x is None or x is frame[column].dtype.na_value else float(x) for x in frame[column]]
            columns[column] = pa.array(values, pa.float32())
    columns["truth/right"] = pa.array([truth.right.get(int(x)) for x in frame["step"]], pa.float32())
    pq.write_table(pa.table(columns), path, compression="zstd", compression_level=19)


def cost(size: Size, device: str, weights: Path, out: Path) -> None:
    """Trainings in turn, unwatched and watched, alone on the machine: seconds of their steps, to ``out/cost.json``."""
    quiet(device)
    steps, warm = (COSTED, WARM) if device == "cuda" else (4, 1)
    run, small = Run(Fault.NONE, size.sums, seed=3), Size(**{**asdict(size), "steps": steps})
    found: dict[str, list[dict[str, float]]] = {"unwatched": [], "full": []}
    for turn in range(4 if device == "cuda" else 2):
        way = ("unwatched", "full")[turn % 2]
        trainer, clock = make_trainer(run, small, device, weights, out / "cost", Truth()), Clock()
        trainer.add_callback(clock)
        if way == "full":
            watch(trainer, project="real-model", name=f"cost-{turn}", store=str(out / "stores" / f"cost-{turn}"))
        trainer.train()
        found[way].append(
            {
                "seconds": statistics.median(clock.seconds()[warm:]),
                "cpu_seconds": statistics.median(clock.cpu_seconds()[warm:]),
            }
        )
        del trainer
    written(out / "cost.json", {"device": device_name(device), "versions": versions(), "ways": found})


def quiet(device: str) -> None:
    """One thread for each run: several share a machine. No bars."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def versions() -> dict[str, str]:
    import trl

    return {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
