"""Whatever somebody calls their configuration: recorded sensibly, or one clear error before training starts."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlwatch
from rlwatch.errors import ConfigError
from rlwatch.redaction import DEEPEST, MOST_VALUES, plain, recordable
from rlwatch.store.url import open_store


class dotdict(dict):  # noqa: N801  (as everybody writes it)
    """Answers ``KeyError`` to whatever it is asked."""

    __getattr__ = dict.__getitem__


class Rude:
    """Raises whatever is done with it."""

    def __init__(self, error: type[Exception]) -> None:
        object.__getattribute__(self, "__dict__")["error"] = error

    def __getattribute__(self, name: str) -> Any:
        raise object.__getattribute__(self, "__dict__")["error"](name)

    def __repr__(self) -> str:
        raise object.__getattribute__(self, "__dict__")["error"]("repr")

    __str__ = __iter__ = __len__ = __hash__ = __eq__ = __bool__ = __repr__  # type: ignore[assignment]


class RudeMapping(Mapping[str, Any]):
    """Has names and does not give their values, or not even names."""

    def __init__(self, *, names: bool) -> None:
        self.names = names

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(name)

    def __iter__(self) -> Iterator[str]:
        if not self.names:
            raise OSError("no")
        return iter(["a", "b"])

    def __len__(self) -> int:
        raise OSError("no")


class Endless(Mapping[str, int]):
    """Never stops to name things."""

    def __getitem__(self, name: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            yield f"k{number}"
            number += 1

    def __len__(self) -> int:
        return 1 << 60


class Mode(Enum):
    """A setting."""

    FAST = "fast"


@dataclass
class Optimizer:
    """A setting of settings."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    extra: dict[str, Any] = field(default_factory=dict)


def circle() -> dict[str, Any]:
    """A configuration that holds itself, in a dictionary, a list and an object."""
    config: dict[str, Any] = {"lr": 1e-6}
    config["self"], config["list"] = config, [config]
    config["object"] = SimpleNamespace(config=config)
    return config


def deep(levels: int) -> dict[str, Any]:
    """Nested so deep."""
    config: dict[str, Any] = {"lr": 1e-6}
    for _ in range(levels):
        config = {"x": config, "lr": 1e-6}
    return config


