"""Who gets into the dashboard of a real ``rlwatch ui``, as another user of the machine and as a foreign page would try it."""

import os
import resource
import socket
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from playwright.sync_api import expect
from real_dashboard import Dashboard
from waiting import patient

from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory):
    dashboard = Dashboard(tmp_path_factory.mktemp("dashboard"))
    store = open_store(dashboard.store)
    writer = store.open_run(RunInfo("r", project="p", name="seed3"))
    writer.write([StepRecord(s, {"reward": s / 10}, ts=time.time()) for s in range(1, 31)])
    writer.close()
    store.close()
    yield dashboard.start()
    dashboard.stop()


def get(url, **headers):
    """As a browser asks for a page; the name of a header with ``_`` for ``-``."""
    given = {"accept": "text/html", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return httpx.get(url, headers=given, trust_env=False)


PATHS = ["/", "/run?run=r", "/alerts", "/static/js/x.js", "/_stcore/host-config", "/_stcore/metrics", "/media/x",
         "/_stcore/health/", "/_stcore/health%3Fx", "/_stcore/../run", "//_stcore/health", "/_stcore/agent/openapi.json",
         "/_stcore/bidi-components/x", "/logout/../run", "/api/runs"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_without_a_session_every_path_is_the_login(dashboard, path):
    """Pages, scripts, what Streamlit serves beside them; and however the one open path, the health check, is spelt."""
    answer = get(dashboard.url + path)
    assert answer.status_code == 401
    assert "paste its token here" in answer.text
    assert "seed3" not in answer.text
    assert httpx.post(dashboard.url + path, trust_env=False).status_code == 401
    assert httpx.get(f"{dashboard.url}/_stcore/health", trust_env=False).text == "ok"


def test_a_websocket_needs_the_cookie_the_origin_and_the_host(dashboard):
    """What another user of the machine, a page on another port, and a name that was rebound would send."""
    cookie, ours = dashboard.cookie(), f"http://127.0.0.1:{dashboard.port}"
    host = f"127.0.0.1:{dashboard.port}"
    forged = cookie[:-2] + ("AA" if not cookie.endswith("AA") else "BB")

    assert dashboard.websocket(None, ours) == 401
    assert dashboard.websocket(forged, ours) == 401
    assert dashboard.websocket(f"rlwatch-{dashboard.port}=x", ours) == 401
    assert dashboard.websocket(cookie.replace(str(dashboard.port), "8501"), ours) == 401
    for origin in (
        None,
        "null",
        "http://127.0.0.1:1",
        "http://localhost:9999",
        "http://evil.example",
        f"https://{host}",
    ):
        assert dashboard.websocket(cookie, origin) == 403, origin
    assert dashboard.websocket(cookie, f"http://localhost:{dashboard.port}") == 403  # ours, and not the one it is under
    for name in ("evil.example", f"evil.example:{dashboard.port}", "127.0.0.1", "127.0.0.1:1", "localhost:9999"):
        assert dashboard.websocket(cookie, f"http://{name}", name) == 421, name
    assert dashboard.websocket(cookie, ours) == 101
    assert dashboard.websocket(cookie, f"http://localhost:{dashboard.port}", f"localhost:{dashboard.port}") == 101
    said = dashboard.log.read_text()
    assert said.count("handshake") <= 1  # a line a minute: a stranger cannot fill the log
    assert "Traceback" not in said


def test_http_needs_the_same(dashboard):
    """And a request that a page of another site or port made is refused though it carries the cookie."""
    cookie = dashboard.cookie()
    page = f"{dashboard.url}/_stcore/host-config"
    assert get(page, cookie=cookie).status_code == 200
    assert get(page, cookie=cookie, origin="http://localhost:9999").status_code == 403
    assert get(page, cookie=cookie, host="evil.example").status_code == 421
    assert get(page, cookie=cookie, sec_fetch_site="same-site", sec_fetch_mode="no-cors").status_code == 403
    assert get(page, cookie=cookie, sec_fetch_site="same-site", sec_fetch_mode="navigate").status_code == 200


def test_the_link_becomes_a_cookie_that_no_script_reads_and_leaves_the_address(dashboard):
    """And leads to a page of ours only."""
    answer = get(dashboard.links["viewer"] + "&next=/run?run=r")
    assert (answer.status_code, answer.headers["location"]) == (303, "/run?run=r")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie  # plain HTTP on this machine
    assert answer.headers["cache-control"] == "no-store"
    for elsewhere in (
        "//evil.example/",
        "https://evil.example/",
        "/\\evil.example",
        "/%09/evil.example",
        "javascript:alert(1)",
    ):
        assert get(f"{dashboard.links['viewer']}&next={elsewhere}").headers["location"] == "/", elsewhere


def test_every_answer_forbids_frames_and_foreign_content(dashboard):
    """The login page no less than the pages; refusals, too."""
    cookie = dashboard.cookie()
    pages = [get(dashboard.url), get(dashboard.url, cookie=cookie), get(f"{dashboard.url}/_stcore/host-config", cookie=cookie),
             get(dashboard.url, host="evil.example")]  # fmt: skip
    assert [page.status_code for page in pages] == [401, 200, 200, 421]
    for page in pages:
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe-eval" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["cross-origin-resource-policy"] == "same-origin"
    assert [page.headers["referrer-policy"] for page in pages] == ["same-origin"] + ["no-referrer"] * 3
    assert "script-src" not in pages[0].headers["content-security-policy"]


def test_no_secret_can_be_read_by_another_user(dashboard):
    """Neither in the process list nor in the files."""
    state = dashboard.directory / "state"
    assert stat.S_IMODE((state / "ui-secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(dashboard.process.pid)], check=False, capture_output=True, text=True
    )
    other = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    tokens = [link.partition("token=")[2] for link in dashboard.links.values()]
    for pid in (dashboard.process.pid, *map(int, children.stdout.split())):
        seen = subprocess.run(["cat", f"/proc/{pid}/cmdline"], check=False, capture_output=True, text=True, **other)
        assert "main.py" in seen.stdout or "rlwatch.cli" in seen.stdout
        assert not any(token in seen.stdout for token in tokens)
        if other:
            environ = subprocess.run(
                ["cat", f"/proc/{pid}/environ"], check=False, capture_output=True, text=True, **other
            )
            assert "Permission denied" in environ.stderr


def test_sessions_outlive_the_server_and_tokens_do_not(tmp_path):
    """Unless they were set; forgetting ends them all."""
    dashboard = Dashboard(tmp_path).start()
    page, first, cookie = f"{dashboard.url}/_stcore/host-config", dashboard.links["operator"], dashboard.cookie()
    try:
        dashboard.stop()
        dashboard.start()
        assert get(page, cookie=cookie).status_code == 200
        assert get(first).status_code == 401
        dashboard.stop()
        dashboard.start("--forget-logins")
        assert get(page, cookie=cookie).status_code == 401
        cookie = dashboard.cookie()
        dashboard.stop()
        dashboard.start(RLWATCH_UI_TOKEN="a token of my own")
        assert get(page, cookie=cookie).status_code == 401
        assert get(f"{dashboard.url}/login?token=a+token+of+my+own").status_code == 303
        assert "a token of my own" not in dashboard.log.read_text()
    finally:
        dashboard.stop()


def test_guessing_is_slow_and_keeps_nobody_out(tmp_path):
    """Forty wrong tokens at once, and a right one from the same address among them; a session goes on."""
    dashboard = Dashboard(tmp_path).start()
    try:
        cookie = dashboard.cookie()
        with ThreadPoolExecutor(8) as pool:
            codes = pool.map(lambda n: get(f"{dashboard.url}/login?token=guess{n}").status_code, range(40))
            right = httpx.post(
                f"{dashboard.url}/login", data={"token": dashboard.links["operator"]}, trust_env=False, timeout=60.0
            )
            assert set(codes) == {401}
        assert right.status_code == 303
        assert get(dashboard.url, cookie=cookie).status_code == 200
    finally:
        dashboard.stop()


def test_silent_connections_without_a_session_stop_nobody_who_has_one_and_fill_no_log(tmp_path):
    """More of them than the server may open files."""
    dashboard = Dashboard(tmp_path).start()
    try:
        cookie, before = dashboard.cookie(), dashboard.log.stat().st_size
        (server,) = Path(f"/proc/{dashboard.process.pid}/task/{dashboard.process.pid}/children").read_text().split()
        resource.prlimit(int(server), resource.RLIMIT_NOFILE, (256, 256))
        with ExitStack() as undo:
            for n in range(300):
                silent = undo.enter_context(socket.create_connection(("127.0.0.1", dashboard.port), timeout=60.0))
                silent.sendall(b"GET / HT"[: n % 9])
            assert get(dashboard.url, cookie=cookie).status_code == 200
            assert dashboard.websocket(cookie, origin=dashboard.url) == 101
            assert get(dashboard.url).status_code == 401
        assert dashboard.log.stat().st_size - before < 2000
    finally:
        dashboard.stop()


def test_a_person_logs_in_by_the_form_and_leaves(dashboard, browser):
    """To the page they wanted; by the token or by the whole link. After leaving, nothing is shown."""
    context = patient(browser)
    page = context.new_page()
    page.goto(f"{dashboard.url}/run?run=r")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("Wrong token")
    page.get_by_label("Token").fill(dashboard.links["viewer"])
    page.get_by_label("Your name").fill("Émile <b>Noether</b>")
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{dashboard.url}/run?run=r")
    expect(page.locator(".rl-name")).to_contain_text("seed3")
    expect(page.locator(".rl-who")).to_contain_text("Émile <b>Noether</b> · viewer")
    expect(page.get_by_role("button", name="Reset reference…")).to_be_disabled()
    expect(page.get_by_role("button", name="Commands", exact=True)).to_be_disabled()
    page.get_by_role("link", name="log out").click()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_text("You are logged out.")).to_be_visible()
    page.goto(f"{dashboard.url}/run?run=r")
    expect(page.get_by_label("Token")).to_be_visible()
    context.close()


@pytest.fixture
def elsewhere():
    """A page on another port of this machine, as another user may serve it; its HTML is what the test sets."""

    class Page(BaseHTTPRequestHandler):
        html = ""

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(Page.html.encode())

        def log_message(self, *arguments):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield Page, server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_page_elsewhere_can_link_here_and_nothing_else(dashboard, browser, elsewhere):
    """From another port and from another site: no websocket, no fetch, no frame; a link works, the strict cookie
    notwithstanding.
    """
    served, port = elsewhere
    context = patient(browser)
    page = context.new_page()
    page.goto(dashboard.links["operator"])
    expect(page.get_by_role("link", name="seed3")).to_be_visible()
    served.html = f"""<a href="{dashboard.url}/run?run=r">the run</a><iframe src="{dashboard.url}/"></iframe>"""
    for host in ("127.0.0.1", "localhost"):
        page.goto(f"http://{host}:{port}/")
        tried = page.evaluate(
            """async ([http, ws]) => [
                await new Promise(done => {
                    const socket = new WebSocket(ws); socket.onopen = () => done('open'); socket.onerror = () => done('refused')
                }),
                await fetch(http, {credentials: 'include'}).then(() => 'read', () => 'refused'),
                await fetch(http, {credentials: 'include', mode: 'no-cors', method: 'POST'}).then(a => a.type, () => 'refused'),
            ]""",
            [f"{dashboard.url}/_stcore/host-config", f"ws://127.0.0.1:{dashboard.port}/_stcore/stream"],
        )
        assert tried[:2] == ["refused", "refused"]
        frame = page.frames[1]
        assert frame.locator("body").inner_text() == "" or "refused" in frame.locator("body").inner_text()
        page.get_by_role("link", name="the run").click()
        expect(page.locator(".rl-name")).to_contain_text("seed3")
    context.close()
