"""One spike from end to end, for the guide: what made it, what is said of it, and what the cure would have been worth.

    python benchmarks/blame_story.py [--pictures docs/pictures]

A real GRPO training of TRL on a tiny random model (advantages not divided by their deviation, as Dr. GRPO has it). At
step 17 the verifier fails on one answer: it returns the number that it parsed, 63, in place of a score from 0 to 1.
The same training is run once more with the cure that was named: the norm really reached is drawn beside the other.
Prints what ``rlwatch show --spikes`` says, and writes two pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integrations"))

import rlwatch
from rlwatch.cli.app import app
from rlwatch.integrations.localising import Localise
from rlwatch.records import LOCALISED, RESPONSES
from rlwatch.wording import Markup, el, number

STEPS, FAILS, PARSED = 22, 17, 63.0
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 240, 56, 30
TITLE = "gradient norm by step, before clipping; dashed: the training run again with the cure"
INK, SOFT, RULE, RED, BLUE, GREEN = "#1c1e21", "#5b6169", "#d9dce0", "#c0392b", "#0072b2", "#00805a"


class Verifier:
    """Share of odd digits; of the first answer at step ``FAILS`` what it parsed."""

    def __init__(self) -> None:
        self.calls = 0
        self.__name__ = "verifier"

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        scores = [sum(c in "13579" for c in text) / 8 for text in completions]
        return [PARSED, *scores[1:]] if self.calls == FAILS else scores


def train(store: Path, name: str, folder: Path, cap: float | None) -> None:
    """Train; where a ``cap`` is given with advantages clipped at it."""
    from tiny_trl import make_trainer

    from rlwatch.integrations.trl import watch

    trainer = make_trainer(
        folder / name, reward=Verifier(), max_steps=STEPS, scale_rewards="none", learning_rate=1e-4,
        per_device_train_batch_size=16, num_generations=4, max_completion_length=12, num_iterations=1,
    )  # fmt: skip
    original = trainer._compute_loss

    def clipped(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if cap is not None:
            inputs = inputs | {"advantages": inputs["advantages"].clamp(-cap, cap)}
        return original(model, inputs)

    trainer._compute_loss = clipped
    watch(trainer, store=store, run_id=name, name=name, text=True, localise=Localise(share=0.9, allowance_s=600.0))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()


def text(x: float, y: float, words: str, *, colour: str = SOFT, anchor: str = "start", size: int = 12) -> Markup:
    style = f"font:{size}px system-ui,sans-serif"
    return el("text", words, x=round(x, 1), y=round(y, 1), fill=colour, text_anchor=anchor, style=style)


def picture(*parts: Markup, height: int = HEIGHT, label: str = "") -> str:
    """A file that is read by itself, on white."""
    paper = el("rect", x=0, y=0, width=WIDTH, height=height, fill="#ffffff")
    whole = el("svg", paper, *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", role="img",
               aria_label=label)  # fmt: skip
    return str(whole) + "\n"


def norms_picture(spiked: dict[int, float], cured: dict[int, float], body: dict[str, Any]) -> str:
    """Gradient norm by step, of both trainings, on a logarithmic axis; the threshold and the promise."""
    every = [*spiked.values(), *cured.values(), body["threshold"]]
    low, high = math.log10(min(every)) - 0.1, math.log10(max(every)) + 0.15

    def at(step: float, norm: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 110) * (step - 1) / (STEPS - 1)
        return x, 24 + (HEIGHT - 24 - BOTTOM) * (high - math.log10(norm)) / (high - low)

    def line(values: dict[int, float], colour: str, dash: str) -> Markup:
        points = " ".join("{:.1f},{:.1f}".format(*at(step, norm)) for step, norm in sorted(values.items()))
        return el("polyline", points=points, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=dash)

    parts = [text(LEFT, 15, TITLE, colour=INK, size=13)]
    for power in range(math.ceil(low), math.floor(high) + 1):
        _, y = at(1, 10.0**power)
        parts += [
            el("line", x1=LEFT, x2=WIDTH - 110, y1=round(y, 1), y2=round(y, 1), stroke=RULE),
            text(LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end"),
        ]
    _, y = at(1, body["threshold"])
    parts.append(
        el("line", x1=LEFT, x2=WIDTH - 110, y1=round(y, 1), y2=round(y, 1), stroke=SOFT, stroke_dasharray="2 3")
    )
    parts.append(text(WIDTH - 104, y + 4, "a spike"))
    parts += [line(cured, GREEN, "5 4"), line(spiked, RED, "none")]
    x, y = at(FAILS, spiked[FAILS])
    parts += [
        el("circle", cx=round(x, 1), cy=round(y, 1), r=4, fill=RED),
        text(x + 8, y + 4, number(spiked[FAILS]), colour=RED),
    ]
    cure = body["cures"][0]
    x, y = at(FAILS, cure["after"])
    parts.append(el("circle", cx=round(x, 1), cy=round(y, 1), r=5, fill="none", stroke=GREEN, stroke_width=2))
    parts.append(text(x - 22, y - 6, f"{number(cure['after'])} {cure['action']}", colour=GREEN, anchor="end"))
    parts += [text(at(step, 1.0)[0], HEIGHT - 8, str(step), anchor="middle") for step in range(1, STEPS + 1, 3)]
    return picture(*parts, label="gradient norm by step, with the spike and with its cure")


def tokens_picture(columns: dict[str, Any], body: dict[str, Any]) -> str:
    """Every token of the responses to blame: its share of the norm as the height of a bar."""
    sequences = list(dict.fromkeys(int(s) for s in columns["sequence"]))[:4]
    top, each = 40, 66
    most = max(abs(float(share)) for share in columns["share"])
    title = f"step {FAILS}: share of the gradient norm, token by token ({body['verdict']})"
    parts = [text(8, 18, title, colour=INK, size=13)]
    for i, sequence in enumerate(sequences):
        rows = [j for j, s in enumerate(columns["sequence"]) if int(s) == sequence]
        base = top + each * i + 26
        parts.append(text(8, base, f"sequence {sequence}", colour=INK))
        parts.append(text(8, base + 14, f"reward {number(float(columns['reward'][rows[0]]))}", size=11))
        for j in rows:
            share, x = float(columns["share"][j]), 110 + 48 * int(columns["position"][j])
            tall = round(max(26 * abs(share) / most, 0.5), 1)
            y, colour = (base - tall, RED) if share >= 0 else (base, BLUE)
            parts += [
                el("rect", x=x, y=round(y, 1), width=42, height=tall, fill=colour),
                text(x + 21, base + 19, str(columns["text"][j]), colour=INK, anchor="middle", size=11),
                text(x + 21, base + 31, f"{share:.1%}", anchor="middle", size=10),
            ]
    return picture(*parts, height=top + each * len(sequences) + 12, label="shares of tokens in the gradient norm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="folder to write them to")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        train(place, "spiked", Path(folder), None)
        store = rlwatch.open_store(place)
        body = next(e.body for e in store.events("spiked") if e.kind == LOCALISED and e.step == FAILS)
        cure = body["cures"][0]
        train(place, "cured", Path(folder), cure["value"])
        norms = {name: norms_of(store, name) for name in ("spiked", "cured")}
        app(["show", "spiked", "--spikes", "--store", str(place)], standalone_mode=False)
        print(f"\npromised {cure['after']:.6g}, reached {norms['cured'][FAILS]:.6g} when the training was run again")
        batch = next(b for b in store.spikes("spiked") if b.reason == RESPONSES and b.step == FAILS)
        if options.pictures is not None:
            options.pictures.mkdir(parents=True, exist_ok=True)
            (options.pictures / "spike-norms.svg").write_text(norms_picture(norms["spiked"], norms["cured"], body))
            (options.pictures / "spike-tokens.svg").write_text(tokens_picture(dict(batch.columns), body))


def norms_of(store: Any, run: str) -> dict[int, float]:
    """Step -> gradient norm before clipping."""
    found = store.series(run, ["optim/grad_norm"])["optim/grad_norm"]
    return {int(step): float(norm) for step, norm in zip(found.steps, found.values, strict=True)}


if __name__ == "__main__":
    main()
