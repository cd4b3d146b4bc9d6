"""The gate of the dashboard: authentication, roles, and the content policy of the pages.

The gate is an ASGI middleware around Streamlit's own application. Every request, over HTTP and websocket alike, must
name this dashboard (``Host``), come from its own pages (``Origin``) and carry a session; a request without a session
gets the login page. The gate passes name and role to the script in two headers that only the gate can set.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import html
import ipaddress
import json
import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from string import Template
from threading import Thread
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit

import streamlit as st
import uvicorn
from itsdangerous import BadSignature, URLSafeTimedSerializer
from limits import parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from streamlit.file_util import get_static_dir
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rlwatch.errors import RLWatchError
from rlwatch.link.limits import BACKLOG, GREETING_S, Strangers, limited, quiet_log

from . import assets, endpoint, news, oidc, preload
from .principal import NAME_HEADER, ROLE_HEADER, SESSION_END

HERE = Path(__file__).resolve().parent
SETTINGS = "RLWATCH_UI_SETTINGS"
"""Environment variable in which ``rlwatch ui`` passes the :class:`GateSettings`."""

SESSION_S = 7 * 24 * 3600
"""Duration of a login session, in seconds."""

TURN_S, SLOW_TURN_S, TRIES = 0.05, 0.25, "10/minute"
"""Delay of a token check in seconds, and the delay once an address has sent more wrong tokens than :data:`TRIES`."""

NAME_LENGTH = 80
FORM_BYTES = 8192
PATH_CHARACTERS = "/:@!$&'()*+,;=~"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Settings of the dashboard's gate.

    Parameters
    ----------
    origins
        Accepted origins, as ``http://localhost:8501``.
    wildcard
        Also accept the address that a request reached as an origin.
    port
        Port of the server; part of the cookie's name, because cookies are shared between ports.
    base_path
        ``""`` or ``/name``.
    tokens
        Login token of each role.
    secret
        Key that signs sessions; it differs by store and by configured token.
    proxies
        Networks whose forwarded headers are trusted.
    user_header
        Header in which such a proxy names the user, in lower case.
    people
        Addresses of each role that may log in by OIDC (:mod:`rlwatch_app.oidc`); empty: OIDC is off.
    """

    origins: Sequence[str]
    port: int
    tokens: Mapping[str, str] = field(repr=False)
    secret: str = field(repr=False)
    base_path: str = ""
    wildcard: bool = False
    proxies: Sequence[str] = ()
    user_header: str = ""
    people: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoginSession:
    """Name and role of a logged-in user, and the end of the session in Unix seconds."""

    role: str
    name: str
    until: float


