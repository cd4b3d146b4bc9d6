"""The door before a small application: what it lets through, as whom, and what it answers itself."""

import asyncio
import gzip
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlwatch_app import gate, preload
from rlwatch_app.principal import NAME_HEADER, ROLE_HEADER
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect
from streamlit.file_util import get_static_dir
from streamlit.web.server.starlette.starlette_app_utils import create_signed_value

OURS = "http://localhost:8501"
STREAM = "ws://localhost:8501/_stcore/stream"
TOKENS = {"operator": "the operator's token", "viewer": "a viewer's own token"}


async def behind(scope, receive, send):
    """Answers with what it is told of who asks; a websocket with the same, and then listens."""
    said = {name.decode(): value.decode() for name, value in scope["headers"]}
    if scope["type"] == "http":
        await JSONResponse(
            {"name": said.get(NAME_HEADER), "role": said.get(ROLE_HEADER), "client": scope["client"][0]}
        )(scope, receive, send)
        return
    websocket = WebSocket(scope, receive, send)
    await websocket.accept()
    await websocket.send_json({"name": said[NAME_HEADER], "role": said[ROLE_HEADER]})
    with suppress(WebSocketDisconnect):
        await websocket.receive_text()


def awaited(coroutine):
    """Its result; in a thread of its own, since a browser's tests leave a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def door(base_url=OURS, client=("10.0.0.9", 5000), **more):
    """A client of the door; it keeps cookies as a browser does."""
    settings = gate.GateSettings(**{"origins": [OURS], "port": 8501, "tokens": TOKENS, "secret": "s" * 32, **more})
    return TestClient(gate.Gate(behind, settings), base_url=base_url, client=client, follow_redirects=False)


def inside(client, role="operator", name="ann"):
    """The same, logged in."""
    assert client.post("/login", data={"token": TOKENS[role], "name": name}).status_code == 303
    return client


def test_the_application_learns_who_it_is_and_nobody_else_can_say_so():
    """Whatever a client writes into these headers, in any spelling and number."""
    client = inside(door(), "viewer", "Zoë")
    forged = [("X-RLWATCH-ROLE", "operator"), ("x-rlwatch-role", "operator"), ("X-Rlwatch-Name", "root")]

    assert client.get("/", headers=forged).json() | {"client": ""} == {
        "name": "Zo%C3%AB",
        "role": "viewer",
        "client": "",
    }
    with client.websocket_connect(STREAM, headers={**dict(forged), "Origin": OURS}) as websocket:
        assert websocket.receive_json() == {"name": "Zo%C3%AB", "role": "viewer"}
    health = door().get("/_stcore/health", headers=forged).json()
    assert (health["name"], health["role"]) == (None, None)


async def paged(scope, receive, send):
    """Streamlit's page in two parts, or a picture; the page of a run as Streamlit answers it, compressed or as known."""
    kind = "image/png" if scope["path"] == "/picture" else "text/html; charset=utf-8"
    body, headers = (
        b'<html><link rel="x"><div id="root"></div></html>',
        {b"content-type": kind.encode(), b"etag": b'"streamlit"'},
    )
    asked = dict(scope["headers"])
    if scope["path"] == "/run" and b"gzip" in asked.get(b"accept-encoding", b""):
        body, headers[b"content-encoding"] = gzip.compress(body), b"gzip"
    headers[b"content-length"] = b"%d" % len(body)
    status = 304 if b"if-none-match" in asked else 200
    await send({"type": "http.response.start", "status": status, "headers": list(headers.items())})
    await send({"type": "http.response.body", "body": body[:20], "more_body": True})
    await send({"type": "http.response.body", "body": body[20:]})


BARE = {"accept": "text/html,*/*;q=0.8", "accept-encoding": "identity"}


def test_a_page_has_grey_rows_until_its_script_runs_and_nothing_else_is_changed():
    """In the element that the script fills; the length is that of the page that is sent, and no inline script is added."""
    settings = gate.GateSettings(origins=[OURS], port=8501, tokens=TOKENS, secret="s" * 32)
    client = TestClient(gate.Gate(paged, settings), base_url=OURS, client=("10.0.0.9", 5000), follow_redirects=False)
    inside(client)

    picture, known = client.get("/picture"), {"accept": "text/html", "if-none-match": '"streamlit"'}

    for page in (client.get("/"), client.get("/run", headers=known), client.get("/run", headers=BARE)):
        assert page.status_code == 200
        assert page.text.count('id="rl-wait"') == page.text.count('id="root"') == 1
        assert (
            re.sub(r'<script type="module" async src="/web/\w+/first.js"></script>', "", page.text).count("<script")
            == 0
        )
        assert page.text.index("data-rl-first") < page.text.index('<link rel="x">')
        packed = "content-encoding" in page.headers
        assert int(page.headers["content-length"]) == len(
            gzip.compress(page.content, 6, mtime=0) if packed else page.content
        )
        assert packed == (page.request.headers["accept-encoding"] != "identity")
        assert "etag" not in page.headers
    assert picture.headers["etag"]
    assert picture.content == b'<html><link rel="x"><div id="root"></div></html>'


