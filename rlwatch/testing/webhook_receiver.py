"""A webhook receiver on this machine, for tests and demos of webhook delivery, and an example of what receivers must
do.

>>> with WebhookReceiver(secret="s3cret") as receiver:
...     receiver.url.startswith("http://127.0.0.1:")
True
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from rlwatch.clock import Clock, SystemClock
from rlwatch.notify.webhook import verify_signature
from rlwatch.records import JSON

LARGEST_BODY = 1_000_000
"""Bytes; a request that announces a larger body is answered with 413 and not read."""


@dataclass(frozen=True, slots=True)
class WebhookReply:
    """The HTTP answer to one request. ``hang``: send no answer until the receiver closes."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """One received request. ``verified``: True if its signature is valid; None if the receiver has no secret."""

    payload: Mapping[str, JSON]
    headers: Mapping[str, str]
    body: bytes
    verified: bool | None
    path: str

    @property
    def message_id(self) -> str:
        """Id of the message, which is the same for all retries of a delivery; empty if the request has none."""
        return self.headers.get("x-rlwatch-delivery", "")

    @property
    def event(self) -> str:
        """Event that the message reports: ``firing``, ``escalated`` or ``resolved``; empty if the request has none."""
        return self.headers.get("x-rlwatch-event", "")


class WebhookReceiver:
    """An HTTP server for webhooks on 127.0.0.1, which runs while its ``with`` block runs.

    Parameters
    ----------
    answers
        Replies (or only their status) to send, in order; the last one is repeated. 204 if none are given.
    secret
        Deliveries that are not signed with this secret are answered with 401.
    clock
        Clock by which the age of deliveries is judged.
    port
        Port to listen on; 0 for a free one.
    any_path
        Accept requests under every path; otherwise other paths than its own are answered with 404.
    """

    def __init__(
        self,
        *answers: WebhookReply | int,
        secret: str | None = None,
        clock: Clock | None = None,
        port: int = 0,
        any_path: bool = False,
    ) -> None:
        self._script = [WebhookReply(a) if isinstance(a, int) else a for a in answers] or [WebhookReply()]
        self._secret, self._any_path = secret, any_path
        self._clock = clock or SystemClock()
        self._received: list[Received] = []
        self._changed = threading.Condition()
        self.closing = threading.Event()
        self._server = _Server(self, port)
        self._path = f"/hook/{secrets.token_urlsafe(16)}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """URL to deliver to; its path is unguessable, as that of real receivers is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}{self._path}"

    @property
    def received(self) -> tuple[Received, ...]:
        """All requests so far, in order of arrival, including retries."""
        with self._changed:
            return tuple(self._received)

    @property
    def deliveries(self) -> tuple[Received, ...]:
        """The first request of each message id: what remains if a receiver drops retries."""
        first: dict[str, Received] = {}
        for request in self.received:
            first.setdefault(request.message_id, request)
        return tuple(first.values())

    def wait_for(self, count: int, timeout_s: float = 10.0) -> bool:
        """Wait until ``count`` requests have arrived; return False if they have not within ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._received) >= count, timeout_s)

    def take(self, path: str, headers: Mapping[str, str], body: bytes) -> WebhookReply:
        """Record a request and return the reply to send.

        ``path``, ``headers`` and ``body`` are those of the request.
        """
        verified = self._verified(headers, body)
        with self._changed:
            answer = self._script[min(len(self._received), len(self._script) - 1)]
            self._received.append(Received(_parsed(body), headers, body, verified, path))
            self._changed.notify_all()
        if path != self._path and not self._any_path:
            return WebhookReply(404)
        return WebhookReply(401) if verified is False else answer

    def close(self) -> None:
        """Stop serving and release requests that hang."""
        self.closing.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _verified(self, headers: Mapping[str, str], body: bytes) -> bool | None:
        if self._secret is None:
            return None
        timestamp, signature = headers.get("x-rlwatch-timestamp", ""), headers.get("x-rlwatch-signature", "")
        return verify_signature(self._secret, timestamp, body, signature, now=self._clock.now())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, receiver: WebhookReceiver, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.receiver = receiver

    def handle_error(self, request: object, client_address: object) -> None:
        """Print no traceback for a client that hangs up."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        """Read and record a request, and send the scripted reply."""
        length = self.headers.get("content-length", "")
        if not length.isdigit() or int(length) > LARGEST_BODY:
            self._reply(WebhookReply(413))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.receiver.take(self.path, headers, self.rfile.read(int(length)))
        if answer.hang:
            self.server.receiver.closing.wait()
            return
        self._reply(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name in the base class)
        """Log nothing, because addresses are secrets."""

    def _reply(self, answer: WebhookReply) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)


def _parsed(body: bytes) -> Mapping[str, JSON]:
    try:
        payload = json.loads(body)
    except ValueError:
        return {}
    return payload if isinstance(payload, dict) else {}
