"""All shipped notifiers keep the contract."""

from __future__ import annotations

import pytest

from rlwatch.notify.registry import HOMES, ConsoleNotifier
from rlwatch.notify.services import SERVICES
from rlwatch.notify.webhook import WebhookNotifier
from rlwatch.ports import Notifier
from rlwatch.testing.notifier_contract import HTTPNotifierContract, NotifierContract


class TestConsole(NotifierContract):
    """The process's own log."""

    @pytest.fixture
    def notifier(self) -> Notifier:
        return ConsoleNotifier()


class TestWebhook(HTTPNotifierContract):
    """Signed JSON over HTTP."""

    def make(self, url: str, secret: str, limit_s: float) -> Notifier:
        # The limit on the whole is the one under test: the others are out of its way.
        return WebhookNotifier(url, secret=secret, read_s=60.0, connect_s=60.0, total_s=limit_s)


class TestWebhookReadLimit(HTTPNotifierContract):
    """The same with the limit between two bytes as the short one, where that is enough."""

    def make(self, url: str, secret: str, limit_s: float) -> Notifier:
        return WebhookNotifier(url, secret=secret, read_s=limit_s, connect_s=limit_s, total_s=2 * limit_s)


def test_every_kind_in_the_registry_is_under_contract():
    """A new notifier brings its contract test, or this fails: the services of apprise each have theirs."""
    assert set(HOMES) == {"console", "webhook", "email", "wandb", "command", *SERVICES}
