"""Programs that begin in milliseconds: forked from a server that has imported once what takes them seconds.

There are two, for programs that need torch and TRL and for those that only have a run. All workers of the tests share
them; each begins with its first program and ends with the tests. What a program does cannot be told from one that
``subprocess`` started, but for the modules that are there already.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

FOLDER = "RLWATCH_TEST_PROCESSES"
"""FOLDER:PID in the environment, from ``conftest.py``: where the server is to be, and with whom it ends."""
ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0


def _server(having: str) -> str:
    """Its address; starts it where it does not run."""
    folder, _, tests = os.environ[FOLDER].rpartition(":")
    address = f"{folder}/{having}"
    with Path(folder, f"{having}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(address).exists():
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            env = {**os.environ, "PYTHONPATH": path if having == "rlwatch" else str(ROOT)}
            env.pop("PYTHONUNBUFFERED", None)
            env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            with Path(folder, f"{having}.log").open("wb") as log:
                server = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("preloaded_server.py")), having, address, tests],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd="/", start_new_session=True,
                )  # fmt: skip
            while not Path(address).exists():
                if server.poll() is not None:
                    raise RuntimeError(
                        f"what starts programs has ended: {Path(folder, f'{having}.log').read_text()[-3000:]}"
                    )
                time.sleep(0.05)
    return address


class Program:
    """A running program, as ``subprocess.Popen`` with ``text=True`` has it; killed when its ``with`` block ends."""

    stdin: IO[str] | None
    stdout: IO[str] | None
    stderr: IO[str] | None

    def __init__(
        self, code=None, *argv, script=None, having="torch", env=None, cwd=None, stdin=None, stdout=None, stderr=None
    ):  # type: ignore[no-untyped-def]
        self.returncode: int | None = None
        self._end = socket.socket(socket.AF_UNIX)
        address = _server(having)
        for _ in range(200):
            try:
                self._end.connect(address)
                break
            except ConnectionRefusedError:  # bound, and not yet listening
                time.sleep(0.05)
        theirs, ours = [], []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            if wanted == subprocess.PIPE:
                read, write = os.pipe()
                theirs.append(read if number == 0 else write)
                ours.append(os.fdopen(write, "w", 1) if number == 0 else os.fdopen(read))
            else:
                ours.append(None)
                if wanted == subprocess.STDOUT:
                    theirs.append(os.dup(theirs[1]))
                elif wanted is None:
                    theirs.append(os.open(os.devnull, os.O_RDONLY) if number == 0 else os.dup(number))
                else:
                    theirs.append(os.dup(wanted if isinstance(wanted, int) else wanted.fileno()))
        self.stdin, self.stdout, self.stderr = ours
        asked = {
            "code": code or "",
            "script": str(script) if script else "",
            "argv": [str(argument) for argument in argv],
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        text = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(self._end, [text], theirs)
        self._end.sendall(text[sent:])
        for stream in theirs:
            os.close(stream)
        self.pid = int(self._answer())

    def _answer(self) -> bytes:
        """One line, and nothing of the next."""
        line = b""
        while not line.endswith(b"\n"):
            part = self._end.recv(1)
            assert part, "what starts programs has ended"
            line += part
        return line

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.wait(0.001)
            except subprocess.TimeoutExpired:
                return None
        return self.returncode

    def wait(self, timeout: float | None = LIMIT_S) -> int:
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                self.returncode = int(self._answer())
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0.0) from None
            self._end.close()
        return self.returncode

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """As ``Popen.communicate``; a child of the program that hangs and holds its pipes keeps nobody."""
        if self.stdin:
            self.stdin.close()
        said = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            said[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=(number, stream), daemon=True)
            for number, stream in enumerate((self.stdout, self.stderr))
            if stream
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()
        self.wait()
        for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
            stream.close()


def run_program(code=None, *argv, timeout=LIMIT_S, check=False, **more) -> subprocess.CompletedProcess[str]:  # type: ignore[no-untyped-def]
    """As ``subprocess.run`` with ``capture_output=True, text=True``."""
    with Program(code, *argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as program:
        out, err = program.communicate(timeout)
    done = subprocess.CompletedProcess(["python", *argv], program.wait(), out, err)
    if check:
        assert not done.returncode, f"ended with {done.returncode}:\n{out[-2000:]}\n{err[-4000:]}"
    return done
