"""Forks the programs that tests start, from a process that has imported once what they need.

``python preloaded_server.py torch|rlwatch SOCKET PID``: each connection brings the three standard streams and a line of JSON
(``code`` or ``script``, ``argv``, ``env``, ``cwd``), and is answered the id of the process and, when that has ended, its
exit status as subprocess counts it. A program begins and ends as the interpreter has it begin and end: with its own
arguments, environment, path and ``__main__``, and whatever it raises. All ends when the process ``PID`` of the tests is
gone.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import selectors
import socket
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

LOOK_S = 1.0
INSTALLED = sys.path[1:]


A_RUN = """
import sys, tempfile, rlwatch
with tempfile.TemporaryDirectory() as place:
    with rlwatch.init(store=place, run_id="r", sigterm=False) as run:
        run.log({"entropy": 0.5}, step=1)
    rlwatch.open_store(place).records("r")
print(*sys.modules, sep="\\n")
"""


def preload_rlwatch() -> None:
    """What a run imports, and nothing of it begun: a run of a parent would be inert in its children."""
    done = subprocess.run([sys.executable, "-c", A_RUN], capture_output=True, text=True, check=True)
    for name in done.stdout.split():
        if name.partition(".")[0] in ("rlwatch", "numpy", "sqlite3") and name not in sys.modules:
            import_module(name)


def preload_torch() -> None:
    """What is heavy: what is ours is imported by each program anew."""
    import torch
    import torch.distributed
    from transformers import Qwen2ForCausalLM, Trainer, TrainingArguments  # noqa: F401
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: F401

    torch.set_num_threads(1)


class Server:
    """Answers until a child of its is to become the program that ``serve`` returns."""

    def __init__(self, address: str, tests: int):
        self._tests = tests
        self._ready = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._waiting: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> dict:  # type: ignore[type-arg]
        while True:
            for key, _ in self._ready.select(LOOK_S):
                if key.fileobj is self._listener:
                    wanted = self._fork(self._listener.accept()[0])
                    if wanted is not None:
                        return wanted
                else:
                    self._ended(key.fd)
            if not Path(f"/proc/{self._tests}").exists():
                raise SystemExit

    def _fork(self, caller: socket.socket) -> dict | None:  # type: ignore[type-arg]
        text, streams, _, _ = socket.recv_fds(caller, 1 << 16, 3)
        while text and not text.endswith(b"\n"):
            text += caller.recv(1 << 16)
        if not text:  # it has thought better of it
            caller.close()
            return None
        pid = os.fork()
        if not pid:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            self._forget(caller, streams)
            return json.loads(text)  # type: ignore[no-any-return]
        for stream in streams:
            os.close(stream)
        caller.sendall(b"%d\n" % pid)
        end = os.pidfd_open(pid)
        self._waiting[end] = pid, caller
        self._ready.register(end, selectors.EVENT_READ)
        return None

    def _forget(self, caller: socket.socket, streams: list[int]) -> None:
        """A program has none of the server's files."""
        self._ready.close()
        self._listener.close()
        for end, (_, other) in self._waiting.items():
            os.close(end)
            other.close()
        caller.close()
        for stream in streams:
            os.close(stream)

    def _ended(self, end: int) -> None:
        pid, caller = self._waiting.pop(end)
        self._ready.unregister(end)
        os.close(end)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # whoever asked is gone
            caller.sendall(b"%d\n" % status)
        caller.close()


def become(wanted: dict) -> None:  # type: ignore[type-arg]
    """As ``python -c CODE`` or ``python SCRIPT`` would begin."""
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    if wanted["env"].get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    script = wanted["script"]
    mine = [place for place in wanted["env"].get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [str(Path(script).parent) if script else "", *mine, *INSTALLED]
    sys.argv[:] = [script or "-c", *wanted["argv"]]
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": __builtins__, **({"__file__": script} if script else {})})
    sys.modules["__main__"] = main
    text = Path(script).read_text() if script else wanted["code"]
    exec(compile(text, script or "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    {"torch": preload_torch, "rlwatch": preload_rlwatch}[sys.argv[1]]()
    gc.freeze()  # else every program walks through all of torch for garbage when it ends
    become(Server(sys.argv[2], int(sys.argv[3])).serve())
