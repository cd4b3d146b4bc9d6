"""Localising gradient spikes while a trainer trains: when to look, what it may cost, where the result goes.

What is said of a step comes from :mod:`rlwatch.gradloc`; here it meets the run and the trainer.
"""

from rlwatch.integrations.localising.localiser import Localiser
from rlwatch.integrations.localising.settings import Localise

__all__ = ["Localise", "Localiser"]
