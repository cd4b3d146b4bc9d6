"""E-mail: through a real SMTP conversation on this machine."""

from __future__ import annotations

import email
import email.policy
import logging
import random

import pytest
from mail_server import mail_server
from message_examples import MESSAGE, message_with

from rlwatch.errors import ConfigError
from rlwatch.notify.mail import EmailNotifier
from rlwatch.notify.registry import build_notifier
from rlwatch.testing.notifier_contract import (
    NotifierContract,
    a_message,
    assert_no_secret,
    closed_port,
    in_time,
    speaking,
)

SECRET = "contract-s3cret-value"
USER = f"someone:{SECRET}@"


class TestEmail(NotifierContract):
    """With a password in the address."""

    secrets = (SECRET,)

    @pytest.fixture
    def notifier(self):
        with mail_server() as box:
            yield EmailNotifier(box.url(USER), total_s=5.0)


def test_the_mail_says_what_a_person_needs_under_a_subject_that_sorts():
    """And carries the key that is the same at every try."""
    with mail_server() as box:
        notifier = build_notifier("email", "mail", {"url": box.url()})
        assert [notifier.deliver(MESSAGE).ok for _ in range(2)] == [True, True]

    mails = [email.message_from_string(mail, policy=email.policy.default) for mail in box.mails]
    assert [mail["X-RLWatch-Delivery"] for mail in mails] == ["m-0123456789"] * 2
    assert [mail["Message-ID"] for mail in mails] == ["<m-0123456789@rlwatch>"] * 2
    assert mails[0]["Subject"] == "[firing CRITICAL] entropy_collapse at step 412 in math/seed3"
    assert mails[0]["To"] == "you@example.com"
    text = mails[0].get_content().replace("\u200b", "")
    for needed in (
        "Since: step 398",
        "Evidence: ",
        "Meaning: Entropy collapse",
        "Action 1: ",
        "http://host:8501/run?run=run-1",
    ):
        assert needed in text


def test_it_is_plain_text_whatever_the_address_asks_for():
    """Parts of a mail would be divided by random numbers of the process."""
    with mail_server() as box:
        before = random.getstate()
        assert EmailNotifier(box.url() + "&format=html").deliver(MESSAGE).ok

    assert random.getstate() == before
    assert email.message_from_string(box.mails[0]).get_content_type() == "text/plain"


def test_a_subject_is_one_line_whatever_the_alert_says():
    """Nobody adds a receiver through it."""
    with mail_server() as box:
        EmailNotifier(box.url()).deliver(message_with(alert={"kind": "x\r\nBcc: evil@example.com"}))

    assert email.message_from_string(box.mails[0])["Bcc"] is None


YES, NO, LATER = (True, True), (False, False), (False, True)


@pytest.mark.parametrize(
    ("answers", "expected", "words"),
    [
        ({"AUTH": f"535 5.7.8 {SECRET} is wrong"}, NO, "SMTP 535"),
        ({"AUTH": "454 4.7.0 later"}, LATER, "SMTP 454"),
        ({"MAIL": f"550 who is {SECRET}"}, NO, "SMTP 550"),
        ({"RCPT": f"450 4.2.0 {SECRET} greylisted"}, LATER, "SMTP 450"),
        ({"RCPT": "550 no such user"}, NO, "SMTP 550"),
        ({"DATA": "451 later"}, LATER, "SMTP 451"),
        ({"END": f"554 spam {SECRET}"}, NO, "SMTP 554"),
        ({"END": "421 too many"}, LATER, "SMTP 421"),
        ({"CONNECT": "554 no"}, NO, "SMTP 554"),
        ({"CONNECT": "421 busy"}, LATER, "SMTP 421"),
        ({"CONNECT": None}, LATER, "SMTPServerDisconnected"),
        ({"END": None}, LATER, "SMTPServerDisconnected"),
        ({"CONNECT": "NOT SMTP AT ALL"}, LATER, ""),
    ],
)
def test_what_the_server_says_is_an_outcome_by_its_number(answers: dict, expected: tuple, words: str, caplog):
    """4xx may pass, 5xx is final; of its words none is repeated."""
    caplog.set_level(logging.DEBUG)
    with mail_server(**answers) as box:
        notifier = EmailNotifier(box.url(USER), total_s=5.0)
        delivery = notifier.deliver(a_message())

    assert (delivery.ok, delivery.retryable) == expected
    assert words in delivery.reason
    assert_no_secret((SECRET,), repr(notifier), repr(delivery), caplog.text)


def test_one_receiver_refused_of_two_is_not_delivered():
    """Who got it gets it again, with the same key."""
    with mail_server(RCPT="550 no") as box:
        delivery = EmailNotifier(box.url(to="you@example.com,her@example.com")).deliver(a_message())

    assert (delivery.ok, delivery.retryable) == (False, False)


@pytest.mark.parametrize("where", ["closed", "nowhere", "no TLS"])
def test_network_trouble_is_an_outcome(where: str, caplog):
    """A closed port, a host that does not exist, a server without TLS."""
    caplog.set_level(logging.DEBUG)
    with speaking(b"220 plain\r\n") as garbage:
        place = {"closed": f"127.0.0.1:{closed_port()}", "nowhere": "rlwatch.invalid", "no TLS": garbage[7:]}[where]
        host, mode = place.partition(":")[0], "ssl" if where == "no TLS" else "insecure"
        url = f"mailto://{USER}{place}?smtp={host}&from=me@example.com&to=you@example.com&mode={mode}"
        delivery = EmailNotifier(url, total_s=5.0).deliver(a_message())

    assert (delivery.ok, delivery.retryable) == (False, True)
    assert_no_secret((SECRET,), repr(delivery), caplog.text)


def test_a_server_that_hangs_is_given_up_in_time_and_holds_only_one_try():
    """Also where it hangs in the middle; the next try says so at once."""
    with mail_server(DATA="") as box:
        notifier = EmailNotifier(box.url(), total_s=0.2)
        notifier.plugin.socket_connect_timeout = 3600.0
        first, second = in_time(lambda: notifier.deliver(a_message())), notifier.deliver(a_message())
        assert notifier.busy

    assert [(d.ok, d.retryable) for d in (first, second)] == [(False, True)] * 2
    assert "still holds" in second.reason


def test_other_users_of_apprise_send_mail_as_before():
    """Outside our deliveries its own answer stands."""
    with mail_server(RCPT="550 no") as box, mail_server() as fine:
        assert EmailNotifier(box.url()).plugin.notify(body="theirs") is False
        assert EmailNotifier(fine.url()).plugin.notify(body="theirs") is True


@pytest.mark.parametrize("options", [{"url": "https://hush-hush"}, {"url": "mailto://x", "total_s": 0.0}])
def test_wrong_settings_are_refused_and_not_shown(options: dict):
    """At set-up."""
    with pytest.raises(ConfigError, match="'mail'") as error:
        build_notifier("email", "mail", options)

    assert "hush" not in str(error.value)
