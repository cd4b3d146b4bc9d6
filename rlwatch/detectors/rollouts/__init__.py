"""Rollouts: broken output, token ids nobody sampled, response lengths."""
