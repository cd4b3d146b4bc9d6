"""Detectors: each watches one way a run fails, causally and relative to the run's own beginning."""