def test_who_gives_no_name_is_called_after_the_role_and_the_host():
    """Or as before, where the link is opened once more."""
    client = inside(door(), name=" \x00\n ")
    assert client.get("/").json()["name"].startswith("operator%40")
    inside(client, name="ann\n of  Göttingen" + "n" * 100)
    assert client.get("/").json()["name"].startswith("ann%20of%20G%C3%B6ttingennn")
    assert len(gate.unquote(client.get("/").json()["name"])) == 80
    client.get("/login", params={"token": TOKENS["operator"]})
    assert client.get("/").json()["name"].startswith("ann%20of")
    client.get("/login", params={"token": TOKENS["viewer"]})
    assert client.get("/").json()["name"].startswith("viewer%40")


def test_a_session_ends_and_its_websocket_with_it(monkeypatch):
    """Nobody stays for ever by not leaving."""
    client, almost = inside(door()), gate.SESSION_S - 3
    with monkeypatch.context() as later:
        later.setattr(gate, "time", SimpleNamespace(time=lambda: time.time() + almost))
        with client.websocket_connect(STREAM, headers={"Origin": OURS}) as websocket:
            websocket.receive_json()
            with pytest.raises(WebSocketDisconnect) as ended:
                websocket.receive_json()
    assert ended.value.code == 1008
    assert client.get("/").status_code == 200
    monkeypatch.setattr(gate, "SESSION_S", -1)
    assert client.get("/").status_code == 401


def test_a_session_of_another_secret_is_none():
    """Another user's, another store's, another token's."""
    cookies = inside(door()).cookies
    other = door(secret="t" * 32)
    other.cookies = cookies
    assert other.get("/").status_code == 401


@pytest.mark.parametrize(
    "body", [b"", b"token", b"token=%ff%fe", b"token=" + b"x" * 10_000, b"\xff" * 100, b"name=ann"]
)
def test_a_form_that_is_none_is_a_wrong_token(body):
    """No traceback, no session."""
    answer = door().post("/login", content=body)
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)


def test_forwarded_headers_count_from_the_proxy_only():
    """Address and name alike; the last hop that is not a proxy's is the person's."""
    behind_proxy = {"proxies": ["10.0.0.0/24"], "user_header": "x-remote-user"}
    claims = {"X-Forwarded-For": "6.6.6.6, 192.0.2.7", "X-Remote-User": "emmy"}

    believed = inside(door(**behind_proxy)).get("/", headers=claims).json()
    assert (believed["client"], believed["name"]) == ("192.0.2.7", "emmy")
    anonymous = inside(door(**behind_proxy)).get("/", headers={**claims, "X-Remote-User": ""}).json()
    assert anonymous["name"] == "ann"
    for stranger in (door(**behind_proxy, client=("10.0.1.9", 1)), door(user_header="x-remote-user")):
        answer = inside(stranger).get("/", headers=claims).json()
        assert (answer["client"] in {"10.0.1.9", "10.0.0.9"}, answer["name"]) == (True, "ann")


def test_guesses_take_longer_and_keep_nobody_out(monkeypatch):
    """A right token is let in from the very address that guesses; a customer's IPv6 addresses are one."""
    waits, sleep = [], asyncio.sleep

    async def noted(seconds):
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(gate, "TRIES", "3/minute")
    monkeypatch.setattr(gate.asyncio, "sleep", noted)
    client = door(proxies=["10.0.0.9"])

    def tries(address, token="wrong"):
        waits.clear()
        given = client.post("/login", data={"token": token}, headers={"X-Forwarded-For": address})
        return given.status_code, [wait for wait in waits if wait in (gate.TURN_S, gate.SLOW_TURN_S)]

    assert [tries(f"2001:db8::{n}") for n in range(3)] == [(401, [gate.TURN_S])] * 3
    assert tries("2001:db8::9") == (401, [gate.SLOW_TURN_S])
    assert tries("2001:db8::9", TOKENS["viewer"]) == (303, [gate.SLOW_TURN_S])
    assert tries("2001:db8:0:1::9") == (401, [gate.TURN_S])
    linked = client.get("/login", params={"token": TOKENS["operator"]}, headers={"X-Forwarded-For": "2001:db8::9"})
    assert linked.status_code == 303


