"""Look at a live page again when what it shows has changed, not by the clock.

A page asks every few seconds (``run_every``), each of its parts by itself. Behind the gate that is answered only where
something is new, and what is new is shown at once: as if the page had asked just then. Where the store tells nothing,
what a page asks is answered as it comes.
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
"""Longest time between two looks: a page says how long ago something was."""

WAIT_S, LINGER_S, RETRY_S = 1.0, 60.0, 5.0
"""Longest wait for news at a time; how long it is listened to after the last page is gone; when the store is tried
again where it cannot be opened.
"""

SMALL = 16_384
"""Bytes below which a message to a page may be one that changes its address."""


# The thread that listens.


@dataclass(eq=False, slots=True)
class Listener:
    """A page. ``runs``: those it shows; none: all. ``told_at``: when there was news of them."""

    runs: frozenset[str] = frozenset()
    told_at: float = 0.0
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def wake(self) -> None:
        """From any thread; nothing where its loop has ended meanwhile."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        self.told_at = time.monotonic()
        self.woken.set()


class NewsFeed:
    """Passes on to pages what the store tells; listens to it while there are any."""

    def __init__(self, ask: Callable[[], News | None], linger_s: float = LINGER_S) -> None:
        self.deaf = True
        self._ask, self._linger_s, self._lock = ask, linger_s, threading.Lock()
        self._listeners: set[Listener] = set()
        self._until = 0.0
        self._thread: threading.Thread | None = None

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        """A page that is told from now on."""
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
        """Wake whom it concerns; all, where nothing was heard until now: nobody knows what was missed."""
        with self._lock:
            turned, self.deaf = deaf != self.deaf, deaf
            for listener in self._listeners:
                if turned or "" in heard or (heard & listener.runs if listener.runs else heard):
                    listener.wake()


def _of_the_store() -> News | None:
    from . import queries  # what it remembers belongs to a server that runs

    return queries.store().news("pages")


HUB = NewsFeed(_of_the_store)


# What comes from a page.


class Asking:
    """The questions of a page, over its web socket: of itself it asks only where there is something new, then at once.

    Parameters
    ----------
    receive
        Of the socket; :meth:`receive` is for the app.
    gap_s, list_gap_s
        Shortest time between two looks because of a run, and of all: drawing a page takes a tenth of a second.
    unseen_s
        A page that has not asked for so long is one that nobody sees: browsers let those ask once a minute.
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
        """The next message: the page's own, or one that it would have sent."""
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
        """Learn from what goes to the page that the script has changed its address: what is asked in the page's stead
        must not name the one before.
        """
        data = message.get("bytes") or b""
        if message["type"] == "websocket.send" and len(data) < SMALL:
            told = ForwardMsg()
            with suppress(DecodeError):
                told.ParseFromString(data)
            if told.WhichOneof("type") == "page_info_changed":
                self._last.query_string = told.page_info_changed.query_string

    def close(self) -> None:
        """Wait for nothing more."""
        if self._coming is not None:
            self._coming.cancel()

    async def _wait(self, coming: asyncio.Future[Message]) -> None:
        """For a message, for news, or until news that came may be shown."""
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
        """Parts that do not show what there is news of."""
        return [part for part, drawn_at in self._drawn.items() if drawn_at < self._listener.told_at]

    def _is_seen(self, now: float) -> bool:
        return now - self._asked_at < self._unseen_s

    @property
    def _free_at(self) -> float:
        return self._pushed_at + (self._gap_s if self._listener.runs else self._list_gap_s)

    def _passes(self, message: Message, now: float) -> bool:
        """True for all but what a part asks by the clock where nothing is new; learns what the page shows."""
        asked = _asked(message)
        if asked is None:
            return True
        self._last, part = asked, asked.fragment_id
        names = parse_qs(asked.query_string.lstrip("?"))
        self._listener.runs = frozenset((*names.get("run", ()), *names.get("runs", ())))
        if not asked.is_auto_rerun:
            if not part:  # drawn whole, perhaps with other parts
                self._whole_at, self._drawn = now, {}
            return True
        self._asked_at, drawn_at = now, self._drawn.setdefault(part, self._whole_at)
        if not self._hub.deaf and drawn_at >= self._listener.told_at and now - drawn_at < CLOCK_S:
            return False
        self._drawn[part] = now
        return True

    def _push(self, now: float) -> None:
        """Have the parts that are behind drawn, as if the page had asked; what a person did is not done again."""
        behind = self._behind()
        if not behind or not self._is_seen(now) or now < self._free_at:
            return
        self._pushed_at = now
        for part in behind:
            self._drawn[part] = now
            told = BackMsg()
            told.rerun_script.CopyFrom(self._last)
            asked = told.rerun_script
            asked.fragment_id, asked.is_auto_rerun, asked.is_history_navigation = part, True, False
            del asked.cached_message_hashes[:]  # the browser may have forgotten them by now
            # Neither what was pressed, which is done, nor what was chosen: the script may have chosen otherwise since,
            # and keeps by itself what it is not told.
            del asked.widget_states.widgets[:]
            self._due.append({"type": "websocket.receive", "bytes": told.SerializeToString()})


def _asked(message: Message) -> ClientState | None:
    """The question, to draw the page or a part; None where it is about something else."""
    data = message.get("bytes")
    if message["type"] != "websocket.receive" or not data:
        return None
    told = BackMsg()
    try:
        told.ParseFromString(data)
    except DecodeError:  # the app says what is wrong with it
        return None
    return told.rerun_script if told.WhichOneof("type") == "rerun_script" else None