class Gate:
    """ASGI middleware that passes a request on to ``app`` if host, origin and session are valid."""

    def __init__(self, app: ASGIApp, settings: GateSettings, strangers: Strangers | None = None) -> None:
        self._app = app
        self._strangers = Strangers() if strangers is None else strangers
        self._settings = settings
        self._by_host = {urlsplit(origin).netloc: origin for origin in settings.origins}
        self._cookie = f"rlwatch-{settings.port}"
        self._signer = URLSafeTimedSerializer(settings.secret, salt="rlwatch ui session")
        self._turns = Turns()
        self._networks = [ipaddress.ip_network(network) for network in settings.proxies]
        self._judged: ASGIApp = self._judge
        if settings.proxies:
            self._judged = ProxyHeadersMiddleware(self._judge, trusted_hosts=list(settings.proxies))  # type: ignore[arg-type, assignment]
        self._policy = content_policy()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check requests; lifespan messages pass."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] in {"http.response.start", "websocket.http.response.start"}:
                headers = MutableHeaders(scope=message)
                for name, value in {**SECURITY_HEADERS, "content-security-policy": self._policy}.items():
                    headers.setdefault(name, value)
            await send(message)

        reserved = {NAME_HEADER.encode(), ROLE_HEADER.encode()}
        scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() not in reserved]
        scope["rlwatch.proxied"] = self._from_proxy(scope)
        scope["rlwatch.peer"] = tuple(scope.get("client") or ())[:2]
        await self._judged(scope, receive, guarded)

    async def _judge(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        session = None
        answer = self._misplaced(connection)
        if answer is None and self._is_public(connection):
            await self._app(scope, receive, send)
            return
        if answer is None:
            session = self._session(connection)
            answer = await self._door(connection, session, receive) if scope["type"] == "http" else None
        if session is not None:
            self._strangers.left(scope["rlwatch.peer"])
        if answer is None and session is not None:
            await self._let_in(scope, receive, send, session)
        elif scope["type"] == "websocket":
            await _deny(scope, receive, send, answer or PlainTextResponse("Log in first.\n", 401))
        else:
            await (answer or self._ask(connection))(scope, receive, send)

    def _is_public(self, connection: HTTPConnection) -> bool:
        """Return True for paths that need no session: the health check, and the OIDC login."""
        path = connection.scope["path"].removeprefix(self._settings.base_path)
        if path == "/_stcore/health":
            return True
        asked = connection.scope["type"] == "http" and connection.scope["method"] == "GET"
        return bool(self._settings.people) and asked and path in oidc.ROUTES

    # -- host and origin of a request

    def _origin(self, connection: HTTPConnection) -> str | None:
        """Return the origin that the request names, if it is an accepted one."""
        hosts = connection.headers.getlist("host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        server = connection.scope.get("server")
        if self._settings.wildcard and server:
            shown = f"[{server[0]}]" if ":" in server[0] else server[0]
            if host == f"{shown.removeprefix('::ffff:')}:{server[1]}":
                return f"http://{host}"
        return self._by_host.get(host)

    def _misplaced(self, connection: HTTPConnection) -> Response | None:
        """Return a refusal of a request with a foreign host or origin, or None if both are accepted."""
        own = self._origin(connection)
        if own is None:
            known = ", ".join(self._settings.origins)
            return PlainTextResponse(
                f"This dashboard answers to {known} only. To reach it through a tunnel or a proxy at another address, "
                "start it with --public-url ADDRESS.\n",
                421,
            )
        origins = connection.headers.getlist("origin")
        websocket = connection.scope["type"] == "websocket"
        if (websocket and origins != [own]) or any(origin != own for origin in origins):
            return PlainTextResponse(f"Refused: {own} does not take requests from pages of another origin.\n", 403)
        site, mode = connection.headers.get("sec-fetch-site"), connection.headers.get("sec-fetch-mode")
        safe = not websocket and connection.scope["method"] in SAFE_METHODS and mode == "navigate"
        if site in {"cross-site", "same-site"} and not safe:
            return PlainTextResponse("Refused: a page of another site may link here but not send requests.\n", 403)
        return None

    def _from_proxy(self, scope: Scope) -> bool:
        client = scope.get("client")
        try:
            peer = ipaddress.ip_address(client[0]) if client else None
        except ValueError:
            return False
        return peer is not None and any(peer in network for network in self._networks)

    # -- logging in and out

    async def _door(
        self, connection: HTTPConnection, session: LoginSession | None, receive: Receive
    ) -> Response | None:
        """Return the gate's own response to a login or logout, or None if the request is for the app."""
        method, path, base = connection.scope["method"], connection.scope["path"], self._settings.base_path
        if path == f"{base}/logout":
            return await self._leave(connection, session, receive)
        if path == f"{base}/oidc" and self._settings.people:
            return RedirectResponse(base + oidc.login_path(), 303, {"cache-control": "no-store"})
        if path == f"{base}/login" and method == "POST":
            form = await _form(receive)
            given = {**form, "token": _bare(form.get("token", ""))}
            return await self._in_turn(connection, session, given, receive)
        if path == f"{base}/login" and method == "GET":
            link = dict(parse_qsl(_query(connection)))
            if "token" in link:
                return await self._in_turn(connection, session, link, receive)
            return RedirectResponse(f"{base}/", 303) if session else self._ask(connection)
        return None

    async def _in_turn(
        self, connection: HTTPConnection, session: LoginSession | None, given: Mapping[str, str], receive: Receive
    ) -> Response:
        """Call :meth:`_log_in` after a delay, which slows down guessing without locking other users out."""
        async with self._turns.turn(connection.client.host if connection.client else "", receive) as here:
            return self._log_in(connection, session, given) if here else PlainTextResponse("Gone.\n", 408)

    def _log_in(self, connection: HTTPConnection, session: LoginSession | None, given: Mapping[str, str]) -> Response:
        """Start a session for the given token and name and redirect to ``next``; or return the form again."""
        client = connection.client.host if connection.client else ""
        after = self._inside(given.get("next", ""))
        role = self._role(given["token"])
        if role is None:
            self._turns.wrong(client)
            words = "Wrong token. Each start of rlwatch ui creates new tokens."
            return self._ask(connection, words, after=after)
        before = session.name if session and session.role == role else ""
        who = _tidy(given.get("name", "")) or before or f"{role}@{socket.gethostname()}"
        answer = RedirectResponse(after, 303, {"cache-control": "no-store"})
        answer.set_cookie(
            self._cookie,
            self._signer.dumps({"role": role, "name": who, "id": secrets.token_hex(8)}),
            max_age=SESSION_S,
            path=f"{self._settings.base_path}/",
            secure=str(self._origin(connection)).startswith("https:"),
            httponly=True,
            samesite="strict",
        )
        return answer

    def _role(self, token: str) -> str | None:
        """Return the role of a token. Every token is compared, so that the timing reveals nothing."""
        given = token.encode("utf-8", "replace")
        found = [role for role, value in self._settings.tokens.items() if secrets.compare_digest(given, value.encode())]
        return found[0] if found else None

    def _inside(self, after: str) -> str:
        """Return the address to redirect to after the login, always a page of this dashboard."""
        base = self._settings.base_path
        try:
            parts = urlsplit(after)
        except ValueError:
            return f"{base}/"
        within = parts.path.startswith(f"{base}/") and not parts.path.startswith("//") and "\\" not in after
        if parts.scheme or parts.netloc or not within or parts.path in {f"{base}/login", f"{base}/logout"}:
            return f"{base}/"
        return after

    async def _leave(self, connection: HTTPConnection, session: LoginSession | None, receive: Receive) -> Response:
        """Log out on a POST with the session's token; a GET, which any page can cause, asks for confirmation."""
        if session is None:
            return self._ask(connection, after="")
        cookies = (connection.cookies.get(name, "") for name in (self._cookie, oidc.COOKIE))
        token = hashlib.sha256("\n".join(("leave", *cookies)).encode()).hexdigest()
        if connection.scope["method"] != "POST":
            return leave_page(f"{self._settings.base_path}/logout", token)
        if not secrets.compare_digest((await _form(receive)).get("token", "").encode(), token.encode()):
            return PlainTextResponse("Refused: open /logout and log out there.\n", 403)
        return self._log_out(connection)

    def _log_out(self, connection: HTTPConnection) -> Response:
        answer = self._ask(connection, "You are logged out.", 200, after="")
        if self._settings.people and oidc.COOKIE in connection.cookies:  # end the provider's session, too
            # not by a redirect: it leads to the provider, which the content policy of the form does not allow
            answer = onward(f"{self._settings.base_path}{oidc.ROUTES[1]}", 200)
        answer.delete_cookie(self._cookie, path=f"{self._settings.base_path}/", httponly=True, samesite="strict")
        return answer

    def _ask(
        self,
        connection: HTTPConnection,
        message: str = "",
        status: int = 401,
        headers: Mapping[str, str] | None = None,
        after: str | None = None,
    ) -> Response:
        """Return the login page, or plain text if the request does not accept HTML."""
        fetched = {name: connection.headers.get(f"sec-fetch-{name}") for name in ("site", "mode")}
        if not message and fetched == {"site": "cross-site", "mode": "navigate"}:
            return again(connection)
        if "text/html" not in connection.headers.get("accept", ""):
            return PlainTextResponse((message or "Log in first.") + "\n", status, dict(headers or {}))
        if after is None:
            after = _here(connection)
        stranger = self._stranger(connection)
        if stranger and not message:
            message, status = f"{stranger} has no access to this dashboard.", 403
        return login_page(
            self._settings.base_path, message, after, status, headers, by_oidc=bool(self._settings.people)
        )

    # -- sessions

    def _session(self, connection: HTTPConnection) -> LoginSession | None:
        """Return the session of the request, if its signature is valid and it has not expired."""
        try:
            held, since = self._signer.loads(
                connection.cookies.get(self._cookie, ""), max_age=SESSION_S, return_timestamp=True
            )
            role, name = str(held["role"]), str(held["name"])
        except (BadSignature, KeyError, TypeError):
            return self._by_oidc(connection)
        header = self._settings.user_header
        if header and connection.scope.get("rlwatch.proxied"):
            name = _tidy(connection.headers.get(header, "")) or name
        return LoginSession(role, name, since.timestamp() + SESSION_S) if role in self._settings.tokens else None

    def _by_oidc(self, connection: HTTPConnection) -> LoginSession | None:
        """Return the session of a user who is logged in by OIDC and listed; it lasts as long as that of a token."""
        claims = oidc.claims_of(connection) if self._settings.people else None
        if claims is None or not isinstance(claims.get("iat"), int | float):
            return None
        address, until = oidc.address_of(claims), claims["iat"] + SESSION_S
        role = oidc.role_of(address, self._settings.people)
        return LoginSession(role, _tidy(address), until) if role is not None and time.time() < until else None

    def _stranger(self, connection: HTTPConnection) -> str:
        """Return the address of a user who is logged in by OIDC but not listed, or an empty string."""
        claims = oidc.claims_of(connection) if self._settings.people else None
        if claims is None or oidc.role_of(oidc.address_of(claims), self._settings.people) is not None:
            return ""
        return _tidy(oidc.address_of(claims)) or "A user without a verified e-mail address"

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, session: LoginSession) -> None:
        """Pass the request to the app with name and role; a websocket is closed when its session ends."""
        principal = {NAME_HEADER: quote(session.name), ROLE_HEADER: session.role}
        headers = [*scope["headers"], *((name.encode(), value.encode()) for name, value in principal.items())]
        inner = {**scope, "headers": headers}
        if scope["type"] == "http":
            if (script := assets.script(scope, self._settings.base_path)) is not None:
                await script(scope, receive, send)
                return
            asked = {**inner, SESSION_END: session.until, "headers": whole_page(headers)}
            await self._app(asked, receive, with_skeleton(scope, send, self._settings.base_path))
            return
        try:
            async with asyncio.timeout(session.until - time.time()):
                with news.HUB.listening() as listener, closing(news.Asking(receive, listener, news.HUB)) as page:

                    async def noted(message: Message) -> None:
                        page.note(message)
                        await send(message)

                    await self._app(inner, page.receive, noted)
        except TimeoutError:
            with suppress(RuntimeError):  # the socket may be closed already
                await send({"type": "websocket.close", "code": 1008, "reason": "the session is over"})


class Turns:
    """Queue of token checks: one at a time for each address, each with a delay that grows after wrong tokens.

    Guessing is slow with any number of connections. A right token waits at most for the queue of its address, which is
    bounded by the number of unauthenticated connections. A client that disconnects leaves the queue.
    """

    def __init__(self) -> None:
        self._limiter, self._tries = MovingWindowRateLimiter(MemoryStorage()), parse(TRIES)
        self._queues: dict[str, asyncio.Lock] = {}
        self._asking: Counter[str] = Counter()

    def wrong(self, client: str) -> None:
        """Count a wrong token from the address ``client``."""
        self._limiter.hit(self._tries, _household(client))

    @asynccontextmanager
    async def turn(self, client: str, receive: Receive) -> AsyncIterator[bool]:
        """Wait for the client's turn in the queue and yield True, or False if the client disconnects first.

        ``client``: network address of the client. ``receive``: ASGI function that reports the disconnection.
        """
        key = _household(client)
        queue = self._queues.setdefault(key, asyncio.Lock())
        self._asking[key] += 1
        try:
            turn, gone = asyncio.ensure_future(queue.acquire()), asyncio.ensure_future(_gone(receive))
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not turn.done():
                turn.cancel()
                yield False
                return
            try:
                await asyncio.sleep(TURN_S if self._limiter.test(self._tries, key) else SLOW_TURN_S)
                yield True
            finally:
                queue.release()
        finally:
            self._asking[key] -= 1
            if not self._asking[key]:
                del self._asking[key], self._queues[key]


async def _gone(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _household(client: str) -> str:
    """Return the address, for IPv6 its /64 network, in which one customer has 2**64 addresses."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def _query(connection: HTTPConnection) -> str:
    return str(connection.scope["query_string"].decode("latin-1"))


def _here(connection: HTTPConnection) -> str:
    """Return the path and query of the request, quoted."""
    query = _query(connection)
    return quote(connection.scope["path"], PATH_CHARACTERS) + (f"?{query}" if query else "")


def _tidy(name: str) -> str:
    """Return a name on one line, without unprintable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())[:NAME_LENGTH]


def _bare(token: str) -> str:
    """Return the token, also from a pasted link that contains it."""
    token = token.strip()
    found = re.search(r"[?&]token=([^&#\s]+)", token)
    return unquote(found[1]) if found else token


async def _form(receive: Receive) -> dict[str, str]:
    """Return the fields of a form, or none if it is too large or too slow."""
    try:
        async with asyncio.timeout(GREETING_S):
            return await _small_form(receive)
    except TimeoutError:
        return {}


async def _small_form(receive: Receive) -> dict[str, str]:
    body = b""
    while len(body) <= FORM_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
            return {name: values[0] for name, values in fields.items()} if len(body) <= FORM_BYTES else {}
    return {}


async def _deny(scope: Scope, receive: Receive, send: Send, answer: Response) -> None:
    """Refuse a websocket before the handshake."""
    websocket = WebSocket(scope, receive, send)
    if "websocket.http.response" in scope.get("extensions", {}):
        await websocket.send_denial_response(answer)
    else:
        await websocket.close(1008)


# -- pages of the gate


def login_page(
    base_path: str,
    says: str,
    after: str,
    status: int,
    headers: Mapping[str, str] | None = None,
    *,
    by_oidc: bool = False,
) -> Response:
    """Return the page with the login form; it needs no script, and its content policy allows none.

    Parameters
    ----------
    base_path
        URL path of the dashboard.
    says
        Message to show, or "".
    after
        Address to open after the login.
    status, headers
        Status and headers of the response.
    by_oidc
        Offer the login by OIDC.
    """
    page = Template((HERE / "login.html").read_text(encoding="utf-8")).substitute(
        action=html.escape(f"{base_path}/login"),
        after=html.escape(after),
        says=f'<p class="says" role="alert">{html.escape(says)}</p>' if says else "",
        oidc=f'<a class="oidc" href="{html.escape(base_path)}/oidc">Log in with your organisation</a>'
        if by_oidc
        else "",
    )
    return HTMLResponse(page, status, {**_page_headers(page), **(headers or {})})


def leave_page(action: str, token: str) -> Response:
    """Return the page with the button that logs out, which sends ``token`` to ``action``."""
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>rlwatch: log out</title>'
        "<style>body { font: 16px/1.5 system-ui, sans-serif; margin: 3rem; color-scheme: light dark; } "
        "button { font: inherit; padding: .5rem 1.5rem; }</style>"
        f'<form method="post" action="{html.escape(action)}"><input type="hidden" name="token" value="{token}">'
        "<button>Log out</button></form></html>"
    )
    return HTMLResponse(page, 200, _page_headers(page))


