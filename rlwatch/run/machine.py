"""Metrics of the machine of a run, measured outside the training thread: processors, memory, disks, networks, GPUs.

A separate thread takes a sample every :data:`EVERY_S` seconds. The mean of the samples since the last row is added to
the next row of the run, so that it has the same step and time; a rank other than 0 sends it with its measurements of a
step. The training thread calls nothing here.

The first rank of a machine measures the machine; the other ranks measure only their process, and their GPU where
``CUDA_VISIBLE_DEVICES`` assigns one.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rlwatch.error_boundary import described, log_message, raised_by, run_forever, sheltered
from rlwatch.ports import PendingRecord
from rlwatch.records import SpikeBatch

# GPUs, read through their drivers: NVIDIA's by NVML (``nvidia-ml-py``), AMD's by ``amdsmi``.


GIB, MIB = 2**30, 2**20
Reader = Callable[[], dict[str, float]]
HELD_BACK = (
    "nvmlClocksThrottleReasonHwSlowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)
"""Reasons for a reduced clock that mean a hardware problem: heat, or a failing power supply."""
CAPPED = "nvmlClocksThrottleReasonSwPowerCap"
"""NVML's flag for the power limit of the card, which is normal under full load."""


def gpu_reader() -> Reader | None:
    """Return a function that reads metrics of the GPUs this process may use; None without a driver.

    It returns name -> value; names have the machine's numbers of the GPUs: ``system/gpu/0/util``.
    """
    for make in (_nvidia, _amd):
        made: list[Reader] = []
        if raised_by(lambda make=make, made=made: made.append(make())) is None:  # type: ignore[misc]
            return made[0]
    return None


def _nvidia() -> Reader:
    nvml: Any = import_module("pynvml")
    nvml.nvmlInit()
    held_back = sum(int(getattr(nvml, name, 0)) for name in HELD_BACK)
    capped = int(getattr(nvml, CAPPED, 0))
    handles = {i: nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())}
    chosen = {i: handles[i] for i in _visible(list(handles), lambda i: nvml.nvmlDeviceGetUUID(handles[i]))}

    def of_one(handle: Any) -> Iterator[tuple[str, float]]:
        refused = nvml.NVMLError  # a card that lacks one value has the others
        with suppress(refused):
            yield "util", nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
        with suppress(refused):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield from (("memory", memory.used / memory.total), ("memory_used", memory.used / GIB))
        with suppress(refused):
            yield "temperature", float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        with suppress(refused):
            yield "power", nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0
        with suppress(refused):
            reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            yield from (
                ("throttled", float(bool(reasons & held_back))),
                ("power_capped", float(bool(reasons & capped))),
            )

    return partial(_read, chosen, of_one)


def _amd() -> Reader:
    smi: Any = import_module("amdsmi")
    smi.amdsmi_init()
    handles = dict(enumerate(smi.amdsmi_get_processor_handles()))
    chosen = {i: handles[i] for i in _visible(list(handles), lambda _: "")}

    def of_one(handle: Any) -> Iterator[tuple[str, float]]:
        refused = smi.AmdSmiException
        with suppress(refused, KeyError, TypeError, ValueError):
            yield "util", float(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]) / 100.0
        with suppress(refused, KeyError, TypeError, ValueError):
            kind = smi.AmdSmiMemoryType.VRAM
            used, total = smi.amdsmi_get_gpu_memory_usage(handle, kind), smi.amdsmi_get_gpu_memory_total(handle, kind)
            yield from (("memory", used / total), ("memory_used", used / GIB))
        with suppress(refused, KeyError, TypeError, ValueError):
            where, what = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
            yield "temperature", float(smi.amdsmi_get_temp_metric(handle, where, what))
        with suppress(refused, KeyError, TypeError, ValueError):
            yield "power", float(smi.amdsmi_get_power_info(handle)["average_socket_power"])

    return partial(_read, chosen, of_one)


def _read(chosen: dict[int, Any], of_one: Callable[[Any], Iterator[tuple[str, float]]]) -> dict[str, float]:
    return {f"system/gpu/{i}/{name}": value for i, handle in chosen.items() for name, value in of_one(handle)}


