"""Import hooks for other libraries, and checks that a trainer has the parts that rlwatch needs.

Methods are checked by the parameters that rlwatch uses, settings by their path. Version numbers are not compared,
because they do not prove that a part exists. Imports neither torch nor a trainer.
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
"""Names of methods -> the parameters that each must have."""


def lacking(holder: Any, needs: Needs) -> str | None:
    """Return a description of the first method in ``needs`` that ``holder`` (a class or an instance) lacks.

    The result is None if ``holder`` has all of them.
    """
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
    """Return the first of ``parameters`` that ``function`` does not accept; None if it accepts all, or any keyword."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled, without a signature
        return None
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):  # an overriding method that passes its arguments on
        return None
    return next((name for name in parameters if name not in known), None)


def lacking_settings(settings: Any, paths: Iterable[str]) -> str | None:
    """Return a description of the first dotted path of attributes that ``settings`` lacks.

    The result is None if it has all ``paths``.
    """
    for path in paths:
        here = settings
        for name in path.split("."):
            if not hasattr(here, name):
                return f"there is no {path}"
            here = getattr(here, name)
    return None


def installed(distribution: str) -> str:
    """Return the installed version of ``distribution``, or ``""``. For messages only, never for decisions."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# Size of a model's vocabulary.


def vocab_size_of(model: Any) -> int | None:
    """Return the vocabulary size of ``model``, whose logarithm bounds the entropy.

    The result is None if the model's config has none.
    """
    described = getattr(model, "config", None)
    if described is None:
        return None
    text = described.get_text_config() if hasattr(described, "get_text_config") else described
    size = getattr(text, "vocab_size", None)
    return int(size) if size else None


# Callbacks right after the import of a module, without importing it.

Then = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Import hook that calls the function registered for a module right after its import.

    The functions must not raise.
    """

    def __init__(self) -> None:
        self._then: dict[str, Then] = {}
        self._looking = threading.local()

    def register(self, module: str, then: Then) -> None:
        """Call ``then(module)`` after the module named ``module`` is imported, or now if it is imported already."""
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
        """Return the spec that other finders have for ``fullname``, with a loader that calls the registered function.

        None for a module without a registered function; Python then asks the other finders.
        """
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
