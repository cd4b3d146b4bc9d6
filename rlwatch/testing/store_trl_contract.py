"""Contract of a store with a log as TRL writes it: metrics with user-chosen names, rows of different metrics, and a
last row without a loss.
"""

from __future__ import annotations

from rlwatch.metrics import OPEN, read_as, unit_of
from rlwatch.ports import Store
from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.testing.store_run_contract import StoreHooks
from rlwatch.view import view_of_run

_TRAINED = {
    "clip_ratio/high_max": 0.0, "clip_ratio/high_mean": 0.0, "clip_ratio/low_mean": 0.0, "clip_ratio/low_min": 0.0,
    "clip_ratio/region_mean": 0.0, "completions/clipped_ratio": 0.01953125, "completions/max_length": 9.0,
    "completions/max_terminated_length": 8.5, "completions/mean_length": 6.08203125,
    "completions/mean_terminated_length": 6.023907899856567, "completions/min_length": 1.5,
    "completions/min_terminated_length": 1.5, "entropy": 0.4132097661495209, "epoch": 0.0078125,
    "frac_reward_zero_std": 0.03125, "grad_norm": 1.216388463973999, "kl": 0.003816066775470972,
    "learning_rate": 0.0003, "loss": 0.003946969285607338, "num_tokens": 3093.0, "reward": 0.661376953125,
    "reward_std": 0.34398457407951355, "rewards/sorting/mean": 0.661376953125,
    "rewards/sorting/std": 0.34398457407951355, "step_time": 0.13743840000006458,
}  # fmt: skip
_ENDED = {
    "epoch": 0.9375, "total_flos": 0.0, "train_loss": 0.022769668298618248, "train_runtime": 26.9453,
    "train_samples_per_second": 1140.088, "train_steps_per_second": 8.907,
}  # fmt: skip
_TAPPED = {f"{family.name}exact-1.5b_[a]": 0.25 for family in OPEN}
"""Metrics that rlwatch adds to the log: a member of each family whose members a trainer names."""
_ROWS = {2: _TRAINED | _TAPPED, 4: _TRAINED | {"reward": float("nan")}, 6: {"eval_reward": 0.5}, 240: _ENDED}
"""By step, as GRPOTrainer of TRL 1.16 logged them."""


class TRLLogContract(StoreHooks):
    """Tests that each metric of a log as TRL writes it can be read from a store, and that the run can be displayed."""

    def test_a_log_of_trl_is_read_by_every_name_it_has(self, store: Store) -> None:
        """Check that each metric of the log has its newest value, its series and its place in the list of metrics."""
        writer = store.open_run(RunInfo("run", source="trl"))
        writer.write([StepRecord(step, row, seq=seq) for seq, (step, row) in enumerate(_ROWS.items(), 1)])
        writer.finish(RunState.FINISHED, "", 2.0)
        writer.close()
        last = {name: (step, value) for step, row in _ROWS.items() for name, value in row.items()}
        again = self.reopen(store)
        found = again.series("run", list(last))

        assert again.metric_names("run") == sorted(last)
        assert repr(again.last_values("run")) == repr({name: last[name] for name in again.last_values("run")})
        assert again.last_values("run").keys() == last.keys()
        assert {name: one.steps.tolist() for name, one in found.items()} == {
            name: [step for step, row in _ROWS.items() if name in row] for name in last
        }

    def test_a_log_of_trl_is_viewed(self, store: Store) -> None:
        """Check that the view of the run describes each metric that has a description, also those with user-chosen
        names.
        """
        writer = store.open_run(RunInfo("run", source="trl"))
        writer.write([StepRecord(step, row, seq=seq) for seq, (step, row) in enumerate(_ROWS.items(), 1)])
        writer.close()
        again = self.reopen(store)
        view = view_of_run(again, again.run("run"))

        assert {"reward/part/sorting", "reward/mean", *_TAPPED} <= set(view.metrics)
        assert {read_as(name, "trl") for name in _TAPPED} == _TAPPED.keys()
        assert {family.unit for family in OPEN} == {unit_of(name) for name in _TAPPED}
        assert not [each for each in view.not_judged if each.name in ("layer_spike", "reward_parts", "straggling_rank")]
