"""Contract of every notifier; subclass it in a test module of a new notifier.

For a channel that speaks HTTP::

    class TestMine(HTTPNotifierContract):
        def make(self, url, secret, limit_s):
            return MyNotifier(url, secret=secret, total_s=limit_s)

For any other, :class:`NotifierContract` with a ``notifier`` fixture and its ``secrets``.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rlwatch.ports import Delivery, Notifier
from rlwatch.records import JSON, OutboxMessage
from rlwatch.testing.webhook_receiver import WebhookReceiver, WebhookReply

SECRET = "contract-s3cret-value"  # noqa: S105  (made up, to look for)
PATH_TOKEN = "T0KEN-in-the-p4th"  # noqa: S105
NEVER_S = 120.0
"""Seconds after which a notifier is considered hung, even on a busy machine."""


def a_message(message_id: str = "0123456789abcdef", **payload: JSON) -> OutboxMessage:
    """Return a message about a firing alert as the outbox holds it; ``payload`` replaces or adds parts of its
    contents.
    """
    whole = {"event": "firing", "text": "entropy collapses", "alert": {"severity": "critical"}} | payload
    return OutboxMessage(message_id, "run-1", "alert-1", "channel", whole)


class NotifierContract:
    """Tests that every notification channel must pass. ``secrets``: texts, such as tokens in an address, that the
    channel must never reveal.
    """

    secrets: tuple[str, ...] = ()

    @pytest.fixture
    def notifier(self) -> Notifier:
        """Return the notifier under test, able to deliver."""
        raise NotImplementedError("give a fixture 'notifier'")

    def test_it_has_a_name(self, notifier: Notifier) -> None:
        """Check that the notifier has a name, that of the channel it serves."""
        assert notifier.name.strip()

    def test_it_delivers_and_reports_success(self, notifier: Notifier) -> None:
        """Check that a delivery succeeds and is reported as ``ok``."""
        delivery = notifier.deliver(a_message())

        assert isinstance(delivery, Delivery)
        assert delivery.ok, delivery.reason

    def test_it_draws_no_random_number_of_the_process(self, notifier: Notifier) -> None:
        """Check that a delivery leaves Python's random state unchanged.

        Deliveries happen in the trainer's process, at any time, and must not change what its seed determines.
        """
        before = random.getstate()
        notifier.deliver(a_message())

        assert random.getstate() == before

    @pytest.mark.parametrize(
        "payload",
        [
            {"event": None, "text": None, "alert": None},
            {"value": math.nan, "more": [math.inf, -math.inf]},
            {"text": "línea\nnuëva \x1b[31m \ud800"},
            {"text": "x" * 100_000},
        ],
        ids=["missing parts", "not finite", "odd text", "long"],
    )
    def test_an_awkward_payload_is_delivered_too(self, notifier: Notifier, payload: dict[str, JSON]) -> None:
        """Check that payloads with missing parts, NaN, odd or very long text are delivered, so that no alert is
        lost.
        """
        assert notifier.deliver(a_message(**payload)).ok

    def test_its_repr_and_logs_leak_no_secret(self, notifier: Notifier, caplog: pytest.LogCaptureFixture) -> None:
        """Check that repr, result and logs (at level DEBUG, of libraries too) hold no secret."""
        caplog.set_level(logging.DEBUG)
        delivery = notifier.deliver(a_message())

        assert_no_secret(self.secrets, repr(notifier), str(notifier), delivery.reason, caplog.text)


class HTTPNotifierContract(NotifierContract):
    """Tests of notifiers that deliver over HTTP, against a real server on the loopback interface."""

    limit_s = 0.3
    yes = b""
    """Body of a positive answer, for services that report success in the body."""

    def make(self, url: str, secret: str, limit_s: float) -> Notifier:
        """Return a notifier that delivers to ``url`` and gives up after ``limit_s`` seconds in all.

        ``secret``: text that is part of its settings, such as a signing key, and must never be revealed.
        """
        raise NotImplementedError("build the notifier under test")

    @pytest.fixture
    def receiver(self) -> Iterator[WebhookReceiver]:
        """Yield a local webhook receiver that accepts every message."""
        with WebhookReceiver(WebhookReply(200, body=self.yes), any_path=True) as receiver:
            yield receiver

    @pytest.fixture
    def notifier(self, receiver: WebhookReceiver) -> Notifier:
        """Return a notifier that delivers to :meth:`receiver`."""
        self.secrets = (SECRET, receiver.url.rpartition("/")[2])
        return self.make(receiver.url, SECRET, 5.0)

    def answered(self, answer: WebhookReply | int, limit_s: float = NEVER_S) -> tuple[Delivery, WebhookReceiver]:
        """Deliver a message to a receiver that replies with ``answer``; return the delivery's result and the receiver.

        ``limit_s``: seconds after which the notifier gives up.
        """
        with WebhookReceiver(answer, any_path=True) as receiver:
            return self.make(receiver.url, SECRET, limit_s).deliver(a_message()), receiver

    def test_a_retry_carries_the_same_idempotency_key(self, notifier: Notifier, receiver: WebhookReceiver) -> None:
        """Check that retries of a message have the same id, by which a receiver can drop duplicates."""
        for message_id in ("first", "first", "second"):
            notifier.deliver(a_message(message_id))

        assert [r.message_id for r in receiver.received] == ["first", "first", "second"]
        assert len(receiver.deliveries) == 2

    @pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
    def test_2xx_is_delivered(self, status: int) -> None:
        """Check that any 2xx status is a success; if the service confirms in the body, an empty body is not."""
        silent = status == 204 and self.yes != b""
        delivery, _ = self.answered(WebhookReply(status, body=b"" if status == 204 else self.yes))

        assert (delivery.ok, delivery.retryable) == (not silent, True)

    @pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
    def test_a_passing_trouble_may_be_tried_again(self, status: int) -> None:
        """Check that a status that reports a temporary problem is a failure that may be retried."""
        delivery, _ = self.answered(status)

        assert (delivery.ok, delivery.retryable) == (False, True)
        assert str(status) in delivery.reason

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 413, 422])
    def test_a_refusal_is_final(self, status: int) -> None:
        """Check that a status that reports a refusal is a failure that must not be retried."""
        delivery, _ = self.answered(status)

        assert (delivery.ok, delivery.retryable) == (False, False)
        assert str(status) in delivery.reason

    def test_a_wish_for_time_is_passed_on(self) -> None:
        """Check that the seconds in Retry-After of a rate limit (429) are passed on, without an immediate retry."""
        delivery, receiver = self.answered(WebhookReply(429, {"Retry-After": "37"}))

        assert (delivery.ok, delivery.retryable, delivery.retry_after_s) == (False, True, 37.0)
        assert len(receiver.received) == 1

    def test_no_answer_of_a_receiver_is_repeated(self, caplog: pytest.LogCaptureFixture) -> None:
        """Check that no text of an answer (body, header or reason phrase) is repeated, as it could contain the
        secret.
        """
        caplog.set_level(logging.DEBUG)
        text = f"{SECRET} {PATH_TOKEN}"
        for status in (200, 400, 401, 403, 404, 429, 500):
            with WebhookReceiver(WebhookReply(status, {"X-Why": text}, text.encode()), any_path=True) as receiver:
                notifier = self.make(f"{receiver.url}/{PATH_TOKEN}", SECRET, 5.0)
                delivery = notifier.deliver(a_message())

            assert_no_secret((SECRET, PATH_TOKEN), repr(notifier), repr(delivery), caplog.text)

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_a_redirect_is_not_followed(self, status: int) -> None:
        """Check that no redirect is followed: the alert, and perhaps a secret, would go to an unconfigured address."""
        with WebhookReceiver(200) as elsewhere:
            delivery, receiver = self.answered(WebhookReply(status, {"Location": elsewhere.url}))

            assert not delivery.ok
            assert (len(receiver.received), len(elsewhere.received)) == (1, 0)
            assert_no_secret((elsewhere.url,), delivery.reason)

    def test_a_receiver_that_hangs_is_given_up_in_time(self) -> None:
        """Check that a delivery to a receiver that never answers ends in time, as a failure that may be retried."""
        with WebhookReceiver(WebhookReply(hang=True), any_path=True) as receiver:
            notifier = self.make(receiver.url, SECRET, self.limit_s)
            delivery = in_time(lambda: notifier.deliver(a_message()))

        assert (delivery.ok, delivery.retryable) == (False, True)

    def test_a_receiver_that_drips_is_given_up_in_time(self) -> None:
        """Check that an answer that arrives byte by byte ends in time, although slow bytes reset most timeouts."""
        with dripping() as url:
            notifier = self.make(url, SECRET, self.limit_s)
            delivery = in_time(lambda: notifier.deliver(a_message()))

        assert (delivery.ok, delivery.retryable) == (False, True)

    def test_a_huge_answer_is_not_read_into_memory(self) -> None:
        """Check that a success with a body of 20 MB is accepted; the status is enough."""
        assert self.answered(WebhookReply(200, body=self.yes + b" " * 20_000_000))[0].ok

    def test_network_trouble_is_an_answer_and_leaks_no_secret(self, caplog: pytest.LogCaptureFixture) -> None:
        """Check that network failures return a retryable failure, raise nothing and reveal no address.

        They are a closed port, an unknown host, and servers that speak no HTTP or no TLS.
        """
        caplog.set_level(logging.DEBUG)
        with speaking(b"NOT HTTP AT ALL\r\n\r\n") as garbage, speaking(b"") as silence:
            closed, no_tls = f"http://127.0.0.1:{closed_port()}", garbage.replace("http:", "https:")
            for url in (closed, "http://rlwatch.invalid", garbage, silence, no_tls):
                notifier = self.make(f"{url}/{PATH_TOKEN}?key={PATH_TOKEN}", SECRET, self.limit_s)
                delivery = notifier.deliver(a_message())

                assert (delivery.ok, delivery.retryable) == (False, True)
                assert delivery.reason
                assert_no_secret((SECRET, PATH_TOKEN), repr(notifier), delivery.reason, caplog.text)


def in_time(deliver: Callable[[], Delivery]) -> Delivery:
    """Return the result of ``deliver``, called with a server that never answers; fail if it takes over ``NEVER_S``
    seconds.
    """
    answers: list[Delivery] = []
    thread = threading.Thread(target=lambda: answers.append(deliver()), daemon=True)
    thread.start()
    thread.join(NEVER_S)
    assert answers, f"no answer within {NEVER_S:g} s"
    return answers[0]


def assert_no_secret(secrets: tuple[str, ...], *texts: str) -> None:
    """Fail if a text holds a secret, without printing the text, which may hold other secrets."""
    for secret in secrets:
        for number, text in enumerate(texts):
            assert secret not in text, f"text {number} leaks a secret"


def closed_port() -> int:
    """Return a local port without a listener."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def speaking(words: bytes, every_s: float | None = None) -> Iterator[str]:
    """Run a local TCP server that sends ``words`` to every client after one read, then closes; yield its URL.

    ``every_s``: seconds between two bytes; None: all bytes at once.
    """
    server, done = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def talk(connection: socket.socket) -> None:
        connection.recv(65536)
        if every_s is None:
            connection.sendall(words)
            return
        for byte in words:
            connection.sendall(bytes([byte]))
            if done.wait(every_s):
                return

    def serve() -> None:
        while not done.is_set():
            try:
                connection, _ = server.accept()
                with connection:
                    talk(connection)
            except OSError:
                continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        done.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5.0)


@contextmanager
def dripping() -> Iterator[str]:
    """Run a local server whose HTTP answer takes hours, one byte every 20 ms; yield its URL."""
    with speaking(b"HTTP/1.1 200 OK\r\nX-Drip: " + b"x" * 1_000_000, every_s=0.02) as url:
        yield url
