"""The app's package under its name, and a store of its own for every test."""

from __future__ import annotations

import app_world  # noqa: F401  (loads the app, before test modules import it)
import pytest
from rlwatch_app import layout
from rlwatch_app.principal import Principal


@pytest.fixture
def store_dir(tmp_path, monkeypatch):
    """A directory store the app is pointed at."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path))
    return tmp_path


@pytest.fixture
def looks(monkeypatch):
    """Say who looks at the pages."""

    def as_(name, role):
        monkeypatch.setattr(layout, "principal", lambda: Principal(name, role))

    return as_


@pytest.fixture(autouse=True)
def ann(looks):
    """By default it is ann, who may command."""
    looks("ann", "operator")
