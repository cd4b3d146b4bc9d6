"""Consoles as people's loops print them, with what was written: for properties of how they are read."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

NAMES = ("reward", "kl", "entropy", "loss", "grad_norm", "mean_reward", "response_length")
PREFIXES = (
    "",
    "",
    "2025-09-23 08:59:{n:02d},896 - INFO - ",
    "INFO:root:",
    "[2025-09-23 08:59:{n:02d}] [trainer.py:33] ",
    "(TaskRunner pid=4711) ",
    "I0923 08:59:{n:02d}.123456 4711 loop.py:12] ",
)
STYLES = ("bars", "colons", "equals", "head", "of total", "brackets", "bare", "dict", "block", "table", "progress")
TEXTS = (
    (
        "Step 1: The tank holds 30 liters.",
        "Step 2: reward = 5",
        "Step 3: score: 3",
        "So entropy = 0.0 and the answer is 5",
    ),
    ("Completion: let x = 3, y = 4.", "Then kl = 7 and the reward: 12", "Step 2: x = 3"),
    (
        "Traceback (most recent call last):",
        '  File "reward.py", line 12, in score',
        "    reward = 0.5",
        "ValueError: step 3",
    ),
    ("def reward(step):", "    kl = 0", "    return {'reward': 1, 'loss': 2}", "for step in range(10): loss = 3"),
    ('{"answer": 5, "reward": 1}', "score: 0.5, accuracy: 0.25"),
    ("Loading checkpoint shards: 100%|####| 4/4 [00:01<00:00, 3.1it/s]", "seed: 3", "GPU memory: 12.5GB"),
)


@dataclass
class Console:
    """What is printed, and the rows that were written: attempt, step and metrics."""

    text: str = ""
    rows: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    said: str = ""
    """What is odd about it."""


@dataclass
class Odd:
    """How a console is printed."""

    style: str
    prefix: str
    names: tuple[str, ...]
    pace: int
    percent: bool
    spread: bool
    change: bool
    thousands: bool
    unit: bool
    coloured: bool
    ranks: int
    ranks_differ: bool
    texts: tuple[int, ...]
    text_every: int
    evaluation_every: int
    restart: tuple[int, int]
    wrapped: bool
    nonfinite: bool


@st.composite
def consoles(draw: st.DrawFn) -> Console:
    """A console of one training, with all that may stand in one."""
    often = st.integers(0, 3).map(lambda n: n == 0)
    steps = draw(st.integers(8, 24))
    back = draw(st.integers(5, steps - 1)) if draw(often) else 0
    style = draw(st.sampled_from(STYLES))
    odd = Odd(
        style=style,
        prefix=draw(st.sampled_from(PREFIXES)),
        names=tuple(draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]),
        pace=draw(st.sampled_from((1, 5, 10))),
        percent=draw(often),
        spread=draw(often),
        change=draw(often),
        thousands=draw(often),
        unit=draw(often),
        coloured=draw(often),
        ranks=draw(st.sampled_from((1, 1, 1, 2, 4))),
        ranks_differ=draw(st.booleans()),
        texts=tuple(draw(st.lists(st.integers(0, len(TEXTS) - 1), max_size=3))),
        text_every=draw(st.integers(1, 6)),
        evaluation_every=draw(st.sampled_from((0, 0, 0, 4, 7))),
        restart=(steps - back, steps) if back else (0, 0),
        wrapped=draw(often),
        nonfinite=draw(often),
    )
    return printed(odd, steps, random.Random(draw(st.integers(0, 2**32 - 1))))


def printed(odd: Odd, steps: int, rng: random.Random) -> Console:
    """The console of a training of so many rows."""
    made = Console(said=repr(odd))
    lines: list[str] = []
    starts = [range(1, steps + 1)]
    if odd.restart[1]:
        starts.append(range(max(1, odd.restart[0]), steps + 6))
    for attempt, counted in enumerate(starts, 1):
        for number in counted:
            step = number * odd.pace
            lines += _row(odd, made, attempt, step, steps, rng)
            if odd.texts and number % odd.text_every == 0:
                lines += TEXTS[rng.choice(odd.texts)]
            if odd.evaluation_every and number % odd.evaluation_every == 0:
                lines.append(f"Evaluation at step {step}: reward = {rng.random():.3f}, accuracy = {rng.random():.3f}")
    made.text = "".join(line + "\n" for line in lines)
    return made


def _row(odd: Odd, made: Console, attempt: int, step: int, steps: int, rng: random.Random) -> list[str]:
    lines: list[str] = []
    texts = {name: f"{rng.uniform(-1, 1) * 10 ** rng.randint(-2, 1):.4g}" for name in odd.names}
    if odd.nonfinite and rng.random() < 0.2:
        texts[odd.names[0]] = rng.choice(("nan", "inf", "-inf"))
    for rank in range(odd.ranks):
        if rank and odd.ranks_differ and odd.style not in {"block", "table", "progress"}:
            texts = {name: f"{rng.uniform(-1, 1):.4g}" for name in odd.names}
        values = dict(_values(odd, texts))
        if rank == 0:
            made.rows.append((attempt, step, {name: value for name, (_, value) in values.items()}))
        prefix = odd.prefix.format(n=step % 60)
        if odd.ranks > 1 and odd.ranks_differ:
            prefix = prefix + f"[rank{rank}]: " if "pid=" in prefix else f"[rank{rank}]: " + prefix
        lines += _written(odd, prefix, step, steps * odd.pace, {name: said for name, (said, _) in values.items()}, rng)
        if odd.style in {"block", "table"}:
            break
    return lines


def _values(odd: Odd, texts: dict[str, str]) -> Iterator[tuple[str, tuple[str, float]]]:
    for number, (name, text) in enumerate(texts.items()):
        value = float(text)
        plain = odd.style in {"dict", "progress"} or not math.isfinite(value)
        if odd.percent and number == 0 and not plain:
            yield name, (f"{text}%" if odd.style == "equals" else f"{text} %", value / 100)
        elif odd.spread and not plain:
            yield name, (f"{text}±0.077", value)
        elif odd.change and not plain:
            yield name, (f"0.25 -> {text}", value)
        else:
            yield name, (text, value)


def _written(odd: Odd, prefix: str, step: int, total: int, said: dict[str, str], rng: random.Random) -> list[str]:
    at = f"{step * 1:,}" if odd.thousands and odd.style in {"bars", "head", "bare"} else str(step)
    unit = {"took": "1.25s"} if odd.unit and odd.style not in {"dict", "bare", "table"} else {}
    pairs = {**said, **unit}
    if odd.style == "dict":
        return [prefix + "{'step': %d, %s}" % (step, ", ".join(f"'{n}': {v}" for n, v in pairs.items()))]  # noqa: UP031
    if odd.style == "block":
        return [f"--- Step {at}/{total} ---", *(f"  {name}: {value}" for name, value in pairs.items())]
    if odd.style == "table":
        return ["-" * 30, f"| step | {step} |", *(f"| {name} | {value} |" for name, value in pairs.items()), "-" * 30]
    if odd.style == "progress":
        inner = ", ".join(f"{name}={value}" for name, value in said.items())
        return [
            f"Training: {step % 100:3d}%|{'#' * rng.randint(0, 9):10}| {step}/{total} [00:01<01:00, 1.0it/s, {inner}]"
        ]
    head, joint, sign = {
        "bars": (f"step {at}", " | ", " "),
        "colons": (f"step: {step}", ", ", ": "),
        "equals": (f"step={step}", " ", "="),
        "head": (f"Step {at}:", " ", "="),
        "of total": (f"Step {step}/{total}:", ", ", " "),
        "brackets": (f"[{step}/{total}]", " ", "="),
        "bare": (f"iter {at}", " ", " "),
    }[odd.style]
    parts = [name + sign + value for name, value in pairs.items()]
    first = head + (" " if odd.style in {"head", "of total", "brackets"} else joint) + joint.join(parts[:2])
    rest = joint.join(parts[2:])
    if odd.coloured:
        first = first.replace(parts[0], f"\x1b[1;32m{parts[0]}\x1b[0m")
    if not rest:
        return [prefix + first]
    if odd.wrapped and odd.style in {"bars", "colons", "equals"} and odd.ranks == 1:
        return [prefix + first, "    " + rest]
    return [prefix + first + joint + rest]


def merged(records: Sequence[object]) -> dict[tuple[int, int], dict[str, float]]:
    """Metrics by attempt and step."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for record in records:
        found.setdefault((record.attempt, record.step), {}).update(record.metrics)  # type: ignore[attr-defined]
    return found
