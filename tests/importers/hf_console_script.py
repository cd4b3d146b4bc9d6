"""Drives the console callback of the installed transformers; run as a script, its output is the log.

``hf_console_script.py STATE``: also saves a trainer_state.json of the same run to STATE.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from transformers.trainer_callback import ProgressCallback, TrainerState

TOTAL, EVERY, EVAL_EVERY = 1500, 5, 100


def logs(step: int) -> dict[str, float | None]:
    """What the run logs at ``step``: ``loss`` tells the step, so that the reader can be checked."""
    entropy = None if step == 30 else 0.5
    return {"loss": float(step), "grad_norm": float("nan") if step == 20 else 1.5, "entropy": entropy, "epoch": 0.5}


def train(state_path: str) -> None:
    console = ProgressCallback()
    state = TrainerState(max_steps=TOTAL, logging_steps=EVERY)
    place = SimpleNamespace(is_world_process_zero=True, max_steps=TOTAL, global_step=0)
    console.on_train_begin(None, place, None)
    for step in range(1, TOTAL + 1):
        place.global_step = step
        if step % 7 == 0:
            sys.stdout.write("a reward function says: {'reward': 1.0, 'answer': '42'}\n")
        console.on_step_end(None, place, None)
        if step % EVERY == 0:
            console.on_log(None, place, None, logs=logs(step))
            state.log_history.append({**logs(step), "step": step})
        if step % EVAL_EVERY == 0:
            batches = list(range(6))
            for _ in batches:
                console.on_prediction_step(None, place, None, eval_dataloader=batches)
            console.on_log(None, place, None, logs={"eval_loss": float(step), "eval_reward": 0.5, "epoch": 0.5})
            console.on_evaluate(None, place, None)
    console.on_log(None, place, None, logs={"train_runtime": 12.0, "train_loss": 0.3, "epoch": 1.0})
    console.on_train_end(None, place, None)
    state.log_history.append({"train_runtime": 12.0, "step": TOTAL})
    state.save_to_json(state_path)


if __name__ == "__main__":
    train(sys.argv[1])
