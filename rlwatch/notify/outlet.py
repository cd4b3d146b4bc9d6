"""apprise composes requests and would send them with ``requests``; here they go out through our own HTTP.

So that a delivery is one request, within our limits, without redirects, and its answer is known: apprise
itself says no more than yes or no. Other threads' use of ``requests`` is as it was.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from rlwatch.notify.http import Courier, Reply, TransportError

KEEP = 65_536
"""Bytes of an answer that are read."""

_DROPPED = frozenset({"content-length", "connection", "accept-encoding", "transfer-encoding", "host"})

_now = threading.local()
_lock = threading.Lock()


class Outlet:
    """Where the request of one delivery leaves the house; what ``requests`` calls an adapter.

    Parameters
    ----------
    message_id
        Sent along as ``X-RLWatch-Delivery``.
    """

    def __init__(self, requests: ModuleType, courier: Courier, message_id: str) -> None:
        self.reply: Reply | None = None
        self.trouble = ""
        """Why there is no reply."""
        self._requests, self._courier, self._message_id = requests, courier, message_id

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within it this thread's ``requests`` leave here."""
        _teach(self._requests)
        _now.outlet = self
        try:
            yield
        finally:
            _now.outlet = None

    def send(self, request: Any, *, verify: object = True, **_: object) -> Any:
        """The answer to the first request of this delivery; a second one is refused."""
        if self.reply is not None or self.trouble:
            raise self._requests.ConnectionError("one request is all there is for one delivery")
        try:
            self.reply = self._exchange(request, verify=verify is not False)
        except TransportError as error:
            self.trouble = str(error)
            raise self._requests.ConnectionError("no answer") from None
        return self._response(request, self.reply)

    def close(self) -> None:
        """Nothing is kept open."""

    def _exchange(self, request: Any, *, verify: bool) -> Reply:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        headers |= {"Accept-Encoding": "identity", "X-RLWatch-Delivery": self._message_id}
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else bytes(body)
        return self._courier.send(request.url, content, headers, method=request.method, verify=verify, keep=KEEP)

    def _response(self, request: Any, reply: Reply) -> Any:
        response = self._requests.Response()
        response.status_code, response.request, response.url = reply.status, request, request.url
        response.headers.update(reply.headers)
        response.raw = io.BytesIO(reply.body)
        return response


def _teach(requests: ModuleType) -> None:
    """Let sessions ask for the outlet of their thread, once per process."""
    with _lock:
        session: Any = requests.Session
        usual = session.get_adapter
        if getattr(usual, "knows_outlets", False):
            return

        def get_adapter(self: Any, url: str) -> Any:
            outlet = getattr(_now, "outlet", None)
            return usual(self, url) if outlet is None else outlet

        get_adapter.knows_outlets = True  # type: ignore[attr-defined]
        session.get_adapter = get_adapter
