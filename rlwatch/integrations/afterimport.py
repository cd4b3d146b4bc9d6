"""Doing something right after a module was imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

Then = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Calls what was registered for a module once it has been executed; what that raises must not leave it."""

    def __init__(self) -> None:
        self._then: dict[str, Then] = {}
        self._looking = threading.local()

    def register(self, module: str, then: Then) -> None:
        """Call ``then(module)`` after ``module`` is imported, or now if it is already."""
        loaded = sys.modules.get(module)
        if loaded is not None and not _being_imported(loaded):
            then(loaded)
            return
        self._then[module] = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec others find, with a loader that tells us when it is done."""
        if fullname not in self._then or getattr(self._looking, "on", False):
            return None
        self._looking.on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.on = False
        if spec is None or spec.loader is None:
            return None
        self._wrap(spec, self._then.pop(fullname))
        return spec

    @staticmethod
    def _wrap(spec: ModuleSpec, then: Then) -> None:
        loader = spec.loader
        original = loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: ModuleType) -> None:
            original(module)
            then(module)

        loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]


def _being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