def again(connection: HTTPConnection) -> Response:
    """Answer ``connection`` with a page that reloads itself, since a browser sends no strict cookie with a link from
    another site.
    """
    return onward(_here(connection), 401)


def onward(address: str, status: int) -> Response:
    """Return a page, with this HTTP ``status``, that redirects to ``address``."""
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}"><title>rlwatch</title>'
    return HTMLResponse(page, status, _page_headers(page))


def _page_headers(page: str) -> dict[str, str]:
    styles = " ".join(_hashes(page, "style")) or "'none'"
    return {
        "content-security-policy": f"default-src 'none'; style-src {styles}; img-src data:; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'",
        # Without a referrer a browser would send "Origin: null" with the form.
        "referrer-policy": "same-origin",
        "cache-control": "no-store",
    }


HEAD = b"<link"
"""First part of the head of Streamlit's page that loads something; what is more urgent goes before it."""
ROOT = b'<div id="root"></div>'
"""Part of Streamlit's page that its script fills."""
SKELETON = b"""<div id="root"><style>
@keyframes rl-wait { 50% { opacity: .4 } }
#rl-wait { padding: 5.5rem 5rem 0; color: #222; animation: rl-wait 1.6s infinite; font: 1.4rem sans-serif; }
#rl-wait i { display: block; height: 1rem; margin: 1.1rem 0; border-radius: 4px; background: #8884; }
@media (max-width: 640px) { #rl-wait { padding: 5.5rem 1rem 0 } }
@media (prefers-color-scheme: dark) { body { background: #171614 } #rl-wait { color: #ddd } }
@media (prefers-reduced-motion: reduce) { #rl-wait { animation: none } }
</style><div id="rl-wait" role="status" aria-label="loading">rlwatch
<i></i><i></i><i></i><i></i><i></i><i></i><i></i><i></i></div></div>"""
"""Replacement for that part, with grey rows that a browser shows before it has any script."""


