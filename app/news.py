"""Refresh of live pages when their data change, not by the clock.

Each fragment of a page requests a rerun every few seconds (``run_every``). Behind the gate such a request is passed on
only if the data have changed, and a change triggers a rerun at once, as if the page had requested it. If the store
sends no notifications, all requests are passed on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from google.protobuf.message import DecodeError
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from rlwatch.errors import RLWatchError
from rlwatch.ports import News

Message = MutableMapping[str, Any]

GAP_S, LIST_GAP_S, UNSEEN_S = 2.0, 5.0, 12.0

CLOCK_S = 30.0
"""Most seconds between two refreshes, because a page shows how long ago events were."""

WAIT_S, LINGER_S, RETRY_S = 1.0, 60.0, 5.0
"""Seconds: most for a single wait for news; to keep listening after the last page has closed; until the store is
opened again after an error.
"""

SMALL = 16_384
"""Size in bytes below which a message to a page is checked for a change of its address."""


# The thread that listens to the store.


@dataclass(eq=False, slots=True)
class Listener:
    """An open page. ``runs``: ids of the runs it shows (empty: all). ``notified_at``: time of their last news."""

    runs: frozenset[str] = frozenset()
    notified_at: float = 0.0
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def wake(self) -> None:
        """Wake the page's coroutine, from any thread; does nothing if its event loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        self.notified_at = time.monotonic()
        self.woken.set()


class NewsFeed:
    """Forwards notifications of the store to the open pages; it listens to the store only while there are any."""

    def __init__(self, ask: Callable[[], News | None], linger_s: float = LINGER_S) -> None:
        self.deaf = True
        self._ask, self._linger_s, self._lock = ask, linger_s, threading.Lock()
        self._listeners: set[Listener] = set()
        self._until = 0.0
        self._thread: threading.Thread | None = None

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        """Register a page for notifications within the block, and yield its listener."""
        listener = Listener()
        with self._lock:
            self._listeners.add(listener)
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="rlwatch-news", daemon=True)
                self._thread.start()
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners.discard(listener)
                self._until = time.monotonic() + self._linger_s

    def _listen(self) -> None:
        news: News | None = None
        while self._wanted():
            if news is None:
                with suppress(RLWatchError):
                    news = self._ask()
            if news is None:
                time.sleep(RETRY_S)
            else:
                heard = news.heard(WAIT_S)
                self._pass_on(heard, deaf=news.deaf)
        if news is not None:
            news.close()

    def _wanted(self) -> bool:
        with self._lock:
            if self._listeners or time.monotonic() < self._until:
                return True
            self._thread, self.deaf = None, True
            return False

    def _pass_on(self, heard: frozenset[str], *, deaf: bool) -> None:
        """Wake the pages concerned; all of them after a gap in notifications, because any news may be missing."""
        with self._lock:
            turned, self.deaf = deaf != self.deaf, deaf
            for listener in self._listeners:
                if turned or "" in heard or (heard & listener.runs if listener.runs else heard):
                    listener.wake()


def _of_the_store() -> News | None:
    from . import queries  # imported late: its caches belong to a running server

    return queries.store().news("pages")


HUB = NewsFeed(_of_the_store)


# Messages from a page.