def test_tokens_of_one_address_are_checked_one_after_the_other_and_who_hangs_up_loses_their_place():
    """Others do not wait for them."""

    async def scene():
        turns, order, gone = gate.Turns(), [], asyncio.Event()

        async def stays():
            await asyncio.Event().wait()

        async def hangs_up():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def asks(name, address, receive=stays):
            async with turns.turn(address, receive) as here:
                order.append((name, here))

        asking = [asyncio.create_task(asks(n, "192.0.2.1", hangs_up if n == 1 else stays)) for n in range(4)]
        await asyncio.sleep(0)
        asking.append(asyncio.create_task(asks("other", "192.0.2.2")))
        await asyncio.sleep(0)
        gone.set()
        await asyncio.gather(*asking)
        return order

    order = awaited(scene())
    assert order[0] == (1, False)
    assert [name for name, here in order if here and name != "other"] == [0, 2, 3]
    assert order.index(("other", True)) < order.index((2, True))


def test_a_form_that_does_not_come_to_its_end_is_none(monkeypatch):
    """It is not waited for longer than for any stranger."""
    monkeypatch.setattr(gate, "GREETING_S", 0.01)
    settings = gate.GateSettings(origins=[OURS], port=8501, tokens=TOKENS, secret="s" * 32)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/login",
        "query_string": b"",
        "headers": [(b"host", b"localhost:8501")],
    }
    said = []

    async def slow():
        await asyncio.Event().wait()

    async def send(message):
        said.append(message)

    awaited(gate.Gate(behind, settings)({**scope, "client": ("10.0.0.9", 1)}, slow, send))
    assert said[0]["status"] == 401


def test_who_has_a_session_is_no_stranger():
    """Others may be cut off where there are too many of them."""
    strangers, closed = gate.Strangers(), []
    settings = gate.GateSettings(origins=[OURS], port=8501, tokens=TOKENS, secret="s" * 32)
    client = TestClient(gate.Gate(behind, settings, strangers), base_url=OURS, client=("10.0.0.9", 5000))
    strangers.arrived(("10.0.0.9", 5000), lambda: closed.append(1))
    client.get("/")
    assert len(strangers) == 1
    client.post("/login", data={"token": TOKENS["viewer"]})
    client.get("/")
    assert (len(strangers), closed) == (0, [])


def test_on_every_interface_the_address_that_was_reached_is_ours():
    """And no other: a page whose name was made to point here still says its own."""
    client = door("http://192.0.2.1:8501", wildcard=True)
    assert client.get("/").status_code == 401
    assert client.get("/", headers={"Host": "192.0.2.2:8501"}).status_code == 421
    assert client.get("/", headers={"Origin": "http://192.0.2.1:8501"}).status_code == 401
    assert client.get("/", headers={"Origin": OURS}).status_code == 403
    assert door("http://192.0.2.1:8501").get("/").status_code == 421


def test_whoever_wants_no_page_gets_words():
    """A script, a component, a program."""
    assert door().get("/", headers={"Accept": "*/*"}).text == "Log in first.\n"
    answer = door().get("/x", headers={"Host": "evil.example"})
    assert OURS in answer.text
    assert "--public-url" in answer.text


def test_a_link_from_another_site_is_asked_once_more_from_here_and_keeps_its_address():
    """A strict cookie does not come with it; what the address holds is text."""
    there = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Accept": "text/html"}
    answer = door().get('/run?run=a&x="><script>', headers=there)
    assert answer.status_code == 401
    assert 'http-equiv="refresh" content="0; url=/run?run=a&amp;x=' in answer.text
    assert "<script" not in answer.text
    assert "paste its token" in door().get("/", headers={**there, "Sec-Fetch-Site": "same-origin"}).text


def test_a_base_path_is_part_of_every_address():
    """The cookie's, the form's, the way back's."""
    client = door(base_path="/rl")
    assert 'action="/rl/login"' in client.get("/rl/", headers={"Accept": "text/html"}).text
    answer = client.post("/rl/login", data={"token": TOKENS["viewer"], "next": "/run"})
    assert answer.headers["location"] == "/rl/"
    assert "Path=/rl/;" in answer.headers["set-cookie"]
    assert (
        client.post("/rl/login", data={"token": TOKENS["viewer"], "next": "/rl/run?x=1"}).headers["location"]
        == "/rl/run?x=1"
    )
    assert client.post("/login", data={"token": TOKENS["viewer"]}).status_code == 401


