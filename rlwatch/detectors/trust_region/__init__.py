"""Detectors of the trust region: KL to the reference and its estimates, clipping, and importance ratios."""
