"""verl on a CPU, as in examples/verl_grpo/cpu; one process group and one tiny policy for the whole session."""

import os
import sys
import tempfile
from pathlib import Path

CPU = Path(__file__).parents[2] / "examples" / "verl_grpo" / "cpu"
sys.path[:0] = [str(CPU), str(Path(__file__).parent)]
os.environ["RLWATCH_STATE_DIR"] = tempfile.mkdtemp(prefix="rlwatch-state-")
os.environ.update(
    VERL_USE_EXTERNAL_MODULES="verl_cpu",
    VERL_CPU_WEIGHTS=str(Path(tempfile.mkdtemp()) / "weights.pt"),
    PYTHONPATH=os.pathsep.join([str(CPU), *filter(None, [os.environ.get("PYTHONPATH")])]),
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
    RAY_prestart_worker_first_driver="0",  # as many processes as CPUs, of which actors with an environment use none
)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def process_group(tmp_path_factory):
    import torch.distributed as dist

    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{rendezvous}")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A directory that holds the tiny policy, its tokenizer and prompts."""
    from train import save_policy

    work = tmp_path_factory.mktemp("work")
    save_policy(work / "policy")
    return work


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(name, version)``: as if that were what is installed."""

    def install(name, version):
        about = tmp_path / "site" / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install
