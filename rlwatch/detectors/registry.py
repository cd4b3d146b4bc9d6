"""The detectors every run gets. Registering one here is enough to have it tested."""

from __future__ import annotations

from rlwatch.detectors.clip_blind import ClipBlind
from rlwatch.detectors.clip_saturation import ClipSaturation
from rlwatch.detectors.degenerate_batch import DegenerateBatch
from rlwatch.detectors.diversity_decay import DiversityDecay
from rlwatch.detectors.entropy_budget import EntropyBudget
from rlwatch.detectors.entropy_collapse import EntropyCollapse
from rlwatch.detectors.entropy_explosion import EntropyExplosion
from rlwatch.detectors.entropy_sides import EntropySides
from rlwatch.detectors.garbled_output import GarbledOutput
from rlwatch.detectors.grad_spike import GradSpike
from rlwatch.detectors.id0_run import Id0Run
from rlwatch.detectors.kl_estimator import KLEstimator
from rlwatch.detectors.kl_reference import KLReference
from rlwatch.detectors.layer_spike import LayerSpike
from rlwatch.detectors.length_collapse import LengthCollapse
from rlwatch.detectors.length_explosion import LengthExplosion
from rlwatch.detectors.length_surge import LengthSurge
from rlwatch.detectors.likelihood_displacement import LikelihoodDisplacement
from rlwatch.detectors.long_tail import LongTail
from rlwatch.detectors.mask_leakage import MaskLeakage
from rlwatch.detectors.metric_vanished import MetricVanished
from rlwatch.detectors.mismatch_blind import MismatchBlind
from rlwatch.detectors.mismatch_correlation import MismatchCorrelation
from rlwatch.detectors.mismatch_growth import MismatchGrowth
from rlwatch.detectors.mismatch_level import MismatchLevel
from rlwatch.detectors.mismatch_mask import MismatchMask
from rlwatch.detectors.mismatch_tail import MismatchTail
from rlwatch.detectors.moe_imbalance import MoEImbalance
from rlwatch.detectors.no_signal import NoSignal
from rlwatch.detectors.nonfinite import NonFinite
from rlwatch.detectors.off_policy_mask import OffPolicyMask
from rlwatch.detectors.ratio_drift import RatioDrift
from rlwatch.detectors.ratio_growth import RatioGrowth
from rlwatch.detectors.reference_continuity import ReferenceContinuity
from rlwatch.detectors.repetition import Repetition
from rlwatch.detectors.retokenisation import Retokenisation
from rlwatch.detectors.reward_constant import RewardConstant
from rlwatch.detectors.reward_drop import RewardDrop
from rlwatch.detectors.reward_hacking import RewardHacking
from rlwatch.detectors.routing_mismatch import RoutingMismatch
from rlwatch.detectors.silent_freeze import SilentFreeze
from rlwatch.detectors.staleness import Staleness
from rlwatch.detectors.stalled_steps import StalledSteps
from rlwatch.detectors.throughput_drop import ThroughputDrop
from rlwatch.detectors.weight_tail import WeightTail
from rlwatch.detectors.zero_variance import ZeroVariance
from rlwatch.ports import Detector

REGISTRY: tuple[type[Detector], ...] = (
    NonFinite,
    SilentFreeze,
    Id0Run,
    DegenerateBatch,
    GarbledOutput,
    EntropyCollapse,
    EntropyExplosion,
    MismatchGrowth,
    MismatchLevel,
    MismatchTail,
    MismatchCorrelation,
    MismatchMask,
    MismatchBlind,
    MoEImbalance,
    RoutingMismatch,
    Retokenisation,
    MaskLeakage,
    LikelihoodDisplacement,
    GradSpike,
    LayerSpike,
    KLReference,
    KLEstimator,
    ReferenceContinuity,
    EntropyBudget,
    EntropySides,
    ClipSaturation,
    ClipBlind,
    WeightTail,
    RatioDrift,
    RatioGrowth,
    OffPolicyMask,
    Staleness,
    NoSignal,
    RewardDrop,
    LengthExplosion,
    RewardConstant,
    RewardHacking,
    ZeroVariance,
    DiversityDecay,
    Repetition,
    LengthSurge,
    LengthCollapse,
    LongTail,
    ThroughputDrop,
    StalledSteps,
    MetricVanished,
)


def default_detectors() -> list[Detector]:
    """A fresh set of all registered detectors, for one run."""
    return [detector() for detector in REGISTRY]
