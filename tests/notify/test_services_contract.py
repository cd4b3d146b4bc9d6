"""Every chat and paging service keeps the contract, over real sockets of this machine."""

from __future__ import annotations

import pytest
from service_examples import EXAMPLES, rerouted

from rlwatch.notify.services import SERVICES
from rlwatch.ports import Notifier
from rlwatch.testing.notifier_contract import HTTPNotifierContract


class ServiceContract(HTTPNotifierContract):
    """The kind's secret is in its address: the one the contract looks for."""

    kind = ""
    limit_s = 0.15

    def make(self, url: str, secret: str, limit_s: float) -> Notifier:
        return rerouted(self.kind, url, token=secret, read_s=60.0, connect_s=60.0, total_s=limit_s)

    @pytest.fixture
    def notifier(self, receiver):
        self.secrets = (EXAMPLES[self.kind].fits("contract-s3cret-value"),)
        return self.make(receiver.url, "contract-s3cret-value", 5.0)


def _contract(kind: str) -> type:
    return type(f"Test{kind.title()}", (ServiceContract,), {"kind": kind, "yes": EXAMPLES[kind].yes})


for _kind in SERVICES:
    globals()[f"Test{_kind.title()}"] = _contract(_kind)


def test_every_service_has_an_example_and_is_under_contract():
    """A new service is tested the moment it is listed."""
    assert set(SERVICES) == set(EXAMPLES)
    assert all(f"Test{kind.title()}" in globals() for kind in SERVICES)
