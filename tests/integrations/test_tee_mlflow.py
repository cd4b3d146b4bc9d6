"""Mirroring MLflow: what is recorded, under which run, and that MLflow never notices."""

import math
import sys

import mlflow
import pytest
from mlflow import MlflowClient

import rlwatch
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.integrations.mlflow import tee_mlflow


@pytest.fixture
def store(tmp_path, monkeypatch):
    """MLflow writes files, the quickest of its stores."""
    monkeypatch.delenv("RLWATCH_RUN_ID", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(str(tmp_path / "mlruns"))
    mlflow.set_experiment("math-rl")
    yield str(tmp_path / "store")
    mlflow.end_run()
    mlflow.set_tracking_uri(None)


@pytest.fixture
def tee(store):
    """Begins a mirror that ends with the test."""
    begun = []

    def begin(**kwargs):
        begun.append(tee_mlflow(**{"store": store, **kwargs}))
        return begun[-1]

    yield begin
    for one in begun:
        one.untee()


def records(store, run):
    return [
        (r.step, {name: repr(v) for name, v in r.metrics.items()})
        for r in rlwatch.open_store(store).records(run.info.run_id)
    ]


def test_what_a_loop_logs_is_recorded_under_mlflows_names(tee, store):
    """In one call or one by one; NaN is NaN; what MLflow knows of the run comes along, without secrets."""
    mirror = tee()
    with mlflow.start_run(run_name="seed 3", tags={"paper": "yes"}) as theirs:
        mlflow.log_params({"lr": 1e-6, "api_key": "sk-0123456789abcdef0123456789abcdef"})
        mlflow.log_metrics({"reward": 0.5, "kl": math.nan}, step=1)
        mlflow.log_metric("reward", 0.75, step=2)
        mlflow.log_metric(key="kl", value=math.inf, step=2)
        mlflow.log_metric("reward", 0.875, step=3)
    info = rlwatch.open_store(store).run(mirror.run.info.run_id)

    assert records(store, mirror.run) == [
        (1, {"reward": "0.5", "kl": "nan"}), (2, {"reward": "0.75", "kl": "inf"}), (3, {"reward": "0.875"}),
    ]  # fmt: skip
    assert (info.project, info.name, info.tags, info.state) == ("math-rl", "seed 3", ("paper",), "finished")
    assert (info.config["lr"], "sk-0123456789abcdef0123456789abcdef" in str(info.config)) == ("1e-06", False)
    assert [m.value for m in MlflowClient().get_metric_history(theirs.info.run_id, "reward")] == [0.5, 0.75, 0.875]


def test_a_run_that_mlflow_resumes_is_resumed_and_one_that_failed_crashed(tee, store):
    """By its id; another run is another."""
    mirror = tee()
    with mlflow.start_run() as theirs:
        mlflow.log_metrics({"reward": 0.5, "kl": 0.1}, step=1)
    mlflow.start_run(run_id=theirs.info.run_id)
    mlflow.log_metrics({"reward": 0.5, "kl": 0.1}, step=2)
    mlflow.end_run("FAILED")
    first = mirror.run
    with mlflow.start_run():
        mlflow.log_metric("reward", 0.25)

    info = rlwatch.open_store(store).run(first.info.run_id)
    assert (info.attempt, info.state) == (2, "crashed")
    assert [step for step, _ in records(store, first)] == [1, 2]
    assert records(store, mirror.run) == [(0, {"reward": "0.25"})]


def test_what_it_measures_of_the_machine_is_left_out(tee, store):
    """It has a step of its own, which is no step of the training."""
    mirror = tee()
    with mlflow.start_run():
        mlflow.log_metrics({"reward": 0.5, "kl": 0.1}, step=7)
        mlflow.log_metrics({"system/cpu_utilization_percentage": 5.0, "system/x": 1.0}, step=0)

    assert [step for step, _ in records(store, mirror.run)] == [7]


def test_untee_gives_mlflow_back(tee, store):
    """Its functions are as they were, and nothing is recorded any more."""
    before = MlflowClient.log_metric, MlflowClient.log_batch, MlflowClient.set_terminated
    mirror = tee()
    with pytest.raises(ConfigError, match="mirrored already"):
        tee()
    mirror.untee()
    with mlflow.start_run():
        mlflow.log_metric("reward", 0.5)

    assert (MlflowClient.log_metric, MlflowClient.log_batch, MlflowClient.set_terminated) == before
    assert mirror.runs == []


def test_what_mlflow_raises_is_the_users_and_what_we_do_is_not(tee, store, monkeypatch):
    """A value it refuses is not recorded; a run that cannot be described costs a warning."""
    mirror = tee()
    with mlflow.start_run():
        with pytest.raises(mlflow.MlflowException):
            mlflow.log_metric("reward[", 0.5)
        assert mirror.run is None
        monkeypatch.setattr(MlflowClient, "get_experiment", lambda *_: 1 / 0)
        mlflow.log_metric("reward", 0.5)

    assert mirror.runs == []


def test_without_mlflow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'rlwatch-monitor\[mlflow\]'"):
        tee_mlflow()
