"""Conversion of imported rows to records: sequence numbers, attempts, and the trainer that the metric names
identify.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import ImportedRow, Skips
from rlwatch.importers.lines import LONGEST_NAME, MOST_ATTEMPTS, MOST_NAMES
from rlwatch.importers.naming import NONE, Naming
from rlwatch.importers.single_records import OneByOne
from rlwatch.importers.step_order import Numbered, StepOrder
from rlwatch.records import StepRecord
from rlwatch.redaction import clean_name

_SIGNATURES: tuple[tuple[str, frozenset[str]], ...] = (
    ("ms-swift", frozenset({"train_speed(iter/s)", "train_speed(s/it)", "memory(GiB)"})),
    ("slime", frozenset({"train/pg_loss", "rollout/raw_reward", "train/train_rollout_logprob_abs_diff"})),
    ("prime-rl", frozenset({"mismatch_kl/all/mean", "entropy/all/mean", "off_policy/mean", "kl_ent_ratio/mean"})),
    (
        "areal",
        frozenset({"ppo_actor/task_reward/avg", "ppo_actor/update/entropy/avg", "ppo_actor/update/actor_loss/avg"}),
    ),
    ("nemo-rl", frozenset({"token_mult_prob_error", "gen_kl_error", "approx_entropy", "probs_ratio_clamped"})),
    ("skyrl", frozenset({"policy/policy_entropy", "policy/ppo_clip_ratio", "reward/avg_raw_reward"})),
    ("tinker", frozenset({"env/all/reward/total", "optim/kl_sample_train_v1"})),
    ("roll", frozenset({"actor/ppo_ratio_clipfrac", "actor/policykl", "critic/entropy/mean"})),
    ("torchforge", frozenset({"reward/evaluate_response/avg_total_reward", "buffer/sample/avg_buffer_utilization"})),
    ("sb3", frozenset({"time/total_timesteps", "rollout/ep_rew_mean"})),
    ("verl", frozenset({"actor/ppo_kl", "actor/pg_loss", "critic/score/mean", "global_seqlen/mean"})),
    ("verl", frozenset({"actor_ppo_kl", "actor_pg_loss", "critic_score_mean", "critic_rewards_mean"})),
    (
        "openrlhf",
        frozenset({"actor_grad_norm", "ppo_clip_ratio", "vllm_kl", "rollout/reward_mean", "group_reward_std"}),
    ),
    ("torchtune", frozenset({"approx_policy_kl", "num_stop_tokens"})),
    ("trl/online_dpo", frozenset({"objective/scores_margin"})),
    ("trl/ppo", frozenset({"policy/approxkl_avg", "objective/rlhf_reward"})),
    ("trl/async_grpo", frozenset({"sample/staleness_mean", "sample/rollout_queue_size", "sample/time_in_queue_s"})),
    (
        "trl/grpo",
        frozenset({"completions/mean_length", "completion_length", "frac_reward_zero_std", "clip_ratio/region_mean"}),
    ),
)
_DPO = "trl/dpo"
_OF_PAIRS = frozenset({"rewards/chosen", "rewards/rejected", "rewards/accuracies"})
"""Names that DPO logs together; a custom loop may log one of them alone."""
_TRACKER = "train/"
_OF_HUGGING_FACE = frozenset({"epoch", "num_tokens", "learning_rate", "eval_loss", "Training Loss"})
"""Names in the rows of every trainer built on Hugging Face's: a printed dict without any of them comes from a custom
loop.
"""


def source_of(names: Iterable[str], known_source: str = "") -> str:
    """Return the trainer that logs metrics called ``names``; empty if unknown.

    ``known_source`` is the trainer that the format implies; it is returned unless the names make it more specific.

    >>> source_of(["loss", "frac_reward_zero_std"], "trl")
    'trl/grpo'
    >>> source_of(["loss"])
    ''
    """
    given = set(names)
    given |= {name.removeprefix(_TRACKER) for name in given}
    for source, signature in _SIGNATURES:
        if not signature.isdisjoint(given) and _compatible(source, known_source):
            return source
    if given >= _OF_PAIRS and _compatible(_DPO, known_source):
        return _DPO
    return "" if known_source == "trl" and _OF_HUGGING_FACE.isdisjoint(given) else known_source


def _compatible(source: str, known_source: str) -> bool:
    """Return True if ``source`` refines the trainer that the format implies; ms-swift prints as TRL does."""
    return not known_source or source.startswith(known_source) or (source == "ms-swift" and known_source == "trl")


class RunAssembly:
    """Conversion of the rows of one run to records with ``seq`` (1, 2, 3..., or continued after ``seq``) and
    ``attempt``.

    Metrics beyond the first 20,000, and metrics with too long a name, are left out. ``path`` is the log, for error
    messages. ``naming`` are metrics that the user assigned to names. ``ordered`` is False for tables, whose rows may
    come in any order.
    """

    def __init__(self, path: str, seq: int = 0, naming: Naming = NONE, *, ordered: bool = True) -> None:
        self.path = path
        self.given: set[str] = set()
        """Names in the log to which the user assigned a metric."""
        self._naming = naming
        self.order = StepOrder(ordered=ordered)
        self._one_by_one = OneByOne()
        self.records: list[StepRecord] = []
        self.names: dict[str, None] = {}
        """Every metric seen, in order of first appearance."""
        self.seq = seq

    def take(self, row: ImportedRow, skips: Skips) -> list[StepRecord]:
        """Return the records that are complete after ``row``, without keeping them.

        Count rows that are left out in ``skips``. Raises ``ImportFormatError`` if steps go back so often that the rows
        cannot be of one run, or if each row is of a single response.
        """
        if self._naming.metrics and not self._naming.metrics.keys().isdisjoint(row.metrics):
            self.given.update(self._naming.metrics.keys() & row.metrics.keys())
            row = replace(row, metrics=self._naming.renamed(row.metrics))
        if not row.metrics.keys() <= self.names.keys():
            row = replace(row, metrics=self._bounded(row, skips))
        if self._one_by_one.possible and (problem := self._one_by_one.take(row.step, row.metrics)):
            raise ImportFormatError(self.path, problem, row.line or None)
        taken = self.order.take(row, skips)
        if self.order.attempt > MOST_ATTEMPTS or self.order.returns > max(MOST_ATTEMPTS, self.seq):
            problem = f"its steps go back more than {MOST_ATTEMPTS:,} times, as those of one run never do; are these "
            raise ImportFormatError(self.path, problem + "the rows of several runs?", row.line or None)
        return self._records(taken)

    def finish(self, skips: Skips) -> list[StepRecord]:
        """Return the records of the rows that are still held back at the end of the log; count rows that are left out
        in ``skips``.
        """
        return self._records(self.order.finish(skips))

    def restart(self, skips: Skips) -> list[StepRecord]:
        """Return the records held back when the trainer restarts; the next row begins another attempt.

        Rows that are left out are counted in ``skips``.
        """
        return self._records(self.order.restart(skips))

    def add(self, row: ImportedRow, skips: Skips) -> None:
        """Add ``row``, and keep the records that are complete after it; count rows that are left out in ``skips``."""
        self.records += self.take(row, skips)

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on rows that were moved to another step, and on names that the user mapped."""
        placed = f"rows of another counter are taken at the step they were printed at: {self.order.placed}"
        given = [f"{name} as {metric}" for name, metric in self._naming.metrics.items() if name in self.given]
        mapped = f"read by --map or [map]: {', '.join(given)}"
        return (*([placed] if self.order.placed else []), *([mapped] if given else []))

    def _records(self, rows: Iterable[Numbered]) -> list[StepRecord]:
        return [self._record(row, attempt) for row, attempt in rows]

    def _record(self, row: ImportedRow, attempt: int) -> StepRecord:
        self.seq += 1
        return StepRecord(step=row.step, metrics=row.metrics, ts=row.ts, attempt=attempt, seq=self.seq)

    def _bounded(self, row: ImportedRow, skips: Skips) -> Mapping[str, float]:
        """Return the metrics of a row with new names, without names that are too long or too many."""
        kept: dict[str, float] = {}
        for name, value in row.metrics.items():
            if name not in self.names:
                if len(name) > LONGEST_NAME:
                    skips.add(f"a metric whose name has more than {LONGEST_NAME} characters", row.line)
                    continue
                if len(self.names) >= MOST_NAMES:
                    skips.add(f"a metric beyond the first {MOST_NAMES:,} of its run", row.line)
                    continue
                name = clean_name(name)  # noqa: PLW2901  (one that is not is looked at again in each row)
                self.names[name] = None
            kept[name] = value
        self._one_by_one.named(kept)
        return kept

    def by_step(self) -> list[StepRecord]:
        """Return the kept records; merged by step and sorted, if the rows came sorted by metric rather than by step."""
        if all(a.attempt != b.attempt or a.step <= b.step for a, b in pairwise(self.records)):
            return self.records
        merged: dict[tuple[int, int], dict[str, float]] = {}
        for record in self.records:
            merged.setdefault((record.attempt, record.step), {}).update(record.metrics)
        return [
            StepRecord(step=step, metrics=merged[attempt, step], attempt=attempt, seq=seq)
            for seq, (attempt, step) in enumerate(sorted(merged), 1)
        ]
