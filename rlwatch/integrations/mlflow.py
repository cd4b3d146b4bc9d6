"""Mirroring of MLflow: every metric that this process logs to it is also recorded and judged by rlwatch.

>>> from rlwatch.integrations.mlflow import tee_mlflow
>>> tee_mlflow(store="./rlwatch-runs")  # doctest: +SKIP

MLflow is imported only when ``tee_mlflow`` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlwatch.error_boundary import guarded
from rlwatch.errors import MissingExtraError
from rlwatch.integrations.tee import Held, Tee, check_first, checked_settings, scalars, snapshot, step_index
from rlwatch.integrations.wandb import run_id
from rlwatch.records import RunState
from rlwatch.run import Run

CALL = "tee_mlflow()"
ENDED = {"FAILED": RunState.CRASHED, "KILLED": RunState.CRASHED}
"""MLflow's final status -> rlwatch's state; any other means finished."""
SYSTEM = "system/"
"""Prefix of MLflow's system metrics, which are skipped: they count their own steps, and rlwatch measures the machine
itself.
"""

_newest: Tee[Any] | None = None


def tee_mlflow(*, run: Run | None = None, **init_kwargs: Any) -> Tee[Any]:
    """Record in rlwatch the metrics that this process logs to MLflow from now on, by ``mlflow`` or an ``MlflowClient``.

    Each MLflow run becomes a run of rlwatch with its first metric. It gets the experiment's name as project, and the
    MLflow run's name, tags and parameters at that time (read once). It ends when the MLflow run ends, and is resumed
    when that run is resumed. MLflow itself works unchanged. A metric logged without a step is at step 0, as in MLflow.

    Parameters
    ----------
    run
        A run to record everything into; the caller ends it.
    init_kwargs
        Arguments of :func:`rlwatch.init`, which override what MLflow knows. ``run_id`` and ``output_dir`` name the
        first run only.

    Returns
    -------
    Tee
        Handle on the mirror: ``.run`` and ``.runs`` are the rlwatch runs that record, and ``.untee()`` stops the
        mirroring.

    Raises
    ------
    MissingExtraError
        If MLflow is not installed.
    ConfigError
        If MLflow is mirrored already, or an argument is wrong.
    StoreError
        If the store cannot be opened.
    """
    global _newest
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise MissingExtraError("mlflow", "mlflow", CALL) from error
    check_first(_newest, "MLflow", CALL)
    tee: Tee[Any] = Tee("MLflow", checked_settings(init_kwargs, run, CALL), run)
    MLflowHooks(tee, MlflowClient)
    _newest = tee
    return tee


class MLflowHooks:
    """Hooks that are called after methods of MLflow's client class, which ``mlflow.log_metrics`` and similar functions
    use.
    """

    def __init__(self, tee: Tee[MlflowMirror], client: type) -> None:
        self.error_boundary = tee.error_boundary
        self._tee = tee
        tee.patches.around(client, "log_metric", after=self._metric)
        tee.patches.around(client, "log_batch", after=self._batch)
        tee.patches.around(client, "set_terminated", after=self._terminated)

    # Parameters have MLflow's names, because they may be passed by keyword.

    @guarded
    def _metric(  # noqa: PLR0917  (as MLflow's own)
        self,
        _: Any,
        client: Any,
        run_id: str,
        key: str,
        value: Any,
        timestamp: Any = None,  # noqa: ARG002
        step: Any = None,
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        self._log(client, run_id, [(step, key, value)])

    @guarded
    def _batch(
        self, _: Any, client: Any, run_id: str, metrics: Sequence[Any] = (), *_args: Any, **_kwargs: Any
    ) -> None:
        self._log(client, run_id, [(one.step, one.key, one.value) for one in metrics])

    @guarded
    def _terminated(self, _: Any, _client: Any, run_id: str, status: Any = None, *_args: Any, **_kwargs: Any) -> None:
        state = ENDED.get(str(status), RunState.FINISHED)
        self._tee.end(run_id, state, f"MLflow's run ended as {status}" if state is RunState.CRASHED else "")

    def _log(self, client: Any, run: str, values: Sequence[tuple[Any, str, Any]]) -> None:
        mirror = self._tee.mirror(run, MlflowMirror, lambda: described(client, run)) if values else None
        if mirror is not None:
            mirror.log(values)


def described(client: Any, run: str) -> dict[str, Any]:
    """Return the arguments of :func:`rlwatch.init` that MLflow knows for its run with the id ``run``, asked from
    ``client``.
    """
    found = client.get_run(run)
    project = client.get_experiment(found.info.experiment_id).name
    tags = [name for name in found.data.tags if not name.startswith("mlflow.")]
    known = {
        "run_id": run_id("mlflow", run),
        "project": project,
        "name": found.info.run_name,
        "tags": tuple(tags),
        "config": dict(found.data.params),
    }
    return {name: value for name, value in known.items() if value}


class MlflowMirror:
    """Recorder of one MLflow run, which collects the metrics of a step into one row.

    A row ends with a metric of another step or a repeated metric, and when the run or the process ends. Metrics logged
    in one call are recorded as a row at once, because trainers log a step that way.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._held = Held()

    def log(self, values: Sequence[tuple[Any, str, Any]]) -> None:
        """Add logged metrics, each as (step or None, name, value); system metrics are skipped."""
        steps: dict[int, dict[str, Any]] = {}
        for step, name, value in values:
            if not name.startswith(SYSTEM):
                steps.setdefault(step_index(step or 0) or 0, {})[name] = value
        for at, row in steps.items():
            kept = snapshot(scalars(row))
            if any(step != at or not kept.keys().isdisjoint(held) for step, held in list(self._held)):
                self.flush()
            if kept:
                self._held.append((at, kept))
        if len(values) > 1:
            self.flush()

    def flush(self) -> None:
        """Record the collected metrics."""
        self._held.record(self.run)
