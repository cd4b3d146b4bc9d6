"""The nginx configuration of docs/dashboard.md, in a real nginx with TLS and a base path, before a real ``rlwatch ui``."""

import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import httpx
import pytest
from playwright.sync_api import expect
from real_dashboard import ROOT, Dashboard
from test_browser_commands import choose
from waiting import patient, until

from rlwatch.cli import ui
from rlwatch.records import CommandStatus
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser

WHOLE = """
daemon off;
{user}
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{}}
http {{
    access_log {directory}/access.log;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    {ours}
}}
"""
"""What Debian's nginx.conf puts around a site."""


def documented():
    """The block of the page."""
    [block] = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "dashboard.md").read_text(), re.DOTALL)
    return block


def nginx():
    path = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return path or pytest.fail("no nginx: run 'apt-get install nginx-light'")


@pytest.fixture
def proxied(tmp_path):
    """nginx as documented, but for the port, the names of files, and the login of nginx's that is a comment there."""
    dashboard, port = Dashboard(tmp_path), ui.free_port("127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "htpasswd").write_text("emmy:{PLAIN}ideals\n")
    ours = documented()
    for old, new in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "gpu.example.org;": "localhost;",
        "/etc/ssl/certs/gpu.example.org.pem": f"{tmp_path}/pem",
        "/etc/ssl/private/gpu.example.org.key": f"{tmp_path}/key",
        "/etc/nginx/rlwatch.htpasswd": f"{tmp_path}/htpasswd",
        "# auth_basic": "auth_basic",
        "127.0.0.1:8501": f"127.0.0.1:{dashboard.port}",
    }.items():
        assert old in ours
        ours = ours.replace(old, new)
    user = "user root;" if os.getuid() == 0 else ""
    (tmp_path / "nginx.conf").write_text(WHOLE.format(directory=tmp_path, ours=ours, user=user))
    process = subprocess.Popen([nginx(), "-e", tmp_path / "error.log", "-p", tmp_path, "-c", tmp_path / "nginx.conf"])
    url = f"https://localhost:{port}/rlwatch"
    dashboard.url += "/rlwatch"
    dashboard.start("--behind-proxy", "127.0.0.1", "--public-url", url, "--user-header", "X-Remote-User")
    yield SimpleNamespace(dashboard=dashboard, url=url, access=tmp_path / "access.log")
    dashboard.stop()
    process.terminate()
    process.wait(30)


def test_a_command_is_sent_through_the_documented_proxy(proxied, train, browser):
    """Under the base path, over TLS, in the name that the proxy knows, whatever the browser claims."""
    trainer = train("live_loop.py", steps=5)
    context = patient(
        browser,
        ignore_https_errors=True,
        http_credentials={"username": "emmy", "password": "ideals"},
        extra_http_headers={"X-Remote-User": "root", "X-Rlwatch-Name": "root", "X-Rlwatch-Role": "operator"},
    )
    page, errors, sockets = context.new_page(), [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("websocket", lambda socket: sockets.append(socket.url))

    page.goto(proxied.url)
    expect(page.get_by_label("Token")).to_be_visible()
    assert proxied.dashboard.links["operator"].startswith(f"{proxied.url}/login?token=")
    page.goto(f"{proxied.dashboard.links['operator']}&name=ann")
    expect(page).to_have_url(f"{proxied.url}/")
    page.get_by_role("link", name=trainer.name).click()
    expect(page).to_have_url(f"{proxied.url}/run?run={trainer.run_id}")
    expect(page.locator(".rl-who")).to_contain_text("emmy · operator")
    dialog = choose(page, "Save checkpoint…")
    expect(dialog).to_contain_text("Signed in as emmy (operator)")
    dialog.get_by_role("button", name="Send").click()
    store = open_store(proxied.dashboard.store)
    until(lambda: [c for c in store.commands(trainer.run_id) if c.status is CommandStatus.DONE], "the trainer obeys")
    page.get_by_role("link", name="log out").click()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_text("You are logged out.")).to_be_visible()

    [command] = store.commands(trainer.run_id)
    assert command.requested_by == "emmy"
    assert set(sockets) == {proxied.url.replace("https:", "wss:") + "/_stcore/stream"}
    assert [text for text in errors if "Content Security" in text] == []
    assert "token=" not in proxied.access.read_text()
    context.close()


def test_the_proxys_users_are_distinguished_and_its_cookie_is_secure(proxied):
    """Wrong tokens keep nobody out, behind a proxy either, and the proxy's address may tell of another's."""
    with httpx.Client(verify=False, auth=("emmy", "ideals"), trust_env=False) as client:
        cookie = client.get(proxied.dashboard.links["viewer"]).headers["set-cookie"]
        assert {"Secure", "HttpOnly", "SameSite=strict", "Path=/rlwatch/"} <= set(cookie.split("; "))
        codes = [
            client.get(f"{proxied.url}/login?token=x", headers={"X-Forwarded-For": f"10.0.0.{n}"}).status_code
            for n in range(12)
        ]
        assert codes == [401] * 12
        assert client.get(proxied.dashboard.links["viewer"]).status_code < 400
        page = client.get(f"{proxied.url}/", headers={"Origin": "https://localhost"})
        assert page.status_code == 403
    direct = httpx.get(
        f"{proxied.dashboard.url}/login?token=x", headers={"X-Forwarded-For": "10.1.1.1"}, trust_env=False
    )
    assert direct.status_code == 401  # the proxy's address may tell of another's
