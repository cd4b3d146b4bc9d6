"""Detectors: each watches for one way in which a run fails, using only past rows and relative to the run's
beginning.
"""