def _visible(numbers: list[int], uuid_of: Callable[[int], object]) -> list[int]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` (AMD: ``ROCR_``, ``HIP_``) makes visible to this process."""
    variables = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    visible = next((os.environ[name] for name in variables if name in os.environ), None)
    if visible is None:
        return numbers
    named = [one.strip() for one in visible.split(",") if one.strip()]
    if all(one.isdecimal() for one in named):
        return [number for number in numbers if str(number) in named]
    found = {number: _text(uuid_of(number)) for number in numbers}
    return [number for number in numbers if any(found[number].startswith(one) for one in named)] or numbers


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# Metrics of the machine, measured off the training thread: processors, memory, disks, networks, GPUs.


EVERY_S = 15.0
"""Seconds between two samples."""
BEGINS = 1 / 3
"""Share of the time to the first sample after which drivers are loaded: a run that ends before needs none."""
VARIABLE = "RLWATCH_SYSTEM"
"""Environment variable; ``0`` or ``off`` turns the measurement off, unless the code sets it."""
NO_PSUTIL = "the machine is not measured: psutil is not installed (pip install 'rlwatch-monitor[system]')"
CGROUP = Path("/sys/fs/cgroup")
_warned: set[str] = set()
Read = Callable[[], dict[str, float]]


def wanted(system: bool | None) -> bool:
    """Return whether to measure the machine: ``system`` if it is set, else by ``RLWATCH_SYSTEM``, else True."""
    if system is not None:
        return bool(system)
    return os.environ.get(VARIABLE, "").strip().lower() not in ("0", "off", "false", "no")


class Machine:
    """Reads the metrics of the machine: present values, and rates since the last reading.

    Parameters
    ----------
    places
        Directories whose disks are measured, by name: ``store``, ``checkpoints``.
    whole
        Whether to measure the whole machine, not only this process.

    Raises
    ------
    ImportError
        Where psutil is missing.
    """

    def __init__(self, places: Mapping[str, str | os.PathLike[str]], *, whole: bool = True) -> None:
        self._psutil: Any = import_module("psutil")
        self._process = self._psutil.Process()
        self._places = dict(places) if whole else {}
        self._whole = whole
        self._gpus = gpu_reader() if whole or _own_gpu() else None
        self._before: tuple[float, dict[str, float]] | None = None
        self._process.cpu_percent()  # the first value of each is meaningless
        self._psutil.cpu_percent()

    def read(self) -> dict[str, float]:
        """Read the machine and return metrics ``system/...`` (name -> value), without those that it does not report."""
        found: dict[str, float] = {}
        parts = [self._of_process, *((self._of_machine, self._of_disks, self._rates) if self._whole else ())]
        for part in (*parts, self._gpus):
            if part is not None:
                sheltered(lambda part=part: found.update(part()), self._left_out)  # type: ignore[misc]
        return found

    def _left_out(self, error: BaseException) -> None:
        """Log once that a part cannot be measured, such as a disk that is gone; the other parts are still measured."""
        _warn_once(f"a part of the machine cannot be measured: {described(error)}")

    def _of_process(self) -> dict[str, float]:
        return {
            "system/cpu/process": self._process.cpu_percent() / 100.0,
            "system/memory/process": self._process.memory_info().rss / GIB,
        }

    def _of_machine(self) -> dict[str, float]:
        memory = self._psutil.virtual_memory()
        total, free = float(memory.total), float(memory.available)
        limit = container_memory()
        if limit is not None and limit[0] < total:
            total, free = limit[0], min(free, limit[1])
        return {
            "system/cpu/util": self._psutil.cpu_percent() / 100.0,
            "system/memory/util": min(max(1.0 - free / total, 0.0), 1.0),
            "system/memory/free": free / GIB,
        }

    def _of_disks(self) -> dict[str, float]:
        found: dict[str, float] = {}
        seen: set[int] = set()
        for name, place in self._places.items():
            path = _existing(Path(place))
            device = path.stat().st_dev
            if device in seen:  # one disk is one metric, under the name of the first place
                continue
            seen.add(device)
            usage = self._psutil.disk_usage(str(path))
            found[f"system/disk/{name}/free"] = usage.free / GIB
            found[f"system/disk/{name}/util"] = usage.percent / 100.0
        return found

    def _rates(self) -> dict[str, float]:
        disk, net = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        counts: dict[str, float] = {}
        if disk is not None:
            counts |= {"system/disk/read": disk.read_bytes / MIB, "system/disk/write": disk.write_bytes / MIB}
        if net is not None:
            counts |= {"system/net/received": net.bytes_recv / MIB, "system/net/sent": net.bytes_sent / MIB}
        now, (then, before) = time.monotonic(), self._before or (0.0, {})
        self._before = (now, counts)
        if not before or now <= then:
            return {}
        return {
            name: max(0.0, (value - before[name]) / (now - then)) for name, value in counts.items() if name in before
        }


def container_memory(root: Path = CGROUP) -> tuple[float, float] | None:
    """Return the memory limit of the container and its free part, in bytes; None without a limit (cgroup v2).

    Pages of files that can be dropped count as free, as they do on a machine. ``root``: directory of the control group.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        total = int(limit)
    except (OSError, ValueError):
        return None
    return float(total), float(max(0, total - used + int(stat.get("inactive_file", 0))))


def _existing(place: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    return next((path for path in (place, *place.absolute().parents) if path.exists()), Path("/"))


def _own_gpu() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return bool(visible) and "," not in visible


class MachineThread:
    """Thread that takes samples of the machine until it is stopped; a daemon, so it does not keep a process alive.

    Parameters
    ----------
    make
        Creates the function that takes a sample, on this thread.
    every_s
        Seconds between two samples.
    """

    def __init__(self, make: Callable[[], Read], *, every_s: float = EVERY_S) -> None:
        self.cpu_seconds = 0.0
        """CPU time of the thread."""
        self._make = make
        self._every_s = every_s
        self._looks: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=run_forever, args=(self._work, _failed), name="rlwatch-machine", daemon=True
        )

    def start(self) -> None:
        """Start the thread that takes samples of the machine."""
        self._thread.start()

    def stop(self, deadline_s: float = 0.0) -> object:
        """Ask the thread to end, and wait up to ``deadline_s`` seconds; return whether it has ended."""
        self._stop.set()
        if deadline_s > 0.0:
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def taken(self) -> dict[str, float]:
        """Return the mean of the samples since the last call (metric -> value); empty if there was none. Not
        thread-safe.
        """
        looks, self._looks = self._looks, []
        names = dict.fromkeys(name for look in looks for name in look)
        read = {name: [look[name] for look in looks if name in look] for name in names}
        return {name: sum(values) / len(values) for name, values in read.items()}

    def _work(self) -> None:
        if self._stop.wait(BEGINS * self._every_s):
            return
        read: Read | None = sheltered(self._make, _failed)
        wait_s = (1.0 - BEGINS) * self._every_s
        while read is not None and not self._stop.wait(wait_s):
            wait_s = self._every_s
            found = sheltered(read, lambda _: {})
            if found and len(self._looks) < MOST_LOOKS:
                self._looks.append(found)
            self.cpu_seconds = time.thread_time()


MOST_LOOKS = 240
"""Largest number of samples kept between two rows: one hour. A row that takes longer has the means of
its first hour.
"""


def _failed(error: BaseException) -> None:
    _warn_once(NO_PSUTIL if isinstance(error, ImportError) else f"the machine is not measured: {described(error)}")


def _warn_once(words: str) -> None:
    if words not in _warned:
        _warned.add(words)
        log_message(logging.INFO if words is NO_PSUTIL else logging.WARNING, "%s", words)


def machine_thread(
    rank: int,
    places: Mapping[str, str | os.PathLike[str]],
    *,
    engines: Read | None = None,
    system: bool = True,
    every_s: float = EVERY_S,
) -> MachineThread:
    """Return the thread that measures for ``rank``: the whole machine for the first rank on it, else only the process.

    Parameters
    ----------
    rank
        This rank.
    places
        Directories whose disks are measured, by name.
    engines
        Function that reads the metrics of rollout engines, which are measured as well; None: no engines.
    system
        Whether to measure the machine.
    every_s
        Seconds between two samples.
    """
    whole = os.environ.get("LOCAL_RANK", "0" if rank == 0 else "1") == "0"

    def make() -> Read:
        machine = sheltered(lambda: Machine(places, whole=whole).read, _failed) if system else None
        reads = [read for read in (machine, engines) if read is not None]
        return lambda: {name: value for read in reads for name, value in sheltered(read, lambda _: {}).items()}

    return MachineThread(make, every_s=every_s)


# Machine metrics sent with a rank's share of a step: a length, the metrics as JSON, then the unchanged share.

_HEAD = struct.Struct("<I")
PREFIX, OF_RANK = "system/", "system/rank/"


def packed(found: Mapping[str, float], share: bytes) -> bytes:
    """Return the bytes that a rank sends to rank 0 for one step: its machine metrics ``found``, then its measurements
    ``share``.

    ``found``: metric -> value, may be empty. :func:`unpacked` separates the two.
    """
    body = json.dumps(found).encode() if found else b""
    return _HEAD.pack(len(body)) + body + share


class WithMachines:
    """Rank 0's measurements of a step, to be merged with the measurements and the machine metrics that other ranks
    sent.

    Machine metrics of another rank are named after the rank. ``parcel``: rank 0's measurements, without machine
    metrics.
    """

    def __init__(self, parcel: PendingRecord) -> None:
        self._parcel = parcel
        self.step = parcel.step

    def ready(self) -> bool:
        """Return whether the measurements can be read without waiting for a device."""
        return self._parcel.ready()

    def encode(self) -> bytes:
        """Return the measurements as bytes, without machine metrics."""
        return self._parcel.encode()

    def merged(self, others: Mapping[int, bytes]) -> tuple[Mapping[str, float], Sequence[SpikeBatch]]:
        """Return the metrics and the extreme tokens of the whole step, with the metrics of other ranks' machines.

        ``others``: rank -> bytes of :func:`packed`.
        """
        shares, found = unpacked(others)
        metrics, spikes = self._parcel.merged(shares)
        return {**metrics, **found}, spikes


def unpacked(others: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[str, float]]:
    """Separate the bytes that :func:`packed` made on each rank; return rank -> measurements, and machine metrics named
    after the rank.

    >>> unpacked({3: packed({"system/cpu/process": 1.0}, b"share")})
    ({3: b'share'}, {'system/rank/3/cpu/process': 1.0})
    """
    shares, found = {}, {}
    for rank, payload in others.items():
        end = _HEAD.size + _HEAD.unpack_from(payload)[0]
        shares[rank] = payload[end:]
        of_rank = json.loads(payload[_HEAD.size : end] or b"{}")
        found.update({f"{OF_RANK}{rank}/{name.removeprefix(PREFIX)}": float(of_rank[name]) for name in of_rank})
    return shares, found