OF_A_COPY = frozenset({b"accept-encoding", b"if-none-match", b"if-modified-since"})


def whole_page(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request; those of one for a page ask for it as it is stored, whole and not compressed.

    Streamlit compresses the page at every address but the first, and calls it unchanged after an update of rlwatch.
    """
    page = any(name == b"accept" and b"text/html" in value for name, value in headers)
    return [pair for pair in headers if not (page and pair[0] in OF_A_COPY)]


def with_skeleton(scope: Scope, send: Send, base_path: str = "") -> Send:
    """Return a ``send`` function that puts grey placeholder rows and the names of the scripts that it will need into
    Streamlit's page, and compresses it; other responses pass unchanged.
    """
    if scope["method"] != "GET":
        return send
    packs = "gzip" in Headers(scope=scope).get("accept-encoding", "")
    held: list[Message] = []

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            page = headers.get("content-type", "").startswith("text/html") and "content-encoding" not in headers
            if page and message["status"] == 200:
                held.append(message)
                return
        elif held:
            held.append(message)
            if message.get("more_body"):
                return
            body = b"".join(part.get("body", b"") for part in held[1:])
            query = scope["query_string"].decode("latin-1")
            links = preload.links(scope["path"], base_path, query).encode("latin-1", "replace")
            body = body.replace(ROOT, SKELETON, 1).replace(HEAD, links + HEAD, 1)
            headers = MutableHeaders(scope=held[0])
            for name in ("etag", "last-modified", "accept-ranges"):
                del headers[name]
            if packs:
                body = gzip.compress(body, assets.LEVEL, mtime=0)
                headers["content-encoding"] = "gzip"
            headers.update({"content-length": str(len(body)), "vary": "Accept-Encoding"})
            await send(held[0])
            message = {"type": "http.response.body", "body": body}
            held.clear()
        await send(message)

    return sent


def content_policy() -> str:
    """Return the strictest content security policy that Streamlit works with; docs/dashboard.md explains each
    relaxation.
    """
    index = Path(get_static_dir(), "index.html").read_text(encoding="utf-8")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(["'self'", "blob:", *_hashes(index, "script")]),
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data:",
        "font-src": "'self' data:",
        "connect-src": "'self'",
        "form-action": "'none'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(page: str, tag: str) -> list[str]:
    """Return hashes that allow only the inline scripts or styles of ``page``."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found]


def warm() -> None:
    """Read the data of the list of runs, and the scripts of the pages, before the first page asks for them."""
    with suppress(RLWatchError):
        import_module(".fleet", __package__).fleet()
    assets.warm()
    for name in (".api", ".navigation"):  # the modules of the data endpoint, and of every page
        import_module(name, __package__)


def serve() -> None:
    """Serve the dashboard behind the gate until the process is stopped."""
    settings = GateSettings(**json.loads(os.environ.pop(SETTINGS)))
    os.environ["FORWARDED_ALLOW_IPS"] = ""  # the gate itself decides which proxies to trust
    options = json.loads(os.environ.pop(f"{SETTINGS}_STREAMLIT"))
    strangers = Strangers()
    protocol = limited(AutoHTTPProtocol, strangers)
    uvicorn.Config = partial(uvicorn.Config, http=protocol, backlog=BACKLOG)  # type: ignore[misc, assignment]  # Streamlit's
    quiet_log()
    Thread(target=warm, name="rlwatch-warm", daemon=True).start()
    st.App(
        HERE / "main.py",
        routes=endpoint.routes(settings.base_path),
        middleware=[Middleware(Gate, settings=settings, strangers=strangers)],
    ).run(config=options)
