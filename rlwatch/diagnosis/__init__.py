"""Diagnosis of a run: from findings (detected problems) to likely causes, and from causes to recommended actions."""

from rlwatch.diagnosis.diagnose import Cause, Confidence, Diagnosis, Evidence, Nature, diagnose
from rlwatch.diagnosis.footprints import TRACKED, KnobTracker
from rlwatch.diagnosis.mismatch_causes import ABOVE as GAP_SHAPE
from rlwatch.diagnosis.mismatch_causes import AROUND, GAP_METRICS
from rlwatch.diagnosis.signs import row_steps
from rlwatch.diagnosis.suspects import Action, Advice, Strength, advice, config_turns, kinds
from rlwatch.diagnosis.turns import ChangeSource, KnobChange

__all__ = [
    "AROUND",
    "GAP_METRICS",
    "GAP_SHAPE",
    "TRACKED",
    "Action",
    "Advice",
    "Cause",
    "ChangeSource",
    "Confidence",
    "Diagnosis",
    "Evidence",
    "KnobChange",
    "KnobTracker",
    "Nature",
    "Strength",
    "advice",
    "config_turns",
    "diagnose",
    "kinds",
    "row_steps",
]
