"""The contract of :mod:`rlwatch.store.base` as tests. A backend passes it by giving one fixture.

>>> class TestMyStore(StoreContract):
...     @pytest.fixture
...     def store(self):
...         return MyStore("somewhere new")

``reopen`` is how another process would open the same store; override it where the URL is not enough.
A test may be overridden only with the reason written beside it.
"""

from __future__ import annotations

import pytest

from rlwatch.testing.store_alerts_contract import AlertContract
from rlwatch.testing.store_branch_contract import BranchContract
from rlwatch.testing.store_command_contract import CommandContract
from rlwatch.testing.store_desk_contract import DeskContract
from rlwatch.testing.store_forecast_contract import ForecastContract
from rlwatch.testing.store_reading_contract import ReadingContract
from rlwatch.testing.store_run_contract import RunContract
from rlwatch.testing.store_values_contract import ValuesContract

__all__ = ["StoreContract", "pytest"]


class StoreContract(
    RunContract,
    ReadingContract,
    ForecastContract,
    ValuesContract,
    BranchContract,
    CommandContract,
    AlertContract,
    DeskContract,
):
    """All of it."""
