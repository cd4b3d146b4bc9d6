"""The newest vLLM still has what ``rlwatch.run.engines`` reads of its metrics; collected by ``make nightly`` only.

vLLM itself needs a GPU to run: its sources are read as they were installed, without what they import.
"""

import importlib.util
from itertools import chain
from pathlib import Path

import pytest

from rlwatch.run import engines

LATER = {"vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc"}
"""What an older one called it -> what it is called now."""


@pytest.fixture(scope="module")
def sources():
    """Of vLLM's metrics, as one text."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vllm is not installed"
    root = Path(next(iter(spec.submodule_search_locations or [])))
    return "\n".join(path.read_text() for path in root.rglob("*.py") if "metric" in str(path.relative_to(root)))


def read_of_vllm():
    tables = (engines.SUMS, engines.MEANS, engines.RATES, engines.SHARES)
    named = chain.from_iterable(names for table in tables for names in table.values())
    return sorted({name for name in (*named, engines.ENDED) if name.startswith("vllm:")} - LATER.keys())


@pytest.mark.parametrize("name", read_of_vllm())
def test_a_metric_that_is_read_is_still_there(sources, name):
    """Prometheus adds ``_total`` to the name of a counter."""
    assert name.removesuffix("_total") in sources


def test_what_was_called_otherwise_is_read_under_its_name_of_now():
    """Else the newest would have no number."""
    assert set(LATER.values()) <= set(read_of_vllm())
