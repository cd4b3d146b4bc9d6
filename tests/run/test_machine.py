"""The machine beside a run: measured off the training thread, recorded with the next row, never in the way."""

import logging
import math
import shutil
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlwatch
from rlwatch.metrics import metric_of
from rlwatch.run import machine
from rlwatch.run.machine import (
    Machine,
    MachineThread,
    WithMachines,
    container_memory,
    gpu_reader,
    machine_thread,
    packed,
    wanted,
)
from rlwatch.run.ranks import join
from rlwatch.store.url import open_store

GIB = 2**30


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_read_is_what_the_system_says(tmp_path):
    """Against the standard library and the process's own books; every name is in the table."""
    read = Machine({"store": tmp_path / "not" / "there" / "yet", "checkpoints": tmp_path}).read
    read()
    busy = time.process_time() + 0.3
    while time.process_time() < busy:
        pass

    found = read()

    usage = shutil.disk_usage(tmp_path)
    assert found["system/disk/store/free"] == pytest.approx(usage.free / GIB, rel=0.2)
    assert "system/disk/checkpoints/free" not in found, "the same disk twice"
    assert found["system/memory/process"] == pytest.approx(psutil.Process().memory_info().rss / GIB, rel=0.2)
    assert found["system/cpu/process"] > 0.05
    assert {name: metric_of(name) for name in found if metric_of(name) is None} == {}
    for name, value in found.items():
        metric = metric_of(name)
        assert metric.low is None or value >= metric.low, name
        assert metric.high is None or value <= metric.high, name


def test_rates_count_what_went_over_the_network(tmp_path):
    """Four MiB to ourselves are at least four that were sent."""
    read = Machine({}).read
    read()
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        threading.Thread(target=lambda: client.sendall(bytes(4 * 2**20)), daemon=True).start()
        left = 4 * 2**20
        with there:
            while left:
                left -= len(there.recv(2**20))
    found = read()

    assert found["system/net/sent"] * (time.monotonic() - began) >= 4.0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max\n"}, None),
        ({}, None),
        (
            {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 300\ninactive_file 250\n"},
            (1000.0, 550.0),
        ),
        ({"memory.max": "1000\n", "memory.current": "1700\n", "memory.stat": "anon 300\n"}, (1000.0, 0.0)),
    ],
)
def test_a_container_has_the_memory_it_is_given(tmp_path, files, expected):
    """Pages of files that can be dropped are free."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert container_memory(tmp_path) == expected


NVML = (
    "nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetCurrentClocksThrottleReasons", "NVML_TEMPERATURE_GPU", "NVMLError", machine.CAPPED, *machine.HELD_BACK,
)  # fmt: skip


class RefusedError(Exception):
    pass


def driver(reasons):
    """A driver of four cards, the last of which tells nothing but its load; with the names and flags of NVIDIA's."""
    import pynvml

    def power(card):
        if card == 3:
            raise RefusedError
        return 350_000 + card

    def refusing(value):
        def ask(card, *_):
            if card == 3:
                raise RefusedError
            return value

        return ask

    return SimpleNamespace(
        NVMLError=RefusedError,
        NVML_TEMPERATURE_GPU=pynvml.NVML_TEMPERATURE_GPU,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda card: f"GPU-{card}abc",
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=97, memory=3),
        nvmlDeviceGetMemoryInfo=refusing(SimpleNamespace(total=80 * GIB, used=60 * GIB, free=20 * GIB)),
        nvmlDeviceGetTemperature=refusing(71),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: refusing(reasons[card])(card),
        **{name: getattr(pynvml, name) for name in (machine.CAPPED, *machine.HELD_BACK)},
    )


