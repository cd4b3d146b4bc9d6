"""A live page is looked at again when there is something new, at once, and not because time went by."""

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from rlwatch_app import news
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

PATIENCE_S = 60.0


class Store:
    """News that a test makes; deaf until the first of them."""

    def __init__(self):
        self.deaf, self.closed, self.words = True, False, queue.Queue()

    def heard(self, timeout_s=0.0):
        try:
            self.deaf, runs = self.words.get(timeout=0.01)
        except queue.Empty:
            return frozenset()
        return frozenset(runs)

    def close(self):
        self.closed = True


def asked(part="", *, auto=False, about="run=live", pressed=False):
    """What a browser sends to have a page drawn, or a part of it."""
    told = BackMsg()
    state = told.rerun_script
    state.fragment_id, state.is_auto_rerun, state.query_string = part, auto, about
    chosen = state.widget_states.widgets.add()
    chosen.id, chosen.bool_value = "live", True
    if pressed:
        button = state.widget_states.widgets.add()
        button.id, button.trigger_value = "send", True
    return {"type": "websocket.receive", "bytes": told.SerializeToString()}


def part_of(message):
    """The part that the app is to draw."""
    told = BackMsg.FromString(message["bytes"]).rerun_script
    return told.fragment_id


class Page:
    """A browser's end and the app's end of one socket."""

    def __init__(self, store):
        self.hub, self.sent = news.NewsFeed(lambda: store, linger_s=0.0), asyncio.Queue()
        self.store, self.patience = store, {"gap_s": 0.01, "list_gap_s": 0.01}

    def over(self, steps):
        """Run ``steps(app, page)``, ``app()`` being what the app receives next."""

        async def through():
            with (
                self.hub.listening() as self.listener,
                closing(news.Asking(self.sent.get, self.listener, self.hub, **self.patience)) as page,
            ):
                self.asking = page
                await asyncio.wait_for(steps(page.receive), PATIENCE_S)

        with ThreadPoolExecutor(1) as pool:  # a browser's tests leave a loop in this thread
            pool.submit(asyncio.run, through()).result()

    async def told(self, *runs, deaf=False):
        """News, and that they are there."""
        before, turns = self.listener.notified_at, self.hub.deaf != deaf
        self.store.words.put((deaf, runs))
        while self.hub.deaf != deaf or ((runs or turns) and self.listener.notified_at == before):
            await asyncio.sleep(0.001)


@pytest.fixture
def page():
    """A page over a store that tells."""
    return Page(Store())


def test_what_is_new_is_drawn_at_once_and_nothing_else_is(page):
    """Of ticks only those get through that come while something is new; news have every part drawn that ticks."""

    async def steps(app):
        await page.told()
        page.sent.put_nowait(asked())
        assert part_of(await app()) == ""
        for part in ("head", "charts"):
            page.sent.put_nowait(asked(part, auto=True))  # nothing is new
        page.sent.put_nowait(asked("drawer"))  # of a person
        assert part_of(await app()) == "drawer"
        await page.told("live")
        assert {part_of(await app()), part_of(await app())} == {"head", "charts"}
        page.sent.put_nowait(asked("head", auto=True))
        page.store.words.put((False, ["another"]))
        page.sent.put_nowait(asked("drawer"))
        assert part_of(await app()) == "drawer"

    page.over(steps)


def test_what_a_person_did_is_not_done_again(page):
    """A button that was pressed last is not pressed by news; what is chosen stays chosen."""

    async def steps(app):
        await page.told()
        for message in (asked(), asked("head", auto=True), asked("drawer", pressed=True)):
            page.sent.put_nowait(message)
        await app()
        assert len(BackMsg.FromString((await app())["bytes"]).rerun_script.widget_states.widgets) == 2
        await page.told("live")
        told = BackMsg.FromString((await app())["bytes"]).rerun_script
        assert (
            list(told.widget_states.widgets) == []
        )  # the script may have moved a slider since: what it knows, it keeps
        assert (told.fragment_id, told.is_auto_rerun, told.query_string) == ("head", True, "run=live")

    page.over(steps)


