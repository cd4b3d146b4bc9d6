"""Recipes of the TRL part of the corpus: runs that stay healthy, some with harmless events, and runs that fail.

A recipe draws a setting, of healthy and failing runs alike: what tells them apart is the fault, not how a run was set
up. So a fault that harms only at a high learning rate raises the rate itself. Most faults begin in the middle of a run
and grow, so that there is something to foresee; some are there from the start, some are sudden. The strengths were
found by trying: at these the run usually fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from forecast.trl_setting import Fault, Setting

Draw = Callable[[np.random.Generator], Setting]
TINY = 1e-6
"""A coefficient whose term TRL computes without its mattering: a term that is off at first cannot be turned on."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """``family``: what goes wrong, named as in the rest of the corpus; ``share``: how often in a round."""

    name: str
    family: str
    draw: Draw
    share: int = 1

    @property
    def healthy(self) -> bool:
        """True where nothing is wrong with it."""
        return self.family == "healthy"


def _log(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _when(rng: np.random.Generator) -> int:
    """A step in the middle of a run, after the baseline."""
    return int(rng.integers(45, 80))


def _ramp(rng: np.random.Generator) -> int:
    return int(rng.integers(45, 90))


def base(rng: np.random.Generator) -> Setting:
    """A healthy run: learning rate, task, rollout engine and the like as people choose them."""
    engine = str(rng.choice(["", "bfloat16", "bfloat16", "float32"]))
    return Setting(
        task=str(rng.choice(["sort", "sort", "reverse", "successor"])),
        start=int(rng.integers(3)),
        steps=int(rng.integers(150, 201)),
        lr=_log(rng, 1e-4, 3e-4),
        batch=int(rng.choice([64, 64, 128])),
        generations=int(rng.choice([4, 8, 8, 16])),
        num_iterations=int(rng.choice([1, 1, 1, 2])),
        beta=float(rng.choice([0.0, 0.01, 0.02, 0.04])),
        reward=str(rng.choice(["shaped", "shaped", "exact"])),
        longest=int(rng.choice([9, 9, 14])),
        engine=engine,
        engine_noise=_log(rng, 3e-3, 2e-2) if engine == "float32" else 0.0,
        correction=bool(rng.integers(2)),
    )


def _engine(rng: np.random.Generator) -> Setting:
    """A healthy run with a rollout engine of its own."""
    setting = base(rng)
    return setting if setting.engine else replace(setting, engine="bfloat16")


def _trained_faster(rng: np.random.Generator, setting: Setting, low: float, high: float, fault: Fault) -> Setting:
    """``setting`` with ``fault`` and, as it grows, a learning rate that is ``low`` to ``high`` times as high."""
    rate = Fault("learning rate", fault.start, _log(rng, low, high), fault.ramp)
    return replace(setting, faults=(fault, rate))


def _accumulation(rng: np.random.Generator) -> Setting:
    return replace(base(rng), accumulation=int(rng.choice([2, 4])), generations=8)


def _two_passes(rng: np.random.Generator) -> Setting:
    return replace(base(rng), num_iterations=int(rng.choice([2, 4])))


def _rloo(rng: np.random.Generator) -> Setting:
    return replace(base(rng), trainer="rloo", engine="")


def _event_lr(rng: np.random.Generator) -> Setting:
    start = int(rng.integers(60, 150))
    return replace(
        base(rng), faults=(Fault("learning rate", start, _log(rng, 3, 6), end=start + int(rng.integers(1, 3))),)
    )


def _event_outage(rng: np.random.Generator) -> Setting:
    start = int(rng.integers(60, 150))
    return replace(base(rng), faults=(Fault("constant reward", start, end=start + 8),))


def _event_mismatch(rng: np.random.Generator) -> Setting:
    start = int(rng.integers(60, 150))
    blip = Fault("engine noise", start, _log(rng, 0.05, 0.15), end=start + int(rng.integers(3, 12)))
    return replace(_engine(rng), correction=True, faults=(blip,))


def _reference(rng: np.random.Generator) -> Setting:
    return replace(base(rng), beta=_log(rng, 0.05, 0.2))


def _event_skip(rng: np.random.Generator) -> Setting:
    """A loss scale that is too large for single steps, whose update is skipped."""
    start = int(rng.integers(60, 150))
    return replace(
        base(rng), skips=True, faults=(Fault("half gradients", start, 40.0, end=start + int(rng.integers(1, 4))),)
    )


def _near_ramp(rng: np.random.Generator) -> Setting:
    """A learning rate that grows as in a run that fails, and is put back in time."""
    start, ramp = _when(rng), _ramp(rng)
    return replace(
        base(rng), faults=(Fault("learning rate", start, _log(rng, 30, 90), ramp, start + int(0.35 * ramp)),)
    )


def _near_small(rng: np.random.Generator) -> Setting:
    """An engine that drifts away as in a run that fails, but not far."""
    return replace(
        _engine(rng), correction=True, faults=(Fault("engine noise", _when(rng), _log(rng, 0.05, 0.12), _ramp(rng)),)
    )


def _often_rloo(rng: np.random.Generator) -> Setting:
    """A healthy run, of RLOO in one case of three."""
    return _rloo(rng) if rng.random() < 1 / 3 else base(rng)


def _lr_ramp(rng: np.random.Generator) -> Setting:
    return replace(_often_rloo(rng), faults=(Fault("learning rate", _when(rng), _log(rng, 30, 90), ramp=_ramp(rng)),))


def _lr_constant(rng: np.random.Generator) -> Setting:
    return replace(base(rng), lr=_log(rng, 3e-3, 8e-3))


def _lr_spike(rng: np.random.Generator) -> Setting:
    start = int(rng.integers(70, 130))
    return replace(base(rng), faults=(Fault("learning rate", start, 200.0, end=start + 2),))


def _no_clip(rng: np.random.Generator) -> Setting:
    rate = Fault("learning rate", _when(rng), _log(rng, 6, 16), ramp=_ramp(rng))
    return replace(base(rng), epsilon=1000.0, num_iterations=4, faults=(rate,))


def _clip_switch(rng: np.random.Generator) -> Setting:
    """Off-policy all along, and bounded by the clip range until that is lost."""
    fault = Fault("clip range", _when(rng), 1000.0)
    return _trained_faster(rng, replace(base(rng), num_iterations=4), 4, 12, fault)


def _stale(rng: np.random.Generator) -> Setting:
    fault = Fault("engine staleness", _when(rng), float(rng.integers(12, 24)), ramp=_ramp(rng))
    return _trained_faster(rng, replace(_engine(rng), correction=False), 3, 8, fault)


def _mismatch_drift(rng: np.random.Generator) -> Setting:
    fault = Fault("engine noise", _when(rng), _log(rng, 0.7, 1.2), ramp=_ramp(rng))
    return replace(_engine(rng), correction=bool(rng.random() < 0.3), faults=(fault,))


def _temperature(rng: np.random.Generator) -> Setting:
    change = float(rng.choice([-0.6, 0.8, 1.2]))
    return replace(
        _engine(rng),
        correction=False,
        faults=(Fault("engine temperature", _when(rng), change, ramp=_ramp(rng)),),
    )


def _entropy_up(rng: np.random.Generator) -> Setting:
    fault = Fault("entropy weight", _when(rng), _log(rng, 0.3, 0.8), ramp=_ramp(rng))
    return _trained_faster(rng, replace(base(rng), entropy_coef=TINY), 1.5, 3, fault)


def _entropy_down(rng: np.random.Generator) -> Setting:
    """On the task that is learnt slowly: low entropy on a solved one is no failure."""
    fault = Fault("entropy weight", int(rng.integers(42, 60)), -_log(rng, 2.0, 6.0), ramp=_ramp(rng))
    return _trained_faster(rng, replace(base(rng), task="sort", entropy_coef=TINY), 2, 4, fault)


def _negative_only(rng: np.random.Generator) -> Setting:
    fault = Fault("positive advantages", _when(rng), 1.0, ramp=_ramp(rng))
    return _trained_faster(rng, base(rng), 6, 15, fault)


def _sign_flip(rng: np.random.Generator) -> Setting:
    return replace(_often_rloo(rng), faults=(Fault("reward sign", int(rng.integers(60, 130))),))


def _verifier_random(rng: np.random.Generator) -> Setting:
    fault = Fault("random reward", _when(rng), 1.0, ramp=_ramp(rng))
    return _trained_faster(rng, base(rng), 3, 8, fault)


def _verifier_stuck(rng: np.random.Generator) -> Setting:
    return replace(base(rng), faults=(Fault("constant reward", int(rng.integers(60, 140))),))


def _hack_length(rng: np.random.Generator) -> Setting:
    fault = Fault("length reward", _when(rng), _log(rng, 12.0, 30.0), ramp=_ramp(rng))
    return _trained_faster(rng, replace(base(rng), longest=14), 2, 4, fault)


def _length_collapse(rng: np.random.Generator) -> Setting:
    fault = Fault("length reward", _when(rng), -_log(rng, 6.0, 20.0), ramp=_ramp(rng))
    return _trained_faster(rng, base(rng), 1.5, 3, fault)


def _kl_sign(rng: np.random.Generator) -> Setting:
    """The KL term pushes away from the reference."""
    fault = Fault("kl weight", _when(rng), -_log(rng, 0.3, 1.5), ramp=_ramp(rng))
    setting = base(rng)
    return _trained_faster(rng, replace(setting, beta=setting.beta or 0.02), 1.5, 3, fault)


def _fp16_overflow(rng: np.random.Generator) -> Setting:
    """A learning rate that grows makes gradients grow until they overflow at the loss scale."""
    rate = Fault("learning rate", _when(rng), _log(rng, 20, 80), ramp=_ramp(rng))
    return replace(
        _engine(rng),
        faults=(Fault("half gradients", 1, rng.uniform(17.5, 19.0)), rate),
        max_grad_norm=float(rng.choice([0.0, 1.0])),
    )


def _fp16_skip(rng: np.random.Generator) -> Setting:
    """A loss scale that grows and is never lowered: ever more updates are skipped."""
    fault = Fault("half gradients", _when(rng), 24.0, ramp=_ramp(rng))
    return replace(base(rng), skips=True, faults=(fault,))


def _lost_weight(rng: np.random.Generator) -> Setting:
    """With an engine, which samples on from weights that are NaN: TRL's own sampler ends a run before one is logged."""
    return replace(_engine(rng), faults=(Fault("lost weight", int(rng.integers(60, 140))),))


