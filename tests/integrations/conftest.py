"""Fixtures over the tiny trainers of ``tiny_trl``; imported as a plain module beside the tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def watched(tmp_path):
    """Train a tiny trainer watched by a fake run; returns (trainer, run)."""
    from tiny_trl import FakeRun, make_trainer

    from rlwatch.integrations.trl import watch

    def train(*, before=None, text=False, **config):
        trainer, run = make_trainer(tmp_path, **config), FakeRun()
        watch(trainer, run=run, text=text)
        if before is not None:
            before(trainer)
        trainer.train()
        assert list(run.taps()) == list(range(1, trainer.args.max_steps + 1)), "every step must have been tapped"
        assert run.counters.snapshot() == {}
        return trainer, run

    return train
