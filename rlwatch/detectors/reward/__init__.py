"""Detectors of the reward: falling, constant, gamed, equal within groups, or scored by a faulty verifier."""