def test_while_nothing_is_heard_the_page_looks_by_itself(page):
    """Every tick gets through; when it is heard again, what was missed is looked for."""

    async def steps(app):
        page.sent.put_nowait(asked())
        await app()
        for _ in range(2):
            page.sent.put_nowait(asked("head", auto=True))
            assert part_of(await app()) == "head"
        await page.told()
        assert part_of(await app()) == "head"
        await page.told(deaf=True)
        assert part_of(await app()) == "head"
        page.sent.put_nowait(asked("head", auto=True))
        assert part_of(await app()) == "head"

    page.over(steps)


def test_a_page_that_was_put_still_is_left_alone(page):
    """Drawn whole, it may have no part any more that looks by itself."""

    async def steps(app):
        await page.told()
        for message in (asked(), asked("head", auto=True), asked()):
            page.sent.put_nowait(message)
        await app()
        await app()
        await page.told("live")
        page.sent.put_nowait(asked("drawer"))
        assert part_of(await app()) == "drawer"
        page.sent.put_nowait(asked("head", auto=True))  # it is live again
        assert part_of(await app()) == "head"

    page.over(steps)


def test_a_page_that_nobody_sees_is_left_alone(page):
    """A hidden one asks no more, until it is looked at again."""
    page.patience["unseen_s"] = -1.0

    async def steps(app):
        await page.told()
        for message in (asked(), asked("head", auto=True), asked("drawer")):
            page.sent.put_nowait(message)
        await app()
        await app()
        await page.told("live")
        page.sent.put_nowait(asked("drawer"))
        assert part_of(await app()) == "drawer"
        page.sent.put_nowait(asked("head", auto=True))
        assert part_of(await app()) == "head"

    page.over(steps)


def test_the_list_hears_of_all_runs_and_a_comparison_of_its_own(page):
    """The address says what a page shows."""

    async def steps(app):
        await page.told()
        for about, run in (("", "any"), ("runs=a&runs=b", "b")):
            page.sent.put_nowait(asked(about=about))
            page.sent.put_nowait(asked("table", auto=True, about=about))
            await app()
            await page.told(run)
            assert part_of(await app()) == "table"

    page.over(steps)


def test_nobody_listens_for_nobody(page):
    """The thread ends some time after the last page is gone, and lets the store go; what is no question passes."""
    threads, of_others = [], set(threading.enumerate())  # those of pages that tests left linger for a minute

    async def steps(app):
        threads.extend(one for one in threading.enumerate() if one.name == "rlwatch-news" and one not in of_others)
        await page.told()
        for message in ({"type": "websocket.receive", "bytes": b"\xff"}, {"type": "websocket.disconnect"}):
            page.sent.put_nowait(message)
            assert await app() is message

    page.over(steps)
    (thread,) = threads
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert page.store.closed
    assert page.hub.deaf


def test_what_is_asked_in_the_pages_stead_names_the_address_that_the_script_wrote(page):
    """A zoom is an address that the script has made: a look that named the one before would undo it."""
    written, other = ForwardMsg(), ForwardMsg()
    written.page_info_changed.query_string = "run=live&from=5&to=9"
    other.script_finished = ForwardMsg.FINISHED_SUCCESSFULLY

    async def steps(app):
        await page.told()
        for message in (asked(), asked("charts", auto=True), asked("drawer")):
            page.sent.put_nowait(message)
        await app()
        await app()
        for message in (written, other):
            page.asking.note({"type": "websocket.send", "bytes": message.SerializeToString()})
        page.asking.note({"type": "websocket.send", "bytes": b"\xff" * 100})
        await page.told("live")
        assert BackMsg.FromString((await app())["bytes"]).rerun_script.query_string == "run=live&from=5&to=9"

    page.over(steps)
