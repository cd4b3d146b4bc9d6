"""Fixtures over the tiny trainers of ``tiny_trl``; imported as a plain module beside the tests."""

import sys
from pathlib import Path

import pytest
from installations import Installations

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def watched(tmp_path):
    """Train a tiny trainer watched by a fake run; returns (trainer, run)."""
    from tiny_trl import FakeRun, make_trainer

    from rlwatch.integrations.trl import watch

    def train(*, before=None, watching=None, **config):
        trainer, run = make_trainer(tmp_path, **config), FakeRun()
        watch(trainer, run=run, **(watching or {}))
        if before is not None:
            before(trainer)
        trainer.train()
        if (watching or {}).get("level") not in ("scalars", "tokens"):
            assert list(run.taps()) == list(range(1, trainer.args.max_steps + 1)), "every step must have been tapped"
        assert run.counters.snapshot() == {}
        return trainer, run

    return train


@pytest.fixture
def behind(monkeypatch):
    """As on a GPU that has much to do: no copy has arrived before it is waited for."""
    from rlwatch.tensors.transfer import Transfer

    monkeypatch.setattr(Transfer, "ready", lambda _: False)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(name, version)``: as if that were what is installed."""
    return Installations(tmp_path / "site", monkeypatch)
