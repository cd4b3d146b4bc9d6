"""Metrics of the rollout engines of a run (vLLM, SGLang), read from their Prometheus endpoints.

Names as in vLLM 0.9 and later (the V1 engine; ``gpu_cache_usage_perc`` before) and SGLang with ``--enable-metrics``.
Counters become rates between two readings; after a restart of an engine, one reading has no rate.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from rlwatch.error_boundary import described, log_message, sheltered
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.redaction import redacted

TIMEOUT_S = 3.0
"""Seconds to wait for the answer of an engine."""
MOST_BYTES = 16 * 2**20
"""Largest size of an answer that is read, in bytes."""
VARIABLE = "RLWATCH_ENGINES"
"""Comma-separated addresses of the engines; used if the code gives none."""

SUMS: Mapping[str, tuple[str, ...]] = {
    "engine/running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "engine/waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
}
"""Metric -> names of gauges that are summed over engines."""
MEANS: Mapping[str, tuple[str, ...]] = {
    "engine/kv_cache": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "engine/spec_accepted": ("sglang:spec_accept_rate",),
    "engine/prefix_hits": ("sglang:cache_hit_rate",),
}
"""Metric -> names of gauges that are averaged over engines."""
RATES: Mapping[str, tuple[str, ...]] = {
    "engine/throughput": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "engine/prompt_throughput": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "engine/preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "engine/failed": ("sglang:num_aborted_requests_total",),
}
"""Metric -> names of counters that become rates per second."""
SHARES: Mapping[str, tuple[str, str]] = {
    "engine/spec_accepted": (
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "engine/prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
}
"""Metric -> two counters; the metric is the growth of the first divided by that of the second."""
ENDED, ENDED_BADLY = "vllm:request_success_total", ("abort", "error")
"""vLLM's counter of requests by the reason for which they ended, and the reasons that are failures."""

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values of one reading, by name and labels."""


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of engines' metrics from a comma-separated text or a list; the default path is ``/metrics``.

    Raises ``ConfigError`` for an invalid address.

    >>> addresses("http://localhost:8000, http://b:30000/metrics")
    ('http://localhost:8000/metrics', 'http://b:30000/metrics')
    """
    asked = given.split(",") if isinstance(given, str) else list(given)
    found = []
    for text in filter(None, (one.strip() for one in asked)):
        try:
            parts = urlsplit(text)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"an engine is http://HOST:PORT/metrics, got {redacted(text)!r}")
        found.append(text if parts.path.strip("/") else f"{text.rstrip('/')}/metrics")
    return tuple(found)


class Engines:
    """Reads the metrics of rollout engines: present values, and rates since the last reading.

    Parameters
    ----------
    urls
        Addresses of the engines' metrics, as :func:`addresses` returns them.
    report
        Called with a message once for each engine that does not answer, and again if it fails after it has answered.
        None: the message is logged.

    Raises
    ------
    MissingExtraError
        Where prometheus_client is missing.
    """

    def __init__(self, urls: Sequence[str], report: Callable[[str], object] | None = None) -> None:
        self._engines = [_Engine(url) for url in urls]
        self._notify = report or (lambda words: log_message(logging.WARNING, "%s", words))
        self.failures = 0
        """Number of readings that got no answer."""
        try:
            self._parse: Any = import_module("prometheus_client.parser").text_string_to_metric_families
        except ImportError:
            raise MissingExtraError("prometheus_client", "system", "asking rollout engines") from None

    def read(self) -> dict[str, float]:
        """Read all engines and return metrics ``engine/...`` (name -> value), without those that no engine reports."""
        totals: defaultdict[str, float] = defaultdict(float)
        means: defaultdict[str, list[float]] = defaultdict(list)
        shares: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        down = 0
        for engine in self._engines:
            looked = sheltered(lambda engine=engine: self._look(engine), lambda e, engine=engine: self._lost(engine, e))  # type: ignore[misc]
            if looked is None:
                down += 1
                continue
            for name, value in looked.added.items():
                totals[name] += value
            for name, value in looked.levels.items():
                means[name].append(value)
            for name, share in looked.shares.items():
                shares[name].append(share)
        found = {name: sum(values) / len(values) for name, values in means.items()}
        for name, parts in shares.items():
            if whole := sum(of for _, of in parts):
                found[name] = min(sum(part for part, _ in parts) / whole, 1.0)
        return {**found, **totals, "engine/down": float(down)} if self._engines else {}

    def _look(self, engine: _Engine) -> _Looked:
        from http.client import HTTPException  # with TLS, which few runs need
        from urllib.request import Request, urlopen

        request = Request(engine.url, headers={"Accept": "text/plain"})  # noqa: S310  (http or https: see addresses)
        with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            body = answer.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES:
            raise HTTPException(f"more than {MOST_BYTES} bytes")
        series: Series = {}
        for family in self._parse(body.decode("utf-8", "replace")):
            for sample in family.samples:
                series[sample.name, tuple(sorted(sample.labels.items()))] = float(sample.value)
        if not any(name.startswith(("vllm:", "sglang:")) for name, _ in series):
            raise HTTPException("no metrics of vLLM or SGLang (SGLang has them with --enable-metrics)")
        looked = engine.looked(series, time.monotonic())
        engine.reported = False
        return looked

    def _lost(self, engine: _Engine, error: BaseException) -> None:
        self.failures += 1
        if not engine.reported:
            engine.reported = True
            host = urlsplit(engine.url)
            self._notify(f"the engine at {host.hostname}:{host.port or 80} does not answer: {described(error)}")


@dataclass(slots=True)
class _Looked:
    added: dict[str, float] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Engine:
    """One engine's endpoint, and its counters at the last reading."""

    url: str
    reported: bool = False
    before: Series = field(default_factory=dict)
    at: float = 0.0

    def looked(self, series: Series, now: float) -> _Looked:
        """Convert one reading, and keep it for the rates of the next one."""
        before, seconds = self.before, now - self.at
        self.before, self.at = series, now
        values = defaultdict(list)
        for (name, _), value in series.items():
            values[name].append(value)
        found = _Looked()
        for metric, names in SUMS.items():
            for name in _first(names, values):
                found.added[metric] = sum(values[name])
        for metric, names in MEANS.items():
            for name in _first(names, values):
                found.levels[metric] = sum(values[name]) / len(values[name])
        if before and seconds > 0.0:
            grown = _grown(before, series)
            for metric, names in RATES.items():
                for name in _first(names, grown):
                    found.added[metric] = grown[name] / seconds
            if ENDED in grown:
                badly = [
                    key for key in series if key[0] == ENDED and dict(key[1]).get("finished_reason") in ENDED_BADLY
                ]
                found.added["engine/failed"] = sum(series[key] - before.get(key, 0.0) for key in badly) / seconds
            found.shares = {m: (grown[a], grown[b]) for m, (a, b) in SHARES.items() if a in grown and b in grown}
        return found


def _first(names: Iterable[str], there: Mapping[str, object]) -> list[str]:
    """Return the first of ``names`` that is present, as a list; empty if none is."""
    return [name for name in names if name in there][:1]


def _grown(before: Series, series: Series) -> dict[str, float]:
    """Return the growth of each counter over all its labels, without counters that fell, as after a restart."""
    grown: defaultdict[str, float] = defaultdict(float)
    fell = set()
    for key, value in series.items():
        if key[0].endswith("_total"):
            more = value - before.get(key, 0.0)
            grown[key[0]] += more
            if more < 0.0:
                fell.add(key[0])
    known = {name for name, _ in before}
    return {name: value for name, value in grown.items() if name in known and name not in fell}
