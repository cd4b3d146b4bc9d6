"""The error boundary to libraries that send for us: errors come back as values, their logs stay quiet."""

from __future__ import annotations

import logging

import pytest

from rlwatch.notify.http import raised_quietly
from rlwatch.notify.mail import _judged

SECRET = "https://hooks.example/T000/s3cret"


def test_what_is_sent_without_error_gives_none() -> None:
    """With the arguments it was given; what it returns does not matter."""
    got: list[object] = []

    def send(*args: object, **kwargs: object) -> bool:
        got.append((args, kwargs))
        return False

    assert raised_quietly(send, 1, to="x") is None
    assert got == [((1,), {"to": "x"})]


@pytest.mark.parametrize("error", [OSError(SECRET), ValueError(SECRET), StopIteration(SECRET), UnicodeError(SECRET)])
def test_an_error_comes_back_as_it_is(error: Exception) -> None:
    """The caller shows its type; of mail, what is judged from it shows no more."""

    def send() -> None:
        raise error

    assert raised_quietly(send) is error
    assert SECRET not in _judged(error).reason
    assert type(error).__name__ in _judged(error).reason


def test_interrupts_pass() -> None:
    """They end the process, not a delivery."""

    def send() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raised_quietly(send)


@pytest.mark.parametrize("fails", [False, True])
def test_libraries_do_not_log_the_address_meanwhile(caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    """Neither before nor in an error; afterwards they log as before."""
    library = logging.getLogger("apprise")

    def send() -> None:
        library.debug("POST %s", SECRET)
        if fails:
            raise OSError(SECRET)

    with caplog.at_level(logging.DEBUG):
        raised_quietly(send)
        quiet = caplog.text
        library.debug("afterwards")

    assert SECRET not in quiet
    assert "afterwards" in caplog.text
