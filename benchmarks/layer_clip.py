"""Training with layer-wise clipping against a global clip, same seeds: what a spiking layer costs, and the cure.

    python benchmarks/layer_clip.py                # 3 seeds, about six minutes on one core; prints the tables
    python benchmarks/layer_clip.py --curves curves.csv
    python benchmarks/layer_clip.py --contrast     # what a spike leaves of the other layers' step; half a minute

A small GRPO task (repeat the digit of the prompt) on a residual policy with four layers, AdamW, global clip at 1 after
whatever a rule does. Four runs:

- ``healthy``: nothing is planted. A rule must not hurt here.
- ``bursts``: from step 110 on, the gradient of one layer is multiplied by 50 in two steps of every ten.
- ``corrupt``: in the same steps that layer's gradient is random noise of 50 times its norm: it does not point where
  the loss falls.
- ``weights``: at step 110 the down-projection of one layer is multiplied by 30, its up-projection divided by 30. The
  function is as it was, but from then on one gradient is 30 times smaller and the other 30 times larger: a lasting
  change of level, which no rule should take for a spike for ever.

``reward`` is the mean of the last 20 steps, over seeds; ``lost`` how many steps later than the healthy run with the
global clip the reward's mean over 10 steps reaches 0.8 (``-``: not within the run); norms are those of all gradients
before clipping; ``clipped`` the share of steps in which the rule scaled a layer down; ``starved`` the share of steps in
which the global clip scaled every layer by less than 0.2.

``--contrast`` plants the same spikes into one training and lets every rule clip them: what each leaves of the step of
the layers that did not spike, as a part of what the global clip would have left of it had nothing been planted; and
how large the spiking layer's step is, in units of its own without the spike.
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from rlwatch.clipping import AGGC, AdaGC, ClipRule, LayerClip, LayerMaxNorm, LayerMedian, ZClip

DIGITS, LENGTH, PROMPTS, GROUP, STEPS, BEGIN, PERIOD, BURST, FACTOR = 8, 6, 8, 8, 300, 110, 10, 2, 50.0
SPIKING, MAX_NORM, LEARNT, LR = 1, 1.0, 0.8, 3e-4
NEVER = LayerMaxNorm(each=1e30)
RULES: dict[str, ClipRule] = {
    "global clip only": NEVER,
    "layer-median (k 4)": LayerMedian(),
    "layer-median, k 3": LayerMedian(k=3.0),
    "adagc (by tensor)": AdaGC(),
    "aggc, high 1.5": AGGC(high=1.5),
    "aggc, as released": AGGC(),
    "zclip (by layer)": ZClip(),
    "max-norm, total 1": LayerMaxNorm(total=1.0),
}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each position sees itself and the mean of all up to it."""
        here = self.norm(x)
        past = here.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(self.up(torch.cat([here, past], -1)).relu())


