"""Import hooks for other libraries, and checks of the parts that a trainer must have to be instrumented.

Methods are checked by the parameters that rlwatch uses, settings by their path, never by a version number, which does
not prove that a part exists. Imports neither torch nor a trainer.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from typing_extensions import override

Needs = Mapping[str, Sequence[str]]
"""Methods, and the parameters that they must have."""


def lacking(holder: Any, needs: Needs) -> str | None:
    """Describe the method of ``needs`` that ``holder`` (a class or an instance) lacks; None if it has all."""
    kind = holder if isinstance(holder, type) else type(holder)
    for method, parameters in needs.items():
        member = getattr(holder, method, None)
        if not callable(member) or getattr(kind, method, None) is getattr(object, method, kind):
            return f"{kind.__name__} has no {method}"
        absent = missing_parameter(member, parameters)
        if absent is not None:
            return f"{kind.__name__}.{method} has no parameter {absent!r}"
    return None


def missing_parameter(function: Callable[..., Any], parameters: Iterable[str]) -> str | None:
    """Return the first of ``parameters`` that ``function`` does not take; None if it takes all, or any keywords."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled, without a signature
        return None
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):  # an overriding method that passes its arguments on
        return None
    return next((name for name in parameters if name not in known), None)


def lacking_settings(settings: Any, paths: Iterable[str]) -> str | None:
    """Describe the dotted path of attributes that ``settings`` lacks; None if it has all."""
    for path in paths:
        here = settings
        for name in path.split("."):
            if not hasattr(here, name):
                return f"there is no {path}"
            here = getattr(here, name)
    return None


def installed(distribution: str) -> str:
    """Return the installed version of ``distribution``, or ``""``; for messages only, never for decisions."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# Size of a model's vocabulary.


def vocab_size_of(model: Any) -> int | None:
    """Return the size of the softmax, whose logarithm bounds the entropy. None if the model does not have it."""
    described = getattr(model, "config", None)
    if described is None:
        return None
    text = described.get_text_config() if hasattr(described, "get_text_config") else described
    size = getattr(text, "vocab_size", None)
    return int(size) if size else None


# Callbacks right after the import of a module, without importing it.

Then = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Calls the functions registered for a module after its import; they must not raise."""

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
        """Return the spec of the other finders, with a loader that calls the registered functions."""
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
