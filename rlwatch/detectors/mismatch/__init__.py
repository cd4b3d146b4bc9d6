"""Mismatch between rollout engine and trainer: level, growth, correlation, masks, and what KL does not see."""
