"""Localised steps as the trainer's side records them: responses of a maths run, their culprits, the event."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
from app_world import write_run
from streamlit.testing.v1 import AppTest

from rlwatch.distributions import MANTISSA, QUANTITIES, batch_of, bins_of
from rlwatch.records import CULPRITS, FAR_OUT, RESPONSES, Event, SpikeBatch

WORDS = (
    " We", " need", " to", " find", " the", " sum", " of", " all", " n", " such", " that", " 2", "^", "n", " <", " 100",
    ".\n", "So", " log", "_", "2", "(", "100", ")", " ≈", " 6", ".", "64", ",", " hence", " is", " at", " most", " wait",
)  # fmt: skip
"""What a small model says about a sum."""

LAYERS = ("embed", *(f"layers.{i}" for i in range(28)), "norm")
HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "\u202egnp", "\x00\x1b[31m", "\n\n", "   ",
    "\u0301\u0302\u0303\u0304\u0305", "a" * 200, "**bold** $x$ [l](http://x)", "\u200b", "", "שלום", "🧮", "\ufffd",
)  # fmt: skip
FLOATS = ("logp", "old_logp", "rollout_logp", "ref_logp", "ratio", "advantage", "reward", "entropy", "coefficient",
          "contribution", "share")  # fmt: skip


@dataclass
class Spiked:
    """One localised step: ``blamed`` of ``length`` tokens of one response hold most of a norm of ``norm``."""

    step: int
    norm: float = 12.3
    blamed: int = 3
    length: int = 220
    cause: str = "token ratio"
    text: bool = True
    words: tuple[str, ...] = WORDS
    drop: tuple[str, ...] = ()
    attempt: int = 1
    why_not: str = ""
    message: str = ""
    body: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng([self.seed, self.step])
        count = self.length
        ids = rng.integers(0, len(self.words), count)
        self.at = np.sort(rng.choice(count, self.blamed, replace=False))[rng.permutation(self.blamed)]
        entropy = rng.gamma(0.4, 0.6, count)
        logp = -rng.exponential(0.3 + entropy)
        old = logp - rng.normal(0.0, 0.05, count)
        old[self.at] = logp[self.at] - rng.uniform(3.0, 5.0, self.blamed)
        advantage = np.full(count, rng.choice([-1.2, 0.8]))
        share = rng.normal(0.0, 0.15 / count, count)
        share[self.at] = np.sort(rng.dirichlet(np.full(self.blamed, 2.0)))[::-1] * 0.85
        ratio = np.exp(logp - old)
        self.response = {
            "sequence": np.full(count, 3), "position": np.arange(count), "microbatch": np.full(count, 1),
            "token_id": 1000 + ids, "logp": logp, "old_logp": old,
            "rollout_logp": old + rng.normal(0.0, 0.02, count), "ref_logp": logp + rng.normal(0.0, 0.4, count),
            "ratio": ratio, "advantage": advantage, "reward": np.full(count, 1.0), "entropy": entropy,
            "coefficient": -advantage * ratio / count, "contribution": share * self.norm, "share": share,
            "text": [self.words[i] for i in ids],
        }  # fmt: skip
        self.response.update(self.columns)
        for name in (*self.drop, *(() if self.text else ("text",))):
            self.response.pop(name, None)
        self.layers, self.own = (
            dict(zip(LAYERS, rng.dirichlet(np.full(len(LAYERS), spread)).tolist(), strict=True))
            for spread in (0.3, 0.1)
        )

    def batches(self):
        """Culprits, worst first, and the response they are in."""
        culprits = {
            name: [column[i] for i in self.at] if isinstance(column, list) else column[self.at]
            for name, column in self.response.items()
        }
        verified = np.arange(self.blamed) < 2
        culprits |= {
            "cause": [self.cause] * self.blamed,
            "why": ["ratio far above 1 + ε while the advantage is negative, so it is not clipped"] * self.blamed,
            "verified": verified.astype(np.int64),
            "own_norm": np.where(verified, self.norm * 0.5, 0.0),
            "layers": [json.dumps(self.own if ok else {}) for ok in verified],
        }
        kinds = [(culprits, CULPRITS), (self.response, RESPONSES)] if self.blamed else []
        return [SpikeBatch(self.step, c, reason, ts=1.0, attempt=self.attempt) for c, reason in kinds]

    def event(self):
        """What the trainer's side says of the step."""
        body = {
            "norm": self.norm, "threshold": 1.9, "tokens": 16384, "method": "fd", "gap": 2e-4, "complete": True,
            "cause": self.cause, "why_not": self.why_not, "message": self.message, "notes": ["fp32 temporaries"], "layers": self.layers,
            "cost": {"forwards": 2, "backwards": 8, "seconds": 0.41},
        }  # fmt: skip
        return Event("gradient_localised", self.step, body | self.body, ts=1.0, attempt=self.attempt)


def far_out(step, count=4, attempt=1, reason=FAR_OUT):
    """Tokens of an ordinary step that are beyond a limit."""
    rng = np.random.default_rng(step)
    logp = -rng.exponential(3.0, count)
    columns = {
        "sequence": rng.integers(0, 8, count), "position": rng.integers(0, 900, count),
        "token_id": rng.integers(1000, 2000, count), "logp": logp, "old_logp": logp - 3.0,
        "ratio": np.full(count, np.exp(3.0)), "advantage": np.full(count, -1.0), "screen": np.full(count, 4.0),
    }  # fmt: skip
    return SpikeBatch(step, columns, reason, ts=1.0, attempt=attempt)


def write_spikes(where, spiked=(), far=(), *, run_id="run-1", **more):
    """A run whose steps were localised, and others with outlier tokens only."""
    items = [item for one in spiked for item in (one.event(), *one.batches())]
    write_run(where, run_id, events=[*items, *(far_out(step) for step in far)], **more)


def tokens_page(run_id="run-1", **params):
    """The tokens page of a run."""

    def script():
        from rlwatch_app.tokens_page import page

        page(lambda run_id: None, lambda run_id, step: None)

    page = AppTest.from_function(script, default_timeout=30)
    page.query_params["run"] = run_id
    for name, value in params.items():
        page.query_params[name] = str(value)
    return page.run()


def counted(step, *, width=0.02, entropy=1.0, tokens=2000, broken=0, attempt=1):
    """How ratio, log-prob difference and entropy lie over ``tokens`` of a step; ``broken`` entropies are NaN."""
    rng = np.random.default_rng(step)
    values = {
        "log_ratio": rng.normal(0, width, tokens),
        "logp_difference": rng.standard_t(3, tokens) * width / 3,
        "entropy": np.append(rng.gamma(0.4, entropy, tokens - broken), np.full(broken, np.nan)),
    }
    batch = batch_of(step, {name: _bins(name, x) for name, x in values.items()})
    return replace(batch, attempt=attempt, ts=1.0)


def _bins(name, x):
    bits = QUANTITIES[name].bits
    raw = np.asarray(x, dtype=np.float32).view(np.uint32) >> (MANTISSA - bits)
    return np.bincount(raw, minlength=bins_of(bits))
