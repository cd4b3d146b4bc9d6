"""Every backend keeps the contract of rlwatch.store."""

from itertools import count
from pathlib import Path

import pytest

from rlwatch.ports import Store
from rlwatch.store.memory import forget
from rlwatch.store.url import open_store
from rlwatch.testing.store_contract import StoreContract

_names = count()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        name = f"contract-{next(_names)}"
        yield open_store(f"memory://{name}")
        forget(name)


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "runs with spaces % and ?")


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def store(self, emptied_postgres_url: str):
        store = open_store(emptied_postgres_url)
        yield store
        store.close()
