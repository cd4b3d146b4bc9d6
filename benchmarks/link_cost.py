"""Ways for the ranks of a run to talk to each other, measured: decision 9 rests on these figures.

    python benchmarks/link_cost.py [PYTHON_WITH_PYZMQ]

Everything runs in processes on one machine, over the loopback. Ours is measured always; the key-value store of
``torch.distributed`` where torch is, ZeroMQ where pyzmq is (CURVE is libsodium's, which its wheels bring). `boundary`
is what the training thread pays where nobody wants anything, `command` the time from rank 0 having one to all ranks
having acted, with ranks that are at the boundary. A share is what one rank sends of one step: 16 kB at level
``tokens``, 0.8 MB at ``full``. A *stopped* host is a process that got SIGSTOP: it neither answers nor closes anything,
as a machine in trouble.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from rlwatch.link.hub import Hub
from rlwatch.link.rounds import Chair
from rlwatch.link.spoke import WorkerClient, introduced
from rlwatch.link.wire import Frame, FrameKind, StepKey

SHARES = {"16 kB": 16_000, "0.8 MB": 800_000, "9 MB": 9_000_000}
STRANGERS, FILES = 300, 256
HANGING_S = 20.0


def percentiles(work: Callable[[], object], repeat: int = 1000) -> str:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    times.sort()
    return f"p50 {1e6 * statistics.median(times):7.0f} us, p99 {1e6 * times[int(0.99 * repeat)]:7.0f} us"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_child(work: Callable[[], object]) -> int:
    """``work()`` in a process of its own; returns its id."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    return pid


