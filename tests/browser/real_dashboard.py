"""``rlwatch ui`` as a process, and clients that are no browser."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from socket import create_connection

import httpx
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from rlwatch.cli import ui

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """This process's, with the checkout importable and one thread for the arithmetic."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Dashboard:
    """``rlwatch ui`` as a process, with a state directory of its own."""

    def __init__(self, directory):
        self.directory, self.store = directory, str(directory / "store")
        self.port = ui.free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "log"

    def start(self, *options, **variables):
        command = [sys.executable, "-u", "-m", "rlwatch.cli", "ui", "--port", str(self.port), "--store", self.store]
        state = {"RLWATCH_STATE_DIR": str(self.directory / "state")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                env={**environment(), **state, **variables}, cwd=self.directory, stdout=log, stderr=log,
            )  # fmt: skip
        problem = ui.wait_healthy(self.process, self.url)
        assert problem is None, f"{problem}: {self.log.read_text()}"
        self.links = dict(re.findall(r"(operator|viewer) .*(http\S+token=\S+)", self.log.read_text()))
        return self

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)

    def cookie(self, role="operator", name=""):
        """The session cookie that the link of the role gives, as a header."""
        answer = httpx.get(self.links[role] + f"&name={name}", trust_env=False)
        assert answer.status_code == 303, answer.text
        return answer.headers["set-cookie"].partition(";")[0]

    def websocket(self, cookie=None, origin=None, host=None):
        """101, or the status of the refusal; as a client that is no browser may send them."""
        headers = {"Cookie": cookie} if cookie else {}
        address = f"ws://{f'127.0.0.1:{self.port}' if host is None else host}/_stcore/stream"
        try:
            socket = create_connection(("127.0.0.1", self.port))
            with connect(address, sock=socket, origin=origin, additional_headers=headers):
                return 101
        except InvalidStatus as refusal:
            return refusal.response.status_code