HOSTILE: dict[str, Any] = {
    "none": None,
    "empty": {},
    "circle": circle(),
    "deep": deep(5000),
    "dotdict": dotdict(lr=1e-6, optim=dotdict(lr=2)),
    "rude values": {"lr": 1e-6, **{error.__name__: Rude(error) for error in (KeyError, OSError, AssertionError)}},
    "rude keys": {Rude: 1, ("a", 1): 2, None: 3, 4: 5, b"k": 6},
    "rude mapping": {"a": RudeMapping(names=True), "b": RudeMapping(names=False)},
    "endless": Endless(),
    "huge": {f"k{i}": {"x": i} for i in range(50_000)},
    "long text": {"x": "y" * 10_000_000},
    "long bytes": {"x": b"y" * 10_000_000},
    "long number": {"x": 10**6000},
    "numbers": {"nan": math.nan, "inf": math.inf, "neg": -math.inf, "none": None},
    "numpy": {"a": np.float32(0.5), "b": np.arange(3), "c": np.zeros((2000, 2000)), "d": np.int64(3), "e": np.bool_(1)},
    "texts no UTF-8 holds": {"x\udc80": "a\ud800b"},
    "namespace": Namespace(lr=1e-6, sub=SimpleNamespace(x=1)),
    "dataclass": Optimizer(extra={"mode": Mode.FAST}),
    "others": {"f": len, "c": Optimizer, "s": {3, 1, 2}, "g": (i for i in range(3)), "p": Path("/x"), "r": range(3)},
    "userdict": UserDict(lr=1e-6),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_run_begins_and_its_configuration_can_be_read_again(what: str, tmp_path: Path):
    """Recorded as far as it can be."""
    with rlwatch.init(store=tmp_path, run_id="r", config=HOSTILE[what]) as run:
        run.log({"loss": 1.0}, step=1)

    kept = open_store(tmp_path).run("r").config
    assert isinstance(kept, dict)
    assert len(repr(kept)) < 1_000_000
    assert kept.get("lr", 1e-6) == 1e-6
    assert run.counters["errors"] == 0


def test_what_is_kept_of_them():
    """What can be read is, the rest is named."""
    assert recordable(circle()) == {
        "lr": 1e-6,
        "self": "<dict that contains itself>",
        "list": ["<dict that contains itself>"],
        "object": {"config": "<dict that contains itself>"},
    }
    assert recordable(HOSTILE["dotdict"]) == {"lr": 1e-6, "optim": {"lr": 2}}
    assert recordable(HOSTILE["rude values"])["KeyError"] == "<Rude, which cannot be read: KeyError>"
    assert recordable(HOSTILE["rude mapping"]) == {
        "a": {"a": "<cannot be read: AssertionError>", "b": "<cannot be read: AssertionError>"},
        "b": "<RudeMapping, which cannot be read: OSError>",
    }
    assert recordable(HOSTILE["dataclass"]) == {"lr": 1e-6, "betas": [0.9, 0.95], "extra": {"mode": "fast"}}
    assert recordable(HOSTILE["numpy"]) | {"e": 1} == {
        "a": 0.5,
        "b": [0, 1, 2],
        "c": "<ndarray of shape (2000, 2000)>",
        "d": 3,
        "e": 1,
    }
    numbers = recordable(HOSTILE["numbers"])
    assert math.isnan(numbers["nan"])
    assert (numbers["inf"], numbers["neg"], numbers["none"]) == (math.inf, -math.inf, None)
    assert len(recordable(HOSTILE["huge"])) <= MOST_VALUES
    kept, depth = recordable(HOSTILE["deep"]), 0
    while isinstance(kept, dict):
        kept, depth = kept["x"], depth + 1
    assert (kept, depth) == ("<dict, nested too deeply>", DEEPEST)


WRONG = {"number": 5, "text": "lr=1e-6", "list": ["lr", 1e-6], "object": object(), "bytes": b"x", "function": len}
WRONG["rude"] = Rude(KeyError)


@pytest.mark.parametrize("what", WRONG)
def test_what_has_no_names_and_values_is_one_clear_error(what: str, tmp_path: Path):
    """Before anything is written."""
    with pytest.raises(ConfigError, match=r"config must have names and values .* got .*; give for example vars"):
        rlwatch.init(store=tmp_path / "runs", config=WRONG[what])

    assert not list(tmp_path.rglob("run.db"))


@pytest.mark.parametrize(
    ("tags", "kept"),
    [(None, ()), ("one", ("one",)), (["a", "b"], ("a", "b")), ((), ()), ({"a"}, ("a",)), ([7, "b"], ("7", "b"))],
)
def test_tags(tags: Any, kept: tuple[str, ...], tmp_path: Path):
    """None are none, one text is one tag."""
    with rlwatch.init(store=tmp_path, run_id="r", tags=tags):
        pass

    assert open_store(tmp_path).run("r").tags == kept


WRONG_TAGS = {"number": 5, "dict": {"a": 1}, "none": [None], "list": [["a"]], "rude": [Rude(OSError)], "bytes": b"one"}
WRONG_TAGS["raises"] = RudeMapping(names=False).keys()


@pytest.mark.parametrize("what", WRONG_TAGS)
def test_tags_that_are_none_are_one_clear_error(what: str, tmp_path: Path):
    """Saying what they must be."""
    with pytest.raises(ConfigError, match=r"tags must be a list of texts, as in tags=\['math', '7b'\]"):
        rlwatch.init(store=tmp_path, tags=WRONG_TAGS[what])


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    )
)
def test_any_body_of_an_event_can_be_kept(value: Any):
    """And what is kept is kept as it is."""
    kept = plain({"x": value})

    assert repr(plain(kept)) == repr(kept)
