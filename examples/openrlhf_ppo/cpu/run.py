"""Runs a real ``openrlhf.cli.train_ppo_ray`` without a GPU: tiny policy, CPU Ray, stand-ins for vLLM and flash-attn.

    python examples/openrlhf_ppo/cpu/run.py --store runs            # watched by rlwatch
    python examples/openrlhf_ppo/cpu/run.py --unwatched

Needs what ``constraints-openrlhf.txt`` lists.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CPU = Path(__file__).parent
sys.path.insert(0, str(CPU))

from world import arguments, make  # noqa: E402

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
MODULE = "openrlhf.cli.train_ppo_ray"


class Cluster:
    """A Ray of its own, that says it has GPUs; it ends with this process."""

    def __enter__(self):
        import ray

        os.environ.update(ENVIRONMENT)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CPU), os.environ.get("PYTHONPATH")]))
        ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
        self.environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        return self

    def __exit__(self, *_):
        import ray

        ray.shutdown()

    def train(self, where, *, rlwatch=None, steps=2, timeout=900, **options):
        """OpenRLHF's console output; ``rlwatch``: the launcher's own options, None for none."""
        launcher = [] if rlwatch is None else ["rlwatch.integrations.openrlhf", *rlwatch, "-m"]
        command = [sys.executable, "-m", *launcher, MODULE, *arguments(Path(where), steps=steps, **options)]
        done = subprocess.run(
            command, env=self.environment, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(done.stdout[-6000:])
        return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="rlwatch-runs")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--unwatched", action="store_true")
    args = parser.parse_args()
    watch = (
        None
        if args.unwatched
        else ["--rlwatch.project", "examples", "--rlwatch.store", str(Path(args.store).absolute())]
    )
    with tempfile.TemporaryDirectory() as directory, Cluster() as cluster:
        print(cluster.train(make(Path(directory)), rlwatch=watch, steps=args.steps))
    if watch:
        import rlwatch

        for run in rlwatch.open_store(args.store).runs()[:1]:
            print(f"recorded {run.run_id}")


if __name__ == "__main__":
    main()
