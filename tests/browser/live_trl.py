"""A trainer process: real TRL GRPO training of a tiny model, watched, until told to stop.

``python live_trl.py STORE DIRECTORY``; ends when ``DIRECTORY/stop`` exists.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integrations"))

from tiny_trl import make_trainer
from transformers import TrainerCallback

from rlwatch.integrations.trl import watch

PACE_S = 0.2
"""Pause after a step: two cores are shared with a browser and a server."""


class UntilTold(TrainerCallback):
    """Goes on until the file ``stop`` appears."""

    def __init__(self, directory):
        self._stop = directory / "stop"

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(PACE_S)
        control.should_training_stop = control.should_training_stop or self._stop.exists()


def main(store, directory):
    trainer = make_trainer(directory, beta=0.1, max_steps=3000, learning_rate=5e-4)
    watch(trainer, project="browser", name="tiny-grpo", store=store)
    trainer.add_callback(UntilTold(directory))
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