def test_a_link_asks_and_only_the_session_itself_logs_out():
    """Any page may hold a link, and a form of another session's; the button's token is of this one."""
    client, other = inside(door()), inside(door(), "viewer")
    asked = client.get("/logout", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
    token, foreign = (re.search(r'name="token" value="(\w+)"', one.get("/logout").text)[1] for one in (client, other))

    assert (asked.status_code, "set-cookie" in asked.headers) == (200, False)
    for given in ({}, {"token": ""}, {"token": foreign}, {"token": TOKENS["operator"]}):
        assert client.post("/logout", data=given).status_code == 403
    assert client.get("/").json()["role"] == "operator", "still in"
    assert "Max-Age=0" in client.post("/logout", data={"token": token}).headers["set-cookie"]
    assert (client.get("/").status_code, client.get("/logout").status_code) == (401, 401)


SECRET = "the secret of Streamlit's cookies"


def vouched(monkeypatch, secret=SECRET, **claims):
    """A client with the cookie that Streamlit leaves after a login by OIDC."""
    monkeypatch.setattr(gate.oidc, "get_cookie_secret", lambda: SECRET)
    said = {"email": "ann@example.org", "iat": time.time(), "is_logged_in": True} | claims
    client = door(people={"operator": ["ann@example.org"], "viewer": ["*@EXAMPLE.org"]})
    client.cookies.set(gate.oidc.COOKIE, create_signed_value(secret, gate.oidc.COOKIE, json.dumps(said)).decode())
    return client


def test_who_a_provider_vouches_for_comes_in_by_the_first_list_with_their_address(monkeypatch):
    """Small and large letters are one; a token that is given besides counts more."""
    assert vouched(monkeypatch, email="ANN@example.org").get("/").json()["role"] == "operator"
    bob = vouched(monkeypatch, email="bob@example.org")
    assert bob.get("/").json() | {"client": ""} == {"name": "bob%40example.org", "role": "viewer", "client": ""}
    with bob.websocket_connect(STREAM, headers={"Origin": OURS}) as websocket:
        assert websocket.receive_json()["role"] == "viewer"
    assert inside(bob, name="bob").get("/").json()["role"] == "operator"


@pytest.mark.parametrize(
    "claims",
    [
        {"email": "eve@example.com"},
        {"email": None},
        {"email": ["ann@example.org"]},
        {"email": ""},
        {"email_verified": False},
        {"is_logged_in": False},
        {"iat": 1e9},
        {"iat": None},
        {"secret": "another's secret"},
    ],
    ids=str,
)
def test_what_a_provider_does_not_vouch_for_stays_outside(monkeypatch, claims):
    """No list has the address, it is not proven, the login is a week old, the cookie is not ours."""
    client = vouched(monkeypatch, **claims)

    assert client.get("/", headers={"accept": "text/html"}).status_code in (401, 403)
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(STREAM, headers={"Origin": OURS}):
        pass


def test_without_lists_there_is_no_way_to_a_provider(monkeypatch):
    """Nor does its cookie open anything; with them only the three addresses of the way there and back are open."""
    with_lists = vouched(monkeypatch)
    without = door()
    without.cookies = with_lists.cookies
    stranger = door(people={"viewer": ["*@example.org"]})

    assert without.get("/").status_code == 401
    assert {without.get(path).status_code for path in ("/oidc", *gate.oidc.ROUTES)} == {401}
    assert {stranger.get(path).json()["role"] for path in gate.oidc.ROUTES} == {None}
    assert {stranger.post(path).status_code for path in gate.oidc.ROUTES} == {401}
    assert {stranger.get(f"{path}/x").status_code for path in gate.oidc.ROUTES} == {401}


def test_streamlits_scripts_come_from_memory_to_who_is_logged_in():
    """Byte for byte, compressed for who takes that, kept for a year; any other path is the application's."""
    folder = Path(get_static_dir(), "static", "js")
    name = max((path.name for path in folder.glob("*.js")), key=lambda name: (folder / name).stat().st_size)
    client = inside(door())

    packed = client.get(f"/static/js/{name}")
    plain = client.get(f"/static/js/{name}", headers={"accept-encoding": "identity"})

    assert packed.content == plain.content == (folder / name).read_bytes()
    assert (packed.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert "immutable" in packed.headers["cache-control"]
    assert packed.headers["content-type"].startswith("text/javascript")
    assert door().get(f"/static/js/{name}").status_code == 401
    for other in ("/static/js/none.abcdefgh.js", "/static/js/..%2f..%2findex.html", f"/other/{name}"):
        assert client.get(other).json()["role"] == "operator"


def test_a_page_names_the_scripts_that_it_will_need():
    """Files that there are, each once, none that Streamlit's own page names; those of charts on a page with charts."""
    folder, index = Path(get_static_dir(), "static", "js"), Path(get_static_dir(), "index.html").read_text("utf-8")
    for path, charted in (("/", False), ("/x/run", True)):
        named = re.findall(r'href="([^"]+)"', preload.links(path, "/x" if charted else ""))
        files = [Path(one).name for one in named if one.startswith("./static/js/")]
        assert any(one.startswith("BidiComponent.") for one in files)
        assert len(set(files)) == len(files)
        assert all((folder / one).is_file() and one not in index for one in files)
        assert any(one.endswith("/board.js") for one in named) == charted
