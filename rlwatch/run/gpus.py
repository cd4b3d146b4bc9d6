"""GPUs as their drivers tell of them: NVIDIA's by NVML (``nvidia-ml-py``), AMD's by ``amdsmi``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from rlwatch.error_boundary import raised_by

Reader = Callable[[], dict[str, float]]
GIB = 2**30
HELD_BACK = (
    "nvmlClocksThrottleReasonHwSlowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)
"""Reasons for a slow clock that mean a sick machine: heat, or a power supply that gives way."""
CAPPED = "nvmlClocksThrottleReasonSwPowerCap"
"""The card's own power limit: usual under full load."""


def gpu_reader() -> Reader | None:
    """Callable that reads the GPUs this process may use, by the machine's numbers; None where there is no driver."""
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
        refused = nvml.NVMLError  # a card that does not tell one thing tells the others
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
    """Those of the machine's GPUs that ``CUDA_VISIBLE_DEVICES`` (AMD: ``ROCR_``, ``HIP_``) leaves to this process."""
    variables = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    told = next((os.environ[name] for name in variables if name in os.environ), None)
    if told is None:
        return numbers
    named = [one.strip() for one in told.split(",") if one.strip()]
    if all(one.isdecimal() for one in named):
        return [number for number in numbers if str(number) in named]
    found = {number: _text(uuid_of(number)) for number in numbers}
    return [number for number in numbers if any(found[number].startswith(one) for one in named)] or numbers


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