class Asking:
    """Filter of the messages that an open page sends on its web socket, so that the page is redrawn when there is news
    of its runs.

    It drops the page's timed requests to redraw while there is no news, and adds such requests for news.

    Parameters
    ----------
    receive
        The socket's ``receive``; the app calls :meth:`receive` instead.
    gap_s, list_gap_s
        Shortest time between two refreshes for news of a run, and of all runs: drawing a page takes 0.1 s.
    unseen_s
        Time without a request after which a page counts as hidden: browsers throttle hidden pages to one a minute.
    """

    def __init__(
        self,
        receive: Callable[[], Awaitable[Message]],
        listener: Listener,
        hub: NewsFeed,
        *,
        gap_s: float = GAP_S,
        list_gap_s: float = LIST_GAP_S,
        unseen_s: float = UNSEEN_S,
    ) -> None:
        self._receive, self._listener, self._hub = receive, listener, hub
        self._gap_s, self._list_gap_s, self._unseen_s = gap_s, list_gap_s, unseen_s
        self._coming: asyncio.Future[Message] | None = None
        self._due: deque[Message] = deque()
        self._last = ClientState()
        self._whole_at = self._asked_at = self._pushed_at = 0.0
        self._drawn: dict[str, float] = {}

    async def receive(self) -> Message:
        """Return the next message for the app: one that the page sent, or a request to redraw that was added because of
        news.
        """
        while not self._due:
            if self._coming is None:
                self._coming = asyncio.ensure_future(self._receive())
            await self._wait(self._coming)
            if self._coming.done():
                message, self._coming = self._coming.result(), None
                if self._passes(message, time.monotonic()):
                    return message
            else:
                self._push(time.monotonic())
        return self._due.popleft()

    def note(self, message: Message) -> None:
        """Note the new address of the page in ``message``, if it has one, so that added requests to redraw have the
        current address.
        """
        data = message.get("bytes") or b""
        if message["type"] == "websocket.send" and len(data) < SMALL:
            forwarded = ForwardMsg()
            with suppress(DecodeError):
                forwarded.ParseFromString(data)
            if forwarded.WhichOneof("type") == "page_info_changed":
                self._last.query_string = forwarded.page_info_changed.query_string

    def close(self) -> None:
        """Stop waiting for messages of the page, because it was closed."""
        if self._coming is not None:
            self._coming.cancel()

    async def _wait(self, coming: asyncio.Future[Message]) -> None:
        """Wait for a message, for news, or until pending news may be shown."""
        woken = asyncio.ensure_future(self._listener.woken.wait())
        either: list[asyncio.Future[Any]] = [coming, woken]
        now = time.monotonic()
        gap = max(0.05, self._free_at - now) if self._behind() and self._is_seen(now) else None
        try:
            await asyncio.wait(either, timeout=gap, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            self._listener.woken.clear()

    def _behind(self) -> list[str]:
        """Return the fragments that are older than the last news."""
        return [part for part, drawn_at in self._drawn.items() if drawn_at < self._listener.notified_at]

    def _is_seen(self, now: float) -> bool:
        return now - self._asked_at < self._unseen_s

    @property
    def _free_at(self) -> float:
        return self._pushed_at + (self._gap_s if self._listener.runs else self._list_gap_s)

    def _passes(self, message: Message, now: float) -> bool:
        """Return False for a timed rerun of a fragment without news, else True; note what the page shows."""
        asked = _asked(message)
        if asked is None:
            return True
        self._last, part = asked, asked.fragment_id
        names = parse_qs(asked.query_string.lstrip("?"))
        self._listener.runs = frozenset((*names.get("run", ()), *names.get("runs", ())))
        if not asked.is_auto_rerun:
            if not part:  # the whole page is redrawn, perhaps with other fragments
                self._whole_at, self._drawn = now, {}
            return True
        self._asked_at, drawn_at = now, self._drawn.setdefault(part, self._whole_at)
        if not self._hub.deaf and drawn_at >= self._listener.notified_at and now - drawn_at < CLOCK_S:
            return False
        self._drawn[part] = now
        return True

    def _push(self, now: float) -> None:
        """Queue reruns of the outdated fragments, as if the page had requested them, without repeating user input."""
        behind = self._behind()
        if not behind or not self._is_seen(now) or now < self._free_at:
            return
        self._pushed_at = now
        for part in behind:
            self._drawn[part] = now
            request = BackMsg()
            request.rerun_script.CopyFrom(self._last)
            asked = request.rerun_script
            asked.fragment_id, asked.is_auto_rerun, asked.is_history_navigation = part, True, False
            del asked.cached_message_hashes[:]  # the browser may have dropped them
            # No widget states: a pressed button is handled already, and the script may have changed a choice since.
            # The script keeps the states that a request leaves out.
            del asked.widget_states.widgets[:]
            self._due.append({"type": "websocket.receive", "bytes": request.SerializeToString()})


def _asked(message: Message) -> ClientState | None:
    """Return the rerun request in a message, or None for any other message."""
    data = message.get("bytes")
    if message["type"] != "websocket.receive" or not data:
        return None
    request = BackMsg()
    try:
        request.ParseFromString(data)
    except DecodeError:  # the app reports the error
        return None
    return request.rerun_script if request.WhichOneof("type") == "rerun_script" else None
