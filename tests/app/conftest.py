"""The app's package under its name, and a store of its own for every test."""

from __future__ import annotations

import app_world  # noqa: F401  (loads the app, before test modules import it)
import pytest


@pytest.fixture
def store_dir(tmp_path, monkeypatch):
    """A directory store the app is pointed at."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path))
    return tmp_path
