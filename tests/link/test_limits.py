"""What strangers may take of a listener: places, time, and lines of a log."""

import asyncio
import logging
import socket
import threading
from contextlib import ExitStack

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rlwatch.link.limits import STRANGERS, Quiet, Strangers, limited

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@given(st.lists(st.tuples(st.sampled_from(["arrives", "speaks", "leaves"]), st.integers(0, 12)), max_size=60))
def test_of_too_many_strangers_the_one_goes_that_was_silent_for_the_longest(events):
    """As a list says that is kept in order of their last sign."""
    strangers, closed, model = Strangers(4), [], []
    for event, who in events:
        if event == "arrives" and who not in model:
            strangers.arrived(who, lambda who=who: closed.append(who))
            model.append(who)
            if len(model) > 4:
                assert closed.pop() == model.pop(0)
        elif event == "speaks" and who in model:
            strangers.spoke(who)
            model.append(model.pop(model.index(who)))
        elif event == "leaves":
            strangers.left(who)
            model = [each for each in model if each != who]
        assert (len(strangers), closed) == (len(model), [])


@pytest.fixture
def listener():
    """``listener(greeting_s)``: the address of a server that says hello, and its strangers."""

    async def hello(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    with ExitStack() as undo:

        def begin(greeting_s, strangers=None):
            strangers = Strangers() if strangers is None else strangers
            config = uvicorn.Config(hello, port=0, lifespan="off", log_level="error", timeout_keep_alive=60)
            config.http = limited(AutoHTTPProtocol, strangers, greeting_s=greeting_s)
            server = uvicorn.Server(config)
            listening = socket.create_server(("127.0.0.1", 0), backlog=256)
            thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
            thread.start()
            undo.callback(thread.join, 60.0)
            undo.callback(lambda: setattr(server, "should_exit", True))
            return listening.getsockname(), strangers

        yield begin


def connected(undo, address):
    connection = socket.create_connection(address, timeout=60.0)
    undo.callback(connection.close)
    return connection


def test_silent_connections_keep_nobody_from_being_answered(listener):
    """However many: the oldest of them go, and who asks is answered."""
    address, strangers = listener(3600.0)
    with ExitStack() as undo:
        silent = [connected(undo, address) for _ in range(3 * STRANGERS)]
        asking = connected(undo, address)
        asking.sendall(REQUEST)

        said = b""
        while not said.endswith(b"hello"):
            said += asking.recv(1000)

        assert silent[0].recv(1) == b""
        assert len(strangers) == STRANGERS


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", REQUEST + b"GET / HTTP/1.1\r\nHo"])
def test_a_request_that_never_becomes_whole_is_cut_off(listener, sent):
    """The first as well as the next of a connection."""
    address, strangers = listener(0.2)
    with ExitStack() as undo:
        slow = connected(undo, address)
        slow.sendall(sent)
        said = b""
        try:
            while data := slow.recv(1000):
                said += data
        except ConnectionResetError:
            pass

        assert said.count(b"hello") == sent.count(REQUEST)
    assert len(strangers) == 0


def test_the_body_of_a_response_does_not_wait_for_an_acknowledgement_of_its_head(listener):
    """With Nagle's algorithm a browser waits 40 ms for each of a page's hundred scripts; Streamlit's socket, as that of
    ``create_server``, names no protocol, so that asyncio leaves the algorithm on.
    """
    options = []

    class Noted(Strangers):
        def arrived(self, who, close):
            super().arrived(who, close)
            options.append(close.__self__.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    address, _ = listener(3600.0, Noted())
    with ExitStack() as undo:
        asking = connected(undo, address)
        asking.sendall(REQUEST)
        asking.recv(1000)

    assert options == [1]


def test_a_stranger_fills_no_log():
    """One line a minute, without a traceback, and how many there were; everything else passes."""
    now = [0.0]
    quiet = Quiet("socket.accept() out of", clock=lambda: now[0])
    made = logging.Logger("x").makeRecord

    def told(message, error=None):
        record = made("x", logging.ERROR, "f", 1, message, (), error and (type(error), error, None))
        return (record.getMessage(), record.exc_info) if quiet.filter(record) else None

    accept = "socket.accept() out of system resource\nsocket: <fd 7>"
    assert told(accept, OSError("too many")) == ("socket.accept() out of system resource", None)
    assert [told(accept, OSError("too many")) for _ in range(5)] == [None] * 5
    now[0] = 61.0
    assert told(accept) == ("socket.accept() out of system resource (5 more since the last time)", None)
    assert told("a failure of ours") == ("a failure of ours", None)
    assert told("a failure of ours") == ("a failure of ours", None)
