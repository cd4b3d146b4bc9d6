"""Write ``written/`` anew with the trackers themselves: ``python tests/importers/write_samples.py swanlab clearml ...``.

In an environment of its own (pip install swanlab clearml mlflow-skinny stable-baselines3): none of them is needed to
read what they wrote. The values are those of ``VALUES`` in test_import_trackers_disk.py.
"""

import json
import math
import os
import shutil
import sys
from pathlib import Path

HOME = Path(__file__).parent / "written"
ROWS = [
    (step, {"train/reward": step / 10, "train/entropy": 1.0, "kl": {4: math.nan, 5: math.inf}.get(step, 0.0)})
    for step in range(1, 6)
]
CONFIG = {"lr": 1e-6, "beta": 0.04}


def swanlab() -> None:
    """``swanlab-VERSION.swanlab``."""
    import swanlab

    swanlab.init(project="p", experiment_name="grpo-s1", mode="offline", logdir="swanlog", config=CONFIG)
    for step, metrics in ROWS:
        swanlab.log(metrics, step=step)
    swanlab.finish()
    [run] = Path("swanlog").glob("run-*/*.swanlab")
    shutil.copy(run, HOME / f"swanlab-{swanlab.__version__}.swanlab")


def clearml() -> None:
    """``clearml-VERSION/``: the metrics and the settings of an offline session, without the script and its requirements."""
    import clearml

    clearml.Task.set_offline(offline_mode=True)
    task = clearml.Task.init("p", "grpo-s1", auto_connect_frameworks=False, auto_resource_monitoring=False)
    task.connect(dict(CONFIG))
    for step, metrics in ROWS:
        for name, value in metrics.items():
            title, _, series = name.rpartition("/")
            task.get_logger().report_scalar(title or name, series, iteration=step, value=value)
    task.get_logger().report_single_value("best", 0.5)
    session = Path(task.get_offline_mode_folder())
    task.close()
    there = HOME / f"clearml-{clearml.__version__}"
    there.mkdir(exist_ok=True)
    shutil.copy(session / "metrics.jsonl", there)
    known = json.loads((session / "task.json").read_text())
    kept = {name: known[name] for name in ("hyperparams", "id", "name", "project_name", "type")}
    (there / "task.json").write_text(json.dumps(kept))


def mlflow() -> None:
    """``mlruns-VERSION/``: two runs of one name."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    mlflow.set_tracking_uri("file:mlruns")
    mlflow.set_experiment("grpo")
    for _ in range(2):
        with mlflow.start_run(run_name="grpo-s1"):
            mlflow.log_params(CONFIG)
            for step, metrics in ROWS:
                mlflow.log_metrics(metrics, step=step)
    there = HOME / f"mlruns-{mlflow.__version__}"
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree("mlruns", there, ignore=shutil.ignore_patterns("tags", "artifacts", "outputs"))


def stable_baselines3() -> None:
    """``sb3-VERSION.{log,csv}``: what PPO prints, and its ``progress.csv``."""
    import stable_baselines3
    from stable_baselines3.common.logger import configure

    version = stable_baselines3.__version__
    model = stable_baselines3.PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0)
    model.set_logger(configure("sb3", ["log", "csv"]))
    model.learn(320)
    shutil.copy("sb3/log.txt", HOME / f"sb3-{version}.log")
    shutil.copy("sb3/progress.csv", HOME / f"sb3-{version}.csv")


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        {"swanlab": swanlab, "clearml": clearml, "mlflow": mlflow, "stable_baselines3": stable_baselines3}[asked]()
