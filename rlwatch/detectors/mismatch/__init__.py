"""Detectors of mismatch between rollout engine and trainer: level, growth, correlation, masks, and what KL misses."""
