"""A run whose completions were kept: sums that the policy learns, forgets, and one long answer that repeats itself."""

from __future__ import annotations

import numpy as np
from app_world import write_run
from streamlit.testing.v1 import AppTest
from token_world import HOSTILE

from rlwatch.records import CompletionBatch

PROMPTS = ("What is 17 + 25?", "Factor x^2 - 5x + 6.", "Name a prime above 90.", "Sort 3, 1, 2.")
RIGHT = ("42", "(x-2)(x-3)", "97", "1, 2, 3")
LATE = 51
"""The step at which the policy has forgotten the first two sums, and says another prime."""


def said(step, prompt, sample):
    """An answer: right at first, of another mind from step :data:`LATE` on."""
    wrong = step >= LATE and prompt < 2
    result = "97" if prompt == 2 and sample == 0 and step < LATE else "101" if prompt == 2 else RIGHT[prompt]
    result = "7" if wrong else result
    return (
        f"Let us see, step by step.\nFirst we look at it.\nSo the answer is \\boxed{{{result}}}.",
        0.0 if wrong else 1.0,
    )


def batch(step, *, long=0, hostile=False, attempt=1):
    """Two answers to each prompt, 8 of a generation of 64; ``long`` characters of one, ``hostile`` text in others."""
    pairs = [(p, s) for p in range(len(PROMPTS)) for s in range(2)]
    texts, rewards = map(list, zip(*(said(step, *pair) for pair in pairs), strict=True))
    prompts = [PROMPTS[p] for p, _ in pairs]
    if long:
        texts[-1] = ("wait, let me check that once more. " * (long // 34 + 1))[:long] + "\nThe answer is 3, 2, 1."
    if hostile:
        texts[:5] = ["\n".join(HOSTILE), *HOSTILE[:4]]
        prompts[0] = HOSTILE[0]
    noise = np.random.default_rng(step)
    columns = {
        "prompt": prompts, "completion": texts, "prompt_id": [f"id{p}" for p, _ in pairs],
        "reward": np.array(rewards), "reward/math": np.array(rewards), "reward/format": np.full(8, 0.5),
        "advantage": np.array(rewards) - 0.5, "length": np.array([len(t) // 4 for t in texts], dtype=np.int64),
        "repetition": np.array([0.95 if len(t) > 2000 else 0.05 for t in texts]),
        "kl": noise.gamma(1.0, 0.02, 8), "group": np.array([p for p, _ in pairs], dtype=np.int64),
        "chars": np.array([len(t) for t in texts], dtype=np.int64), "generated": np.full(8, 64, dtype=np.int64),
        "task": ["algebra" if p == 1 else "numbers" for p, _ in pairs],
    }  # fmt: skip
    return CompletionBatch(step, columns, ts=float(step), attempt=attempt)


def write_rollouts(where, steps=(1, 11, 51, 61), *, run_id="run-1", more=(), **how):
    """A run with completions at ``steps``; ``how`` goes to the batch of the last one."""
    last = batch(steps[-1], **how)
    write_run(where, run_id, steps=80, events=[*(batch(step) for step in steps[:-1]), last, *more])


def rollouts_page(run_id="run-1", **params):
    """The rollouts page of a run."""

    def script():
        from rlwatch_app.rollouts_page import page

        page(lambda run_id: None, lambda run_id, step: None)

    page = AppTest.from_function(script, default_timeout=60)
    page.query_params["run"] = run_id
    for name, value in params.items():
        page.query_params[name.rstrip("_")] = str(value)
    return page.run()
