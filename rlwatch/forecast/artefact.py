"""The model as a file: JSON that is checked through and through, so that no file can make a wrong number or a loop.

Format ``rlwatch-hazard/2``: ``features``; ``hazards``, a list of three heads; ``limits``, a head a type of onset;
``gains``; ``profiles``; ``meta``. A head has ``base``, ``slope``, ``offset``, ``trees`` and ``line``; a tree the
columns ``feature`` (-1: a leaf), ``threshold``, ``missing_left``, ``left``, ``right``, ``value``; a line the columns
``feature``, ``spread``, ``weight``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from rlwatch.errors import ConfigError
from rlwatch.forecast.features import FEATURES
from rlwatch.forecast.forecast import LIMITS
from rlwatch.forecast.model import Model, Profile
from rlwatch.forecast.signals import BY_SIGNAL
from rlwatch.forecast.trees import LEAF, Head, Line, Tree
from rlwatch.records import JSON

FORMAT = "rlwatch-hazard/2"
_COLUMNS = ("feature", "threshold", "missing_left", "left", "right", "value")
_TERMS = ("feature", "spread", "weight")
LEAST_SPREAD = 1e-12
_WHOLE = ("feature", "missing_left", "left", "right")
HAZARDS = 3
MOST_NODES = 10_000


class _WrongError(ValueError):
    """What is wrong with the contents, and where."""


def shipped() -> Model:
    """The model that comes with rlwatch. Raises ``ConfigError`` if its file is not the one that was shipped."""
    folder = files("rlwatch.forecast") / "shipped"
    return parse(
        (folder / "hazard.json").read_bytes(),
        sha256=(folder / "hazard.sha256").read_text().split()[0],
        name="the shipped forecasting model",
    )


def load(path: str | os.PathLike[str], *, sha256: str | None = None) -> Model:
    """Read a model that ``rlwatch forecast train`` wrote.

    Parameters
    ----------
    path
        The JSON file. A file of the same name that ends in ``.sha256`` pins its contents.
    sha256
        Hash that the contents must have, instead of the one beside the file.

    Raises
    ------
    ConfigError
        If there is no such file, its hash is another one, or anything in it is not as it must be.
    """
    file = Path(path)
    pin = file.with_suffix(".sha256")
    try:
        data = file.read_bytes()
        pinned = sha256 or (pin.read_text().split() or [""])[0] if sha256 or pin.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the forecasting model {file} cannot be read: {error}; give the path of a model file"
        ) from None
    return parse(data, sha256=pinned, name=f"the forecasting model {file}")


def parse(data: bytes, *, sha256: str | None = None, name: str = "the forecasting model") -> Model:
    """Read a model from the bytes of its file. Raises ``ConfigError`` as :func:`load` does."""
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256:
        raise ConfigError(
            f"{name} has the hash {found}, and {sha256} was expected: the file was changed; restore it or train it anew"
        )
    try:
        return _model(json.loads(data))
    except (_WrongError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not a valid {FORMAT} file: {error}; restore it or train it anew") from None


def write(model: Model, path: str | os.PathLike[str]) -> str:
    """Write a model and, beside it, its hash; both files appear whole or not at all. Returns the hash."""
    file = Path(path)
    data = json.dumps(_plain(model), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    digest = hashlib.sha256(data).hexdigest()
    parse(data, name=f"the model to be written to {file}")
    for target, content in ((file, data), (file.with_suffix(".sha256"), f"{digest}\n".encode())):
        beside = target.with_name(target.name + ".part")
        beside.write_bytes(content)
        beside.replace(target)
    return digest


def _model(raw: JSON) -> Model:
    top = _mapping(raw, "the file")
    if top.get("format") != FORMAT:
        raise _WrongError(f"its format is {top.get('format')!r}")
    features = tuple(_texts(top.get("features"), "features"))
    if unknown := sorted(set(features) - set(FEATURES)):
        raise _WrongError(f"this version computes no feature {unknown[0]!r}")
    hazards = [
        _head(head, len(features), f"hazards[{i}]") for i, head in enumerate(_list(top.get("hazards"), "hazards"))
    ]
    if len(hazards) != HAZARDS:
        raise _WrongError(f"it has {len(hazards)} hazards instead of {HAZARDS}")
    limits = _mapping(top.get("limits"), "limits")
    if unknown := sorted(set(limits) - set(LIMITS)):
        raise _WrongError(f"there is no limit {unknown[0]!r}")
    profiles = tuple(_profile(p, f"profiles[{i}]") for i, p in enumerate(_list(top.get("profiles"), "profiles")))
    if not profiles:
        raise _WrongError("it has no profiles, so no thresholds")
    if len({frozenset(profile.thresholds) for profile in profiles}) > 1:
        raise _WrongError("its profiles have thresholds for different budgets")
    return Model(
        features=features,
        hazards=(hazards[0], hazards[1], hazards[2]),
        limits={kind: _head(head, len(features), f"limits.{kind}") for kind, head in limits.items()},
        gains={
            name: _number(value, f"gains.{name}", low=0.0)
            for name, value in _mapping(top.get("gains"), "gains").items()
        },
        profiles=profiles,
        meta=_mapping(top.get("meta", {}), "meta"),
    )


def _head(raw: JSON, features: int, where: str) -> Head:
    head = _mapping(raw, where)
    trees = _list(head.get("trees"), f"{where}.trees")
    base, slope, offset = (_number(head.get(key), f"{where}.{key}") for key in ("base", "slope", "offset"))
    grown = tuple(_tree(t, features, f"{where}.trees[{i}]") for i, t in enumerate(trees))
    return Head(base, grown, slope, offset, _line(head.get("line"), features, f"{where}.line"))


def _line(raw: JSON, features: int, where: str) -> Line:
    table = _mapping(raw, where)
    columns = {name: _list(table.get(name), f"{where}.{name}") for name in _TERMS}
    if len({len(column) for column in columns.values()}) != 1:
        raise _WrongError(f"the columns of {where} have {sorted({len(c) for c in columns.values()})} entries")
    for feature in columns["feature"]:
        if not 0 <= _number(feature, f"{where}.feature", whole=True) < features:
            raise _WrongError(f"{where} asks for feature {feature}, and there are {features}")
    for spread in columns["spread"]:
        _number(spread, f"{where}.spread", low=LEAST_SPREAD)
    for weight in columns["weight"]:
        _number(weight, f"{where}.weight")
    return Line(**{name: tuple(column) for name, column in columns.items()})


def _tree(raw: JSON, features: int, where: str) -> Tree:
    table = _mapping(raw, where)
    columns = {name: _list(table.get(name), f"{where}.{name}") for name in _COLUMNS}
    count = len(columns["feature"])
    if not 0 < count <= MOST_NODES or any(len(column) != count for column in columns.values()):
        raise _WrongError(f"the columns of {where} have {sorted({len(c) for c in columns.values()})} entries")
    for name, column in columns.items():
        for value in column:
            _number(value, f"{where}.{name}", whole=name in _WHOLE)
    _joined(columns, features, where)
    return Tree(**{name: tuple(column) for name, column in columns.items()})


def _joined(columns: Mapping[str, Sequence[int]], features: int, where: str) -> None:
    """Every node but the root is the child of exactly one node before it: a tree, and every walk ends."""
    children: list[int] = []
    for node, feature in enumerate(columns["feature"]):
        if feature == LEAF:
            continue
        if not 0 <= feature < features:
            raise _WrongError(f"node {node} of {where} asks for feature {feature}, and there are {features}")
        pair = (columns["left"][node], columns["right"][node])
        if not all(node < child < len(columns["feature"]) for child in pair):
            raise _WrongError(f"node {node} of {where} has the children {pair}")
        if columns["missing_left"][node] not in (0, 1):
            raise _WrongError(f"missing_left of node {node} of {where} is {columns['missing_left'][node]}")
        children += pair
    if sorted(children) != list(range(1, len(columns["feature"]))):
        raise _WrongError(f"{where} is no tree: a node has two parents or none")


def _profile(raw: JSON, where: str) -> Profile:
    table = _mapping(raw, where)
    signals = frozenset(_texts(table.get("signals"), f"{where}.signals"))
    if unknown := sorted(signals - set(BY_SIGNAL)):
        raise _WrongError(f"{where}: this version knows no signal {unknown[0]!r}")
    parts = {
        key: {
            budget: _number(v, f"{where}.{key}", low=1e-6)
            for budget, v in _mapping(table.get(key), f"{where}.{key}").items()
        }
        for key in ("thresholds", "static")
    }
    if not parts["thresholds"] or set(parts["thresholds"]) != set(parts["static"]):
        raise _WrongError(f"{where} must have a threshold of both kinds for the same budgets")
    (name,) = _texts([table.get("name")], f"{where}.name")
    return Profile(name, signals, parts["thresholds"], parts["static"])


def _mapping(value: JSON, where: str) -> Mapping[str, JSON]:
    if not isinstance(value, dict):
        raise _WrongError(f"{where} is {type(value).__name__} instead of an object")
    return value


def _list(value: JSON, where: str) -> Sequence[JSON]:
    if not isinstance(value, list):
        raise _WrongError(f"{where} is {type(value).__name__} instead of a list")
    return value


def _texts(value: JSON, where: str) -> list[str]:
    items = _list(value, where)
    if not all(isinstance(item, str) for item in items) or len(set(items)) != len(items):
        raise _WrongError(f"{where} must be different texts")
    return list(items)


def _number(value: JSON, where: str, *, whole: bool = False, low: float = -math.inf) -> float:
    good = isinstance(value, int) if whole else isinstance(value, int | float)
    if not good or isinstance(value, bool) or not math.isfinite(value) or value < low:
        raise _WrongError(f"{where} holds {value!r}")
    return float(value)


def _plain(model: Model) -> dict[str, JSON]:
    return {
        "format": FORMAT,
        "features": list(model.features),
        "hazards": [_plain_head(head) for head in model.hazards],
        "limits": {kind: _plain_head(head) for kind, head in model.limits.items()},
        "gains": dict(model.gains),
        "profiles": [
            {"name": p.name, "signals": sorted(p.signals), "thresholds": dict(p.thresholds), "static": dict(p.static)}
            for p in model.profiles
        ],
        "meta": dict(model.meta),
    }


def _plain_head(head: Head) -> dict[str, JSON]:
    trees = [{name: list(getattr(tree, name)) for name in _COLUMNS} for tree in head.trees]
    line = {name: list(getattr(head.line, name)) for name in _TERMS}
    return {"base": head.base, "slope": head.slope, "offset": head.offset, "trees": trees, "line": line}
