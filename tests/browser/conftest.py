"""The real app in a real browser over a store that a real trainer process writes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from preloaded import Program
from real_dashboard import ROOT, environment
from waiting import PATIENCE_MS, patient, until

from rlwatch.cli import ui
from rlwatch.cli.app_login import Login, LoginToken, place
from rlwatch.store.url import open_store

HERE = Path(__file__).resolve().parent
HARMLESS = ("Failed to load resource: the server responded with a status of 404",)
"""Streamlit probes for a base path on deep links; two 404s belong to it."""


@dataclass(frozen=True)
class Trainer:
    """A live trainer process and its run."""

    process: Program
    run_id: str
    name: str
    log: Path

    def alive(self) -> bool:
        """Whether it still trains."""
        return self.process.poll() is None


@pytest.fixture
def store_url(tmp_path):
    """An empty directory store."""
    return str(tmp_path / "store")


@pytest.fixture
def train(tmp_path, store_url):
    """Start a trainer script of this directory and wait for its first steps; stopped afterwards."""
    directory = tmp_path / "trainer"
    directory.mkdir()
    started = []

    def start(script: str, steps: int = 5) -> Trainer:
        log = directory / "log"
        with log.open("wb") as out:
            process = Program(
                None, store_url, directory, script=HERE / script,
                env=environment(), cwd=directory, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        started.append(process)
        store = open_store(store_url)

        def stepping():
            if process.poll() is not None:
                pytest.fail(f"{script} ended with {process.returncode}: {log.read_text()[-3000:]}")
            return [run for run in store.runs() if (run.last_step or 0) >= steps]

        run = until(stepping, f"{script} wrote {steps} steps")[0]
        store.close()
        return Trainer(process, run.run_id, run.name, log)

    yield start
    (directory / "stop").touch()
    for process in started:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


TOKENS = {"operator": "the operator's token", "viewer": "a viewer's own token"}


@contextmanager
def serving(store_url, port=None):
    """Address of an app over ``store_url``, started as ``rlwatch ui`` starts it."""
    where = place("127.0.0.1", port or ui.free_port("127.0.0.1"))
    login = Login({role: LoginToken(token) for role, token in TOKENS.items()}, "what sessions are signed with")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        server = ui.start_server(ui.app_script(), where, login, store_url, quiet=True)
    problem = ui.wait_healthy(server, where.local)
    yield where.local if problem is None else pytest.fail(problem)
    ui.stop_server(server)


@pytest.fixture
def serve():
    """Start an app, at a port of one's choice."""
    return serving


@pytest.fixture
def app(store_url):
    """Address of the app over ``store_url``."""
    with serving(store_url) as address:
        yield address


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    """A directory store in which each test of a module has runs of its own."""
    return str(tmp_path_factory.mktemp("shared") / "store")


@pytest.fixture(scope="module")
def shared_app(shared_store):
    """Address of the app over ``shared_store``: started once for the tests to which other runs do no harm."""
    with serving(shared_store) as address:
        yield address


@pytest.fixture(scope="module")
def filled(shared_store):
    """A run with all that a page can tell, and its twin."""
    from test_browser_pages import write

    from rlwatch.records import Alert, AlertState, Event, Finding, RunState, Severity

    alert = Alert("a1", "ill", "entropy", "entropy_collapse", Severity.CRITICAL, AlertState.FIRING, 150, 160,
                  "entropy fell to 0.1", fired_at=time.time())  # fmt: skip
    collapse = Finding("d", "entropy_collapse", Severity.CRITICAL, 160, 150, "entropy fell", {"ratio": 0.1})
    layers = {f"grad_layer/model.layers.{i}": 1.0 + i for i in range(4)}
    quantiles = {"ratio/mean": 1.0, "ratio/min": 0.5, "ratio/p99": 1.5}
    events = [collapse, Event("gradient_localised", step=40), Event("reference_reset", step=80)]
    write(shared_store, "ill", steps=range(1, 201), alerts=[alert], findings=events, metrics={**layers, **quantiles})
    write(shared_store, "well", name="seed4", steps=range(1, 201), end=RunState.FINISHED)
    return shared_store


def log_in(context, app, role="operator", name="ann"):
    """Give a browser a session, as the form of the login page does."""
    answer = context.request.post(f"{app}/login", form={"token": TOKENS[role], "name": name}, max_redirects=0)
    assert answer.status == 303


def chromium() -> str:
    """Where Chromium is: ``RLWATCH_CHROMIUM``, or where Debian puts it. Fails loudly where there is none."""
    path = os.environ.get("RLWATCH_CHROMIUM", "/usr/bin/chromium")
    if not Path(path).is_file():
        pytest.fail(
            f"no Chromium at {path}: run 'apt-get install chromium', or set RLWATCH_CHROMIUM to another one's path"
        )
    return path


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=chromium(), args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, request):
    """A fresh page, logged in as operator ann, that fails its test on any script error or breach of the content policy;
    its last picture is kept in ``screenshots/``.
    """
    context = patient(browser, viewport={"width": 1500, "height": 1000})
    for name in {"app", "shared_app"} & set(request.fixturenames):
        log_in(context, request.getfixturevalue(name))
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    pictures = ROOT / "screenshots"
    pictures.mkdir(exist_ok=True)
    page.screenshot(path=pictures / f"{request.node.name}.png", full_page=True)
    context.close()
    assert [error for error in errors if not error.startswith(HARMLESS)] == []


@pytest.fixture
def early(browser, shared_app):
    """A page whose copy of Streamlit's script is held back until it is let go, and what went wrong in it."""
    context = browser.new_context(viewport={"width": 1500, "height": 1000})
    context.set_default_timeout(PATIENCE_MS)
    log_in(context, shared_app)
    page, held, errors = context.new_page(), [], []
    page.on("pageerror", lambda error: errors.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)

    def hold(route):
        held.append(route)

    page.route(re.compile(r"/static/js/index\.[\w-]+\.js"), hold)
    yield page, lambda: [route.continue_() for route in held]
    context.close()
    assert [error for error in errors if not error.startswith(HARMLESS)] == []


@pytest.fixture
def joined(browser):
    """A page of another person's browser."""
    contexts = []

    def join(app, role, name, **screen):
        contexts.append(patient(browser, **screen))
        log_in(contexts[-1], app, role, name)
        return contexts[-1].new_page()

    yield join
    for context in contexts:
        context.close()


@pytest.fixture
def messages(page):
    """The sizes of what the app has sent to ``page`` so far, in bytes; scripts and styles are not among them."""
    sizes = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda sent: sizes.append(len(sent))))
    return sizes
