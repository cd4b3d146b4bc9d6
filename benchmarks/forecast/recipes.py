"""Recipes of runs: their start, what goes wrong in them and when. One function a recipe.

A recipe draws a fault for a run whose base is drawn apart from it, from the same distribution for all recipes: nothing
but the fault tells one recipe from another. ``Fault.changes`` says what happens; the run of a pair is without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from forecast import faults
from forecast.faults import Changes, Rng, between
from forecast.knobs import Change, Config, Knobs, Pace, Start
from forecast.policy import BASES, LOOSE


@dataclass(frozen=True)
class Recipe:
    """``draw``: the changes of a run; ``healthy`` recipes are to come out well."""

    name: str
    family: str
    draw: Callable[[Rng, Knobs], Changes]
    about: str

    @property
    def healthy(self) -> bool:
        """True where nothing in it is meant to break a run."""
        return self.family == "healthy"


def base(r: Rng) -> Knobs:
    """Knobs that every run starts from: trains well, and differs from run to run."""
    task = str(r.choice(["copy", "reverse", "sort", "add"]))
    return Knobs(
        task=task,
        k=3 if task == "add" else int(r.choice([3, 3, 4])),
        prompts=int(r.choice([6, 8, 8])),
        lr=between(r, 5e-4, 1.6e-3),
        schedule=str(r.choice(["constant", "constant", "cosine"])),
        mu=int(r.choice([1, 1, 2, 2, 3])),
        clip_high=float(r.choice([0.2, 0.28])),
        grad_clip=float(r.choice([0.0, 0.5, 1.0, 1.0])),
        beta=float(r.choice([0.0, 0.0, 0.01, 0.03, 0.1])),
        kl=str(r.choice(["k2", "k3", "k3"])),
        entropy=float(r.choice([0.0, 0.0, 0.001, 0.003])),
        old=str(r.choice(["trainer", "trainer", "engine"])),
        truncation=float(r.choice([0.0, 0.0, 2.0])),
        advantage=str(r.choice(["std", "std", "mean", "rloo"])),
        partial=float(r.choice([0.0, 0.0, 0.3])),
        engine=str(r.choice(["exact", "bf16", "bf16", "bf16", "int8", "int8"])),
    )


def _nothing(_: Rng, __: Knobs) -> Changes:
    return ()


def _for_good(**knobs: Any) -> Callable[[Rng, Knobs], Changes]:
    """A choice that holds from the first step."""
    return lambda r, _: (Change(0, {k: v(r) if callable(v) else v for k, v in knobs.items()}),)


def _for_a_while(least: int, most: int, **knobs: Any) -> Callable[[Rng, Knobs], Changes]:
    """An event of ``least`` to ``most`` steps that a run gets over."""

    def draw(r: Rng, _: Knobs) -> Changes:
        at = int(r.integers(60, 210))
        turned = {name: value(r) if callable(value) else value for name, value in knobs.items()}
        return (Change(at, turned, until=at + int(r.integers(least, most + 1))),)

    return draw


NO_NEAR = ("lr_constant", "fp16_overflow", "log_zero", "nan_batch", "zero_division", "quantised")
"""One step of these is one too many, or there is no less of them."""


def _near(r: Rng) -> Recipe:
    """A failing recipe to come close to."""
    failing = [recipe for recipe in FAILING if recipe.name not in NO_NEAR]
    return failing[r.integers(len(failing))]


def _near_short(r: Rng, knobs: Knobs) -> Changes:
    """A fault that ends again in time."""
    (change,) = _near(r).draw(r, knobs)
    return (replace(change, over=0, until=change.at + int(r.integers(2, 9))),)


def _near_ramp(r: Rng, knobs: Knobs) -> Changes:
    """A fault that grows slowly and is noticed early."""
    (change,) = _near(r).draw(r, knobs)
    over = max(change.over, 100)
    return (replace(change, over=over, until=change.at + int(over * r.uniform(0.08, 0.3))),)


def _near_small(r: Rng, knobs: Knobs) -> Changes:
    """A fault of a tenth of its size."""
    (change,) = _near(r).draw(r, knobs)
    share = r.uniform(0.05, 0.2)
    small = {
        name: new
        if isinstance(new, bool | str)
        else Change(0, {}, exponential=False).value(getattr(knobs, name), new, share)
        for name, new in change.knobs.items()
    }
    return (replace(change, knobs=small),)


FAILING: tuple[Recipe, ...] = (
    Recipe("lr_constant", "learning_rate", faults.lr_constant, "too high from the start"),
    Recipe("lr_step", "learning_rate", faults.lr_step, "multiplied at once"),
    Recipe("lr_ramp", "learning_rate", faults.lr_ramp, "growing exponentially"),
    Recipe("lr_spike", "learning_rate", faults.lr_spike, "very high for a few steps"),
    Recipe("no_clip", "trust_region", faults.no_clip, "no clipping of ratios or gradients, more epochs"),
    Recipe("negative_weight", "advantage", faults.negative_weight, "negative advantages weigh more"),
    Recipe("advantage_shift", "advantage", faults.advantage_shift, "a baseline that is too high"),
    Recipe("advantage_uncentred", "advantage", faults.advantage_uncentred, "no baseline at all"),
    Recipe("stale_level", "staleness", faults.stale_level, "weights of the engine many steps old"),
    Recipe("stale_growing", "staleness", faults.stale_growing, "weights of the engine older and older"),
    Recipe("mismatch_level", "mismatch", faults.mismatch_level, "weights of the engine off by a fixed amount"),
    Recipe("mismatch_drift", "mismatch", faults.mismatch_drift, "drifting away exponentially"),
    Recipe("mismatch_fresh", "mismatch", faults.mismatch_fresh, "off by another amount at each synchronisation"),
    Recipe("quantised", "mismatch", faults.quantised, "3-bit weights in the engine"),
    Recipe("temperature", "mismatch", faults.temperature, "the engine samples at another temperature"),
    Recipe("one_engine", "mismatch", faults.one_engine, "one of several engines is off"),
    Recipe("entropy_up", "entropy", faults.entropy_up, "entropy bonus too large"),
    Recipe("entropy_down", "entropy", faults.entropy_down, "entropy bonus of the wrong sign"),
    Recipe("positive_only", "entropy", faults.positive_only, "only positive advantages count"),
    Recipe("kl_k1", "reference", faults.kl_k1, "k1 as a loss, with a large coefficient"),
    Recipe("kl_k3", "reference", faults.kl_k3, "k3 as a loss, with a large coefficient"),
    Recipe("kl_sign", "reference", faults.kl_sign, "KL term of the wrong sign"),
    Recipe("reference_drift", "reference", faults.reference_drift, "a spoilt reference"),
    Recipe("fp16_overflow", "precision", faults.fp16_overflow, "float16 with a loss scale that overflows, not skipped"),
    Recipe("fp16_skip", "precision", faults.fp16_skip, "the same, skipped: a loop of skips"),
    Recipe("log_zero", "precision", faults.log_zero, "log of a probability that underflows"),
    Recipe("nan_batch", "precision", faults.nan_batch, "a reward that is NaN now and then"),
    Recipe("zero_division", "precision", faults.zero_division, "advantages over a standard deviation of 0"),
    Recipe("hack_magic", "reward_hacking", faults.hack_magic, "the verifier pays for a token in the answer"),
    Recipe("hack_filler", "reward_hacking", faults.hack_filler, "the verifier pays for thought"),
    Recipe("hack_length", "reward_hacking", faults.hack_length, "the verifier pays for length"),
    Recipe("hack_format", "reward_hacking", faults.hack_format, "the verifier pays for the format alone"),
    Recipe("sign_flip", "reward_bug", faults.sign_flip, "right answers are punished"),
    Recipe("verifier_stuck", "reward_bug", faults.verifier_stuck, "nearly everything is right"),
    Recipe("verifier_noisy", "reward_bug", faults.verifier_noisy, "verdicts turned round at random"),
    Recipe("wrong_key", "reward_bug", faults.wrong_key, "reference answers are wrong"),
    Recipe("length_collapse", "length", faults.length_collapse, "length is punished"),
    Recipe("end_banned", "length", faults.end_banned, "the engine rarely ends a response"),
    Recipe("data_hard", "data", faults.data_hard, "longer prompts than were demonstrated"),
    Recipe("data_narrow", "data", faults.data_narrow, "the same one or two prompts"),
    Recipe("impossible", "data", faults.impossible, "no answer is ever right, so no group teaches"),
    Recipe("switch", "switch", faults.switch, "several knobs at once"),
)


def _healthy(name: str, draw: Callable[[Rng, Knobs], Changes], about: str) -> Recipe:
    return Recipe(name, "healthy", draw, about)


HEALTHY: tuple[Recipe, ...] = (
    _healthy("plain", _nothing, "the base alone"),
    _healthy("cosine", _for_good(schedule="cosine"), "learning rate by a cosine"),
    _healthy("rloo", _for_good(advantage="rloo", mu=1), "leave-one-out advantages, on policy"),
    _healthy("head_only", _for_good(trainable="head", lr_factor=0.7), "few weights learn"),
    _healthy("small_lr", _for_good(lr_factor=lambda r: between(r, 0.15, 0.5)), "slow"),
    _healthy("epochs", _for_good(mu=lambda r: int(r.integers(2, 5)), lr_factor=0.6), "2 to 4 epochs a step"),
    _healthy("minibatches", _for_good(minibatches=2, lr_factor=0.7), "two mini-batches an epoch"),
    _healthy("engine_int8", _for_good(engine="int8", truncation=2.0), "8-bit engine with truncated weights"),
    _healthy(
        "stale_little", _for_good(stale=lambda r: int(r.integers(2, 4))), "weights of the engine 2 or 3 steps old"
    ),
    _healthy("event_lr", _for_a_while(5, 15, lr_factor=lambda r: between(r, 1.5, 3)), "a blip of the learning rate"),
    _healthy("event_mismatch", _for_a_while(5, 20, noise=lambda r: between(r, 0.03, 0.1)), "a blip of the engine"),
    _healthy("event_half_batch", _for_a_while(10, 40, prompts=4), "half the prompts for a while"),
    _healthy("event_easy", _for_a_while(15, 80, digits=lambda r: int(r.integers(3, 6))), "easy prompts for a while"),
    _healthy(
        "event_noise", _for_a_while(20, 80, flipped=lambda r: float(r.uniform(0.02, 0.08))), "some wrong verdicts"
    ),
    _healthy("event_bad_batch", _for_a_while(1, 1, bad_batch=1.0, skip_nonfinite=True), "one NaN reward, skipped"),
    _healthy("event_reset", _for_a_while(1, 1, reference_reset=True), "the reference is reset on purpose"),
    _healthy("near_short", _near_short, "a failing recipe, ended in time"),
    _healthy("near_ramp", _near_ramp, "a failing ramp, ended in time"),
    _healthy("near_small", _near_small, "a failing recipe at a fraction of its size"),
)
PLAIN = ("plain", "cosine", "near_short", "near_ramp", "near_small")
"""Healthy recipes that come twice in a deck."""
TWINS = 8
"""Runs of a deck that get a faultless twin."""
RECIPES = {recipe.name: recipe for recipe in (*FAILING, *HEALTHY)}


@dataclass(frozen=True)
class Plan:
    """One run to make."""

    run: str
    recipe: str
    family: str
    seed: int
    config: Config
    pair: str = ""
    fault_step: int | None = None


AT_ONCE = ("lr_constant", "lr_spike", "log_zero", "zero_division", "nan_batch", "switch")
"""Failing recipes that do not come gradually, whatever is asked for: at once, at random, or there from the start."""
UNSEEN = ("fp16_overflow",)
"""Failing recipes whose fault grows unseen: a loss scale is divided out again, but for rounding nothing changes."""


def cold(config: Config, r: Rng) -> Config:
    """The same run from a cold policy, rewarded in parts of which the format is one, by a rate that may be low."""
    knobs = replace(
        config.knobs,
        lr=config.knobs.lr * between(r, 0.2, 1.0),
        format_bonus=float(r.choice([0.0, 0.5, 1.0])),
        partial=float(r.choice([0.0, 0.3, 1.0])),
        right=float(r.choice([1.0, 1.0, 2.0, 3.0])),
    )
    return replace(config, knobs=knobs, base=BASES + int(r.integers(len(LOOSE))))


def slowed(changes: Changes, pace: Pace, r: Rng) -> Changes:
    """The same, growing.

    Gradually: over 60 to 200 steps where they came at once, half as slowly again where they grew. In a long run: over
    120 to 300 steps.
    """
    if pace is Pace.LONG:
        return tuple(replace(change, over=int(r.integers(120, 300))) for change in changes)
    return tuple(
        replace(change, over=round(1.5 * change.over) if change.over else int(r.integers(60, 200)))
        for change in changes
    )


def enlarged(config: Config, batch: int) -> Config:
    """The same run on ``batch`` times as many prompts a step, also where an event changes their number."""
    changes = tuple(
        replace(change, knobs={k: batch * v if k == "prompts" else v for k, v in change.knobs.items()})
        for change in config.changes
    )
    return replace(config, knobs=replace(config.knobs, prompts=batch * config.knobs.prompts), changes=changes)


def plan(name: str, seed: int, number: int, pace: Pace = Pace.DRAWN, batch: int = 1, start: Start = Start.WARM) -> Plan:
    """Run ``number`` of recipe ``name`` from ``start``; its fault comes at ``pace``, where that can be.

    ``batch``: how many times the prompts a step that the recipe draws.
    """
    recipe = RECIPES[name]
    r = np.random.default_rng([seed, number, *name.encode()])
    knobs = base(r)
    changes = recipe.draw(r, knobs)
    if pace is not Pace.DRAWN and not recipe.healthy and name not in AT_ONCE:
        changes = slowed(changes, pace, r)
    config = Config(knobs, changes, steps=int(r.integers(*pace.steps)), base=int(r.integers(2)))
    seeded = int(r.integers(1 << 40))
    if start is Start.COLD:
        config = cold(config, r)
    begins = min((change.at for change in changes), default=None)
    return Plan(
        run=f"{name}-{seed}-{number:04d}",
        recipe=name,
        family=recipe.family,
        seed=seeded,
        config=enlarged(config, batch),
        fault_step=None if recipe.healthy and not name.startswith(("near", "event")) else begins,
    )


def twin(of: Plan) -> Plan:
    """The same run without what goes wrong in it."""
    return replace(
        of,
        run=f"{of.run}-twin",
        recipe="control",
        family="healthy",
        config=of.config.without_changes(),
        pair=of.run,
        fault_step=None,
    )


def plans(
    seed: int, only: tuple[str, ...] = (), pace: Pace = Pace.DRAWN, batch: int = 1, start: Start = Start.WARM
) -> Iterator[Plan]:
    """Runs without end, in an order in which every stretch is a fair mix: decks of all recipes, shuffled."""
    number = 0
    while True:
        r = np.random.default_rng([seed, number])
        deck = [recipe.name for recipe in (*FAILING, *HEALTHY)] + list(PLAIN)
        made = [plan(name, seed, number + i, pace, batch, start) for i, name in enumerate(deck)]
        paired = r.choice(np.arange(1, len(FAILING)), TWINS, replace=False)
        made += [twin(made[i]) for i in paired]
        number += len(deck)
        yield from (made[i] for i in r.permutation(len(made)) if not only or made[i].recipe in only)
