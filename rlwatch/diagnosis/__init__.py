"""From findings to causes, and from causes to what people do about them."""

from rlwatch.diagnosis.actions import Action, Advice, Strength, advice, kinds
from rlwatch.diagnosis.diagnose import Cause, Diagnosis, Evidence, Sureness, diagnose
from rlwatch.diagnosis.signs import row_steps

__all__ = [
    "Action",
    "Advice",
    "Cause",
    "Diagnosis",
    "Evidence",
    "Strength",
    "Sureness",
    "advice",
    "diagnose",
    "kinds",
    "row_steps",
]