class Policy(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(4)])
        self.head = nn.Linear(width, DIGITS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def logp_of(policy: nn.Module, ids: Tensor) -> Tensor:
    logits = policy(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def generate(policy: nn.Module, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    prompts = torch.randint(0, DIGITS, (PROMPTS, 1), generator=draw).repeat_interleave(GROUP, 0)
    ids = prompts
    for _ in range(LENGTH):
        ids = torch.cat([ids, torch.multinomial(policy(ids)[:, -1].softmax(-1), 1, generator=draw)], 1)
    return ids, (ids[:, 1:] == prompts).float().mean(1)


def loss_of(policy: nn.Module, ids: Tensor, rewards: Tensor) -> Tensor:
    grouped = rewards.view(PROMPTS, GROUP)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-2)
    return -(logp_of(policy, ids) * advantages.view(-1, 1)).mean()


Plant = Callable[[Policy, int, torch.Generator], None]


def bursting(step: int) -> bool:
    return step >= BEGIN and step % PERIOD < BURST


def healthy(policy: Policy, step: int, draw: torch.Generator) -> None:
    """Nothing."""


def bursts(policy: Policy, step: int, _draw: torch.Generator) -> None:
    if bursting(step):
        for p in policy.layers[SPIKING].parameters():
            p.grad.mul_(FACTOR)


def corrupt(policy: Policy, step: int, draw: torch.Generator) -> None:
    if bursting(step):
        for p in policy.layers[SPIKING].parameters():
            noise = torch.randn(p.shape, generator=draw)
            p.grad.copy_(noise * (FACTOR * p.grad.norm() / noise.norm()))


def weights(policy: Policy, step: int, _draw: torch.Generator) -> None:
    """Before the gradients of the next step."""
    if step == BEGIN:
        layer = policy.layers[SPIKING]
        with torch.no_grad():
            layer.down.weight.mul_(30.0)
            layer.up.weight.div_(30.0)
            layer.up.bias.div_(30.0)


PLANTS: dict[str, Plant] = {"healthy": healthy, "bursts": bursts, "corrupt": corrupt, "weights": weights}


@dataclass
class Curve:
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[bool] = field(default_factory=list)
    starved: list[bool] = field(default_factory=list)

    @property
    def final(self) -> float:
        return statistics.fmean(self.rewards[-20:])

    def learnt(self) -> int | None:
        """The first step at which the mean reward of ten steps is what was asked for."""
        means = (statistics.fmean(self.rewards[i - 10 : i]) for i in range(10, len(self.rewards) + 1))
        return next((i + 10 for i, mean in enumerate(means) if mean >= LEARNT), None)


def train(rule: ClipRule, plant: Plant, seed: int) -> Curve:
    """Seeds are of the model, of sampling and of the noise; the rule draws nothing."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    clip = LayerClip(policy, copy.deepcopy(rule), max_norm=MAX_NORM)
    sampling, noise, curve = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2), Curve()
    for step in range(STEPS):
        ids, rewards = generate(policy, sampling)
        loss = loss_of(policy, ids, rewards)
        optimizer.zero_grad()
        loss.backward()
        plant(policy, step, noise)
        clipped = clip()
        optimizer.step()
        curve.rewards.append(rewards.mean().item())
        curve.losses.append(loss.item())
        curve.norms.append(clipped.total.item())
        curve.clipped.append(bool(clipped.layers_clipped > 0))
        curve.starved.append(clipped.coefficient.item() < 0.2)
    return curve


# The contrast: what is left of a step in which one layer spikes.


@dataclass
class Left:
    """Of the steps with a spike: parts of the other layers' step, and of the spiking layer's."""

    others: list[float] = field(default_factory=list)
    spiking: list[float] = field(default_factory=list)


def contrast(plant: Plant, seed: int) -> dict[str, Left]:
    """One training without the spikes; rules clip copies of its gradients with them, and keep states of their own."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    clips = {name: LayerClip(policy, copy.deepcopy(rule), max_norm=MAX_NORM) for name, rule in RULES.items()}
    alone = LayerClip(policy, NEVER, max_norm=MAX_NORM, by="layer")
    sampling, noise = torch.Generator().manual_seed(seed + 1), torch.Generator().manual_seed(seed + 2)
    left = {name: Left() for name in clips}
    for step in range(STEPS):
        ids, rewards = generate(policy, sampling)
        optimizer.zero_grad()
        loss_of(policy, ids, rewards).backward()
        usual, healthy = clipped_norms(policy, alone), [p.grad.clone() for p in policy.parameters()]
        plant(policy, step, noise)
        for name, clip in clips.items():
            now = clipped_norms(policy, clip)
            if bursting(step) and usual[0] > 0:
                left[name].others.append(now[0] / usual[0])
                left[name].spiking.append(now[1] / usual[1])
        for p, before in zip(policy.parameters(), healthy, strict=True):
            p.grad.copy_(before)
        alone()
        optimizer.step()
    return left


def clipped_norms(policy: Policy, clip: LayerClip) -> tuple[float, float]:
    """Norms of the other layers' and the spiking layer's clipped gradients; what the policy holds stays as it is."""
    held = [p.grad.clone() for p in policy.parameters()]
    clip()
    spiking = {id(p) for p in policy.layers[SPIKING].parameters()}
    squares = [0.0, 0.0]
    for p, before in zip(policy.parameters(), held, strict=True):
        squares[id(p) in spiking] += float(p.grad.square().sum())
        p.grad.copy_(before)
    return squares[0] ** 0.5, squares[1] ** 0.5


def show_contrast(seeds: range) -> None:
    """One row for each rule, of all seeds."""
    every = {plant: [contrast(PLANTS[plant], seed) for seed in seeds] for plant in ("bursts", "corrupt")}
    print(
        "| rule | other layers, bursts | other layers, corrupt | the spiking layer, bursts |\n| --- | --- | --- | --- |"
    )
    for rule in RULES:
        others = [[x for one in every[plant] for x in one[rule].others] for plant in every]
        spiking = [x for one in every["bursts"] for x in one[rule].spiking]
        cells = [f"{statistics.median(values):.2f} (least {min(values):.2f})" for values in others]
        print(f"| {rule} | {' | '.join(cells)} | {statistics.median(spiking):.2f} |")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def rows(curves: dict[tuple[str, str, int], Curve], plant: str, seeds: range) -> Iterator[list[str]]:
    for rule in RULES:
        these = [curves[plant, rule, seed] for seed in seeds]
        finals = [curve.final for curve in these]
        lost = []
        for seed, curve in zip(seeds, these, strict=True):
            usual, now = curves["healthy", "global clip only", seed].learnt(), curve.learnt()
            lost.append("-" if usual is None or now is None else f"{now - usual:+d}")
        norms = [norm for curve in these for norm in curve.norms]
        spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
        yield [
            rule,
            f"{statistics.fmean(finals):.3f} +- {spread:.3f}",
            f"{min(finals):.3f}",
            " ".join(lost),
            " / ".join(f"{percentile(norms, q):.2f}" for q in (0.5, 0.9, 0.99)),
            f"{statistics.fmean(c for curve in these for c in curve.clipped):.2f}",
            f"{statistics.fmean(c for curve in these for c in curve.starved):.2f}",
        ]


HEAD = ["rule", "reward", "worst", "steps lost, by seed", "norm p50 / p90 / p99", "clipped", "starved"]


def show(title: str, table: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(HEAD, *table, strict=True)]
    print(f"\n{title}")
    for row in (HEAD, ["-" * width for width in widths], *table):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def write(path: Path, curves: dict[tuple[str, str, int], Curve]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "rule", "seed", "step", "reward", "loss", "norm", "clipped"])
        for (plant, rule, seed), curve in curves.items():
            columns = zip(curve.rewards, curve.losses, curve.norms, curve.clipped, strict=True)
            writer.writerows([plant, rule, seed, step, *row] for step, row in enumerate(columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--curves", type=Path, default=None, help="write loss, reward and norm of every step as CSV")
    parser.add_argument("--contrast", action="store_true", help="only what a spike leaves of the other layers' step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, curves = range(args.seeds), {}
    if args.contrast:
        show_contrast(seeds)
        return
    for plant, change in PLANTS.items():
        for rule, settings in RULES.items():
            for seed in seeds:
                curves[plant, rule, seed] = train(settings, change, seed)
        show(f"{plant} ({STEPS} steps, {len(seeds)} seeds)", list(rows(curves, plant, seeds)))
    if args.curves is not None:
        write(args.curves, curves)


if __name__ == "__main__":
    main()
