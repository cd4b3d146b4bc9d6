"""verl without a GPU: a platform called "cpu", and a rollout engine that hands the actor's weights on through a file.

verl imports this in every process (VERL_USE_EXTERNAL_MODULES=verl_cpu). Everything else of verl runs as it is: the
trainer, its workers under Ray, FSDP2 with gloo, the losses, the TransferQueue, the tracking.
"""

import contextlib
import os
from pathlib import Path

import torch
from torch.distributed import fsdp
from verl.plugin.platform import PlatformBase, set_platform

WEIGHTS = "VERL_CPU_WEIGHTS"  # the variable that names the file
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # the engine classes verl has registered for GPUs


class CpuModule:
    """What verl asks of ``torch.cuda``."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    @staticmethod
    def get_device_name(*_):
        return "CPU"

    @staticmethod
    def max_memory_allocated(*_):
        return 0

    memory_allocated = memory_reserved = max_memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info(*_):
        return 1, 1

    @staticmethod
    def get_rng_state(*_):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, *_):
        torch.set_rng_state(state)

    @staticmethod
    def empty_cache():
        """Nothing is cached."""

    ipc_collect = empty_cache


class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = CpuModule()

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        """There is one."""

    def synchronize(self, device_index=None):
        """Nothing is under way."""

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        """There are none."""

    empty_cache = profiler_start = profiler_stop = lambda self: None

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "GPU"  # what the example gives Ray to count

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def without_pinned_memory():
    original = fsdp.CPUOffloadPolicy
    fsdp.CPUOffloadPolicy = lambda pin_memory=True: original(pin_memory=False)


def with_gloo_alone():
    from verl.utils import distributed

    original = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: original(
        timeout_second, "gloo"
    )


def add_rollout_engine():
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    class CpuRollout(BaseRollout):
        """The end of the rollout engine in a worker: rank 0 writes the weights it is given."""

        async def resume(self, tags):
            """Nothing slept."""

        async def release(self):
            """Nothing is held."""

        async def update_weights(self, weights, **kwargs):
            state = {name: tensor.detach().float().cpu().clone() for name, tensor in weights}
            if self.device_mesh.get_rank() == 0:
                path = Path(os.environ[WEIGHTS])
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)

    class CpuReplica(RolloutReplica):
        """The end in the driver: there is no server, see rollouts.py."""

        async def launch_servers(self):
            self._server_address, self._server_handle = "cpu", None

    globals()["CpuRollout"] = CpuRollout
    _ROLLOUT_REGISTRY["cpu", "async"] = "verl_cpu.CpuRollout"
    RolloutReplicaRegistry.register("cpu", lambda: CpuReplica)


set_platform(CpuPlatform())
without_pinned_memory()
with_gloo_alone()
add_rollout_engine()
