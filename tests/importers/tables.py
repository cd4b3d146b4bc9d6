"""JSON lines, tables and notebooks as people's loops write them, with what was written: for properties of reading."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from hypothesis import strategies as st

Rows = list[tuple[int, int, dict[str, float]]]
"""Attempt, step and metrics."""
NAMES = ("reward", "kl", "entropy", "loss", "grad_norm", "mean_reward", "response_length", "lr", "apples")
often = st.integers(0, 3).map(lambda number: number == 0)


@dataclass
class Written:
    """A file: its name, what is in it, and the rows that were written."""

    name: str
    data: bytes = b""
    rows: Rows = field(default_factory=list)
    said: str = ""
    """What is odd about it."""


def value(rng: random.Random, *, finite: bool) -> float:
    """A number as loops log it."""
    if not finite and rng.random() < 0.1:
        return rng.choice((math.nan, math.inf, -math.inf))
    return float(f"{rng.uniform(-1, 1) * 10 ** rng.randint(-6, 3):.5g}")


def training(draw: st.DrawFn, *, finite: bool) -> tuple[Rows, list[str], random.Random]:
    """The rows of a training that may have been started again, its names, and a source of chance."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    names = ["loss", *draw(st.permutations([name for name in NAMES if name != "loss"]))[: draw(st.integers(1, 4))]]
    steps, pace = draw(st.integers(8, 24)), draw(st.sampled_from((1, 5, 10)))
    begins = [range(1, steps + 1)]
    if draw(often):
        begins.append(range(draw(st.integers(1, steps - 4)), steps + 6))
    rows = [
        (attempt, step * pace, {name: value(rng, finite=finite) for name in names})
        for attempt, counted in enumerate(begins, 1)
        for step in counted
    ]
    return rows, names, rng


# JSON lines


STEP_FIELDS = ("step", "global_step", "iteration", "Step", "train_step", "_step", "grpo_step", "global_step/max_steps")
LINES = (
    "Loading checkpoint shards: 100%",
    '{"step": 3, "reward": ',
    "Traceback (most recent call last):",
    '  File "reward.py", line 12, in score',
    '{"config": {"lr": 1e-6, "steps": 900}}',
    '{"question_id": 7, "score": 1.0, "answer": "so it is"}',
)