RECIPES: tuple[Recipe, ...] = (
    Recipe("trl_plain", "healthy", base, share=3),
    Recipe("trl_accumulation", "healthy", _accumulation),
    Recipe("trl_epochs", "healthy", _two_passes),
    Recipe("trl_rloo", "healthy", _rloo),
    Recipe("trl_engine", "healthy", _engine),
    Recipe("trl_reference", "healthy", _reference),
    Recipe("trl_event_lr", "healthy", _event_lr),
    Recipe("trl_event_outage", "healthy", _event_outage),
    Recipe("trl_event_mismatch", "healthy", _event_mismatch),
    Recipe("trl_event_skip", "healthy", _event_skip),
    Recipe("trl_near_ramp", "healthy", _near_ramp),
    Recipe("trl_near_small", "healthy", _near_small),
    Recipe("trl_lr_constant", "learning_rate", _lr_constant),
    Recipe("trl_lr_ramp", "learning_rate", _lr_ramp, share=2),
    Recipe("trl_lr_spike", "learning_rate", _lr_spike),
    Recipe("trl_no_clip", "trust_region", _no_clip),
    Recipe("trl_clip_switch", "trust_region", _clip_switch),
    Recipe("trl_negative_only", "advantage", _negative_only),
    Recipe("trl_stale_level", "staleness", _stale),
    Recipe("trl_mismatch_drift", "mismatch", _mismatch_drift, share=2),
    Recipe("trl_temperature", "mismatch", _temperature),
    Recipe("trl_entropy_up", "entropy", _entropy_up),
    Recipe("trl_entropy_down", "entropy", _entropy_down),
    Recipe("trl_kl_sign", "reference", _kl_sign),
    Recipe("trl_fp16_overflow", "precision", _fp16_overflow),
    Recipe("trl_fp16_skip", "precision", _fp16_skip),
    Recipe("trl_lost_weight", "precision", _lost_weight),
    Recipe("trl_sign_flip", "reward_bug", _sign_flip),
    Recipe("trl_verifier_random", "reward_bug", _verifier_random),
    Recipe("trl_verifier_stuck", "reward_bug", _verifier_stuck),
    Recipe("trl_hack_length", "reward_hacking", _hack_length),
    Recipe("trl_length_collapse", "length", _length_collapse),
)
AT_ONCE = ("trl_lr_constant", "trl_lr_spike", "trl_clip_switch", "trl_lost_weight")
"""Recipes whose faults do not come gradually: at once, or there from the start."""
