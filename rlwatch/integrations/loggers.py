"""Loggers for trainers without a usable package: NeMo-RL, prime-rl and slime.

Each fits the interface that the trainer's source defines for its own loggers, and records what it is given, under the
trainer's names. They were written against those sources (November 2026) and tested against stand-ins of the interfaces,
not in the trainers. Errors of set-up are raised where the trainer makes its loggers; later nothing raises.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlwatch.error_boundary import ErrorBoundary, call_or, log_message
from rlwatch.run.setup import init

if TYPE_CHECKING:
    from rlwatch.run import Run

TAP = "logger of the trainer"


def numbers_of(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the scalars of ``metrics``, with ``prefix`` before their names; nested mappings are joined by a slash.

    >>> numbers_of({"loss": 0.5, "table": [1, 2], "timing": {"step": 3}}, "train")
    {'train/loss': 0.5, 'train/timing/step': 3.0}
    """
    return dict(_scalars(metrics, f"{prefix}/" if prefix else ""))


def _scalars(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
            continue
        number = call_or(lambda value=value: _scalar(value), lambda _error: None)  # type: ignore[misc]
        if number is not None:
            yield f"{prefix}{name}", number


def _scalar(value: Any) -> float | None:
    if isinstance(value, str | bytes) or value is None:
        return None
    single = getattr(value, "numel", None)
    if callable(single) and (single() != 1 or getattr(value.device, "type", "cpu") != "cpu"):
        return None  # a tensor on a device would be waited for
    return float(value)


class NemoLogger:
    """Logger backend of NeMo-RL that records in rlwatch: ``logger.loggers.append(NemoLogger(project="math"))`` after
    its ``Logger`` is made.

    Parameters
    ----------
    arguments
        Arguments of :func:`rlwatch.init`, which begins the run now.

    Raises
    ------
    RLWatchError
        Errors of :func:`rlwatch.init`.
    """

    def __init__(self, **arguments: Any) -> None:
        self.run: Run = init(**{"source": "nemo-rl", **arguments})
        self._error_boundary = ErrorBoundary(self.run)

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,  # noqa: ARG002  (NeMo-RL's signature)
    ) -> None:
        """Record the numbers in ``metrics`` as the row of ``step``, with ``prefix`` before their names.

        A row with an axis of its own (``metrics`` contain ``step_metric``) is no training step and is left out.
        """
        if step_metric is None or step_metric not in metrics:
            self._error_boundary.attempt(TAP, lambda: self.run.log(numbers_of(metrics, prefix or ""), step=int(step)))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the numbers in ``params``, the settings of the training, as an event of the run."""
        self._error_boundary.attempt(TAP, lambda: self.run.event("config", 0, **numbers_of(params)))

    def log_histogram(self, histogram: Sequence[Any], step: int, name: str) -> None:
        """Do nothing: histograms are not recorded."""

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Do nothing: figures are not recorded."""

    def finish(self) -> None:
        """End the run that this logger records."""
        self._error_boundary.attempt("finish", self.run.finish)


class PrimeMonitor:
    """Monitor of prime-rl that records in rlwatch: ``monitors.append(PrimeMonitor(project="math"))`` where the trainer
    makes its monitors.

    ``config``: prime-rl's configuration, not used. ``arguments``: arguments of :func:`rlwatch.init`.
    """

    run_id: str | None = None

    def __init__(self, config: Any = None, **arguments: Any) -> None:
        self.config = config
        self._arguments = arguments
        self._error_boundary = ErrorBoundary()
        self.run: Run | None = None

    def init(self, **_context: Any) -> None:
        """Begin the run that this monitor records. Raises the errors of :func:`rlwatch.init`."""
        self.run = init(**{"source": "prime-rl", **self._arguments})
        self.run_id = self.run.info.run_id
        self._error_boundary = ErrorBoundary(self.run)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the numbers in ``metrics`` as the row of ``step``."""
        run = self.run
        if run is not None:
            self._error_boundary.attempt(TAP, lambda: run.log(numbers_of(metrics), step=int(step)))

    def log_episodes(self, rollouts: Sequence[Any], step: int) -> None:
        """Do nothing: episodes are not recorded."""

    def finalize(self) -> None:
        """End the run that this monitor records."""
        if self.run is not None:
            self._error_boundary.attempt("finish", self.run.finish)


# slime calls a function by its path: --custom-rollout-log-function-path rlwatch.integrations.loggers.slime_rollouts

SLIME: list[tuple[Run, ErrorBoundary]] = []
"""The run of this process, once slime has called; empty before."""


def slime_rollouts(
    rollout_id: int, args: Any, samples: Sequence[Any], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    """Record one generation of slime: rewards, groups, lengths and truncation of its ``samples``, and slime's own
    metrics; return False.

    slime calls this function by the path in ``--custom-rollout-log-function-path``, and logs as usual afterwards. The
    run is made at the first call, in the store of ``RLWATCH_STORE``; if that fails, one warning is logged and nothing
    is recorded. ``rollout_id`` becomes the step, ``args`` are slime's arguments, and ``rollout_time`` is in seconds.
    """
    if not SLIME:
        made = call_or(
            lambda: init(source="slime", project=str(getattr(args, "wandb_project", None) or "slime")), _warn
        )
        if made is None:
            return False
        SLIME.append((made, ErrorBoundary(made)))
    run, error_boundary = SLIME[0]
    extra = numbers_of(rollout_extra_metrics or {}) | {"timing/rollout": float(rollout_time)}
    measured = error_boundary.attempt(TAP, samples_measured, samples) or {}
    error_boundary.attempt(TAP, lambda: run.log({**extra, **measured}, step=int(rollout_id)))
    return False


def _warn(error: Exception) -> None:
    log_message(logging.WARNING, "rlwatch records nothing (training goes on): %s", error)


def samples_measured(samples: Sequence[Any]) -> dict[str, float]:
    """Return metrics of slime's ``samples`` (name -> value): each has ``reward``, ``response_length``, ``group_index``,
    ``status``.

    If a reward is a mapping with one number for each part, the sample counts as one without a reward: how the parts add
    up is not known here.
    """
    from rlwatch.integrations.step_tally import read_stats  # after the first call: it needs torch
    from rlwatch.tensors.responses import ResponseBatch, observe_responses

    if not samples:
        return {}
    rewards = [_reward(sample) for sample in samples]
    groups = [getattr(sample, "group_index", None) for sample in samples]
    cut = [str(getattr(getattr(sample, "status", ""), "value", "")) == "truncated" for sample in samples]
    known = None not in groups
    batch = ResponseBatch.of(
        rewards=rewards if any(one is not None for one in rewards) else None,
        groups=[str(one) for one in groups] if known else None,
        lengths=[int(sample.response_length) for sample in samples],
        cut=cut,
    )
    return {name: value for name, value in read_stats(observe_responses(batch)).items() if math.isfinite(value)}


def _reward(sample: Any) -> float | None:
    reward = getattr(sample, "reward", None)
    return float(reward) if isinstance(reward, int | float) else None
