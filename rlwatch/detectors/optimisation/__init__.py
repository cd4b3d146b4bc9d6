"""Detectors of optimisation: NaN and infinity, skipped updates, spikes of the gradient and of single layers."""