def ended(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def hangs(work: Callable[[], object]) -> str:
    """How long ``work`` takes, if it ends."""
    begin, failed = time.monotonic(), []

    def attempt() -> None:
        try:
            work()
        except Exception as error:
            failed.append(type(error).__name__)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(HANGING_S)
    if thread.is_alive():
        return f"still hangs after {HANGING_S:g} s"
    return f"{time.monotonic() - begin:.2f} s{' ' + failed[0] if failed else ''}"


def ours(ranks: int) -> None:
    hub = Hub(ranks)

    def other(rank: int) -> None:
        spoke = WorkerClient(rank, lambda: hub.address, list, lambda _: None)
        spoke.start()
        spoke.settled(60.0)
        while spoke.member.open:
            while spoke.member.meets(1, staying=True):
                spoke.member.offered()
                spoke.member.vote(None)
                spoke.member.vote(None)
                spoke.member.over()
            time.sleep(0.0001)

    pids = [in_child(lambda rank=rank: other(rank)) for rank in range(1, ranks)]
    hub.start()
    while len(hub.linked()) < ranks - 1:
        time.sleep(0.01)
    chair, step = Chair(hub), iter(range(2, 10**9))

    def command() -> None:
        assert chair.meets(1, wanted=True, staying=True)
        chair.offer(b"x" * 200)
        assert chair.decide(None) is None
        assert chair.decide(None) is None
        chair.over()

    told = percentiles(command, 200)
    idle = percentiles(lambda: chair.meets(next(step), wanted=False), 10_000)
    print(f"ours, {ranks} ranks: boundary {idle}; command {told}")
    if ranks == 2:
        os.kill(pids[0], signal.SIGSTOP)
        print(f"  another rank is stopped: boundary {hangs(lambda: chair.meets(next(step), wanted=False))}", end="; ")
        print(f"command refused after {hangs(lambda: chair.meets(next(step), wanted=True))}", end="; ")
        chair.over()
        print(f"the next after {hangs(lambda: chair.meets(next(step), wanted=True))}")
        os.kill(pids[0], signal.SIGCONT)
    ended(*pids)
    hub.close()


def our_shares() -> None:
    hub = Hub(2)
    hub.start()
    address = hub.address

    def other() -> None:
        connection, _, _ = introduced(1, address, "steps")
        connection.settimeout(60.0)
        step = 0
        for size in SHARES.values():
            body = os.urandom(size)
            for _ in range(30):
                step += 1
                connection.sendall(Frame(FrameKind.STEP, StepKey(0, step, 0), body).packed())
        time.sleep(60.0)

    pid, step = in_child(other), 0
    for name in SHARES:
        begin = time.perf_counter()
        for _ in range(30):
            step += 1
            while hub.inbox.awaited(StepKey(0, step, 0)):
                time.sleep(0.0001)
            hub.inbox.take(StepKey(0, step, 0))
        print(f"ours: a share of {name} on a thread of its own: {1e3 * (time.perf_counter() - begin) / 30:.2f} ms")
    ended(pid)
    hub.close()


def our_strangers() -> None:
    """In a process that may open few files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    hub = Hub(2)
    hub.start()
    pid = in_child(lambda: besiege(hub.address.port))
    time.sleep(4.0)
    held = len(list(Path("/proc/self/fd").iterdir()))
    begin = time.monotonic()
    connection, *_ = introduced(1, hub.address, "steps")
    print(
        f"ours: {STRANGERS} idle strangers, {FILES} files: {held} open, "
        f"a rank in after {time.monotonic() - begin:.2f} s"
    )
    connection.close()
    ended(pid)
    hub.close()


def besiege(port: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    callers = []
    with contextlib.suppress(OSError):
        for _ in range(STRANGERS):
            callers.append(socket.create_connection(("127.0.0.1", port), 5.0))  # noqa: PERF401  (kept if one fails)
    time.sleep(60.0)


def tcp_store() -> None:
    import torch.distributed as dist

    port = free_port()

    def host() -> None:
        store = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
        store.set("x", "")
        time.sleep(600.0)

    def client() -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", port, 2, False, timeout=timedelta(seconds=5))

    pid, store = in_child(host), client()
    store.set("k", "")
    print(f"TCPStore: boundary (check a key) {percentiles(lambda: store.check(['k']))}")
    for name, size in SHARES.items():
        body = os.urandom(size)

        def share(body: bytes = body) -> None:
            store.set("share", body)
            store.get("share")
            store.delete_key("share")

        try:
            begin = time.perf_counter()
            for _ in range(30):
                share()
            print(f"TCPStore: a share of {name}, set and got: {1e3 * (time.perf_counter() - begin) / 30:.2f} ms")
        except RuntimeError as error:
            print(f"TCPStore: a share of {name}: {type(error).__name__}, and the trainer's own connection is gone")
    reader, writer, other = client(), client(), client()
    writer.set("w", "")
    threading.Thread(target=hangs, args=[lambda: other.wait(["never"], timedelta(seconds=3))], daemon=True).start()
    time.sleep(0.2)
    print(f"TCPStore: check, while another thread waits 3 s on the client: {hangs(lambda: other.check(['k']))}")
    os.kill(pid, signal.SIGSTOP)
    print(f"TCPStore, host stopped, timeout 5 s: set {hangs(lambda: writer.set('w', 'x'))}", end="; ")
    print(f"check {hangs(lambda: reader.check(['k']))}")
    ended(pid)


ZMQ = """
import os, sys, time
import zmq
context = zmq.Context()
public, secret = zmq.curve_keypair()
server = context.socket(zmq.ROUTER)
server.curve_server, server.curve_publickey, server.curve_secretkey = True, public, secret
port = server.bind_to_random_port("tcp://127.0.0.1")
client = context.socket(zmq.DEALER)
client.curve_serverkey = public
client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
client.connect(f"tcp://127.0.0.1:{port}")
def there_and_back(body):
    client.send(body)
    who, got = server.recv_multipart()
    server.send_multipart([who, b"yes"])
    client.recv()
there_and_back(b"x")
times = []
for _ in range(500):
    begin = time.perf_counter(); there_and_back(b"x" * 200); times.append(time.perf_counter() - begin)
times.sort()
print(f"ZeroMQ with CURVE: there and back p50 {1e6 * times[250]:.0f} us, p99 {1e6 * times[495]:.0f} us")
for size in (16_000, 800_000, 9_000_000):
    body = os.urandom(size)
    begin = time.perf_counter()
    for _ in range(10):
        there_and_back(body)
    print(f"ZeroMQ with CURVE: a share of {size / 1e6:g} MB: {1e3 * (time.perf_counter() - begin) / 10:.2f} ms")
print(port, flush=True)
time.sleep(4.0)
try:
    open(os.devnull).close()
    print("ZeroMQ: beside idle strangers a file can be opened", flush=True)
except OSError as error:
    print("ZeroMQ: beside idle strangers a file cannot be opened:", error, flush=True)
try:
    zmq.Context().socket(zmq.DEALER)
    print("ZeroMQ: one more socket can be made", flush=True)
except zmq.ZMQError as error:
    print("ZeroMQ: one more socket:", error, flush=True)
"""


def zero_mq(python: str) -> None:
    """In a process of its own, with few files, besieged as ours was."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))\n" + ZMQ
    process = subprocess.Popen([python, "-c", limited], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    siege = 0
    for line in process.stdout or ():
        if line.strip().isdecimal():
            siege = in_child(lambda port=int(line): besiege(port))
        else:
            print(line.rstrip())
    print(f"ZeroMQ: {STRANGERS} idle strangers, {FILES} files: the process ended with {process.wait()}")
    if siege:
        ended(siege)


def main() -> None:
    logging.disable()
    for ranks in (2, 4, 8):
        ours(ranks)
    our_shares()
    ended_by = os.fork()
    if ended_by == 0:
        our_strangers()
        os._exit(0)
    os.waitpid(ended_by, 0)
    with contextlib.suppress(ImportError):
        tcp_store()
    python = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    if subprocess.run([python, "-c", "import zmq"], capture_output=True, check=False).returncode == 0:
        zero_mq(python)


if __name__ == "__main__":
    main()
