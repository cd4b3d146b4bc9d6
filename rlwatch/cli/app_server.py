"""The dashboard as a process: where its script lies, how it is started, whether it answers."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import rlwatch
from rlwatch.alerts.config import CONFIG_VARIABLE, own_file
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.store.url import absolute_url

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 5.0
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def app_script() -> Path:
    """``main.py`` of the app: in the wheel (``rlwatch/_app``), or beside the package in a checkout."""
    package = Path(rlwatch.__file__).parent
    places = (package / "_app" / "main.py", package.parent / "app" / "main.py")
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(f"the dashboard's files are missing: looked for {places[0]} and {places[1]}; reinstall rlwatch")


def require_streamlit() -> None:
    """Raises ``MissingExtraError`` where streamlit is not installed."""
    if find_spec("streamlit") is None:
        raise MissingExtraError("streamlit", "app", "rlwatch ui")


def require_loopback(host: str) -> None:
    """Raises ``ConfigError`` unless ``host`` is an address only this machine can reach."""
    if not is_loopback(host):
        raise ConfigError(
            f"will not listen on {host!r}: the dashboard has no login yet, and whoever reaches it can read runs and "
            "send commands; keep 127.0.0.1 and tunnel to it: ssh -L 8501:127.0.0.1:8501 <this machine>"
        )


def is_loopback(host: str) -> bool:
    """``localhost``, ``127.x.y.z`` or ``::1``; other names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def free_port(host: str) -> int:
    """A port nobody listens on at this moment."""
    with _socket(host) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """Raises ``ConfigError`` if ``port`` cannot be listened on."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def server_command(script: Path, host: str, port: int) -> list[str]:
    """The command line that serves ``script``. ``-P``: no Python file of the working directory is imported."""
    options = {
        "server.address": host.strip("[]"),
        "server.port": str(port),
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.showErrorDetails": "none",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [sys.executable, "-P", "-m", "streamlit", "run", str(script), *flags]


def server_environment(
    host: str, store_url: str | None, outer: Mapping[str, str] | None = None, config: Path | None = None
) -> dict[str, str]:
    """The environment of the server: the store it shows, whose configuration, and the host names it answers to.

    Without the list of names a web page anywhere could reach the dashboard by DNS rebinding. It is a
    variable, not a flag, because older streamlit versions refuse flags they do not know.
    """
    environment = dict(os.environ if outer is None else outer)
    environment["RLWATCH_STORE"] = absolute_url(store_url or environment.get("RLWATCH_STORE"))
    if environment.get("PYTHONPATH"):  # the server runs in another directory
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(place).absolute()) for place in environment["PYTHONPATH"].split(os.pathsep) if place
        )
    named = config.absolute() if config is not None else own_file()
    if named is not None:
        environment[CONFIG_VARIABLE] = str(named)
    names = dict.fromkeys((*LOCAL_NAMES, host.strip("[]")))
    environment.setdefault("STREAMLIT_SERVER_ALLOWED_HOSTS", " ".join(names))
    return environment


def start(
    script: Path, host: str, port: int, store_url: str | None, *, quiet: bool = False, config: Path | None = None
) -> subprocess.Popen[str]:
    """Start the server; with ``quiet`` its words are kept in the process's ``stdout``.

    Not in the working directory, which may be a store: Streamlit obeys the ``.streamlit`` that lies there.
    """
    return subprocess.Popen(
        server_command(script, host, port),
        env=server_environment(host, store_url, config=config),
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )


def address(host: str, port: int) -> str:
    """Where a browser finds the dashboard."""
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def wait_healthy(process: subprocess.Popen[str], url: str, deadline_s: float = START_DEADLINE_S) -> str | None:
    """None as soon as the server says it is healthy; else why it did not within ``deadline_s`` seconds."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if process.poll() is not None:
            return f"the server ended with code {process.returncode}"
        if _healthy(url):
            return None
        time.sleep(0.1)
    return f"no healthy answer from {url} within {deadline_s:g} s"


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2.0) as answer:  # noqa: S310  (http, loopback)
            return bool(answer.status == 200 and answer.read().strip() == b"ok")
    except (urllib.error.URLError, OSError):
        return False


def stop(process: subprocess.Popen[str]) -> None:
    """End the server: asked first, then made to."""
    process.terminate()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