@st.composite
def json_lines(draw: st.DrawFn) -> Written:
    """A row a line, among others."""
    rows, names, rng = training(draw, finite=False)
    at = draw(st.sampled_from(STEP_FIELDS))
    as_step = draw(st.sampled_from((int, float, str)))
    shape = draw(st.sampled_from(("flat", "metrics", "text", "nested", "strings")))
    others = draw(st.lists(st.sampled_from(LINES), max_size=3))
    ranks, copies = draw(st.sampled_from((1, 1, 1, 3))), draw(st.booleans())
    evaluated, sample = draw(st.sampled_from((0, 0, 4))), draw(often)
    hole = draw(often)
    made = Written("metrics.jsonl", rows=rows, said=f"{at=} {as_step=} {shape=} {others=} {ranks=} {copies=} {names=}")
    lines: list[str] = []
    for number, (_, step, metrics) in enumerate(rows, 1):
        head: dict[str, object] = {at: f"{step}/9000" if "max" in at else as_step(step)}
        head |= {"sample": "Step 2: reward = 5"} if sample else {}
        for rank in range(ranks):
            own = metrics if rank == 0 or copies else {name: value(rng, finite=True) for name in metrics}
            told = {} if copies or ranks == 1 else {"rank": rank}
            lines.append(json.dumps({**head, **told, **_shaped(shape, own)}))
        if evaluated and number % evaluated == 0:
            lines.append(json.dumps({"type": "eval", at: head[at], "reward": 0.9, "accuracy": 0.5}))
        lines += rng.choices(others, k=1) if others and rng.random() < 0.3 else []
    if not copies and ranks > 1:
        made.rows = [(attempt, step, {**metrics, "rank": 0.0}) for attempt, step, metrics in rows]
    text = [line.encode() + b"\n" for line in lines]
    if hole:
        text[len(text) // 2] = b"\x00" * 4096 + text[len(text) // 2]
    made.data = b"".join(text)
    return made


def _shaped(shape: str, metrics: Mapping[str, float]) -> dict[str, object]:
    if shape == "metrics":
        return {"metrics": dict(metrics)}
    if shape == "text":
        return {"metrics": str(dict(metrics))}
    if shape == "nested":
        return {"logs": {"stats": dict(metrics)}}
    return {name: str(number) if shape == "strings" else number for name, number in metrics.items()}


# Tables


@st.composite
def tables(draw: st.DrawFn) -> Written:
    """A wide table of one training, or a long one."""
    rows, names, rng = training(draw, finite=False)
    separator = draw(st.sampled_from((",", ";", "\t", " | ")))
    comma = separator != "," and draw(st.booleans())
    end = draw(st.sampled_from(("\n", "\r\n")))
    quoted, index, gaps = draw(often), "|" not in separator and draw(often), draw(often)
    comment, again, floats = draw(often), draw(often), draw(st.booleans())
    column = draw(st.sampled_from(("step", "Step", "global_step", "iteration", "training_step")))
    long = draw(often)
    encoding = draw(st.sampled_from(("utf-8", "utf-8", "utf-8-sig", "utf-16")))

    def cell(number: float) -> str:
        text = repr(number)
        text = text.replace(".", ",") if comma else text
        return f'"{text}"' if quoted and "|" not in separator else text

    made = Written(
        "metrics.csv", said=f"{separator=} {comma=} {column=} {long=} {gaps=} {encoding=} {index=} {floats=}"
    )
    lines = ["# seed 3"] * comment
    header = [column, "metric", "value"] if long else [column, *names]
    lines.append(separator.join([*([""] if index else []), *header]))
    for number, (attempt, step, metrics) in enumerate(rows):
        at = cell(float(step)) if floats else str(step)
        left = {name for name in names if gaps and not long and name != "loss" and rng.random() < 0.2}
        kept = {name: number for name, number in metrics.items() if name not in left}
        before = [str(number)] if index else []
        if long:
            lines += [separator.join([*before, at, name, cell(number)]) for name, number in kept.items()]
        else:
            lines.append(
                separator.join([*before, at, *("" if name in left else cell(metrics[name]) for name in names)])
            )
        made.rows.append((attempt, step, kept))
        if again and number == 3:
            lines.append(separator.join([*([""] if index else []), *header]))
    made.data = "".join(line + end for line in lines).encode(encoding)
    return made


# Notebooks


@st.composite
def notebooks(draw: st.DrawFn) -> Written:
    """A training whose cell drew a table, printed rows, or both."""
    rows, names, rng = training(draw, finite=True)
    rows = [(1, step, {**row, "reward": value(rng, finite=True)}) for attempt, step, row in rows if attempt == 1]
    names = list(rows[0][2])
    drawn, printed = draw(st.sampled_from(((True, False), (False, True), (True, True))))
    style = draw(st.sampled_from(("dict", "line", "stepped dict")))
    elsewhere = draw(st.booleans())
    shared = names if not printed else [name for name in names if name == "loss"]
    columns = {name: "Training Loss" if name == "loss" else name for name in (names if not printed else shared)}
    made = Written("train.ipynb", said=f"{drawn=} {printed=} {style=} {elsewhere=} {names=}")
    outputs: list[list[dict[str, object]]] = [[], []]
    if drawn:
        outputs[0].append({"output_type": "display_data", "data": {"text/html": [_html(rows, columns)]}})
    if printed:
        text = "".join(_printed(style, step, metrics, rows[-1][1]) for _, step, metrics in rows)
        where = outputs[1 if elsewhere else 0]
        where += [{"output_type": "stream", "name": "stdout", "text": part} for part in _cut(text)]
    cells = [{"cell_type": "code", "source": [], "outputs": output} for output in outputs]
    made.data = json.dumps({"cells": cells, "nbformat": 4, "metadata": {}}).encode()
    counted = style == "dict" and not drawn  # nothing says a step: the rows are numbered
    made.rows = [(1, number if counted else step, row) for number, (_, step, row) in enumerate(rows, 1)]
    return made


def _html(rows: Rows, columns: Mapping[str, str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("Step", *columns.values()))
    body = (
        "".join(f"<td>{cell}</td>" for cell in (step, *(metrics[name] for name in columns)))
        for _, step, metrics in rows
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def _printed(style: str, step: int, metrics: Mapping[str, float], last: int) -> str:
    if style == "line":
        return f"step: {step}, " + ", ".join(f"{name}: {number}" for name, number in metrics.items()) + "\n"
    stepped = {"step": step} if style == "stepped dict" else {}
    return str({**stepped, **metrics, "epoch": round(step / last, 4)}) + "\n"


def _cut(text: str) -> list[str]:
    return [text[: len(text) // 3], text[len(text) // 3 :]]