def test_gpus_are_read_by_their_driver(monkeypatch):
    """Heat is no power limit; a card that refuses an answer gives the others. The names are those of the package."""
    import pynvml

    assert [name for name in NVML if not hasattr(pynvml, name)] == []
    heat, cap = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, pynvml.nvmlClocksThrottleReasonSwPowerCap
    monkeypatch.setitem(sys.modules, "pynvml", driver([heat | cap, cap, 0, 0]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    found = gpu_reader()()

    assert [found[f"system/gpu/{i}/throttled"] for i in range(3)] == [1.0, 0.0, 0.0]
    assert [found[f"system/gpu/{i}/power_capped"] for i in range(3)] == [1.0, 1.0, 0.0]
    assert found["system/gpu/0/memory"] == 0.75
    assert found["system/gpu/1/power"] == pytest.approx(350.001)
    assert {name: value for name, value in found.items() if "/gpu/3/" in name} == {"system/gpu/3/util": 0.97}
    assert all(metric_of(name) for name in found)


@pytest.mark.parametrize(("visible", "read"), [("1", {1}), ("0,2", {0, 2}), ("GPU-3", {3}), ("", set())])
def test_only_gpus_of_this_process_are_read(monkeypatch, visible, read):
    """By number and by name, under the machine's own numbers."""
    monkeypatch.setitem(sys.modules, "pynvml", driver([0] * 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert {int(name.split("/")[2]) for name in gpu_reader()()} == read


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    """Nor an error."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)

    assert gpu_reader() is None


def looking(*looks):
    """A machine that says these things, one after the other, and then nothing more."""
    said = iter(looks)
    return MachineThread(lambda: lambda: next(said, {}), every_s=0.005)


def rows_of(store, run):
    return [dict(record.metrics) for record in open_store(store).records(run.info.run_id)]


def test_a_look_goes_with_the_next_row_as_the_mean_of_all_since_the_last(tmp_path):
    """Once; what the trainer calls so is the trainer's."""
    thread = looking({"system/cpu/util": 0.2, "system/gpu/0/util": 1.0}, {"system/cpu/util": 0.4})
    with rlwatch.init(store=tmp_path, system=False) as run:
        run.measure(thread)
        until(lambda: thread.cpu_seconds > 0.0)
        time.sleep(0.1)
        run.log({"entropy": 0.5, "system/gpu/0/util": 0.25}, step=1)
        run.log({"entropy": 0.4}, step=2)

    assert rows_of(tmp_path, run) == [
        {"entropy": 0.5, "system/gpu/0/util": 0.25, "system/cpu/util": pytest.approx(0.3)},
        {"entropy": 0.4},
    ]


def test_what_is_trained_is_recorded_alike_with_and_without(tmp_path):
    """Bit for bit, NaN and infinities too; nothing but looks is added."""

    def recorded(where, thread):
        with rlwatch.init(store=tmp_path / where, system=False) as run:
            if thread is not None:
                run.measure(thread)
            for step in range(300):
                run.log({"entropy": math.sin(step), "loss": [math.nan, math.inf, -math.inf, 0.1][step % 4]}, step=step)
                time.sleep(0.0005)
        return rows_of(tmp_path / where, run)

    plain, looked = recorded("off", None), recorded("on", looking(*[{"system/cpu/util": 0.5}] * 1000))
    own = [{name: value for name, value in row.items() if not name.startswith("system/")} for row in looked]

    assert repr(own) == repr(plain)
    assert any("system/cpu/util" in row for row in looked)


def test_what_fails_on_the_machine_stays_there(tmp_path):
    """A reading that raises, whatever it is, costs the run no row."""

    def read():
        raise SystemExit(3)

    thread = MachineThread(lambda: read, every_s=0.001)
    with rlwatch.init(store=tmp_path, system=False) as run:
        run.measure(thread)
        until(lambda: thread.cpu_seconds > 0.0)
        run.log({"entropy": 0.5}, step=1)

    assert rows_of(tmp_path, run) == [{"entropy": 0.5}]


def test_without_psutil_it_is_said_once(tmp_path, caplog, monkeypatch):
    """And the run goes on."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    with caplog.at_level(logging.INFO, "rlwatch"):
        for i in range(2):
            with rlwatch.init(store=tmp_path / str(i), system=True) as run:
                until(lambda: any("psutil" in one.message for one in caplog.records))
                run.log({"entropy": 0.5}, step=1)

    assert [one.message for one in caplog.records if "psutil" in one.message] == [machine.NO_PSUTIL]


@pytest.mark.parametrize(
    ("said", "variable", "looks"), [(None, "", 1), (None, "off", 0), (True, "off", 1), (False, "1", 0)]
)
def test_it_can_be_turned_off(tmp_path, monkeypatch, said, variable, looks):
    """In the code, else in the environment; and it ends with the run."""

    def threads():
        return sum(thread.name == "rlwatch-machine" for thread in threading.enumerate())

    monkeypatch.setenv("RLWATCH_SYSTEM", variable)
    before = threads()
    with rlwatch.init(store=tmp_path, system=said):
        assert threads() == before + looks
        assert wanted(said) == bool(looks)
    until(lambda: threads() == before)


def test_ranks_of_one_machine_measure_it_once(monkeypatch, tmp_path):
    """The first of them the machine, the others their process."""

    def names(rank, **environment):
        for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        thread = machine_thread(rank, {}, every_s=0.001)
        found = {}
        thread.start()
        until(lambda: found.update(thread.taken()) or found)
        thread.stop(5.0)
        return set(found)

    assert "system/memory/free" in names(0)
    assert "system/memory/free" in names(8, LOCAL_RANK="0")
    assert names(9, LOCAL_RANK="1") == {"system/cpu/process", "system/memory/process"}


found = st.dictionaries(
    st.sampled_from(["system/cpu/util", "system/gpu/0/power"]), st.floats(allow_nan=False), max_size=2
)


class Shares:
    step = 7

    def ready(self):
        return True

    def encode(self):
        return b"own"

    def merged(self, others):
        return {"shares": others}, []


@given(ranks=st.dictionaries(st.integers(1, 64), st.tuples(found, st.binary(max_size=50)), max_size=4))
def test_a_share_arrives_as_it_was_sent_and_the_machine_beside_it(ranks):
    """Whatever bytes it has."""
    metrics, _ = WithMachines(Shares()).merged({rank: packed(*sent) for rank, sent in ranks.items()})

    assert metrics.pop("shares") == {rank: share for rank, (_, share) in ranks.items()}
    assert metrics == {
        f"system/rank/{rank}/{name.removeprefix('system/')}": value
        for rank, (looks, _) in ranks.items()
        for name, value in looks.items()
    }


class Empty(Shares):
    def merged(self, others):
        assert set(others.values()) <= {b"own"}
        return {"entropy": 0.5}, []


def test_another_rank_sends_its_machine_to_the_first(tmp_path):
    """With its share of a step, over the real link."""

    class Place(dict):
        put = dict.__setitem__

    place = Place()
    first = rlwatch.init(store=tmp_path, rank=0, world_size=2, system=False)
    other = rlwatch.init(store=tmp_path, rank=1, world_size=2, system=False)
    thread = looking({"system/gpu/0/util": 0.5})
    other.measure(thread)
    join(first, place)
    join(other, place)
    assert other.ranks.settled(20.0)
    until(lambda: thread.cpu_seconds > 0.0)
    for run in (first, other):
        run.send(Empty())
    other.finish()
    first.finish()

    (row,) = rows_of(tmp_path, first)
    assert row == {"entropy": 0.5, "rlwatch/ranks": 2.0, "system/rank/1/gpu/0/util": 0.5}


def test_a_run_of_minutes_is_measured_without_being_asked(tmp_path):
    """As a training does it: nothing but ``init``; a process of its own, with a shorter pause."""
    code = (
        "import sys, time, rlwatch\n"
        "from rlwatch.run import machine\n"
        "machine.machine_thread.__kwdefaults__['every_s'] = 0.02\n"
        "with rlwatch.init(store=sys.argv[1], run_id='measured', output_dir=sys.argv[1]) as run:\n"
        "    for step in range(40): run.log({'entropy': 0.5}, step=step); time.sleep(0.02)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)

    names = {name for record in open_store(str(tmp_path)).records("measured") for name in record.metrics}
    assert {"system/cpu/util", "system/memory/free", "system/disk/checkpoints/free", "system/net/sent"} <= names
