"""Detectors of rollouts: broken output, token ids that were not sampled, response lengths."""
