"""The app's package under its name, and a store of its own for every test."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

APP = Path(__file__).resolve().parents[2] / "app"


def _load_app() -> None:
    spec = spec_from_file_location("rlwatch_app_main", APP / "main.py")
    assert spec is not None
    assert spec.loader is not None
    main = module_from_spec(spec)
    spec.loader.exec_module(main)
    main.load_package(APP)


_load_app()  # before test modules import rlwatch_app


@pytest.fixture
def store_dir(tmp_path, monkeypatch):
    """A directory store the app is pointed at."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path))
    return tmp_path
